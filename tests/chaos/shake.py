"""`python -m chaos.shake FOLDER COUNT`: every reader meets so many changed files, or those of three seconds.

For `make test`, without Atheris.
FOLDER/NAME/failures.jsonl holds what was found; a line is printed for every reader.
"""

import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from chaos.fuzz_one import SECONDS, Trial, limit
from chaos.processes import spread
from chaos.targets import TARGETS, example

MOST = 3.0  # seconds
FEW = {"parquet": 3}  # inputs of a reader that starts a process for each


def shake(name: str, folder: Path, count: int) -> str:
    trial = Trial(name, folder / name)
    limit()
    draw = random.Random(name)
    pool = list(trial.seeds)
    deadline = time.monotonic() + MOST
    for i in range(FEW.get(name, len(pool) + count)):
        if time.monotonic() > deadline:  # a reader that starts processes is slow
            break
        data = pool[i] if i < len(trial.seeds) else trial.target.mutate(draw.choice(pool), draw)
        signal.alarm(SECONDS)  # ends the process, which is an answer too
        trial.one(data)
        if len(pool) < 2 * len(trial.seeds) or draw.random() < 0.05:
            pool.append(data)  # changes upon changes
    signal.alarm(0)
    return f"{name}: {trial.tried} inputs, {trial.taken} taken"


if __name__ == "__main__":
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    example()  # before the copies are made: they all use it
    for line in spread([partial(shake, name, folder, count) for name in TARGETS], float("inf")):
        sys.stdout.write(f"{line}\n")
