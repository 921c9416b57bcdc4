"""A linear probe: multinomial logistic regression on frozen, z-scored features, by L-BFGS to convergence.

The weights W (D, K) and biases b (K,) minimize

    f = 1/n sum_i  -log softmax(x_i W + b)[y_i]  +  l2/2 |W|^2

which is convex, so there is nothing to tune but l2. (scikit-learn's C is 1 / (n l2).) With P the softmax of all rows
and Y the one-hot labels, the gradient is X'(P - Y)/n + l2 W, and for b the mean of the rows of P - Y. Sums go over
chunks of c rows in float64, and the features stay float32. Beside these the work takes some 50 (D+1) K numbers, most
of them the history of L-BFGS, and c (2D + 3K), of 8 bytes each: 0.5 GB for ImageNet's D = 768, K = 1000, c = 4096.

Shapes: n images, m test images, D width of the features, K classes, c rows of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlab.data.open import held_out, pick
from vitlab.data.rng import HOLDOUT, Ints, keys
from vitlab.errors import UserError
from vitlab.evaluation.extract import Features, Values
from vitlab.evaluation.fewshot import CHUNK, Standard, standard
from vitlab.terminal import progress

SWEEP = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TOLERANCE = 1e-6  # largest entry of the gradient of f at which the solution is taken as found
STEPS = 2000  # of L-BFGS, at most
HISTORY = 20
SHARE = 0.2  # of the training images, to choose l2 on


# ---- one fit


@dataclass(frozen=True)
class Linear:
    """A fitted probe; `slope` is the largest entry of the gradient that is left."""

    standard: Standard
    weights: Tensor  # (D+1, K) float64, the biases last
    l2: float
    steps: int
    slope: float

    @property
    def converged(self) -> bool:
        return self.slope <= TOLERANCE

    def scores(self, features: Values) -> Tensor:
        """Logits, (c, K), float64."""
        x = inputs(torch.from_numpy(features).to(self.weights.device), self.standard)
        return x @ self.weights[:-1] + self.weights[-1]

    def guesses(self, features: Values, chunk: int = CHUNK) -> Ints:
        """The class with the largest score for each image, (m,)."""
        starts = range(0, len(features), chunk)
        return np.concatenate([self.scores(features[s : s + chunk]).argmax(1).cpu().numpy() for s in starts])


def inputs(features: Tensor, about: Standard) -> Tensor:
    """z-scored, (c, D), float64."""
    mean, deviation = (torch.from_numpy(x).to(features.device) for x in (about.mean, about.deviation))
    return (features.double() - mean) / deviation


def logistic(
    features: Values,
    labels: Ints,
    classes: int,
    l2: float,
    *,
    start: Linear | None = None,
    device: str | torch.device = "cpu",
    chunk: int = CHUNK,
) -> Linear:
    """Fit to all rows, whose labels lie in 0 … classes - 1; `start` is a fit with another l2 to set out from."""
    about = standard(features, np.arange(len(features)))
    x, y = torch.from_numpy(features).to(device), torch.from_numpy(labels).to(device)
    w = torch.zeros(features.shape[1] + 1, classes, dtype=torch.float64, device=device)
    if start is not None:
        w.copy_(start.weights)

    def closure() -> Tensor:
        loss, w.grad = objective(x, y, about, w, l2, chunk)
        return loss

    # n f rather than f: torch's L-BFGS learns from a step only where step times change of slope exceeds 1e-10
    limit = TOLERANCE * len(x) / 2
    optimizer = torch.optim.LBFGS(
        [w],
        max_iter=STEPS,
        max_eval=2 * STEPS,
        tolerance_grad=limit,
        tolerance_change=0,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    slope = float(objective(x, y, about, w, l2, chunk)[1].abs().max()) / len(x)  # the last look may have been elsewhere
    return Linear(about, w, l2, int(optimizer.state[w]["n_iter"]), slope)


@torch.no_grad()
def objective(x: Tensor, y: Tensor, about: Standard, w: Tensor, l2: float, chunk: int) -> tuple[Tensor, Tensor]:
    """n f, and its gradient, (D+1, K)."""
    penalised = w.clone()
    penalised[-1] = 0  # not the biases
    gradient = len(x) * l2 * penalised
    loss = len(x) * l2 / 2 * penalised.square().sum()
    for start in range(0, len(x), chunk):
        rows, truth = inputs(x[start : start + chunk], about), y[start : start + chunk, None]
        likely = (rows @ w[:-1] + w[-1]).log_softmax(1)  # (c, K)
        loss -= likely.gather(1, truth).sum()
        excess = likely.exp_().scatter_add_(1, truth, torch.full_like(likely[:, :1], -1))  # P - Y
        gradient[:-1] += rows.T @ excess
        gradient[-1] += excess.sum(0)
    return loss, gradient


# ---- the evaluation


@dataclass(frozen=True)
class Tried:
    """An l2 and how well it did on images that its fit has not seen."""

    l2: float
    hits: int
    images: int
    converged: bool


@dataclass(frozen=True)
class Probe:
    """The probe with the l2 that did best, fitted to all training images, and how it does on the test."""

    tried: tuple[Tried, ...]
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
    device: str | torch.device = "cpu",
) -> Probe:
    """Choose l2, by the validation images or else by a fifth of each class, and fit to all training images.

    The same images are held out every time. A bar shows on a terminal.
    """
    if min(l2, default=0) <= 0:
        raise UserError(f"l2 must be positive numbers, not {list(l2)}")
    present = np.unique(train.labels)
    classes, labels = len(present), np.searchsorted(present, train.labels)
    order = sorted(set(l2), reverse=True)
    with progress("linear probe", len(order) + 1) as advance:
        tried: list[Tried] = []
        if len(order) > 1:
            seen, unseen = parts(train, validation)
            fitted = None
            for value in order:  # from the strongest, which is found soonest; each sets out from the one before
                y = np.searchsorted(present, seen.labels)
                fitted = logistic(seen.values, y, classes, value, start=fitted, device=device)
                right = present[fitted.guesses(unseen.values)] == unseen.labels
                tried.append(Tried(value, int(right.sum()), len(right), fitted.converged))
                advance(1)
        best = max(tried, key=lambda each: each.hits).l2 if tried else order[0]
        linear = logistic(train.values, labels, classes, best, device=device)
        advance(1)
    hits = int((present[linear.guesses(test.values)] == test.labels).sum())
    return Probe(tuple(tried), linear, hits, len(test.labels))


def parts(train: Features, validation: Features | None) -> tuple[Features, Features]:
    """What the sweep learns from and what it is judged by."""
    if validation is not None:
        return train, validation
    n = len(train.labels)
    aside = np.zeros(n, bool)
    aside[pick(train.labels, lambda count: held_out(count, SHARE), keys(0, HOLDOUT, np.arange(n)))] = True
    if not aside.any():
        raise UserError("no class has two training images, so none can be set aside to choose l2 on; give one l2")
    return (
        Features(train.values[~aside], train.labels[~aside]),
        Features(train.values[aside], train.labels[aside]),
    )
