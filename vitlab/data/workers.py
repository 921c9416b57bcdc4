"""What runs in the loader's worker processes: reading images and converting them to tensors, a chunk at a time."""

import itertools
import math
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from vitlab.data.decoder import DecodeHint
from vitlab.data.images import BrokenImage
from vitlab.data.places import Placing, make_places
from vitlab.data.randaugment import randaugment
from vitlab.data.rng import Floats
from vitlab.data.transforms import (
    Augment,
    crop_and_resize,
    draw_crops,
    draw_flips,
    drawn_boxes,
    eval_pixels,
    shrink_for_crop,
)
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.signals import postponed
from vitlab.terminal import track

CHUNK = 64  # the most images a worker is asked for at a time
AHEAD = 4  # chunks that each worker keeps ready
MAX_BROKEN_RUN = 100  # consecutive broken images before the data set is given up
GRACE = 10  # seconds a worker stays after SIGTERM, so that the main process can finish its step

Samples = Sequence[tuple[int, int]]  # (index, key) of each image of a chunk or batch
BrokenEntry = tuple[int, str, str]  # index, name, reason


class Images(Protocol):
    """Images by index; every ImageSource is one."""

    def __len__(self) -> int: ...

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image: ...


class HasError(Protocol):
    """What workers answer: an error in place of a result."""

    @property
    def error(self) -> str: ...


Answer = TypeVar("Answer", bound=HasError)


@dataclass(frozen=True)
class Chunk:
    """What a worker sends back: c tensors, the images they came from, and the broken ones it met."""

    pixels: Tensor  # (c, 3, h, w) uint8
    index: Tensor  # (c,)
    broken: tuple[BrokenEntry, ...] = ()
    error: str = ""
    ratio: Tensor = field(default_factory=lambda: torch.empty(0))  # (c,) width over height of the original images
    cuts: Tensor = field(default_factory=lambda: torch.empty(0))  # (c, 6) see regions.py, where pixels are (bytes,)

    def pin_memory(self) -> "Chunk":
        return replace(self, pixels=self.pixels.pin_memory())


@dataclass
class ImageReader(Dataset[Chunk]):
    """Reads the images of a chunk; subclasses define the tensor that each becomes.

    A broken image is listed in the chunk. Where `tries` is more than 1, the next good one replaces it.
    """

    source: Images
    tries: ClassVar[int] = 1  # the most images read, one after another, until one is good

    def convert(self, image: Image.Image, key: int) -> Tensor:
        """The tensor of an image."""
        raise NotImplementedError

    def blank(self, broken: list[BrokenEntry]) -> Tensor:
        """The tensor in place of an image, where all that were tried are broken: black."""
        return self.convert(Image.new("RGB", (1, 1)), 0)

    def shrink(self, key: int) -> DecodeHint | None:
        """How much smaller an image may be decoded; None: not at all."""
        return None

    def read(self, index: int, key: int) -> tuple[Tensor, int, float, list[BrokenEntry]]:
        """The tensor of the first good image from an index on, its index and ratio, and the broken images met."""
        broken: list[BrokenEntry] = []
        for place in range(index, index + min(self.tries, len(self.source))):
            place %= len(self.source)
            try:
                image = self.source.image(place, self.shrink(key))
            except BrokenImage as error:
                broken.append((place, error.name, error.why))
            else:
                return self.convert(image, key), place, image.width / image.height, broken
        return self.blank(broken), index, 1.0, broken

    def read_chunk(self, samples: Samples) -> Chunk:
        tensors, indices, ratios, met = zip(*(self.read(index, key) for index, key in samples), strict=True)
        broken = tuple(itertools.chain.from_iterable(met))
        ratio = torch.tensor(ratios, dtype=torch.float64)
        return Chunk(self.join(list(tensors)), torch.tensor(indices), broken, ratio=ratio)

    def join(self, tensors: list[Tensor]) -> Tensor:
        """The pixels of a chunk from those of its images."""
        return torch.stack(tensors)

    def __getitems__(self, samples: Samples) -> Chunk:
        """For DataLoader. A UserError is returned as a value: raised in a worker, it would arrive as a traceback."""
        try:
            return self.read_chunk(samples)
        except UserError as error:
            return Chunk(torch.empty(0), torch.empty(0), error=str(error))


@dataclass
class EvalReader(ImageReader):
    """Frames images for evaluation, (3, h, w) uint8; broken ones are black."""

    size: Size
    preprocess: Preprocess

    @property
    def room(self) -> int:
        """Bytes that an image needs on its way."""
        return 3 * math.prod(self.size)

    def convert(self, image: Image.Image, key: int) -> Tensor:
        return eval_pixels(image, self.size, self.preprocess)


@dataclass
class TrainReader(EvalReader):
    """Augments images as their keys determine, (3, h, w) uint8; the next good image replaces a broken one."""

    augment: Augment
    tries: ClassVar[int] = MAX_BROKEN_RUN
    drawn: dict[int, tuple[Floats, bool]] = field(default_factory=dict, init=False, repr=False)  # by key, of a chunk

    def read_chunk(self, samples: Samples) -> Chunk:
        """Draws the numbers of all images at once, which takes a twentieth of the time that it takes one by one."""
        keys = np.array([key for _, key in samples], np.uint64)
        flips = draw_flips(keys, self.augment).tolist()
        self.drawn = dict(zip(keys.tolist(), zip(draw_crops(keys), flips, strict=True), strict=True))
        return super().read_chunk(samples)

    def shrink(self, key: int) -> DecodeHint:
        return shrink_for_crop(key, self.size, self.augment, self.preprocess)

    def blank(self, broken: list[BrokenEntry]) -> Tensor:
        _, name, why = broken[0]
        raise UserError(f"{len(broken)} images in a row cannot be read, the first being {name} ({why}); check the data")

    def convert(self, image: Image.Image, key: int) -> Tensor:
        box, flip = self.box(*image.size, key), self.drawn[key][1]
        pixels = crop_and_resize(image, box, self.size, self.preprocess, flip)
        return randaugment(pixels[None], np.array([key], np.uint64), self.augment)[0]

    def box(self, width: int, height: int, key: int) -> Floats:
        """The crop of an image of this size, (4,), in fractions of its sides."""
        draws, ratio = self.drawn[key][0][None], np.array([width / height])
        return drawn_boxes(draws, ratio, self.size, self.augment, self.preprocess)[0]


# ---- the processes


def chunk_size(batch: int, workers: int) -> int:
    """Images in a chunk, so that all workers share each batch."""
    return min(CHUNK, math.ceil(batch / max(1, workers)))


def read_batches(
    reader: EvalReader, batches: Iterable[Samples], chunk: int, workers: int, ahead: int, device: torch.device
) -> Iterator[Chunk]:
    """Each batch in turn, its pixels on the device, read in chunks of at most `chunk` images.

    `batches` is read ahead and may be endless.
    """
    batches, asked = itertools.tee(batches)
    requests = (samples[start : start + chunk] for samples in asked for start in range(0, len(samples), chunk))
    with closing(read_to_device(reader, requests, chunk, workers, ahead, device)) as chunks:
        for samples in batches:
            parts = list(itertools.islice(chunks, math.ceil(len(samples) / chunk)))
            pixels, index, cuts = (torch.cat([getattr(x, name) for x in parts]) for name in ("pixels", "index", "cuts"))
            yield Chunk(pixels, index, tuple(entry for part in parts for entry in part.broken), cuts=cuts)


def read_to_device(
    reader: EvalReader, requests: Iterable[Samples], chunk: int, workers: int, ahead: int, device: torch.device
) -> Generator[Chunk]:
    """The chunks in order, their pixels on the device."""
    # a worker always gets the same places: those of the chunks that it keeps ready, and one that is copied
    places = make_places(workers * (ahead + 1), chunk * reader.room, device) if workers else None
    if places is None:
        for found in read_chunks(reader, requests, workers, ahead, device.type == "cuda"):
            yield replace(found, pixels=found.pixels.to(device, non_blocking=True))
        return
    with (
        closing(places),
        closing(read_chunks(Placing(reader, places), places.ask(requests), workers, ahead)) as parcels,
    ):
        for parcel in parcels:
            yield places.take(parcel)


def read_all(reader: ImageReader, count: int, workers: int, title: str) -> Iterator[Chunk]:
    """The first `count` images once, in order, with a progress bar."""
    requests = [[(i, 0) for i in range(s, min(s + CHUNK, count))] for s in range(0, count, CHUNK)]
    return track(read_chunks(reader, requests, workers, AHEAD), title, len(requests))


def read_chunks(
    reader: Dataset[Answer], requests: Iterable[object], workers: int, ahead: int, pin: bool = False
) -> Generator[Answer]:
    """The chunks in order, read by `workers` processes (0: by this one) that keep `ahead` chunks ready each.

    Raises UserError where the reader does, or where a worker was killed.
    """
    before = signal.getsignal(signal.SIGCHLD)
    loader = DataLoader(
        reader,
        batch_sampler=requests,  # type: ignore[arg-type]  # pairs of numbers rather than numbers
        num_workers=workers,
        collate_fn=default_convert,  # leaves a Chunk as it is
        pin_memory=pin,
        prefetch_factor=ahead if workers else None,
        worker_init_fn=_handle_signals,
    )
    with postponed():  # torch complains at length of an iterator that was not completed
        chunks = iter(loader)
    if workers and threading.current_thread() is threading.main_thread():
        # torch raises from a signal handler when a worker dies, wherever the program is; so does asking for a chunk
        signal.signal(signal.SIGCHLD, before)
    try:
        while (chunk := next(chunks, None)) is not None:
            if chunk.error:
                raise UserError(chunk.error)
            yield chunk
    except (RuntimeError, OSError, EOFError) as error:
        raise (_lost_worker(getattr(chunks, "_workers", [])) or error) from None
    finally:
        del chunks  # ends the workers now, rather than when a traceback that holds this frame is let go


def _handle_signals(number: int) -> None:
    """Leave Ctrl-C and SIGTERM, which may reach all processes at once, to the main process: it saves first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_later)


def _exit_later(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(GRACE)  # ends the worker, unless the main process has done so by then


def _lost_worker(workers: list[BaseProcess]) -> UserError | None:
    """The error to report if a worker died; the others, which may wait for it forever, are ended."""
    for worker in workers:
        worker.join(0.1)
    dead = [worker for worker in workers if worker.exitcode]
    if not dead:
        return None
    for worker in workers:
        worker.kill()
    code = dead[0].exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return UserError(
        f"a loader worker (process {dead[0].pid}) {how}; it may have run out of memory: "
        "try fewer of them (workers=1), and resume"
    )
