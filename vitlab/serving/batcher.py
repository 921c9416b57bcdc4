"""Many callers, one model: waiting items are run together, by the one thread that owns the model.

What runs them may return before it has their answers, with something to wait for them by: a second thread does, so that
the next batch is prepared while a device computes this one.

A caller first reserves places in the queue, then prepares its items (decoding a photo takes a while), then submits them
and gets futures. Places that are reserved but not yet filled show the batcher that more items are coming: with a short
batch at hand it waits for those, at most `max_wait`; when nothing is coming it starts at once. So a single request pays
nothing for the batching, and under load batches are full.

A future that is cancelled before its turn costs nothing. An exception in the model is the result of its batch alone.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from vitlab.errors import UserError

log = logging.getLogger("vitlab")

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
# Batches that are started and not answered: a device has work, and others wait to be a batch. One that is full, which
# nothing more can join, starts while two are under way, so that the device need not wait for it.
UNDER_WAY, WITH_FULL = 2, 3


class QueueFull(Exception):
    """There is no place left in the queue."""


class BatcherClosed(Exception):
    """The batcher accepts no more work."""


@dataclass(slots=True)
class QueueEntry:
    """Something that waits: an item for a batch, or a call that runs on the model's thread by itself."""

    item: Any = None
    call: Callable[[], Any] | None = None
    future: Future[Any] = field(default_factory=Future)


@dataclass
class StartedBatch:
    """A batch that runs, when it began, and what waits for its answers."""

    entries: list[QueueEntry]
    began: float
    collect: Callable[[], Sequence[Any]]


@dataclass(eq=False)
class Batcher(Generic[Item, Answer]):
    """Runs items in batches of up to `max_batch`, in the order they came; at most `queue` of them wait.

    `run` takes the items of a batch and returns as many answers, or something that waits for them when it is called.
    `on_batch` gets the size and seconds of each batch.
    """

    run: Callable[[Sequence[Item]], Sequence[Answer] | Callable[[], Sequence[Answer]]]
    max_batch: int = 64
    max_wait: float = 0.005
    queue: int = 256
    on_batch: Callable[[int, float], None] = lambda size, seconds: None

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.queue < 1 or self.max_wait < 0:
            given = f"{self.max_batch}, {self.queue} and {self.max_wait:g} s"
            raise UserError(f"a batch and the queue hold at least one image and the wait is not negative, not {given}")
        self.waiting: deque[QueueEntry] = deque()
        self.reserved = 0  # places without an item yet
        self.closed = self.finished = False  # closed for new work; reserved places may still be filled
        self.all_started = False  # nothing more comes for the collector
        lock = threading.RLock()
        self.changed = threading.Condition(lock)  # wakes the worker,
        self.begun = threading.Condition(lock)  # and this the collector
        self.started: deque[StartedBatch] = deque()  # the first one is being collected
        self.worker = threading.Thread(target=self._work, name="model", daemon=True)
        self.collector = threading.Thread(target=self._collect, name="answers", daemon=True)
        self.worker.start()
        self.collector.start()

    # ---- for callers, from any thread

    def __len__(self) -> int:
        """Places in use."""
        return len(self.waiting) + self.reserved

    def reserve(self, number: int) -> "Reservation[Item, Answer]":
        """Reserve places for `number` items; QueueFull where not all of them are free."""
        with self.changed:
            self._check_room(number)
            self.reserved += number
        return Reservation(self, number)

    def submit(self, item: Item) -> "Future[Answer]":
        """Queue one item that is ready already."""
        entry = QueueEntry(item)
        with self.changed:
            self._check_room(1)
            self._queue([entry])
        return entry.future

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run something else on the model's thread, in its turn; it takes one place."""
        entry = QueueEntry(call=function)
        with self.changed:
            self._check_room(1)
            self._queue([entry])
        return entry.future

    def close(self, seconds: float | None = None) -> bool:
        """Accept no more and finish the queue; False if that takes too long, and what still waits is cancelled."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        began = time.monotonic()
        self.worker.join(seconds)
        self.collector.join(None if seconds is None else max(0.0, seconds - (time.monotonic() - began)))
        with self.changed:
            in_time, self.finished = self.finished and not self.collector.is_alive(), True
            self.changed.notify_all()
            left, self.waiting, self.reserved = self.waiting, deque(), 0
        for entry in left:
            entry.future.cancel()
        return in_time

    @property
    def is_open(self) -> bool:
        return self.worker.is_alive() and self.collector.is_alive() and not self.closed

    def _check_room(self, number: int) -> None:
        if self.closed:
            raise BatcherClosed
        if len(self) + number > self.queue:
            raise QueueFull

    def _queue(self, entries: list[QueueEntry]) -> None:
        """Add entries, and wake the worker unless it would go on waiting: that costs more than the rest of this."""
        self.waiting.extend(entries)
        if self._may_start() and (len(self.waiting) == len(entries) or self._has_all()):
            self.changed.notify()

    # ---- the worker's thread

    def _work(self) -> None:
        while batch := self._next_batch():
            if batch := [entry for entry in batch if entry.future.set_running_or_notify_cancel()]:
                self._run_batch(batch)
            del batch  # or images would stay in memory until the next batch
        with self.changed:
            self.all_started = True
            self.begun.notify()

    def _run_batch(self, batch: list[QueueEntry]) -> None:
        """Answer a batch or a call, or start it and leave the rest to the collector."""
        began, call = time.perf_counter(), batch[0].call
        try:
            answers = self.run([entry.item for entry in batch]) if call is None else [call()]
        except Exception as error:
            fail(batch, error)
            return
        if not callable(answers):
            self._answer(batch, answers, began)
            return
        for entry in batch:
            entry.item = None  # the images are on their way
        with self.changed:
            self.started.append(StartedBatch(batch, began, answers))
            self.begun.notify()

    def _answer(self, batch: list[QueueEntry], answers: Sequence[Any], began: float) -> None:
        """Set every future's result."""
        if len(answers) != len(batch):
            fail(batch, RuntimeError(f"a batch of {len(batch)} got {len(answers)} answers"))
            return
        if batch[0].call is None:
            self.on_batch(len(batch), time.perf_counter() - began)
        for entry, answer in zip(batch, answers, strict=True):
            entry.future.set_result(answer)

    def _next_batch(self) -> list[QueueEntry]:
        """Wait for the next batch, or a call by itself; empty when the batcher is closed and all is started."""
        with self.changed:
            self.changed.wait_for(self._may_start)
            self.changed.wait_for(lambda: self.waiting or (self.closed and not self.reserved))
            if not self.waiting:
                self.finished = True
                return []
            self.changed.wait_for(self._has_all, self.max_wait)
            if not self.waiting:  # closing has cancelled them
                return self._next_batch()
            batch = [self.waiting.popleft()]
            if batch[0].call is not None:
                self.changed.wait_for(lambda: not self.started)  # it has the device to itself
            while batch[0].call is None and self.waiting and not self.waiting[0].call and len(batch) < self.max_batch:
                batch.append(self.waiting.popleft())
            return batch

    def _may_start(self) -> bool:
        """Whether another batch may be under way, once there is one."""
        return len(self.started) < (WITH_FULL if len(self.waiting) >= self.max_batch else UNDER_WAY)

    def _has_all(self) -> bool:
        """Whether a batch is full, or nothing more is coming for it."""
        return not self.reserved or len(self.waiting) >= self.max_batch or self.closed

    # ---- the collector's thread

    def _collect(self) -> None:
        while batch := self._next_started():
            try:
                answers = batch.collect()
            except Exception as error:
                self._next_may_start()
                fail(batch.entries, error)
            else:
                self._next_may_start()
                self._answer(batch.entries, answers, batch.began)
                del answers
            del batch

    def _next_may_start(self) -> None:
        """The device is done with the first batch, whose callers get their answers meanwhile."""
        with self.changed:
            self.started.popleft()
            self.changed.notify()

    def _next_started(self) -> StartedBatch | None:
        """Wait for the batch that was started first; None when all are answered and no more will be started."""
        with self.changed:
            self.begun.wait_for(lambda: self.started or self.all_started)
            return self.started[0] if self.started else None


def fail(batch: list[QueueEntry], error: Exception) -> None:
    """Set the exception on every future."""
    log.error("the model failed on a batch of %d", len(batch), exc_info=error)
    for entry in batch:
        entry.future.set_exception(error)


class Reservation(Generic[Item, Answer]):
    """Reserved places in the queue: fill them with `submit`; the end of the `with` block releases those left over."""

    def __init__(self, batcher: Batcher[Item, Answer], number: int) -> None:
        self.batcher, self.left = batcher, number

    def submit(self, items: Sequence[Item]) -> "list[Future[Answer]]":
        if len(items) > self.left:
            raise ValueError(f"{len(items)} items for {self.left} reserved places")
        entries = [QueueEntry(item) for item in items]
        self._release(len(items), entries)
        return [entry.future for entry in entries]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release(self.left, [])

    def _release(self, number: int, entries: list[QueueEntry]) -> None:
        with self.batcher.changed:
            if self.batcher.finished:
                if entries:
                    raise BatcherClosed
                return
            self.left -= number
            self.batcher.reserved -= number
            self.batcher._queue(entries)
