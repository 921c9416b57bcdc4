"""Classes of uneven size: weights for the loss, or a stream of images in which every class has the same share."""

from typing import Literal

import numpy as np

from vitlab.data.rng import BALANCE, ORDER, Floats, Ints, keys

Balance = Literal["none", "weights", "sampling"]


def class_weights(counts: Ints) -> Floats:
    """The weight of each class, (K,), with the same sum over the images of each, n over all n; 0 without images."""
    present = counts > 0
    weights = np.zeros(len(counts))
    weights[present] = counts.sum() / (present.sum() * counts[present])
    return weights


def balanced_order(labels: Ints, seed: int, epoch: int) -> Ints:
    """The indices of an epoch, (n,), with equally many of each class: n of n images, shuffled.

    Images of small classes occur several times, all of them equally often up to one; of large classes each epoch has
    other ones. Where the classes do not divide n, each epoch has one more of other classes.
    """
    classes, n = np.unique(labels), len(labels)
    hashed = keys(seed, epoch, BALANCE, np.arange(n))
    quota = np.full(len(classes), n // len(classes))
    quota[keys(seed, epoch, BALANCE, classes, 1).argsort(kind="stable")[: n % len(classes)]] += 1
    by_class = np.lexsort((hashed, labels))
    ends = np.searchsorted(labels[by_class], classes, "right")
    own = np.split(by_class, ends[:-1])
    chosen = np.concatenate([np.resize(some, count) for some, count in zip(own, quota, strict=True)])
    return chosen[keys(seed, epoch, ORDER, np.arange(n)).argsort(kind="stable")]
