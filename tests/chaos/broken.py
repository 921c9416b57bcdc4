"""`python -m chaos.broken FOLDER`: what the chaos run finds in a package that was broken on purpose, as JSON.

A run in which nothing fails means little if nothing could.
"""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from chaos import disk, kills, runs
from chaos.faults import GROWING, Fault, put_everywhere
from chaos.fuzz_one import Trial
from chaos.targets import TARGETS, Target
from vitlab.errors import UserError
from vitlab.training import checkpoint


def damaged_checkpoint(folder: Path) -> list[str]:
    """Checkpoints are written over the one that is there."""

    def in_place(place: Path, write: Callable[[Path], None]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        write(place)

    with replaced(checkpoint.replace_folder, in_place):
        return failures_of_chain(folder, Fault("save_file", 3, "within"))


def wrong_step(folder: Path) -> list[str]:
    """A checkpoint claims to be a step further than it is."""
    plain = checkpoint.read_meta

    def read_meta(place: Path) -> checkpoint.CheckpointMeta:
        return dataclasses.replace(plain(place), step=plain(place).step + 1)

    with replaced(plain, read_meta):
        return failures_of_chain(folder, Fault("vitlab.training.trainer:Trainer.step", 7, "before"))


def raw_disk_errors(folder: Path) -> list[str]:
    """A full disk is a traceback."""
    with replaced(checkpoint.disk_errors, lambda place: nullcontext()):
        failure = disk.starve(folder, "raw", Fault(GROWING, 20, "full"))
    return [failure] if failure else []


@contextmanager
def replaced(plain: object, broken: object) -> Iterator[None]:
    """Another function in its place, in all modules of the package."""
    put_everywhere(plain, broken)
    try:
        yield
    finally:
        put_everywhere(broken, plain)


def failures_of_chain(folder: Path, fault: Fault) -> list[str]:
    failures: list[str] = kills.chain(folder, "broken", [fault])["failures"]
    return failures


def bad_reader(folder: Path) -> list[str]:
    """A reader that executes its input."""

    def reader(place: Path) -> Callable[[bytes], None]:
        def make_and_remove() -> None:
            (place / "a" / "b").mkdir(parents=True)
            shutil.rmtree(place / "a")

        def read(data: bytes) -> None:
            deeds: dict[bytes, Callable[[], Any]] = {
                b"write": lambda: (folder / "elsewhere").write_text("x"),
                b"run": lambda: os.system(f"touch {folder}/ran"),
                b"grow": lambda: bytearray(3 << 29).count(1),
                b"key": lambda: dict[str, str]()["key"],
                b"inside": lambda: (place / "inside").write_text("x"),
                b"empty": make_and_remove,
            }
            if data not in deeds:
                raise UserError("rejected")
            deeds[data]()

        return read

    TARGETS["bad"] = Target(lambda _: [], reader, lambda data, _: data)
    trial = Trial("bad", folder / "bad")
    for content in (b"other", b"inside", b"empty", b"write", b"run", b"grow", b"key"):
        trial.one(content)
    assert not (folder / "elsewhere").exists()
    assert not (folder / "ran").exists()
    return [json.loads(line)["kind"] for line in (folder / "bad" / "failures.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    runs.profile(place)
    checks = (damaged_checkpoint, wrong_step, raw_disk_errors, bad_reader)
    sys.stdout.write(json.dumps({check.__name__: check(place) for check in checks}))
