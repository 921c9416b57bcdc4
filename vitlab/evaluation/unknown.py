"""Fit what answers "none of these": how strange features are among those of training images, and the limit.

Shapes: n training images, m others, D width of the features, C classes that have training images.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from vitlab.data.rng import HOLDOUT, Floats, Ints, keys
from vitlab.device import few_threads
from vitlab.errors import UserError
from vitlab.evaluation.cross_validation import deal_folds
from vitlab.evaluation.extract import Features
from vitlab.evaluation.piece_cache import Values
from vitlab.models.unknown import Unknown

RATE = 0.05  # of images of the classes that may be refused
MOST = 50_000  # training images that are looked at; more would take memory and change little
FOLDS = 10  # with fewer, classes have visibly fewer images than in the fit to all

Strangeness = Callable[[Values], Floats]  # of features (m, D): numbers (m,), higher for stranger images


def fit_unknown(train: Features, held_out: Features | None = None, rate: float = RATE) -> Unknown | None:
    """Fit to training images; the limit refuses the share `rate` of images like the held-out ones.

    The held-out images must be new to the model: those that it was trained on are less strange than any others. Without
    any, each training image is held out in turn, a tenth at a time: that is right where the features were not trained
    on these images, as those of a frozen body. None where there are too few images for that rate, or where those of
    each class are all the same.
    """
    if not 0 < rate < 1:
        raise UserError(f"the share of false refusals must be above 0 and below 1, not {rate:g}")
    train = draw_images(train)
    n, d = train.values.shape
    try:
        with few_threads(max(n, d) * d**2):
            fitted = fit_classes(train.values, train.labels)
            if held_out is None:
                strange = out_of_fold(fit_strangeness, train)
            else:
                strange = fitted.strangeness(torch.from_numpy(held_out.values)).numpy().astype(np.float64)
    except NoSpread:
        return None
    found = replace(fitted, held_out=torch.from_numpy(np.sort(strange)).float(), rate=rate)
    return found if found.limit < np.inf else None


class NoSpread(ValueError):
    """The images of each class do not differ."""


def draw_images(data: Features) -> Features:
    """At most MOST of the images, the same every time."""
    if len(data.labels) <= MOST:
        return data
    rows = np.argsort(keys(0, HOLDOUT, np.arange(len(data.labels))))[:MOST]
    return Features(data.values[rows], data.labels[rows])


def fit_strangeness(features: Values, labels: Ints) -> Strangeness:
    """What `Unknown` computes, fitted to these images."""
    fitted = fit_classes(features, labels)
    return lambda values: fitted.strangeness(torch.from_numpy(values)).numpy().astype(np.float64)


def fit_classes(features: Values, labels: Ints) -> Unknown:
    """Fit the Gaussian classes of `Unknown` to features (n, D), without a limit, in float64.

    With A = W^(-1/2), W the shrunk covariance within classes, the means of classes times A have the covariance
    B + I / n, where B is that of the classes themselves. The eigenvectors of B make it diagonal.
    """
    names, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    n, c = len(labels), len(names)
    means = np.zeros((c, features.shape[1]))
    np.add.at(means, place, features)
    means /= counts[:, None]
    inner = features - means[place]
    if n == c or np.abs(inner).max() < 1e-6 * np.abs(features).max():
        raise NoSpread
    values, vectors = eigh(covariance(inner) * n / (n - c))
    whitening = vectors / np.sqrt(np.maximum(values, 1e-12 * values[-1]))
    center = means.mean(0)
    white = product(means - center, whitening)
    between = product(white.T, white) / max(1, c - 1) - np.eye(len(values)) * (1 / counts).mean()
    spread, turn = eigh(between)
    arrays = {"center": center, "projection": product(whitening, turn)}
    arrays |= {"spread": np.maximum(spread, 0), "means": product(white, turn)}
    arrays |= {"counts": counts.astype(np.float64), "held_out": np.zeros(0)}
    return Unknown(**{name: torch.from_numpy(array).float() for name, array in arrays.items()}, rate=RATE)


def out_of_fold(fit: Callable[[Values, Ints], Strangeness], data: Features) -> Floats:
    """The strangeness of images by fits to nine tenths of each class that leave them out.

    An image that is alone in its class has none: without it the class would be unknown.
    """
    fold = deal_folds(data.labels, FOLDS)
    found = np.full(len(fold), np.nan)
    for number in range(FOLDS):
        aside = fold == number
        present = aside & np.isin(data.labels, data.labels[~aside])
        if present.any():
            found[present] = fit(data.values[~aside], data.labels[~aside])(data.values[present])
    return found[~np.isnan(found)]


def covariance(x: Floats) -> Floats:
    """The covariance (D, D) of centered rows (n, D), shrunk towards a multiple of the identity by Ledoit and Wolf.

    The shrinkage is the share of noise in the empirical S = X'X / n: the variance of its entries, as estimated from
    the rows, over its squared distance from the target. So few images give a round covariance, many their own.
    """
    n, d = x.shape
    s = product(x.T, x) / n
    scale = np.trace(s) / d
    distance = (s**2).sum() - d * scale**2
    noise = ((x**2).sum(1) ** 2).sum() / n**2 - (s**2).sum() / n
    shrinkage = min(1.0, noise / distance) if distance > 0 else 1.0
    shrunk: Floats = (1 - shrinkage) * s + shrinkage * scale * np.eye(d)
    return shrunk


# torch's products, whose threads can be limited


def product(a: Floats, b: Floats) -> Floats:
    found: Floats = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    return found


def eigh(a: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues, ascending, and eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(a))
    return values.numpy(), vectors.numpy()


def auroc(known: Floats, unknown: Floats) -> float:
    """The probability that an unknown image is stranger than a known one; half of it if they are equal."""
    both = np.sort(known)
    below, up_to = (np.searchsorted(both, unknown, side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(known)))
