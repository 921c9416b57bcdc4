"""Random numbers as pure functions: a key gives the same numbers on any machine, in any process, in any order.

A key is a 64-bit hash of what the numbers belong to, such as (seed, epoch, index). Every use has a purpose of its own,
so that adding one changes none of the others.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# the purposes
ORDER, SHARDS, HOLDOUT, SUBSET, CROP, FLIP, LAYERS, MIXUP, CUTMIX, SAMPLES, BATCHES, VALIDATION, BALANCE = range(1, 14)
CORRUPT = 40  # with the corruption's own numbers after it

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
TRIES, TRIES_AT_ONCE = 32, 4  # of rejection sampling


def splitmix64(x: Keys) -> Keys:
    """The finalizer of splitmix64: every bit of the input changes half of the bits of the output."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def keys(*parts: ArrayLike) -> Keys:
    """One key per element of the parts, broadcast against each other; at least one-dimensional."""
    key: Keys = np.zeros(1, np.uint64)
    for part in parts:
        key = splitmix64(splitmix64(key + GAMMA) + np.asarray(part).astype(np.uint64))
    return key


def text_keys(words: NDArray[np.bytes_]) -> Keys:
    """A key for each word, (n,), whatever other words there are."""
    width = -(-max(1, words.itemsize) // 8)
    parts = np.asarray(words, f"S{8 * width}").view("<u8").reshape(len(words), width)
    length = -(-np.char.str_len(words) // 8)  # a long word among them adds empty parts to the others
    key: Keys = np.zeros(len(words), np.uint64)
    for i in range(width):
        own = np.flatnonzero(length > i)
        key[own] = splitmix64(splitmix64(key[own] + GAMMA) + parts[own, i])
    return key


def uniforms(key: Keys, purpose: int, count: int) -> Floats:
    """Numbers in [0, 1), (n, count), for keys (n,)."""
    return to_unit(keys(key[:, None], purpose, np.arange(count)))


def to_unit(bits: Keys) -> Floats:
    """64 bits as a number in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def beta(key: Keys, purpose: int, alpha: float) -> Floats:
    """Samples of Beta(alpha, alpha), 0 < alpha <= 1, by Jöhnk's rejection; one in 2^32 fails and is 1/2."""
    samples = np.full(len(key), 0.5)
    left = np.arange(len(key))
    for first in range(0, TRIES, TRIES_AT_ONCE):  # most are done after the first few
        bits = keys(key[left, None], purpose, np.arange(2 * first, 2 * (first + TRIES_AT_ONCE)))
        u = to_unit(bits).reshape(len(left), TRIES_AT_ONCE, 2) ** (1 / alpha)
        total = u.sum(-1)
        accepted = (total > 0) & (total <= 1)
        rows, which = np.flatnonzero(accepted.any(1)), accepted.argmax(1)
        samples[left[rows]] = u[rows, which[rows], 0] / total[rows, which[rows]]
        left = np.delete(left, rows)
        if not len(left):
            break
    return samples
