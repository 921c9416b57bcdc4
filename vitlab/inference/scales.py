"""The ranges of the inputs of a model's dense layers, by which they are stored in 8 bits; a file beside the model."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitlab.errors import UserError
from vitlab.files import read_json, write_text
from vitlab.models.variants import Model
from vitlab.settings import to_json
from vitlab.weights.digest import digest_model

NAME = "fp8.json"
RESTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Scales:
    """The largest magnitude of each layer's input, by its name; layers that are not here stay in 16 bits."""

    weights: str  # of which these are, as `weights_key` has it
    maxima: dict[str, float]
    agreement: float  # share of the images on which the best class is float32's
    images: int  # of which that is
    separate: bool  # whether the ranges are from others
    layers: int  # that could be in 8 bits
    work: float  # share of their products' work that is
    closer: float  # logits apart that the two best classes are at least, unless an image is computed again in 16 bits;
    again: float  # share of the images that should be
    rest: str  # what all else is computed in, by a name of RESTS

    def __post_init__(self) -> None:
        """A file may hold anything."""
        numbers = self.maxima.values() if isinstance(self.maxima, dict) else [math.nan]
        if not all(isinstance(value, float) and 0 < value < math.inf for value in numbers):
            raise UserError("its maxima are not all positive numbers")
        if not all(isinstance(share, float) and 0 <= share <= 1 for share in (self.agreement, self.work, self.again)):
            raise UserError("its shares are not numbers from 0 to 1")
        if not (isinstance(self.closer, float) and 0 <= self.closer < math.inf):
            raise UserError("its distance of close calls is no number from 0")
        if not all(isinstance(count, int) for count in (self.images, self.layers)):
            raise UserError("its counts are not integers")
        if self.rest not in RESTS:
            raise UserError(f"its 16 bits are not {' or '.join(RESTS)}")

    @property
    def digest(self) -> str:
        """What values computed with these scales depend on, beside the weights."""
        facts = json.dumps([self.maxima, self.closer, self.rest], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:12]

    @property
    def dtype(self) -> torch.dtype:
        return RESTS[self.rest]

    def describe(self) -> str:
        """One line on what was measured."""
        where = "" if self.separate else ", including those the ranges are from"
        shown = f"on {self.agreement:.2%} of {self.images:,} images{where}"
        layers = f"{len(self.maxima)} of {self.layers} dense layers in 8 bits, {self.work:.0%} of their work"
        again = f"; {self.again:.1%} of the images, the closest calls, once more in 16 bits" if self.again else ""
        return f"fp8: {layers}, the rest in {self.rest}{again}; the best class is float32's {shown}"

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(to_json(self), indent=2) + "\n")


def read_scales(path: Path) -> Scales:
    """The scales of a file; UserError where it is not one."""
    found: dict[str, Any] = read_json(path)
    try:
        return Scales(**found)
    except (TypeError, UserError) as error:
        raise UserError(f"{path} has no scales for fp8 ({error}); calibrate again with --calibrate IMAGES") from None


def weights_key(model: Model) -> str:
    """Hash what the ranges depend on: weights, settings and preprocessing."""
    return digest_model([to_json(model.config), to_json(model.card.preprocess)], model.state_dict())[:24]
