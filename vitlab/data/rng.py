"""Random numbers as pure functions: a key gives the same draws on any machine, in any process, in any order.

A key is a 64-bit hash of what the draw belongs to, such as (seed, epoch, index). Every draw has a purpose of its own,
so that asking for one more kind of draw changes none of the others.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# what a draw is for
ORDER, SHARDS, HOLDOUT, SUBSET, CROP, FLIP, LAYERS, MIXUP, CUTMIX, SAMPLES = range(1, 11)

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
TRIES, AT_ONCE = 32, 4  # of a draw by rejection


def mixed(x: Keys) -> Keys:
    """The finaliser of splitmix64: every bit of the input turns half of the bits of the output."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def keys(*parts: ArrayLike) -> Keys:
    """One key per element of the parts, broadcast against each other; at least one-dimensional."""
    key: Keys = np.zeros(1, np.uint64)
    for part in parts:
        key = mixed(mixed(key + GAMMA) + np.asarray(part).astype(np.uint64))
    return key


def uniforms(key: Keys, purpose: int, count: int) -> Floats:
    """Numbers in [0, 1), (n, count), for keys (n,)."""
    return unit(keys(key[:, None], purpose, np.arange(count)))


def unit(bits: Keys) -> Floats:
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, seed: int, epoch: int) -> Ints:
    """The order of an epoch: indices sorted by the hash of (seed, epoch, index)."""
    return np.argsort(keys(seed, epoch, ORDER, np.arange(n)), kind="stable")


def beta(key: Keys, purpose: int, alpha: float) -> Floats:
    """Draws from Beta(alpha, alpha), 0 < alpha <= 1, by Jöhnk's rejection; one in 2^32 misses and is 1/2."""
    found = np.full(len(key), 0.5)
    left = np.arange(len(key))
    for first in range(0, TRIES, AT_ONCE):  # most are done after the first few
        bits = keys(key[left, None], purpose, np.arange(2 * first, 2 * (first + AT_ONCE)))
        u = unit(bits).reshape(len(left), AT_ONCE, 2) ** (1 / alpha)
        total = u.sum(-1)
        good = (total > 0) & (total <= 1)
        rows, which = np.flatnonzero(good.any(1)), good.argmax(1)
        found[left[rows]] = u[rows, which[rows], 0] / total[rows, which[rows]]
        left = np.delete(left, rows)
        if not len(left):
            break
    return found
