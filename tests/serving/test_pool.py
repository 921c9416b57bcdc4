"""Which connections are closed when there are too many."""

import asyncio
import time
from dataclasses import dataclass

import pytest
from timing import measure_until, seconds

from vitlab.serving.pool import STALL_SECONDS, ConnectionPool


@dataclass(eq=False)
class FakeConnection:
    stalled: float | None  # for how many seconds; None: its request is being computed
    address: str = "10.0.0.1"
    aborted: bool = False
    since: float | None = None  # a moment, instead of `stalled`

    @property
    def idle_since(self) -> float | None:
        return self.since if self.stalled is None else time.monotonic() - self.stalled

    def abort(self) -> None:
        self.aborted = True


def admit(pool: ConnectionPool, *connections: FakeConnection) -> list[bool]:
    """Whether each of them, one after the other, is admitted."""

    async def admit_all() -> list[bool]:
        return [await pool.admit(connection) for connection in connections]

    return asyncio.run(admit_all())


def test_the_connection_that_stalled_longest_is_closed() -> None:
    stalled = [(3 * STALL_SECONDS, "a"), (None, "b"), (9 * STALL_SECONDS, "c"), (0.1, "d")]
    connections = [FakeConnection(*one) for one in stalled]
    pool = ConnectionPool(4)
    assert all(admit(pool, *connections, FakeConnection(0.0, "e")))
    assert [one.aborted for one in connections] == [False, False, True, False]
    assert admit(pool, FakeConnection(0.0, "f")) == [True]
    assert connections[0].aborted
    assert len(pool.connections) == 4


def test_neither_work_nor_a_short_pause_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.serving.pool.ADMIT_SECONDS", 0.2)
    connections = [FakeConnection(None), FakeConnection(STALL_SECONDS / 4)]
    assert admit(ConnectionPool(2), *connections, FakeConnection(0.0)) == [True, True, False]
    assert not any(one.aborted for one in connections)


def test_a_waiting_connection_replaces_one_that_leaves_or_stalls() -> None:
    def attempt() -> None:
        young, working = FakeConnection(None, since=time.monotonic() - STALL_SECONDS + 0.3), FakeConnection(None)
        assert admit(ConnectionPool(2), young, working, FakeConnection(0.0)) == [True, True, True]
        assert young.aborted

    measure_until(lambda took: 0.2 < took < 1.0, lambda: seconds(attempt))


def test_an_address_beyond_its_share_loses_its_own_first() -> None:
    pool = ConnectionPool(6)  # a share is 3
    other = FakeConnection(60.0, "10.0.0.2")
    ours = [FakeConnection(5.0), FakeConnection(4.0), FakeConnection(2.0)]
    assert all(admit(pool, other, *ours, FakeConnection(0.0)))
    assert ours[0].aborted  # though the pool has room, and another address has stalled longer
    assert not other.aborted


def test_good_clients_of_one_address_may_fill_the_pool() -> None:
    pool = ConnectionPool(6)
    assert all(admit(pool, *(FakeConnection(0.0) for _ in range(6))))
    assert len(pool.connections) == 6


def test_removing_twice_is_removing_once() -> None:
    pool, connection = ConnectionPool(2), FakeConnection(0.0)
    admit(pool, connection)
    pool.remove(connection)
    pool.remove(connection)
    assert not pool.connections
    assert not pool.per_address


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_pools(size: int) -> None:
    pool = ConnectionPool(size)
    assert all(admit(pool, *(FakeConnection(9.0) for _ in range(5))))
    assert len(pool.connections) <= size
