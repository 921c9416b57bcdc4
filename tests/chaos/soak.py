"""Good and hostile clients at one server for a long time: nothing may leak, and no good client may get an error."""

import asyncio
import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from chaos.clients import Load, besieged, press
from chaos.rows import Row
from chaos.watch import Held, held  # also makes `servers` importable

if TYPE_CHECKING:
    from servers import Running

SECONDS = 20 * 60
GOOD = 64
HOSTILE = {"silent": 12, "slow": 12, "tiny": 4, "dribble": 12, "pixels": 2, "scans": 2, "noise": 10, "leave": 10}
SETTLE = 3.0  # seconds until the server has closed the connections of the clients that left
GROWTH = 100.0  # megabytes under load, from the first minute to the end
FIRST = 400.0  # and where there is no minute: the largest pictures alone take that for the first time
LONG = 240.0  # seconds from which growth and throughput mean something
FILES = 8  # more than before is a leak


async def load_for(port: int, pid: int, seconds: float, pictures: list[bytes], load: Load) -> tuple[Held, Held]:
    """What the server holds after a minute of load, or a twentieth of the time, and at its end."""
    end = time.monotonic() + seconds
    clients = asyncio.create_task(press(port, pictures, end, load))
    await asyncio.sleep(max(seconds / 20, min(60.0, seconds / 4)))
    early = held(pid)
    await asyncio.sleep(max(0.0, end - time.monotonic() - 0.2))
    late = held(pid)
    await clients
    return early, late


def judge(load: Load, seconds: float, before: Held, early: Held, late: Held, after: Held) -> list[str]:
    failures = [f"{len(load.errors)} errors of good clients, the first: {load.errors[0]}"] if load.errors else []
    if late.megabytes - early.megabytes > (GROWTH if seconds >= LONG else FIRST):
        failures.append(f"memory grew from {early.megabytes:.0f} to {late.megabytes:.0f} MB")
    if after.files > before.files + FILES:
        failures.append(f"open files grew from {before.files} to {after.files}")
    if after.children > before.children:
        failures.append(f"child processes grew from {before.children} to {after.children}")
    if not load.answers:
        failures.append("no good client was answered")
    elif seconds >= LONG and len(load.between(0.75, 1.0)) < len(load.between(0.0, 0.25)) / 2:
        failures.append("the last quarter's throughput is less than half of the first's")
    return failures


def quarter(load: Load, seconds: float, start: float) -> str:
    found = load.between(start, start + 0.25)
    late = sorted(found)[int(0.99 * len(found))] * 1000
    return (
        f"{len(found) / (seconds / 4):.0f} requests/s, p50 {statistics.median(found) * 1000:.0f} ms, p99 {late:.0f} ms"
    )


def run(scale: float = 1.0, running: "Running | None" = None) -> Row:
    """Load a server of its own, or one that runs already."""
    from servers import encoded, photo, small_server

    seconds, load = max(2.0, scale * SECONDS), Load()
    pictures = [encoded(photo(seed, 160, 120), "JPEG") for seed in range(GOOD)]
    with nullcontext(running) if running else small_server() as live:
        pid, start = live.process.pid, time.monotonic()
        asyncio.run(press(live.port, pictures, time.monotonic() + 1.0, Load()))
        time.sleep(1.0)
        before = held(pid)
        with besieged(live.port, seconds + 60, **HOSTILE):
            early, late = asyncio.run(load_for(live.port, pid, seconds, pictures, load))
        time.sleep(SETTLE)
        after, log = held(pid), "".join(live.lines)
        took = time.monotonic() - start
    failures = judge(load, seconds, before, early, late, after)
    if "Traceback" in log:
        failures.append("a traceback in the log: " + log[log.index("Traceback") :][:1500])
    notes = f"under load {early}, then {late}; without load {before}, then {after}"
    if load.answers:
        notes = f"first quarter {quarter(load, seconds, 0)}; last {quarter(load, seconds, 0.75)}; {notes}"
    name = f"soak: {GOOD} good and {sum(HOSTILE.values())} hostile clients"
    return Row(name, len(load.answers), "answers", took, failures, notes)
