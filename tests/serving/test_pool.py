"""Who gives way when there are too many connections."""

import asyncio
import time
from dataclasses import dataclass

import pytest
from timing import measure_until, seconds

from vitlab.serving.pool import STALLED, ConnectionPool


@dataclass(eq=False)
class Seat:
    stalled: float | None  # for how many seconds; None: its request is being computed
    address: str = "10.0.0.1"
    dropped: bool = False
    since: float | None = None  # instead of `stalled`, a moment

    @property
    def waits(self) -> float | None:
        return self.since if self.stalled is None else time.monotonic() - self.stalled

    def drop(self) -> None:
        self.dropped = True


def seated(table: ConnectionPool, *seats: Seat) -> list[bool]:
    """Whether each of them, one after the other, gets a place."""

    async def enter() -> list[bool]:
        return [await table.enter(seat) for seat in seats]

    return asyncio.run(enter())


def test_who_has_stalled_longest_gives_way() -> None:
    seats = [Seat(3 * STALLED), Seat(None, "b"), Seat(9 * STALLED, "c"), Seat(0.1, "d")]
    table = ConnectionPool(4)
    assert all(seated(table, *seats, Seat(0.0, "e")))
    assert [seat.dropped for seat in seats] == [False, False, True, False]
    assert seated(table, Seat(0.0, "f")) == [True]
    assert seats[0].dropped
    assert len(table.seats) == 4


def test_work_is_never_dropped_nor_a_short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.serving.pool.PATIENCE", 0.2)
    seats = [Seat(None), Seat(STALLED / 4)]
    assert seated(ConnectionPool(2), *seats, Seat(0.0)) == [True, True, False]
    assert not any(seat.dropped for seat in seats)


def test_who_waits_gets_the_place_of_one_that_leaves_or_comes_to_stall() -> None:
    def attempt() -> None:
        young, working = Seat(None, since=time.monotonic() - STALLED + 0.3), Seat(None)
        assert seated(ConnectionPool(2), young, working, Seat(0.0)) == [True, True, True]
        assert young.dropped

    measure_until(lambda took: 0.2 < took < 1.0, lambda: seconds(attempt))


def test_an_address_beyond_its_share_loses_its_own_first() -> None:
    table = ConnectionPool(6)  # a share is 3
    other = Seat(60.0, "10.0.0.2")
    ours = [Seat(5.0), Seat(4.0), Seat(2.0)]
    assert all(seated(table, other, *ours, Seat(0.0)))
    assert ours[0].dropped  # though the table has room, and another address has stalled longer
    assert not other.dropped


def test_good_clients_of_one_address_may_fill_the_table() -> None:
    table = ConnectionPool(6)
    assert all(seated(table, *(Seat(0.0) for _ in range(6))))
    assert len(table.seats) == 6


def test_leaving_twice_is_leaving() -> None:
    table, seat = ConnectionPool(2), Seat(0.0)
    seated(table, seat)
    table.leave(seat)
    table.leave(seat)
    assert not table.seats
    assert not table.held


@pytest.mark.parametrize("most", [1, 2])
def test_the_smallest_tables(most: int) -> None:
    table = ConnectionPool(most)
    assert all(seated(table, *(Seat(9.0) for _ in range(5))))
    assert len(table.seats) <= most
