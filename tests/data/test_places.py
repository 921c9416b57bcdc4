"""Pixels that workers write into memory they share: what arrives is what was read, also in places used many times."""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.data.places import Places, Placing, make_places
from vitlab.data.source import ArraySource
from vitlab.data.transforms import Augment
from vitlab.data.workers import Chunk, EvalReader, Samples, TrainReader, read_batches
from vitlab.errors import UserError
from vitlab.models.config import Preprocess

CPU = torch.device("cpu")
SIZE = (8, 8)


GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(params=[CPU, pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def source(images: int) -> ArraySource:
    pixels = np.random.default_rng(0).integers(0, 256, (images, 9, 10, 3), dtype=np.uint8)
    return ArraySource("random", pixels, np.arange(images) % 2, ("a", "b"))


def reader(images: int) -> TrainReader:
    return TrainReader(source(images), SIZE, Preprocess(), Augment())


def requests(batches: int, batch: int, images: int) -> list[Samples]:
    return [[((b * batch + i) % images, 7 * b + i) for i in range(batch)] for b in range(batches)]


def read(
    reader: EvalReader, asked: Sequence[Samples], workers: int, device: torch.device = CPU, chunk: int = 3
) -> list[Chunk]:
    """Batches as they come, kept until all are there."""
    return list(read_batches(reader, iter(asked), chunk, workers, 2, device))


def same(found: Sequence[Chunk], expected: Sequence[Chunk]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.pixels.cpu(), b.pixels) and torch.equal(a.index, b.index) for a, b in pairs)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_those_of_one_process_however_often_a_place_is_used(workers: int, device: torch.device) -> None:
    """With 2 workers there are 6 places, for 27 chunks, of which some are short."""
    asked = requests(9, 7, images=20)
    assert same(read(reader(20), asked, workers, device), read(reader(20), asked, 0))


@pytest.mark.parametrize("part", [0, 1, 5])
def test_a_chunk_that_does_not_fit_arrives_too(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk fits, or chunks of one image do, or short ones do."""
    monkeypatch.setattr(TrainReader, "room", property(lambda self: part * 3 * 64 // 3))
    asked = requests(5, 7, images=20)
    assert same(read(reader(20), asked, 2), read(reader(20), asked, 0))


def test_workers_send_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch would send in a file in /dev/shm each."""
    places, found = Places(2, 4096, CPU), reader(4)
    parcel = Placing(found, places).__getitems__((1, [(0, 1), (3, 2)]))
    assert not [value for value in vars(parcel).values() if isinstance(value, Tensor)]
    assert parcel.chunk is None
    chunk, expected = places.take(parcel), found.read_chunk([(0, 1), (3, 2)])
    assert same([chunk], [expected])
    assert torch.equal(chunk.ratio, expected.ratio)
    places.bytes.zero_()
    assert same([chunk], [expected])  # it has left its place


def test_a_place_is_free_when_it_is_given_again() -> None:
    """The loader asks before the GPU may have read what is in it."""

    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    places, event = Places(2, 16, CPU), Event()
    asked: Iterator[tuple[int, Samples]] = places.ask([[(n, 0)] for n in range(4)])
    assert [next(asked)[0] for _ in range(2)] == [0, 1]
    places.read[0] = event  # type: ignore[assignment]
    assert next(asked) == (0, [(2, 0)])
    assert event.waited == 1
    assert next(asked)[0] == 1
    assert list(asked) == []


class Failing(TrainReader):
    def read_chunk(self, samples: Samples) -> Chunk:
        return replace(super().read_chunk(samples), error="no more")


def test_an_error_is_raised_here() -> None:
    with pytest.raises(UserError, match="no more"):
        read(Failing(source(4), SIZE, Preprocess(), Augment()), requests(2, 4, 4), 1)


@pytest.mark.parametrize("change", ["start", "memory"])
def test_where_nothing_can_be_shared_torch_sends_it(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    if change == "start":
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "forkserver")
    else:
        monkeypatch.setattr("vitlab.data.places.mmap.mmap", refuse)
    assert make_places(3, 4096, CPU) is None
    asked = requests(3, 7, images=20)
    assert same(read(reader(20), asked, 1), read(reader(20), asked, 0))
