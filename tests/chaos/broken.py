"""`python -m chaos.broken FOLDER`: what the chaos run finds in a package that was broken on purpose, as JSON.

A run in which nothing fails says little if nothing could.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from chaos import disk, kills, runs
from chaos.faults import GROWING, Fault
from chaos.fuzz_one import Trial
from chaos.targets import TARGETS, Target
from vitlab.errors import UserError
from vitlab.training import checkpoint


def torn_checkpoint(folder: Path) -> list[str]:
    """Checkpoints are written over the one that is there."""
    plain = checkpoint.replace

    def in_place(place: Path, write: Callable[[Path], None]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        write(place)

    checkpoint.replace = in_place
    try:
        return kills.chain(folder, "torn", [Fault("save_file", 3, "within")])["failures"]
    finally:
        checkpoint.replace = plain


def forgotten_step(folder: Path) -> list[str]:
    """A checkpoint says that it is a step further than it is."""
    plain = checkpoint.read_meta
    checkpoint.read_meta = lambda place: checkpoint.CheckpointMeta(
        **{**vars(plain(place)), "step": plain(place).step + 1}
    )
    try:
        return kills.chain(folder, "forgotten", [Fault("vitlab.training.loop:Run.step", 7, "before")])["failures"]
    finally:
        checkpoint.read_meta = plain


def raw_disk_errors(folder: Path) -> list[str]:
    """A full disk is a traceback."""
    plain = checkpoint.disk_errors
    checkpoint.disk_errors = lambda place: nullcontext()
    try:
        found = disk.starve(folder, "raw", Fault(GROWING, 20, "full"))
        return [found] if found else []
    finally:
        checkpoint.disk_errors = plain


def bad_reader(folder: Path) -> list[str]:
    """A reader that does what its input says."""

    def reader(place: Path) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            deeds: dict[bytes, Callable[[], Any]] = {
                b"write": lambda: (folder / "elsewhere").write_text("x"),
                b"run": lambda: os.system(f"touch {folder}/ran"),
                b"grow": lambda: bytearray(3 << 29).count(1),
                b"key": lambda: {}["key"],
                b"inside": lambda: (place / "inside").write_text("x"),
                b"empty": lambda: ((place / "a" / "b").mkdir(parents=True), shutil.rmtree(place / "a")),
            }
            if data not in deeds:
                raise UserError("refused")
            deeds[data]()

        return read

    TARGETS["bad"] = Target(lambda _: [], reader, lambda data, _: data)
    trial = Trial("bad", folder / "bad")
    for word in (b"other", b"inside", b"empty", b"write", b"run", b"grow", b"key"):
        trial.one(word)
    assert not (folder / "elsewhere").exists()
    assert not (folder / "ran").exists()
    return [json.loads(line)["kind"] for line in (folder / "bad" / "failures.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    runs.profile(place)
    checks = (torn_checkpoint, forgotten_step, raw_disk_errors, bad_reader)
    sys.stdout.write(json.dumps({check.__name__: check(place) for check in checks}))
