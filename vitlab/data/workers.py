"""What runs in the loader's worker processes: reading images and cutting them to size, a chunk at a time."""

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlab.data.images import BrokenImage, Shrink
from vitlab.data.randaugment import randaugment
from vitlab.data.source import ImageSource
from vitlab.data.transforms import Augment, boxes, cut, eval_pixels, flips, shrink_for
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size

log = logging.getLogger("vitlab")

CHUNK = 64  # images a worker is asked for at a time
IN_A_ROW = 100  # broken images one after another before the set is given up
GRACE = 10  # seconds a worker stays after SIGTERM, so that the main process can finish its step

Order = list[tuple[int, int]]  # (index, key) of each image of a chunk
Broken = tuple[int, str, str]  # index, name, why


@dataclass(frozen=True)
class Chunk:
    """What a worker sends back: bytes, the images they came from, and what was broken on the way."""

    pixels: Tensor  # (c, 3, h, w) uint8
    index: Tensor  # (c,)
    broken: tuple[Broken, ...] = ()
    error: str = ""
    ratio: Tensor = field(default_factory=lambda: torch.empty(0))  # (c,) width over height of the whole pictures

    def pin_memory(self) -> "Chunk":
        return Chunk(self.pixels.pin_memory(), self.index, self.broken, self.error, self.ratio)


@dataclass
class AugmentedReader(Dataset[Chunk]):
    """Reads and augments the images of a chunk; without an augment, frames them for evaluation."""

    source: ImageSource
    size: Size
    preprocess: Preprocess
    augment: Augment | None

    def __getitems__(self, order: Order) -> Chunk:
        return self.train_chunk(order, self.augment) if self.augment else self.eval_chunk(order)

    def train_chunk(self, order: Order, augment: Augment) -> Chunk:
        key = np.array([k for _, k in order], np.uint64)
        flip = flips(key, augment)
        pixels, index, broken = [], [], []
        for place, (wanted, each) in enumerate(order):
            shrink = shrink_for(each, self.size, augment, self.preprocess)
            found, image, bad = next_good(self.source, wanted, shrink)
            ratio = np.array([image.width / image.height])
            box = boxes(key[place : place + 1], ratio, self.size, augment, self.preprocess)[0]
            pixel = cut(image, box, self.size, self.preprocess, bool(flip[place]))[None]
            pixels.append(randaugment(pixel, key[place : place + 1], augment))
            index.append(found)
            broken += bad
        return Chunk(torch.cat(pixels), torch.tensor(index), tuple(broken))

    def eval_chunk(self, order: Order) -> Chunk:
        try:
            pixels = [eval_pixels(self.source.image(index), self.size, self.preprocess) for index, _ in order]
        except BrokenImage as broken:
            raise UserError(
                f"{broken.name} cannot be read ({broken.why}); evaluation needs every image, so mend or remove it"
            ) from None
        return Chunk(torch.stack(pixels), torch.tensor([index for index, _ in order]))


def next_good(source: ImageSource, index: int, shrink: Shrink | None) -> tuple[int, Image.Image, list[Broken]]:
    """The image at an index or, where it is broken, the first good one after it; and the broken ones passed over."""
    broken: list[Broken] = []
    for found in range(index, index + min(IN_A_ROW, len(source))):
        found %= len(source)
        try:
            return found, source.image(found, shrink), broken
        except BrokenImage as bad:
            broken.append((found, bad.name, bad.why))
    _, name, why = broken[0]
    raise UserError(f"{len(broken)} images in a row cannot be read, the first being {name} ({why}); check the data")


# ---- the processes


@dataclass
class Guard(Dataset[Chunk]):
    """Sends a worker's UserError back as a value: a raised one would arrive as a page of traceback."""

    data: Any

    def __getitems__(self, order: Order) -> Chunk:
        try:
            return self.data.__getitems__(order)
        except UserError as error:
            return Chunk(torch.empty(0), torch.empty(0), (), str(error))


def read_chunks(data: Dataset[Chunk], orders: Iterable[Order], workers: int, ahead: int, pin: bool) -> Iterator[Chunk]:
    """The chunks in order, read by `workers` processes (0: by this one) that keep `ahead` chunks ready each."""
    before = signal.getsignal(signal.SIGCHLD)
    loader = DataLoader(
        Guard(data),
        batch_sampler=orders,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=pin,
        prefetch_factor=ahead if workers else None,
        worker_init_fn=_start,
    )
    chunks = iter(loader)
    if workers and threading.current_thread() is threading.main_thread():
        # torch raises from a signal handler when a worker dies, wherever the program is; asking for a chunk tells too
        signal.signal(signal.SIGCHLD, before)
    try:
        while (chunk := next(chunks, None)) is not None:
            if chunk.error:
                raise UserError(chunk.error)
            yield chunk
    except (RuntimeError, OSError, EOFError) as error:
        vanished = _vanished(getattr(chunks, "_workers", []))
        raise (vanished or error) from None
    finally:
        del chunks  # ends the workers now, rather than when a traceback that holds this frame is let go


def _as_is(chunk: Any) -> Any:
    return chunk


def _start(number: int) -> None:
    """Ctrl-C and SIGTERM, which may reach all processes at once, are the main one's to act on: it saves first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)


def _leave_soon(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(GRACE)  # ends the worker, unless the main process has done so by then


def _vanished(workers: list[BaseProcess]) -> UserError | None:
    """A sentence if a worker is gone; the others, which may wait for it for ever, are ended."""
    for worker in workers:
        worker.join(0.1)
    gone = [worker for worker in workers if worker.exitcode]
    for worker in workers:
        if gone and worker.is_alive():
            worker.kill()
    if not gone:
        return None
    code = gone[0].exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return UserError(
        f"a loader worker (process {gone[0].pid}) {how}; it may have run out of memory: "
        "try fewer of them (workers=1), and resume"
    )
