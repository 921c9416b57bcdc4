"""As one of torchrun's processes: the images this one gets in the first epochs of a set, one line per batch."""

import json
import os
import sys
from pathlib import Path

from vitlab.data.loader import TrainLoader
from vitlab.data.open import open_data
from vitlab.data.transforms import Augment
from vitlab.models.config import Preprocess

if __name__ == "__main__":
    spec, target, batch, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    source = open_data(spec).train
    loader = TrainLoader(
        source, (8, 8), Augment(), Preprocess(), batch=batch, workers=2, rank=rank, world=world, resident=False
    )
    lines = [
        json.dumps([source.name(i) for i in found.index.tolist()])
        for _, found in zip(range(steps), loader.batches(), strict=False)
    ]
    (target / f"rank{rank}.jsonl").write_text("\n".join(lines))
