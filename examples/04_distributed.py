"""Train on several processes: the same script, started by torchrun. Each process reads its share of every batch.

torchrun --nproc-per-node 2 examples/04_distributed.py                        # digits on two CPU processes
torchrun --nproc-per-node 8 examples/04_distributed.py B/16-imagenet runs/b16 data=imagenet:/data/imagenet parallel=fsdp
"""

import sys

from quick_run import SETTINGS

from vitlab.training.loop import train
from vitlab.training.recipe import override
from vitlab.training.recipes import find


def main(recipe: str, out: str, *settings: str) -> None:
    result = train(override(find(recipe).recipe, list(settings)), out)  # joins the process group of torchrun
    if result.first:  # of the processes
        print(result.report, f"the model is in {result.folder}")


if __name__ == "__main__":
    main(*(sys.argv[1:] if len(sys.argv) > 2 else ["digits", "runs/example-distributed", *SETTINGS]))
