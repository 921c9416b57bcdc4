"""All open connections, and which of them is closed when there are too many.

A new client is not refused because others occupy the pool: the connection whose client has been idle longest is closed
for it. Good and bad clients may share an address, a proxy's for instance, so what counts is what a connection does.
"""

import asyncio
import random
import time
from collections import Counter
from typing import Protocol

STALL_SECONDS = 1.0  # a client may be idle for that long without being closed for another
ADMIT_SECONDS = 3.0  # that a new connection waits for room
RECHECK_SECONDS = 0.05  # until the first in line checks again whether a connection has stalled
PIPELINE_PAUSE = 0.005  # seconds between two pipelined requests


class PooledConnection(Protocol):
    """What the pool needs of a connection."""

    address: str

    @property
    def idle_since(self) -> float | None: ...  # since when the server waits for its client; None while it works for it

    def abort(self) -> None: ...


class ConnectionPool:
    """At most `size` connections; an address that has half of them or more loses its own stalled ones first."""

    def __init__(self, size: int) -> None:
        self.size, self.address_share, self.waiting = size, max(1, size // 2), 0
        self.connections: set[PooledConnection] = set()
        self.per_address: Counter[str] = Counter()
        self.admission, self.pipeline = asyncio.Lock(), asyncio.Lock()

    async def admit(self, connection: PooledConnection) -> bool:
        """Add a connection, in the order of arrival, as soon as there is room; False if there is none for too long."""
        if self.per_address[connection.address] >= self.address_share:
            self.close_stalled(connection.address)
        self.waiting += 1
        try:
            async with asyncio.timeout(ADMIT_SECONDS), self.admission:
                while len(self.connections) >= self.size and not self.close_stalled():
                    await asyncio.sleep(RECHECK_SECONDS)
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
        self.connections.add(connection)
        self.per_address[connection.address] += 1
        return True

    def remove(self, connection: PooledConnection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self.per_address -= Counter([connection.address])  # also removes an address with none left

    def close_stalled(self, address: str | None = None) -> bool:
        """Close the connection whose client has been idle longest, of all or of one address; False if none stalled."""
        stalled, since = None, time.monotonic() - STALL_SECONDS
        for one in self.connections:
            if one.idle_since is not None and one.idle_since <= since and address in (None, one.address):
                stalled, since = one, one.idle_since
        if stalled is None:
            return False
        self.remove(stalled)
        stalled.abort()
        return True

    async def wait_to_pipeline(self, seconds: float) -> bool:
        """Delay a request that was sent before the previous answer: one of them starts at a time, after a pause.

        Few clients pipeline but those that make the server work without reading its answers. False: the request has
        waited too long.
        """
        try:
            # clients that came together time out apart
            async with asyncio.timeout(seconds * random.uniform(0.5, 1)), self.pipeline:
                await asyncio.sleep(PIPELINE_PAUSE)
        except TimeoutError:
            return False
        return True
