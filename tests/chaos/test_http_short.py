"""The HTTP parts of the chaos run, for a few seconds each."""

import random

from chaos import http_fuzz, soak


def test_the_grammar_is_the_same_for_a_seed_and_spoils_what_it_should() -> None:
    def draw(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [http_fuzz.spoil(rng, http_fuzz.good(rng)[0]) + http_fuzz.odd(rng) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)


def test_a_thousand_requests() -> None:
    row = http_fuzz.run(0.01)
    assert row.failures == [], row
    assert row.count >= 1000


def test_two_seconds_of_soak() -> None:
    row = soak.run(0.0)
    assert row.failures == [], row
    assert row.count > 20
