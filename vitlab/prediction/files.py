"""`vitlab predict`: from arguments of the command line to lines of predictions, complete lines even when stopped.

Under torchrun each process predicts a contiguous slice of the inputs and writes a file of its own; the files joined in
the order of their ranks are what one process would have written.
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

from vitlab.data.workers import BrokenEntry
from vitlab.device import pick_workers
from vitlab.errors import Stopped, UserError
from vitlab.files import write_errors
from vitlab.inference.int8 import EightBits
from vitlab.prediction.classifier import Classifier
from vitlab.prediction.formats import TOP, Format, FormatName, make_format
from vitlab.prediction.inputs import STDIN, Inputs, find_inputs
from vitlab.prediction.look import write_looks
from vitlab.prediction.stream import PredictionBatch, predict_stream
from vitlab.signals import catch_stop_signals
from vitlab.terminal import progress

NAMED = 20  # broken files that are named; the rest are counted


@dataclass
class PredictSummary:
    """How many images were predicted, how many could not be read, the first of those; pictures of where it looked."""

    total: int
    done: int = 0
    broken: int = 0
    first: list[BrokenEntry] = field(default_factory=list)
    looked: list[Path] = field(default_factory=list)


def predict_files(
    run: str,
    paths: Sequence[str],
    *,
    kind: FormatName,
    top: int | None = None,
    out: Path | None = None,
    device: str = "auto",
    batch: int | None = None,
    workers: int | None = None,
    allow_url: bool = False,
    refuse: float | None = None,
    scales: EightBits | None = None,
    look: Path | None = None,
) -> PredictSummary:
    """Write the predictions to `out`, or to standard output, as they come; Ctrl-C leaves complete lines behind.

    `refuse` is the share of false refusals and `scales` are those for 8 bits, as `Classifier` has them. `look` is a
    folder for a picture of each image, of where the model looked; `summary.looked` has the files.

    Raises UserError if nothing could be read, and Stopped after SIGINT or SIGTERM.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    inputs = find_inputs(paths, allow_url=allow_url)
    out = output_path(out, rank, world, inputs)
    indices = range(len(inputs) * rank // world, len(inputs) * (rank + 1) // world)
    summary = PredictSummary(len(indices))
    try:
        classifier = Classifier(run, device, refuse=refuse, scales=scales)
        is_multi = classifier.thresholds is not None
        count = None if top is None and is_multi else min(top or TOP[kind], len(classifier.labels))
        form = make_format(kind, inputs, classifier.labels, None if is_multi else count, classifier.unknown is not None)
        readers = min(pick_workers(classifier.device) if workers is None else workers, len(indices) // 2)
        stream = predict_stream(classifier, inputs, indices, top=count, batch=batch, workers=readers)
        with open_output(out) as file:
            stop = write_stream(stream, file, form, summary, rank, world)
        if look is not None and not stop:
            summary.looked = write_looks(classifier, inputs, indices, look)
    except KeyboardInterrupt:  # before the first prediction, or a second time
        stop = signal.SIGINT
    if stop:
        kept = f"; their predictions are in {out}" if out is not None and summary.done else ""
        raise Stopped(stop, f"stopped after {summary.done} of {summary.total} images{kept}")
    if world == 1 and summary.done == 0:
        if out is not None:
            out.unlink()
        _, name, why = summary.first[0]
        if summary.total == 1:
            raise UserError(f"{name} cannot be read: {why}")
        raise UserError(f"none of the {summary.total} files can be read, such as {name}: {why}")
    return summary


def write_stream(
    stream: Iterator[PredictionBatch], file: TextIO, form: Format, summary: PredictSummary, rank: int, world: int
) -> int:
    """Write batch after batch; the first process writes the header, together with the first prediction.

    Returns the number of the signal that requested a stop, which waits for the end of a batch, or 0.
    """
    head = form.head() if rank == 0 else ""
    shown = rank == 0 and not file.isatty()
    with progress("images", summary.total, shown=shown) as advance, catch_stop_signals() as signals:
        for batch in stream:
            if batch.good:
                file.write(head + "".join(map(form.line, batch.good)))
                file.flush()  # a program that follows the output sees every prediction at once
                summary.done += len(batch.good)
                head = ""
            summary.broken += len(batch.broken)
            summary.first += batch.broken[: NAMED - len(summary.first)]
            advance(len(batch.good) + len(batch.broken))
            if signals.number:
                return signals.number
    if world > 1:
        file.write(head)  # the other files may have predictions
    return 0


def output_path(out: Path | None, rank: int, world: int, inputs: Inputs) -> Path | None:
    """The new file this process writes: of several processes each has its own, named so that they sort by rank."""
    if world > 1:
        if out is None:
            raise UserError(f"{world} processes cannot share the standard output; name a file with --out")
        if os.fsencode(STDIN) in inputs.names:
            raise UserError(f"{world} processes cannot share the standard input; name files instead of '-'")
        out = out.with_name(f"{out.stem}.rank{rank:0{len(str(world - 1))}}{out.suffix}")
    if out is not None and out.exists():
        raise UserError(f"{out} exists; remove it or name another file with --out")
    return out


@contextmanager
def open_output(out: Path | None) -> Iterator[TextIO]:
    """The new file, or the standard output; file names that are not valid text keep their bytes."""
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdout
        return
    with write_errors(out), out.open("x", encoding="utf-8", errors="surrogateescape", newline="") as file:
        yield file
