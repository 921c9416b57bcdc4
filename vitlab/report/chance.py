"""What chance alone would give: exact one-sided tests on counts, and a test for a trend.

Each returns the probability of something at least as extreme as what was observed, if there were nothing to find.
"""

from collections.abc import Sequence

import numpy as np

from vitlab.data.rng import Floats


def at_least(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or more in so many trials, each of which hits with probability `share` (binomial)."""
    if hits <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    k = np.arange(1, trials + 1)
    steps = np.log((trials - k + 1) / k) + np.log(share) - np.log1p(-share)
    return tail(np.concatenate([[0.0], np.cumsum(steps)]), hits)


def as_few(hits: int, images: int, other_hits: int, other_images: int) -> float:
    """The probability of `hits` or fewer in `images` if the others have the same rate (Fisher's exact test)."""
    total = hits + other_hits
    least, most = max(0, total - other_images), min(images, total)
    x = np.arange(least, most, dtype=float)
    steps = np.log((total - x) * (images - x)) - np.log((x + 1) * (other_images - total + x + 1))
    weights = np.concatenate([[0.0], np.cumsum(steps)])[::-1]  # a lower tail, from the other end
    return tail(weights, most - hits)


def falls(values: Sequence[float] | Floats) -> float:
    """The probability that values in random order go down as consistently as these (Mann and Kendall's test).

    A tie counts half, rounded against the trend.
    """
    v = np.asarray(values, float)
    n = len(v)
    later, earlier = v[None, :], v[:, None]
    ordered = np.triu(np.ones((n, n), bool), 1)
    down, up = int((ordered & (later < earlier)).sum()), int((ordered & (later > earlier)).sum())
    counts = np.ones(1)  # orders of m values, by their number of pairs that go down
    for m in range(2, n + 1):
        counts = np.convolve(counts, np.ones(m)) / m
    return float(min(1.0, counts[(n * (n - 1) // 2 + down - up) // 2 :].sum()))


def tail(logs: Floats, start: int) -> float:
    """The share of a distribution, as unnormalized logs, from an index on."""
    weights = np.exp(logs - logs.max())
    return float(weights[start:].sum() / weights.sum())
