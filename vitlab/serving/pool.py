"""All connections, and which of them has to go when there are too many.

A newcomer is not refused because others hold their places: the client that has kept the server waiting longest gives
way. Good and bad clients may share an address, a proxy's for instance, so what counts is what a connection does.
"""

import asyncio
import random
import time
from collections import Counter
from typing import Protocol

STALLED = 1.0  # seconds; a shorter pause is nobody's fault
PATIENCE = 3.0  # seconds at the door
LOOK = 0.05  # seconds until the first at the door looks again whether somebody has stalled
PACE = 0.005  # seconds between two requests sent ahead of their turn


class Seat(Protocol):
    """What the table has to know of a connection."""

    address: str
    waits: float | None  # since when its client keeps us waiting; None while we work for it

    def drop(self) -> None: ...


class ConnectionPool:
    """At most `most` connections; an address that holds more than half of them loses its own stalled ones first."""

    def __init__(self, most: int) -> None:
        self.most, self.share, self.waiting = most, max(1, most // 2), 0
        self.seats: set[Seat] = set()
        self.held: Counter[str] = Counter()
        self.door, self.lane = asyncio.Lock(), asyncio.Lock()

    @property
    def crowded(self) -> bool:
        """Whether as many wait as have a place."""
        return self.waiting >= self.most

    async def enter(self, seat: Seat) -> bool:
        """Take a place, in the order of arrival, as soon as there is one; False if there is none for too long."""
        if self.held[seat.address] >= self.share:
            self.shed(seat.address)
        self.waiting += 1
        try:
            async with asyncio.timeout(PATIENCE), self.door:
                while len(self.seats) >= self.most and not self.shed():
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
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

    async def turn(self, patience: float) -> bool:
        """For a request sent ahead of its turn: one of them starts at a time, with a pause, whoever sent it.

        Hardly anybody pipelines but those who want the server to work without reading its answers. False: it has
        waited too long.
        """
        try:
            async with asyncio.timeout(patience * random.uniform(0.5, 1)), self.lane:  # who came together goes apart
                await asyncio.sleep(PACE)
        except TimeoutError:
            return False
        return True
