"""All connections, and which of them has to go when there are too many.

A newcomer is not refused because others hold their places: the client that has kept the server waiting longest gives
way. Good and bad clients may share an address, a proxy's for instance, so what counts is what a connection does.
"""

import asyncio
import time
from collections import Counter
from typing import Protocol

STALLED = 1.0  # seconds; a shorter pause is nobody's fault


class Seat(Protocol):
    """What the table has to know of a connection."""

    address: str
    waits: float | None  # since when its client keeps us waiting; None while we work for it

    def drop(self) -> None: ...


class Table:
    """At most `most` connections; an address that holds more than half of them loses its own stalled ones first."""

    def __init__(self, most: int) -> None:
        self.most, self.share = most, max(1, most // 2)
        self.seats: set[Seat] = set()
        self.held: Counter[str] = Counter()
        self.lane = asyncio.Lock()

    def admit(self, seat: Seat) -> bool:
        """Whether there is room for one more; those that are closed for it are closed at once."""
        if self.held[seat.address] >= self.share:
            self.shed(seat.address)
        if len(self.seats) >= self.most and not self.shed():
            return False
        self.seats.add(seat)
        self.held[seat.address] += 1
        return True

    def leave(self, seat: Seat) -> None:
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        self.held[seat.address] -= 1
        if not self.held[seat.address]:
            del self.held[seat.address]

    def shed(self, address: str | None = None) -> bool:
        """Close the connection that has been stalled longest, of all or of one address."""
        found, oldest = None, time.monotonic() - STALLED
        for seat in self.seats:
            if seat.waits is not None and seat.waits <= oldest and address in (None, seat.address):
                found, oldest = seat, seat.waits
        if found is None:
            return False
        self.leave(found)
        found.drop()
        return True

    async def turn(self) -> None:
        """For requests sent ahead of their turn: one of them starts per turn of the event loop, whoever sent it."""
        async with self.lane:
            await asyncio.sleep(0)
