"""Random numbers are pure functions of their key, and follow the distributions they name."""

import numpy as np
import pytest
from pictures import arrays
from scipy import stats

from vitlab.data.loader import epoch_order
from vitlab.data.rng import CROP, FLIP, HOLDOUT, beta, keys, text_keys, to_unit, uniforms


def test_splitmix_reference() -> None:
    """The hash is splitmix64's: its first output from state 0 is published as 0xE220A8397B1DCDAF."""
    from vitlab.data.rng import GAMMA, splitmix64

    assert int(splitmix64(np.array([GAMMA]))[0]) == 0xE220A8397B1DCDAF


def test_uniforms_are_uniform_and_independent() -> None:
    u = uniforms(keys(3, 1, np.arange(20_000)), CROP, 4)
    v = uniforms(keys(3, 1, np.arange(20_000)), FLIP, 1)[:, 0]
    for column in (*u.T, v):
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    together = np.corrcoef(np.column_stack([u, v]).T) - np.eye(5)
    assert np.abs(together).max() < 5 / np.sqrt(20_000)
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 5 / np.sqrt(20_000)  # neighbors in index


def test_a_draw_does_not_depend_on_its_neighbors() -> None:
    many = uniforms(keys(7, 2, np.arange(100)), CROP, 6)
    one = uniforms(keys(7, 2, 42), CROP, 3)
    np.testing.assert_array_equal(many[42, :3], one[0])


def test_the_key_of_a_word_is_its_own() -> None:
    """Whatever words are beside it, longer ones too; and different ones differ, as in a long common beginning."""
    words = [f"class {i % 7}/photo {i}" for i in range(5_000)] + ["", "a", "a" * 8, "a" * 9, "a" * 16, "b" + "a" * 15]
    alone = [int(text_keys(np.array([word], np.bytes_))[0]) for word in words[-50:]]
    together = text_keys(np.array([*words, "x" * 300], np.bytes_))
    assert together[-51:-1].tolist() == alone
    assert len(set(together.tolist())) == len(words) + 1
    assert stats.kstest(to_unit(keys(0, HOLDOUT, together[:5_000])), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0])
def test_beta(alpha: float) -> None:
    draws = beta(keys(0, np.arange(20_000)), 9, alpha)
    assert stats.kstest(draws, stats.beta(alpha, alpha).cdf).pvalue > 1e-4


def test_orders_of_epochs_are_permutations() -> None:
    source = arrays(50)
    orders = np.stack([epoch_order(source, seed, epoch) for seed in range(20) for epoch in range(50)])
    assert (np.sort(orders, 1) == np.arange(50)).all()
    assert len(np.unique(orders, axis=0)) == len(orders)
    counts = np.bincount(orders[:, 0], minlength=50)  # which index comes first
    assert stats.chisquare(counts).pvalue > 1e-4
