"""A disk that is full at every single write of a run, and small file systems that really are.

The process must end with one error line, and once there is space the resumed run must equal the uninterrupted one.
"""

import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from chaos.faults import GROWING, Fault, Kind
from chaos.processes import spread
from chaos.rows import Row
from chaos.runs import difference, fresh, once, profile

BUDGET = 5 * 60  # seconds
KINDS: tuple[Kind, ...] = ("full", "full once")  # it stays full, or has space again at once
SIZES = 12  # real file systems
PAGE = 4096


def run(scale: float = 1.0) -> list[Row]:
    began = time.monotonic()
    deadline = began + BUDGET * max(scale, 0.2)
    with tempfile.TemporaryDirectory(prefix="chaos-disk-") as place:
        folder = Path(place)
        count = profile(folder)[GROWING]
        step = max(1, round(1 / scale))
        faults = [Fault(GROWING, call, kind) for call in range(1, count + 1) for kind in KINDS][::step]
        failures = list(
            spread([partial(starve, folder, f"full{i}", fault) for i, fault in enumerate(faults)], deadline)
        )
        if len(failures) < len(faults):
            failures.append(f"only {len(failures)} of {len(faults)} faults were tried within the time")
        notes = f"a run has {count} operations that need space; each fails once, and from then on"
        bad = [failure for failure in failures if failure]
        rows = [Row("disk full at every write", len(faults), "faults", time.monotonic() - began, bad, notes)]
        return [*rows, small_disks(folder, max(2, round(SIZES * scale)))]


def starve(folder: Path, name: str, fault: Fault) -> str | None:
    """What went wrong, if anything."""
    out = fresh(folder, name)
    ended = once(out, resume=False, fault=fault)
    where = f"operation {fault.call} failed, {fault.kind}"
    if ended.code == 0:  # it continued without that operation
        return failure_text(where, difference(folder / "reference", out))
    if not ended.clean:
        return f"{where}: no clean end, {ended}"
    return failure_text(where, resumed(folder, out))


def resumed(folder: Path, out: Path) -> str | None:
    ended = once(out, resume=True)
    found = f"cannot be resumed, {ended}" if ended.code else difference(folder / "reference", out)
    fresh(out.parent, out.name)
    return found


def failure_text(where: str, what: str | None) -> str | None:
    return f"{where}: {what}" if what else None


# ---- real ones


def small_disks(folder: Path, count: int) -> Row:
    """File systems in memory, of sizes from one page to nearly enough; then each is made large enough."""
    began = time.monotonic()
    reference = folder / "reference"
    need = sum(-(-path.stat().st_size // PAGE) for path in reference.rglob("*") if path.is_file())
    place = folder / "small"
    place.mkdir()
    if mount(place, PAGE).returncode:
        return Row("small file systems", 0, "file systems", 0.0, [], "not tried: mounting one needs root")
    unmount(place)
    failures = []
    for i in range(count):
        size = PAGE * (1 + round((need - 1) * i / count))
        mount(place, size)
        try:
            failures.append(failure_text(f"a file system of {size:,} bytes", fill(folder, place)))
        finally:
            unmount(place)
    notes = f"from {PAGE:,} to {size:,} bytes; a run needs {need * PAGE:,}"
    found = [failure for failure in failures if failure]
    return Row("small file systems", count, "file systems", time.monotonic() - began, found, notes)


def fill(folder: Path, place: Path) -> str | None:
    out = place / "run"
    ended = once(out, resume=False)
    if not ended.clean:
        return f"no clean end, {ended}"
    subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)
    return resumed(folder, out)


def mount(place: Path, size: int) -> subprocess.CompletedProcess[bytes]:
    if os.geteuid():
        return subprocess.CompletedProcess([], 1)
    words: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    return subprocess.run(words, stderr=subprocess.DEVNULL, check=False)


def unmount(place: Path) -> None:
    subprocess.run(["umount", place], check=True)
