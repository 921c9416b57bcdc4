"""A linear probe: multinomial logistic regression on frozen, z-scored features, by L-BFGS to convergence.

The weights W (D, K) and biases b (K,) minimize

    f = 1/n sum_i  -v_i log softmax(x_i W + b)[y_i]  +  l2/2 |W|^2

which is convex, so there is nothing to tune but l2. (scikit-learn's C is 1 / (n l2), and v_i its sample weight, here 1
unless given.) With P the softmax of all rows and Y the one-hot labels, both times v, the gradient is
X'(P - Y)/n + l2 W, and for b the mean of the rows of P - Y. Sums go over
chunks of c rows in float64, and the features stay float32. Beside these the work takes some 50 (D+1) K numbers, most
of them the history of L-BFGS, and c (2D + 3K), of 8 bytes each: 0.5 GB for ImageNet's D = 768, K = 1000, c = 4096.

Shapes: n images, m test images, D width of the features, K classes, c rows of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlab.data.open import holdout_size, pick_per_class
from vitlab.data.rng import HOLDOUT, Floats, Ints, keys
from vitlab.device import few_threads
from vitlab.errors import UserError
from vitlab.evaluation.extract import Device, Features
from vitlab.evaluation.fewshot import CHUNK, Standardizer, fit_standardizer
from vitlab.evaluation.piece_cache import Values
from vitlab.terminal import progress

SWEEP = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TOLERANCE = 1e-6  # largest entry of the gradient of f at which the fit has converged
STEPS = 2000  # of L-BFGS, at most
HISTORY = 20
SHARE = 0.2  # of the training images, to choose l2 on


# ---- one fit


class LBFGS(torch.optim.LBFGS):
    """torch's, whose parameters are added without a wrapper for torch.compile, which takes a second to import."""

    add_param_group = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.LBFGS.add_param_group)


@dataclass(frozen=True)
class Linear:
    """A fitted probe; `slope` is the largest entry of the gradient that is left."""

    standardizer: Standardizer
    weights: Tensor  # (D+1, K) float64, the biases last
    l2: float
    steps: int
    slope: float

    @property
    def converged(self) -> bool:
        return self.slope <= TOLERANCE

    def scores(self, features: Values) -> Tensor:
        """Compute logits (c, K), float64, of features (c, D)."""
        x = standardize(torch.from_numpy(features).to(self.weights.device), self.standardizer)
        return x @ self.weights[:-1] + self.weights[-1]

    def guesses(self, features: Values, chunk: int = CHUNK) -> Ints:
        """Return the class with the largest score for each image, (m,)."""
        starts = range(0, len(features), chunk)
        return np.concatenate([self.scores(features[s : s + chunk]).argmax(1).cpu().numpy() for s in starts])


def standardize(features: Tensor, by: Standardizer) -> Tensor:
    """Return the z-scores (c, D), float64, of features (c, D)."""
    mean, deviation = (torch.from_numpy(x).to(features.device) for x in (by.mean, by.deviation))
    return (features.double() - mean) / deviation


def logistic(
    features: Values,
    labels: Ints,
    classes: int,
    l2: float,
    *,
    weights: Floats | None = None,
    start: Linear | None = None,
    device: Device = "cpu",
    chunk: int = CHUNK,
    tolerance: float = TOLERANCE,
) -> Linear:
    """Fit to all rows, whose labels are in 0 … classes - 1; `start` is a fit with another l2 to start from.

    `weights` (n,) are those of the rows, as `class_weights(counts)[labels]` for classes of uneven size.
    """
    standardizer = fit_standardizer(features, np.arange(len(features)))
    x, y = torch.from_numpy(features).to(device), torch.from_numpy(labels).to(device)
    v = None if weights is None else torch.from_numpy(weights).to(device, torch.float64)
    shape = (features.shape[1] + 1, classes)
    w = torch.zeros(shape, dtype=torch.float64, device=device) if start is None else start.weights.clone()

    def closure() -> Tensor:
        loss, w.grad = objective(x, y, standardizer, w, l2, chunk, v)
        return loss

    # n f rather than f: torch's L-BFGS learns from a step only where step times change of slope exceeds 1e-10
    optimizer = LBFGS(
        [w],
        max_iter=STEPS,
        max_eval=2 * STEPS,
        tolerance_grad=tolerance * len(x) / 2,
        tolerance_change=0,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )
    with few_threads(min(chunk, len(x)) * w.numel()):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        _, gradient = objective(x, y, standardizer, w, l2, chunk, v)  # the line search may have ended elsewhere
    slope = float(gradient.abs().max()) / len(x)
    return Linear(standardizer, w, l2, int(optimizer.state[w]["n_iter"]), slope)


@torch.no_grad()
def objective(
    x: Tensor, y: Tensor, by: Standardizer, w: Tensor, l2: float, chunk: int, v: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute n f and its gradient, (D+1, K), at the weights w, on features standardized `by`; v (n,) as above."""
    penalized = w.clone()
    penalized[-1] = 0  # not the biases
    gradient = len(x) * l2 * penalized
    loss = len(x) * l2 / 2 * penalized.square().sum()
    shares = [None] * len(x) if v is None else v[:, None].split(chunk)
    for part, truth, share in zip(x.split(chunk), y[:, None].split(chunk), shares, strict=False):
        rows = standardize(part, by)
        likely = (rows @ w[:-1] + w[-1]).log_softmax(1)  # (c, K)
        own = likely.gather(1, truth)
        loss -= (own if share is None else own * share).sum()
        excess = likely.exp_().scatter_add_(1, truth, torch.full_like(likely[:, :1], -1))  # P - Y
        if share is not None:
            excess *= share
        gradient[:-1] += rows.T @ excess
        gradient[-1] += excess.sum(0)
    return loss, gradient


# ---- the evaluation


@dataclass(frozen=True)
class Trial:
    """An l2 and its hits on images that its fit has not seen."""

    l2: float
    hits: int
    images: int
    converged: bool


@dataclass(frozen=True)
class Probe:
    """The probe with the best l2, fitted to all training images, and its hits on the test images."""

    tried: tuple[Trial, ...]
    linear: Linear
    hits: int
    images: int

    @property
    def accuracy(self) -> float:
        return self.hits / self.images


def linear_probe(
    train: Features,
    test: Features,
    validation: Features | None = None,
    *,
    l2: Sequence[float] = SWEEP,
    device: Device = "cpu",
) -> Probe:
    """Choose l2 on the validation images, or else on a fifth of each class, and fit to all training images.

    The same images are held out every time. A progress bar shows the fits.
    """
    if min(l2, default=0) <= 0:
        raise UserError(f"l2 must be positive numbers, not {list(l2)}")
    present = np.unique(train.labels)
    classes, labels = len(present), np.searchsorted(present, train.labels)
    order = sorted(set(l2), reverse=True)
    with progress("linear probe", len(order) + 1) as advance:
        tried: list[Trial] = []
        if len(order) > 1:
            seen, unseen = split_for_sweep(train, validation)
            fitted = None
            for value in order:  # the strongest converges soonest; each starts from the one before
                y = np.searchsorted(present, seen.labels)
                fitted = logistic(seen.values, y, classes, value, start=fitted, device=device)
                right = present[fitted.guesses(unseen.values)] == unseen.labels
                tried.append(Trial(value, int(right.sum()), len(right), fitted.converged))
                advance(1)
        best = max(tried, key=lambda each: each.hits).l2 if tried else order[0]
        linear = logistic(train.values, labels, classes, best, device=device)
        advance(1)
    hits = int((present[linear.guesses(test.values)] == test.labels).sum())
    return Probe(tuple(tried), linear, hits, len(test.labels))


def split_for_sweep(train: Features, validation: Features | None) -> tuple[Features, Features]:
    """Return the features that the sweep is fitted to and those that it is scored on."""
    if validation is not None:
        return train, validation
    n = len(train.labels)
    aside = np.zeros(n, bool)
    aside[pick_per_class(train.labels, lambda count: holdout_size(count, SHARE), keys(0, HOLDOUT, np.arange(n)))] = True
    if not aside.any():
        raise UserError("no class has two training images, so none can be set aside to choose l2 on; give one l2")
    return Features(train.values[~aside], train.labels[~aside]), Features(train.values[aside], train.labels[aside])
