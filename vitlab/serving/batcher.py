"""Many callers, one model: what waits is answered together, by the one thread that owns the model.

A caller first reserves seats, then prepares its items (decoding a photo takes a while), then submits them and gets
futures. Seats that are reserved but not yet filled are how the batcher knows that more is coming: with a short batch in
hand it waits for those, and no longer than `max_wait`; when nothing is coming it starts at once. So a lone request pays
nothing for the batching, and a busy moment fills batches.

A future that is cancelled before its turn costs nothing. An exception in the model is the answer of its own batch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from vitlab.errors import UserError

log = logging.getLogger("vitlab")

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Full(Exception):
    """There is no seat left in the queue."""


class Closed(Exception):
    """The batcher takes no more work."""


@dataclass
class Entry:
    """Something that waits: an item for a batch, or a call that has the model to itself."""

    item: Any = None
    call: Callable[[], Any] | None = None
    future: Future[Any] = field(default_factory=Future)


class Batcher(Generic[Item, Answer]):
    """Answers items in batches of up to `max_batch`, in the order they came; at most `queue` wait.

    `run` takes the items of a batch and returns as many answers. `watch` is told the size and seconds of each batch.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Answer]],
        *,
        max_batch: int = 64,
        max_wait: float = 0.005,
        queue: int = 256,
        watch: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        if max_batch < 1 or queue < 1 or max_wait < 0:
            said = f"not {max_batch}, {queue} and {max_wait:g} s"
            raise UserError(f"a batch and the queue hold at least one image and a wait is not negative, {said}")
        self.run, self.max_batch, self.max_wait, self.queue, self.watch = run, max_batch, max_wait, queue, watch
        self.waiting: deque[Entry] = deque()
        self.reserved = 0  # seats without an item yet
        self.closed = False  # to newcomers; those with a seat are still served
        self.ended = False
        self.changed = threading.Condition()
        self.worker = threading.Thread(target=self._work, name="model", daemon=True)
        self.worker.start()

    # ---- for callers, from any thread

    def __len__(self) -> int:
        """Seats taken."""
        return len(self.waiting) + self.reserved

    def reserve(self, number: int) -> "Seats[Item, Answer]":
        """Seats for `number` items: all or, as `Full`, none."""
        with self.changed:
            self._check_room(number)
            self.reserved += number
        return Seats(self, number)

    def submit(self, item: Item) -> "Future[Answer]":
        """One item that is ready already."""
        with self.reserve(1) as seats:
            return seats.submit([item])[0]

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run something else on the model's thread, in its turn; it takes one seat."""
        entry: Entry = Entry(call=function)
        with self.changed:
            self._check_room(1)
            self.waiting.append(entry)
            self.changed.notify()
        return entry.future

    def close(self, seconds: float | None = None) -> bool:
        """Take no more, finish what waits; False where it does not end in time, and what still waits is cancelled."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.worker.join(seconds)
        with self.changed:
            in_time, self.ended = self.ended, True
            left = list(self.waiting)
            self.waiting.clear()
            self.reserved = 0
        for entry in left:
            entry.future.cancel()
        return in_time

    @property
    def alive(self) -> bool:
        return self.worker.is_alive() and not self.closed

    def _check_room(self, number: int) -> None:
        if self.closed:
            raise Closed
        if len(self) + number > self.queue:
            raise Full

    # ---- the worker's side

    def _work(self) -> None:
        while batch := self._take():
            batch = [entry for entry in batch if entry.future.set_running_or_notify_cancel()]
            if batch:
                self._answer(batch)
            del batch  # a picture is not kept until the next one comes

    def _answer(self, batch: list[Entry]) -> None:
        """Give every future its answer, or all of them the exception."""
        start, call = time.perf_counter(), batch[0].call
        try:
            answers = self.run([entry.item for entry in batch]) if call is None else [call()]
            if len(answers) != len(batch):
                raise RuntimeError(f"a batch of {len(batch)} got {len(answers)} answers")
        except Exception as error:
            log.exception("the model failed on a batch of %d", len(batch))
            for entry in batch:
                entry.future.set_exception(error)
            return
        if call is None:
            self.watch(len(batch), time.perf_counter() - start)
        for entry, answer in zip(batch, answers, strict=True):
            entry.future.set_result(answer)

    def _take(self) -> list[Entry]:
        """The next batch, or a call by itself; nothing when the batcher is closed and all is done."""
        with self.changed:
            while not self.waiting:
                if self.closed and not self.reserved:
                    self.ended = True
                    return []
                self.changed.wait()
            self._wait_for_more()
            if self.waiting[0].call is not None:
                return [self.waiting.popleft()]
            batch: list[Entry] = []
            while self.waiting and self.waiting[0].call is None and len(batch) < self.max_batch:
                batch.append(self.waiting.popleft())
            return batch

    def _wait_for_more(self) -> None:
        deadline = time.monotonic() + self.max_wait
        while self.reserved and len(self.waiting) < self.max_batch and not self.closed:
            left = deadline - time.monotonic()
            if left <= 0 or not self.changed.wait(left):
                return


class Seats(Generic[Item, Answer]):
    """Reserved places: fill them once with `submit`; leaving the `with` block gives back those that were not."""

    def __init__(self, batcher: Batcher[Item, Answer], number: int) -> None:
        self.batcher, self.left = batcher, number

    def submit(self, items: Sequence[Item]) -> "list[Future[Answer]]":
        if len(items) > self.left:
            raise ValueError(f"{len(items)} items for {self.left} seats")
        entries: list[Entry] = [Entry(item) for item in items]
        self._leave(len(items), entries)
        return [entry.future for entry in entries]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave(self.left, [])

    def _leave(self, number: int, entries: list[Entry]) -> None:
        with self.batcher.changed:
            if self.batcher.ended:
                if entries:
                    raise Closed
                return
            self.left -= number
            self.batcher.reserved -= number
            self.batcher.waiting.extend(entries)
            self.batcher.changed.notify()
