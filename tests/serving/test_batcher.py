"""Many callers and one worker: which items run together, and when."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
from timing import seconds

from vitlab.errors import UserError
from vitlab.serving.batcher import Batcher, BatcherClosed, QueueFull


class Doubler:
    """Answers with twice the item and remembers its batches; holds still while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.entered.set()
        assert self.gate.wait(60)
        self.batches.append(list(items))
        if 13 in items:
            raise ArithmeticError("unlucky")
        return [2 * item for item in items]

    def hold(self) -> None:
        self.gate.clear()
        self.entered.clear()


@contextmanager
def doubling(**settings: Any) -> Iterator[tuple[Batcher[int, int], Doubler]]:
    run = Doubler()
    batcher = Batcher(run, **settings)
    try:
        yield batcher, run
    finally:
        run.gate.set()
        batcher.close(10)


def test_every_caller_gets_its_own_answer_and_no_item_runs_twice() -> None:
    with doubling(max_batch=8, queue=2000) as (batcher, run), ThreadPoolExecutor(16) as callers:
        items = [n for n in range(1000) if n != 13]
        answers = list(callers.map(lambda n: batcher.submit(n).result(60), items))
    assert answers == [2 * n for n in items]
    assert sorted(n for batch in run.batches for n in batch) == items
    assert max(map(len, run.batches)) <= 8


def test_what_came_in_while_the_model_was_busy_is_one_batch() -> None:
    with doubling(max_batch=4) as (batcher, run):
        run.hold()
        futures = [batcher.submit(0)]
        assert run.entered.wait(60)
        futures += [batcher.submit(n) for n in range(1, 7)]
        run.gate.set()
        wait(futures, 60)
    assert run.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_a_single_item_does_not_wait() -> None:
    with doubling(max_wait=50.0) as (batcher, _):
        assert seconds(lambda: batcher.submit(3).result(60)) < 10


def test_it_waits_for_reserved_places() -> None:
    with doubling(max_wait=50.0) as (batcher, run), batcher.reserve(1) as late:
        first = batcher.submit(1)
        time.sleep(0.05)
        assert not first.done()
        second = late.submit([2])[0]
        assert (first.result(60), second.result(60)) == (2, 4)
    assert run.batches == [[1, 2]]


def test_it_waits_no_longer_than_max_wait() -> None:
    with doubling(max_wait=0.05) as (batcher, _), batcher.reserve(1):
        assert 0.04 < seconds(lambda: batcher.submit(1).result(60)) < 10


def test_a_full_queue_raises_and_places_are_released() -> None:
    with doubling(queue=3, max_wait=0) as (batcher, _):
        with batcher.reserve(2):
            with pytest.raises(QueueFull):
                batcher.reserve(2)
            batcher.submit(1).result(60)
        with batcher.reserve(3) as places:
            assert len(batcher) == 3
            assert [f.result(60) for f in places.submit([1, 2])] == [2, 4]
        assert len(batcher) == 0


def test_a_cancelled_item_never_reaches_the_model() -> None:
    with doubling() as (batcher, run):
        run.hold()
        first = batcher.submit(0)
        assert run.entered.wait(60)
        cancelled, kept = batcher.submit(1), batcher.submit(2)
        assert cancelled.cancel()
        run.gate.set()
        assert (first.result(60), kept.result(60)) == (0, 4)
    assert run.batches == [[0], [2]]


def test_an_exception_is_the_answer_of_its_batch_alone() -> None:
    with doubling(max_batch=2) as (batcher, run):
        run.hold()
        first = batcher.submit(0)
        assert run.entered.wait(60)
        futures = [batcher.submit(n) for n in (13, 14, 15)]
        run.gate.set()
        for unlucky in futures[:2]:
            with pytest.raises(ArithmeticError, match="unlucky"):
                unlucky.result(60)
        assert (first.result(60), futures[2].result(60)) == (0, 30)
        assert batcher.is_open


def test_too_few_answers_are_an_error_not_a_hang() -> None:
    batcher: Batcher[int, int] = Batcher(lambda items: [])
    with pytest.raises(RuntimeError, match="got 0 answers"):
        batcher.submit(1).result(60)
    assert batcher.close(5)


def test_a_call_has_the_models_thread_to_itself_in_its_turn() -> None:
    with doubling() as (batcher, run):
        run.hold()
        order: list[Any] = []
        batcher.submit(0)
        assert run.entered.wait(60)
        before = batcher.submit(1)
        called = batcher.call(lambda: order.append((threading.current_thread().name, list(run.batches))))
        after = batcher.submit(2)
        run.gate.set()
        futures: list[Future[Any]] = [before, called, after]
        wait(futures, 60)
    assert order == [("model", [[0], [1]])]
    assert run.batches == [[0], [1], [2]]


def test_closing_finishes_what_waits_and_takes_no_more() -> None:
    with doubling() as (batcher, run):
        run.hold()
        futures = [batcher.submit(n) for n in range(5)]
        places = batcher.reserve(1)
        closing = threading.Thread(target=batcher.close, args=(10,))
        closing.start()
        while not batcher.closed:
            time.sleep(0.001)
        with pytest.raises(BatcherClosed):
            batcher.submit(9)
        run.gate.set()
        futures += places.submit([5])  # reserved places are still served
        assert [f.result(60) for f in futures] == [0, 2, 4, 6, 8, 10]
        closing.join(60)
        assert not batcher.worker.is_alive()


def test_closing_with_a_timeout_cancels_what_waits() -> None:
    with doubling() as (batcher, run):
        run.hold()
        running = batcher.submit(1)
        assert run.entered.wait(60)
        waiting = batcher.submit(2)
        assert not batcher.close(0.05)
        with pytest.raises(CancelledError):
            waiting.result(60)
        run.gate.set()
        assert running.result(60) == 2


def test_on_batch_gets_size_and_seconds() -> None:
    seen: list[tuple[int, float]] = []
    batcher: Batcher[int, int] = Batcher(list, on_batch=lambda size, seconds: seen.append((size, seconds)))
    assert batcher.submit(1).result(60) == 1
    assert batcher.close(5)
    assert [size for size, _ in seen] == [1]
    assert 0 <= seen[0][1] < 60


# ---- batches that are collected later


class Device:
    """Starts batches at once, and has the answers to each when the test lets it."""

    def __init__(self) -> None:
        self.started: list[list[int]] = []
        self.collected: list[list[int]] = []
        self.ready = threading.Semaphore(0)
        self.changed = threading.Condition()

    def __call__(self, items: Sequence[int]) -> Callable[[], list[int]]:
        with self.changed:
            self.started.append(list(items))
            self.changed.notify_all()

        def collect() -> list[int]:
            assert self.ready.acquire(timeout=60)
            self.collected.append(list(items))
            if 13 in items:
                raise ArithmeticError("unlucky")
            return [2 * item for item in items]

        return collect

    def wait_for(self, batches: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= batches, 60)


def test_the_next_batch_starts_before_the_first_is_answered_and_a_third_once_it_is_full() -> None:
    device = Device()
    batcher = Batcher(device, max_batch=2)
    with batcher.reserve(4) as places:  # so that these are two full batches
        futures = places.submit([0, 1, 2, 3])
    device.wait_for(2)
    futures.append(batcher.submit(4))
    time.sleep(0.02)
    assert len(device.started) == 2  # others may still join it
    futures.append(batcher.submit(5))
    device.wait_for(3)
    with batcher.reserve(4) as places:
        futures += places.submit([6, 7, 8, 9])
    time.sleep(0.02)
    assert device.started == [[0, 1], [2, 3], [4, 5]]
    assert not any(future.done() for future in futures)
    device.ready.release(5)
    assert [future.result(60) for future in futures] == [2 * n for n in range(10)]
    assert batcher.close(10)
    assert not batcher.worker.is_alive()
    assert not batcher.collector.is_alive()


def test_a_call_waits_until_nothing_is_under_way() -> None:
    device = Device()
    batcher = Batcher(device, max_batch=1)
    batcher.submit(1)
    device.wait_for(1)
    called = batcher.call(lambda: list(device.collected))
    time.sleep(0.02)
    assert not called.done()
    device.ready.release()
    assert called.result(60) == [[1]]
    assert batcher.close(10)


def test_the_next_batch_does_not_wait_for_callers_to_take_their_answers() -> None:
    device, taken = Device(), threading.Event()
    batcher = Batcher(device, max_batch=1)
    slow = batcher.submit(1)
    slow.add_done_callback(lambda _: taken.wait(60))
    device.wait_for(1)
    futures = [batcher.submit(n) for n in (2, 3, 4)]
    device.ready.release(4)
    device.wait_for(4)  # three are under way, the fourth one after the first is collected
    assert not taken.is_set()
    taken.set()
    assert [future.result(60) for future in futures] == [4, 6, 8]
    assert batcher.close(10)


def test_an_exception_while_collecting_is_the_answer_of_its_batch_alone() -> None:
    device = Device()
    batcher = Batcher(device, max_batch=1)
    futures = [batcher.submit(n) for n in (13, 14)]
    device.ready.release(2)
    with pytest.raises(ArithmeticError, match="unlucky"):
        futures[0].result(60)
    assert futures[1].result(60) == 28
    assert batcher.is_open
    assert batcher.close(10)


def test_closing_in_time_means_that_all_is_collected() -> None:
    device = Device()
    batcher = Batcher(device)
    late = batcher.submit(3)
    device.wait_for(1)
    assert not batcher.close(0.02)
    device.ready.release()
    assert late.result(60) == 6


@pytest.mark.parametrize("settings", [{"max_batch": 0}, {"queue": 0}, {"max_wait": -1}])
def test_impossible_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="at least one image"):
        Batcher(list, **settings)
