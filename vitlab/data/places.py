"""Memory that the loader's workers write pixels into, and that a GPU reads them from.

torch sends each tensor of a worker in shared memory of its own: a file, mapped by two processes, with a fault for every
page, then copied to pinned memory. That takes a tenth of the time of a machine whose cores all read images. Here it is
one piece, mapped before the workers are forked and used over and over, which needs no room in /dev/shm either. Each
chunk that is asked for has a place in it; one that does not fit is sent as torch does.
"""

import contextlib
import itertools
import mmap
import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from vitlab.data.workers import BrokenEntry, Chunk, ImageReader, Samples

Request = tuple[int, "Samples"]  # the place of a chunk, and its images
MOST = 4 << 30  # bytes of a loader


@dataclass(frozen=True)
class Parcel:
    """A chunk on its way: its pixels are in a place, or in `chunk`, as all of it where they do not fit."""

    error: str = ""
    place: int = 0
    shape: tuple[int, ...] = ()
    index: np.ndarray | None = None  # as arrays: a tensor, as small as it is, would be sent in memory of its own
    ratio: np.ndarray | None = None
    cuts: np.ndarray | None = None
    broken: "tuple[BrokenEntry, ...]" = ()
    chunk: "Chunk | None" = None


class Places:
    """As many places of `size` bytes as chunks can be under way."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self.memory = mmap.mmap(-1, count * size)  # anonymous: processes that are forked from now on share it
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8).view(count, size)
        self.device = device
        self.pinned: bool | None = None  # None: not tried yet
        self.read: dict[int, torch.cuda.Event] = {}  # when the GPU has read what was in a place

    def ask(self, requests: "Iterable[Samples]") -> Iterator[Request]:
        """Requests with their places, each of which is free by then."""
        for samples, place in zip(requests, itertools.cycle(range(len(self.bytes)))):
            if (event := self.read.pop(place, None)) is not None:
                event.synchronize()
            yield place, samples

    def put(self, place: int, chunk: "Chunk") -> Parcel:
        """In a worker: write a chunk's pixels to its place."""
        pixels = chunk.pixels
        if chunk.error or pixels.numel() > self.bytes.shape[1]:
            return Parcel(chunk.error, chunk=chunk)
        self.bytes[place, : pixels.numel()] = pixels.flatten()
        index, ratio, cuts = chunk.index.numpy(), chunk.ratio.numpy(), chunk.cuts.numpy()
        return Parcel("", place, tuple(pixels.shape), index, ratio, cuts, chunk.broken)

    def take(self, parcel: Parcel) -> "Chunk":
        """A chunk on the device; its place may be used again."""
        from vitlab.data.workers import Chunk

        if parcel.chunk is not None:
            return replace(parcel.chunk, pixels=parcel.chunk.pixels.to(self.device, non_blocking=True))
        here = self.bytes[parcel.place, : int(np.prod(parcel.shape))].view(parcel.shape)
        if self.device.type != "cuda":
            pixels = here.clone() if self.device.type == "cpu" else here.to(self.device)
        else:
            if self.pinned is None:  # after the workers were forked
                self.pinned = self.pin()
            pixels = here.to(self.device, non_blocking=True)
            self.read[parcel.place] = torch.cuda.Event()
            self.read[parcel.place].record()
        index, ratio, cuts = (tensor(x) for x in (parcel.index, parcel.ratio, parcel.cuts))
        return Chunk(pixels, index, parcel.broken, ratio=ratio, cuts=cuts)

    def pin(self) -> bool:
        """Let the GPU read the memory by itself; whether the system allows it."""
        if int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # the next use of the GPU raises the error, once
            torch.zeros(1, device=self.device)
        return False

    def close(self) -> None:
        """Wait until the GPU has read all that was sent to it."""
        for event in self.read.values():
            event.synchronize()
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


def tensor(array: np.ndarray | None) -> Tensor:
    assert array is not None  # of a parcel without a chunk
    return torch.from_numpy(array)


@dataclass
class Placing(Dataset[Parcel]):
    """In a worker: a reader whose chunks are put into places."""

    reader: "ImageReader"
    places: Places

    def __getitems__(self, request: Request) -> Parcel:
        place, samples = request
        return self.places.put(place, self.reader.__getitems__(samples))


def make_places(chunks: int, size: int, device: torch.device) -> Places | None:
    """Places for chunks of usually less than `size` bytes; None where workers are not forked, or would share none."""
    size += -size % mmap.PAGESIZE
    if multiprocessing.get_start_method() != "fork" or chunks * size > MOST:
        return None
    try:
        return Places(chunks, size, device)
    except (OSError, MemoryError, ValueError):  # as much is not to be had
        return None
