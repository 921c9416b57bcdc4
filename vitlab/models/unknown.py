"""What refuses an image that is none of a model's classes: how strange its features are, and a limit.

The features of a class are taken for Gaussian with a covariance that all classes share, and the means of classes for
Gaussian too (probabilistic linear discriminant analysis). A projection makes the first covariance the identity and the
second diagonal, with the variances s. In each of its directions

    an image of a class with n training images of mean m    is N( n s / (n s + 1) m,  1 + s / (n s + 1) )
    an image of a class that was not trained on             is N( 0,  1 + s )
    an image of another kind altogether                     is N( 0,  f (1 + s) ),  f one of FAR

and the strangeness is the log of how much likelier one of the last kinds is than the likeliest class. It takes several
f: in D directions at once a large f alone explains only what is very far, and images somewhat outside pass.

Shapes: b images, D width of the features, C classes that had training images, m held-out images of these classes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from vitlab.errors import UserError

FAR = (2.0, 10.0)  # variances of images of other kinds, in those of these classes
FARTHEST = 1e6  # a distance as a number that fits every format
NOT_HELD = '%s cannot hold what answers "none of these"; only a vitlab folder can'  # to log, of another format's file


@dataclass(frozen=True, eq=False)
class Unknown:
    """Gaussian classes in the space of a model's features, and the strangeness of held-out images of these classes.

    An image is refused if it is stranger than the share 1 - `rate` of the held-out images.
    """

    center: Tensor  # (D,)
    projection: Tensor  # (D, D)
    spread: Tensor  # (D,), s above
    means: Tensor  # (C, D), projected
    counts: Tensor  # (C,), n above
    held_out: Tensor  # (m,), ascending
    rate: float  # the share of images of the classes that are refused, on average

    @cached_property
    def limit(self) -> float:
        """The strangeness above which an image is refused; infinite where too few images were held out."""
        return held_out_limit(self.held_out, self.rate)

    def distances(self, features: Tensor) -> Tensor:
        """Distances (b,) of features (b, D): the strangeness on a scale on which images above 1 are refused.

        One unit is from the median of the held-out images to their 95 % quantile, so that with a rate of 5 % a typical
        image is at 0.
        """
        if self.limit == math.inf:
            return features.new_zeros(len(features), dtype=torch.float32)
        distances = 1 + (self.strangeness(features) - self.limit) / self.unit
        return distances.nan_to_num(FARTHEST).clamp(-FARTHEST, FARTHEST)

    def strangeness(self, features: Tensor) -> Tensor:
        """The log likelihood ratio (b,) in float32 of no class to the likeliest one."""
        densities = self.normals.log_densities((features.float() - self.center) @ self.projection)  # (b, C + 3)
        known = len(self.counts)
        return densities[:, known:].logsumexp(1) - densities[:, :known].amax(1)

    @cached_property
    def unit(self) -> float:
        low, high = self.held_out.quantile(torch.tensor([0.5, 0.95])).tolist()
        return max(float(high - low), 1e-6)

    @cached_property
    def normals(self) -> "Normals":
        """Those of the classes, of a class that was not trained on, and of other kinds of images."""
        s, n = self.spread, self.counts[:, None]
        others = torch.stack([f * (1 + s) for f in (1.0, *FAR)])
        means = torch.cat([n * s / (n * s + 1) * self.means, torch.zeros_like(others)])
        variances = torch.cat([1 + s / (n * s + 1), others])
        return Normals.make(means, variances)

    def to(self, device: torch.device) -> Self:
        """The same on another device; the held-out images stay, as the limit is one number."""
        names = ("center", "projection", "spread", "means", "counts")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    # ---- as tensors of a file

    def tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "rate": torch.tensor(self.rate, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], classes: int, width: int) -> Self:
        """The inverse, for untrusted tensors and a head of this many classes on features of this width."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        count, m = ((*shapes.get(name, ()), 0)[0] for name in ("means", "held_out"))
        wanted = {"center": (width,), "projection": (width, width), "spread": (width,)}
        wanted |= {"means": (count, width), "counts": (count,), "held_out": (m,), "rate": ()}
        if shapes != wanted or not 1 <= count <= classes:
            raise UserError(f"the tensors of 'unknown' do not fit features of {width} numbers and {classes} classes")
        rate = float(tensors["rate"])
        values = {name: tensor.float() for name, tensor in tensors.items() if name != "rate"}
        if not all(bool(tensor.isfinite().all()) for tensor in values.values()):
            raise UserError("the tensors of 'unknown' have values that are not finite")
        if bool((values["spread"] < 0).any()) or bool((values["counts"] < 1).any()):
            raise UserError("the tensors of 'unknown' have a negative variance or a class without images")
        if not 0 < rate < 1 or bool((values["held_out"].diff() < 0).any()):
            raise UserError("the tensors of 'unknown' have a rate that is no share, or values that are not in order")
        return cls(**values, rate=rate)


@dataclass(frozen=True, eq=False)
class Normals:
    """Normal distributions (C, D) with diagonal covariances, ready for two matrix products.

    The sum of (x - m)^2 / v is that of x^2 / v, less twice that of x m / v, and a constant.
    """

    squares: Tensor  # (D, C), 1 / v
    products: Tensor  # (D, C), m / v
    constants: Tensor  # (C,)

    @classmethod
    def make(cls, means: Tensor, variances: Tensor) -> Self:
        constants = (means.square() / variances + variances.log()).sum(1)
        return cls((1 / variances).T, (means / variances).T, constants)

    def log_densities(self, x: Tensor) -> Tensor:
        """Log densities (b, C) of rows (b, D), less a constant that all share."""
        return x @ self.products - (x.square() @ self.squares + self.constants) / 2


def held_out_limit(ascending: Tensor, rate: float) -> float:
    """The value that a new image exceeds with the probability `rate`, from m values of images like it.

    Each of the m + 1 ranks among them is as likely for it, so it exceeds the k-th smallest of the m with probability
    1 - k / (m + 1), which is `rate` for k = (m + 1)(1 - rate); a k that is no integer lies between two of the values.
    Infinite where that k is more than m.
    """
    k = (len(ascending) + 1) * (1 - rate)
    if not 1 <= k <= len(ascending) + 1e-9:  # against rounding: 20 * (1 - 0.05) is 19
        return math.inf
    low = min(int(k + 1e-9), len(ascending))
    below, above = float(ascending[low - 1]), float(ascending[min(low, len(ascending) - 1)])
    return below + max(0.0, k - low) * (above - below)
