"""The HTTP parts of the chaos run, for a few seconds each."""

import random
from typing import Any

import pytest
from timing import measure_until

from chaos import http_fuzz, soak
from chaos.rows import Row


def test_requests_are_the_same_for_a_seed() -> None:
    def draw(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [http_fuzz.damage(rng, http_fuzz.good(rng)[0]) + http_fuzz.odd(rng) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)


@pytest.fixture
def live() -> Any:
    from servers import shared_server  # made importable by chaos.watch

    return shared_server()


@pytest.mark.slow
def test_a_thousand_requests(live: Any) -> None:
    def attempt() -> Row:
        row = http_fuzz.run(0.01, running=live)
        assert [failure for failure in row.failures if not failure.startswith(http_fuzz.SLOW)] == [], row
        assert row.count >= 1000
        return row

    measure_until(lambda row: not row.failures, attempt)


@pytest.mark.slow
def test_two_seconds_of_soak(live: Any) -> None:
    row = soak.run(0.0, running=live)
    assert row.failures == [], row
    assert row.count > 20
