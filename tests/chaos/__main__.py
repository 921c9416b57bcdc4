"""`cd tests && python -m chaos`: faults that must not break a run or a server, for an hour at most.

Writes OUT/chaos.json and the table in docs/reliability.md as it goes, so that Ctrl-C leaves what was measured so far.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# before numpy and torch come in: a process with threads cannot be copied safely
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

from rich.console import Console

from chaos import interrupts
from chaos.processes import cause
from chaos.rows import Row
from chaos.table import about, write_json, write_page

PARTS = ("fuzz", "kills", "disk", "ranks", "http_fuzz", "soak")  # what is measured, the soak, runs alone, at the end
BOUND = 60 * 60  # seconds for all; each part has a budget of its own that keeps to it
SEED = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 takes up to an hour; counts and times go with it")
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("../runs/chaos"), help="where chaos.json and bad inputs go")
    parser.add_argument("--no-page", action="store_true", help="leave docs/reliability.md as it is")
    given = parser.parse_args()
    unknown = set(filter(None, given.only.split(","))) - set(PARTS)
    if unknown or not 0 < given.scale <= 1:
        parser.error(
            f"there is no part {', '.join(sorted(unknown))}" if unknown else "--scale is above 0 and at most 1"
        )
    return given


def part(name: str, scale: float, out: Path) -> list[Row]:
    """The rows of one part; an exception is its failure and does not stop the other parts."""
    began = time.monotonic()
    if find_spec(f"chaos.{name}") is None:
        return [Row(name, 0, "", 0.0, [], "skipped: there is no such file")]
    try:
        run: Callable[..., Row | list[Row]] = import_module(f"chaos.{name}").run
        found = run(scale, out / "fuzz") if name == "fuzz" else run(scale)
    except Exception as error:
        why = cause(f"{type(error).__name__}: {error}")
        found = Row(name, 0, "", time.monotonic() - began, [f"the part itself failed: {why}"])
    return found if isinstance(found, list) else [found]


def over(number: int, frame: object) -> None:
    raise TimeoutError(f"{BOUND // 60} minutes were over")


def main() -> int:
    given = arguments()
    interrupts.watch()
    signal.signal(signal.SIGALRM, over)
    signal.alarm(BOUND)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console, began = Console(), time.monotonic()
    facts = about(given.scale, SEED, given.only)
    rows: list[Row] = []
    try:
        for name in given.only.split(",") if given.only else PARTS:
            if time.monotonic() - began >= BOUND:
                rows.append(Row(name, 0, "", 0.0, [f"not begun: {BOUND // 60} minutes were over"]))
                continue
            console.print(f"{name} ...", highlight=False)
            found = part(name, given.scale, out)
            rows += found
            for row in found:
                show(console, row)
            write_json(out / "chaos.json", facts, rows)
            interrupts.check()
    except KeyboardInterrupt:
        console.print("stopped; what was measured so far is kept", highlight=False)
        rows.append(Row("the rest", 0, "", 0.0, ["stopped by hand before its end"]))
    write_json(out / "chaos.json", facts, rows)
    if not given.no_page:
        write_page(facts, rows)
    bad = sum(len(row.failures) for row in rows)
    minutes = (time.monotonic() - began) / 60
    console.print(f"{bad} failures in {minutes:.0f} min; {shlex.quote(str(out / 'chaos.json'))}", highlight=False)
    return 1 if bad else 0


def show(console: Console, row: Row) -> None:
    mark = "[red]failed[/]" if row.failures else "[green]held[/]"
    console.print(f"  {mark}  {row.name}: {row.count:,} {row.unit}, {row.seconds:.0f} s", highlight=False)
    console.print(f"        {row.notes}", highlight=False, markup=False) if row.notes else None
    for failure in row.failures:
        console.print(f"        {failure}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
