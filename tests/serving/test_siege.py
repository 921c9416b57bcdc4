"""Good clients beside hostile ones, all from one address: the good ones are served in time.

By itself, `python tests/serving/test_siege.py [SECONDS]` prints what it measured.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # to run this file by itself
from chaos.clients import Load, besieged, health, press
from servers import Running, encoded, photo, shared_server, small_server
from timing import assert_below, measure_until

HOSTILE = {"silent": 512, "slow": 300, "tiny": 4}
CLIENTS = 64
SECONDS = 20.0


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    live = shared_server()
    yield live
    assert live.process.poll() is None
    assert "Traceback" not in "".join(live.lines)


def measure(live: Running, clients: int, seconds: float, hostile: dict[str, int]) -> tuple[Load, list[float]]:
    """What good clients see, and how long each health check takes."""
    pictures = [encoded(photo(seed, 160, 120), "JPEG") for seed in range(clients)]

    async def both(load: Load) -> list[float]:
        end = time.monotonic() + seconds
        return (await asyncio.gather(health(live.port, end), press(live.port, pictures, end, load)))[0]

    load = Load()
    with besieged(live.port, seconds + 60, **hostile) if hostile else contextlib.nullcontext():
        checks = asyncio.run(both(load))
    return load, checks


def report(load: Load, checks: list[float]) -> str:
    middle, late = load.percentile(0.5) * 1000, load.percentile(0.99) * 1000
    return (
        f"{len(load.answers)} answers, median {middle:.0f} ms, p99 {late:.0f} ms, {len(load.errors)} errors; "
        f"health check at most {max(checks) * 1000:.0f} ms"
    )


@pytest.mark.slow
def test_a_short_siege(live: Running) -> None:
    def slowest_check() -> float:
        load, checks = measure(live, 8, 3.0, {"silent": 60, "slow": 40, "tiny": 4, "dribble": 20})
        assert load.errors == []
        assert len(load.answers) > 50
        return max(checks)

    assert_below(1.0, slowest_check)


def measure_siege(live: Running, seconds: float) -> tuple[float, float, str]:
    """p99 under siege by p99 before it, the slowest health check, and a description; any error fails."""
    measure(live, CLIENTS, 2.0, {})
    quiet, quiet_checks = measure(live, CLIENTS, seconds, {})
    load, checks = measure(live, CLIENTS, seconds, HOSTILE)
    ratio = load.percentile(0.99) / quiet.percentile(0.99)
    words = f"quiet: {report(quiet, quiet_checks)}\nsiege: {report(load, checks)}\np99 {ratio:.2f} times"
    assert load.errors == quiet.errors == [], words + str(load.errors[:3])
    return ratio, max(checks), words


@pytest.mark.slow
def test_a_siege(live: Running) -> None:
    def is_met(measured: tuple[float, float, str]) -> bool:
        ratio, slowest, _ = measured
        return ratio < 3 and slowest < 1.0

    print(measure_until(is_met, lambda: measure_siege(live, SECONDS), lambda measured: measured[2])[2])


@pytest.mark.slow
def test_more_silent_clients_than_the_pool_has_room_for(live: Running) -> None:
    def slowest_check() -> float:
        load, checks = measure(live, 8, 12.0, {"silent": 1500})
        assert load.errors == [], report(load, checks)
        return max(checks)

    assert_below(2.0, slowest_check)


if __name__ == "__main__":
    with small_server() as one:
        print(measure_siege(one, float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)[2])
