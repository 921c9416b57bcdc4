"""The HTTP parts of the chaos run, for a few seconds each."""

import random

from timing import measure_until

from chaos import http_fuzz, soak
from chaos.rows import Row


def test_the_grammar_is_the_same_for_a_seed_and_spoils_what_it_should() -> None:
    def draw(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [http_fuzz.spoil(rng, http_fuzz.good(rng)[0]) + http_fuzz.odd(rng) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)


def test_a_thousand_requests() -> None:
    def attempt() -> Row:
        row = http_fuzz.run(0.01)
        assert [failure for failure in row.failures if not failure.startswith(http_fuzz.SLOW)] == [], row
        assert row.count >= 1000
        return row

    measure_until(lambda row: not row.failures, attempt)


def test_two_seconds_of_soak() -> None:
    row = soak.run(0.0)
    assert row.failures == [], row
    assert row.count > 20
