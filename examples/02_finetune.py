"""Fine-tune a model on a folder with one folder per class.

python examples/02_finetune.py                                              # on digits, from a small digits model
python examples/02_finetune.py photos/ google/vit-base-patch16-224 runs/mine   # your photos, a model of the hub
"""

import sys
from pathlib import Path

from quick_run import train_digits

from vitlab.training.auto import finetune_recipe
from vitlab.training.loop import train


def main(data: str, weights: str, out: str, *settings: str) -> None:
    advice = finetune_recipe(data, weights, list(settings))  # chooses what you do not set
    print(*advice.lines, *advice.warnings, sep="\n")
    result = train(advice.recipe, out)
    print(result.report, f"the model is in {result.folder}")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        main(*sys.argv[1:])
    else:
        weights = str(train_digits(Path("runs/example")))
        main("digits", weights, "runs/example-finetuned", "steps=20", "warmup=2", "device=cpu", "workers=0")
