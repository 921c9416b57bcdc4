"""Speeds side by side: contestants take turns in one process, so that what slows the machine slows them all."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vitlab.device import synchronize

FIRST, WARM_UP = 1, 6  # calls before the clock starts: the first compiles, the fourth may record a CUDA graph
LARGE = {"cuda": 8192, "cpu": 2048}  # rows of the square matrices whose product is the machine's peak
MATMUL = "matmul"


@dataclass(frozen=True)
class Contestant:
    """Something that handles one batch a call, ready to be timed."""

    name: str
    version: str
    call: Callable[[], object]
    memory: int | None  # bytes of the device at its peak, on a GPU
    how: str = ""  # what runs it, where that is chosen on this machine


@dataclass(frozen=True)
class Row:
    """What was measured of a contestant: images per second, round by round."""

    name: str
    version: str
    rates: tuple[float, ...]
    memory: int | None
    shares: tuple[float, ...]  # of the operations per second of large matrix products in the same round
    how: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def share(self) -> float:
        return statistics.median(self.shares)

    def ratio(self, other: "Row") -> float:
        """The median of the ratios of each round, which no drift of the machine's speed changes."""
        return statistics.median(a / b for a, b in zip(self.rates, other.rates, strict=True))


def warm_up(call: Callable[[], object], device: torch.device, before: int) -> int | None:
    """Call until it is as fast as it gets; the memory of a GPU at the peak, without the `before` bytes of others.

    The first call is left out of it, in which compilers try things out.
    """
    for _ in range(FIRST):
        call()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP - FIRST if device.type == "cuda" else 1):
        call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def race(
    contestants: list[Contestant], device: torch.device, *, rounds: int, seconds: float, alone: bool
) -> Iterator[dict[str, float]]:
    """Calls per second of each contestant, round by round; each round starts with another one.

    With `alone` each call ends before the next begins, as of a user who waits for one answer.
    """
    calls = {c.name: calls_within(c.call, device, seconds) for c in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        yield {
            c.name: calls[c.name] / measure(c.call, device, calls[c.name], alone=alone)
            for c in itertools.chain(contestants[first:], contestants[:first])
        }


def calls_within(call: Callable[[], object], device: torch.device, seconds: float) -> int:
    """How many calls take about so long."""
    done = 1
    while (took := measure(call, device, done)) < seconds / 4:
        done *= 2
    return max(1, round(done * seconds / took))


def measure(call: Callable[[], object], device: torch.device, calls: int, *, alone: bool = False) -> float:
    """Seconds that so many calls take, with their work on the device."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
        if alone:
            synchronize(device)
    synchronize(device)
    return time.perf_counter() - began


def matmul(device: torch.device, dtype: torch.dtype) -> Contestant:
    """A large matrix product: what this machine can reach at all, and does while the others take their turns."""
    rows = LARGE.get(device.type, LARGE["cpu"])
    a, b = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    return Contestant(MATMUL, torch.__version__, lambda: a @ b, None)


def matmul_flops(device: torch.device) -> float:
    """Operations of that product."""
    return float(2 * LARGE.get(device.type, LARGE["cpu"]) ** 3)


@contextmanager
def own_compilations() -> Iterator[None]:
    """With room for the compiled code of everything inside, and without that code afterwards.

    Compiled code belongs to a class: after eight models of it, or sizes of images, torch would no longer compile, and
    run what follows eagerly without a word.
    """
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
