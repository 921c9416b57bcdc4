"""`vitlab predict`: from words on the command line to lines of answers, whole lines whatever happens.

Under torchrun each process takes a contiguous slice of the inputs and writes a part of its own; the parts joined in the
order of their ranks are what one process would have written.
"""

import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitlab.data.workers import Broken
from vitlab.device import pick_workers
from vitlab.errors import Stopped, UserError
from vitlab.predict.classifier import Classifier
from vitlab.predict.formats import TOP, Format, Kind, make_format
from vitlab.predict.inputs import STDIN, Inputs, find
from vitlab.predict.stream import PredictionBatch, predictions
from vitlab.signals import catch_stop_signals

NAMED = 20  # broken files that are named; the rest are counted


@dataclass
class PredictSummary:
    """What came of the inputs: how many were answered, how many could not be read, and the first of those."""

    total: int
    done: int = 0
    broken: int = 0
    first: list[Broken] = field(default_factory=list)

    def note(self, broken: Sequence[Broken]) -> None:
        self.broken += len(broken)
        self.first += broken[: NAMED - len(self.first)]


def predict_files(
    run: str,
    words: Sequence[str],
    *,
    kind: Kind,
    top: int | None = None,
    out: Path | None = None,
    device: str = "auto",
    batch: int | None = None,
    workers: int | None = None,
    allow_url: bool = False,
) -> PredictSummary:
    """Write the answers to `out`, or to standard output, as they come; Ctrl-C leaves whole lines behind."""
    rank, world = place()
    inputs = find(words, allow_url=allow_url)
    out = own_part(out, rank, world, inputs)
    part = range(len(inputs) * rank // world, len(inputs) * (rank + 1) // world)
    outcome = PredictSummary(len(part))
    try:
        classifier = Classifier(run, device)
        count = min(TOP[kind] if top is None else top, len(classifier.labels))
        form = make_format(kind, inputs, classifier.labels, count)
        helpers = min(pick_workers(classifier.device) if workers is None else workers, len(part) // 2)
        stream = predictions(classifier, inputs, part, top=count, batch=batch, workers=helpers)
        with opened(out) as file:
            stop = pour(stream, file, form, outcome, rank, world)
    except KeyboardInterrupt:  # before the first answer, or a second time
        stop = signal.SIGINT
    if stop:
        kept = f"; their answers are in {out}" if out is not None and outcome.done else ""
        raise Stopped(stop, f"stopped after {outcome.done} of {outcome.total} images{kept}")
    if world == 1 and outcome.done == 0:
        if out is not None:
            out.unlink()
        raise UserError(nothing(outcome))
    return outcome


def pour(
    stream: Iterator[PredictionBatch], file: TextIO, form: Format, outcome: PredictSummary, rank: int, world: int
) -> int:
    """Batch after batch; the header, which the first process writes, waits for the first answer.

    Returns the signal that asked to stop, which waits for the end of a batch, or 0.
    """
    head = form.head() if rank == 0 else ""
    with progress(outcome.total, shown=rank == 0 and not file.isatty()) as bar, catch_stop_signals() as signals:
        for found in stream:
            if found.good:
                write(file, head + form.lines(found.good))
                outcome.done += len(found.good)
                head = ""
            outcome.note(found.broken)
            bar.advance(bar.task_ids[0], len(found.good) + len(found.broken))
            if signals.number:
                return signals.number
    if world > 1:
        write(file, head)  # the other parts may have answers
    return 0


def nothing(outcome: PredictSummary) -> str:
    _, name, why = outcome.first[0]
    if outcome.total == 1:
        return f"{name} cannot be read: {why}"
    return f"none of the {outcome.total} files can be read, such as {name}: {why}"


# ---- shards


def place() -> tuple[int, int]:
    """Which of how many processes this is, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def own_part(out: Path | None, rank: int, world: int, inputs: Inputs) -> Path | None:
    """The file this process writes: of several processes each has its own, named so that they sort by rank."""
    if world > 1:
        if out is None:
            raise UserError(f"{world} processes cannot share the standard output; name a file with --out")
        if os.fsencode(STDIN) in inputs.names:
            raise UserError(f"{world} processes cannot share the standard input; name files instead of '-'")
        out = out.with_name(f"{out.stem}.rank{rank:0{len(str(world - 1))}}{out.suffix}")
    if out is not None and out.exists():
        raise UserError(f"{out} exists; remove it or name another file with --out")
    return out


# ---- writing


@contextmanager
def opened(out: Path | None) -> Iterator[TextIO]:
    """The new file, or the standard output; names that are no text keep their bytes."""
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdout
        return
    try:
        with out.open("x", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None


def write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()  # whoever follows sees every answer at once


def progress(total: int, *, shown: bool) -> Progress:
    """A bar on the standard error, which leaves the standard output to the answers."""
    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("left"), TimeRemainingColumn())
    bar = Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not (shown and console.is_terminal)
    )
    bar.add_task("images", total=total)
    return bar
