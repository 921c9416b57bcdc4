"""What every format must determine about a file.

The shapes in a file determine the dimensions of its model, but not its heads, GELU, epsilons, rotary positions or
preprocessing, and not always its pooling. Of these, the caller's value comes first, then that of a config beside the
weights, then the format's default, which is logged.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

from torch import Tensor

from vitlab.models.card import Card
from vitlab.models.config import (
    LARGEST_SIDE,
    Gelu,
    ModelConfig,
    Pool,
    Preprocess,
    ResNetConfig,
    Rotary,
    RotaryLayout,
    Size,
    Standardize,
)
from vitlab.settings import POSITIVE, Range
from vitlab.weights.formats.table import Row
from vitlab.weights.lora import Adapter
from vitlab.weights.tensors import Shape, TensorFile


@dataclass(frozen=True)
class FormatDefaults:
    """The settings that shapes do not determine; None where they are unknown."""

    heads: Annotated[int | None, Range(1), "attention heads"] = None
    gelu: Annotated[Gelu | None, "exact GELU, its tanh approximation, or x sigmoid(1.702 x)"] = None
    norm_eps: Annotated[float | None, POSITIVE, "eps of the layer norms"] = None
    group_eps: Annotated[float | None, POSITIVE, "eps of a stem's or ResNet's group norms"] = None
    standardize: Annotated[Standardize | None, "what weight standardization divides by"] = None
    standardize_eps: Annotated[float | None, POSITIVE, "eps of the weight standardization"] = None
    pool: Annotated[Pool | None, "what the head sees, where the tensors allow several"] = None
    rotary: Annotated[Rotary | None, "rotary positions of patches"] = None
    rotary_layout: Annotated[RotaryLayout | None, "channels that turn together"] = None
    rotary_base: Annotated[float | None, Range(above=1, most=1e9), "ratio of the rotary wavelengths"] = None
    rotary_grid: Annotated[int | None, Range(0, LARGEST_SIDE), "cells to which rotary positions scale any grid"] = None
    preprocess: Annotated[Preprocess | None, "how photos become the model's input"] = None

    def over(self, other: "FormatDefaults") -> "FormatDefaults":
        """These values, and the other's where these are None."""
        return dataclasses.replace(other, **{name: value for name, value in vars(self).items() if value is not None})

    def missing_in(self, other: "FormatDefaults") -> tuple[str, ...]:
        """The names of the values that are known here and not in the other."""
        return tuple(name for name, value in vars(self).items() if value is not None and vars(other)[name] is None)


ROTARY = ("rotary", "rotary_layout", "rotary_base", "rotary_grid")
OWN = ("heads", "gelu", "norm_eps", "pool", *ROTARY)  # a ViT's fields of the same name; the others are a ResNet's


# What a format may have no place for, and the JSON beside a file has
CardPart = Literal["preprocess", "labels", "thresholds", "temperature"]
PARTS: tuple[CardPart, ...] = get_args(CardPart)


def parts_of(card: Card, parts: Iterable[CardPart] = PARTS) -> list[CardPart]:
    """Those of the parts that a card has; a temperature of 1 and no class names are none."""
    empty = Card()
    return [part for part in parts if part == "preprocess" or getattr(card, part) != getattr(empty, part)]


@dataclass(frozen=True)
class RawCheckpoint:
    """An opened checkpoint: a file's tensors and the JSON with it (empty where there is none)."""

    name: str
    tensors: TensorFile
    config: Mapping[str, Any]  # config.json of a folder
    processor: Mapping[str, Any]  # preprocessor_config.json of a hub's folder
    beside: Mapping[str, Any] = field(default_factory=dict)  # what the file itself cannot hold
    is_guess: bool = False  # config and processor lie beside a file, and may be another's

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self.tensors.shapes


@dataclass(frozen=True)
class ParsedCheckpoint:
    """The model that a checkpoint holds, and the table that makes its tensors from the file's."""

    config: ModelConfig
    card: Card
    defaulted: tuple[str, ...]  # names of the settings that are the format's default
    table: list[Row]
    tensors: TensorFile  # those that the table is for: a file may hold more, or have other names for them
    adapter: Adapter | None = None  # where the tensors are updates of another file's


class Reader(Protocol):
    """What the module of a format has that is read."""

    @property
    def NAME(self) -> str: ...

    def recognizes(self, source: RawCheckpoint) -> bool: ...

    def read(self, source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint: ...


class Format(Reader, Protocol):
    """What the module of a format has that is read and written."""

    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # of the files it writes; "" stands for a folder

    @property
    def PREPROCESS(self) -> Preprocess: ...  # what its own code usually does to images

    def write(self, config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None: ...

    def lost(self, config: ModelConfig, card: Card, folder: bool) -> list[CardPart]: ...  # what it writes lacks these


def settings_of(c: ModelConfig) -> FormatDefaults:
    """A model's own values of the settings that shapes do not determine."""
    resnet = c if isinstance(c, ResNetConfig) else c.stem
    own = {} if isinstance(c, ResNetConfig) else {name: getattr(c, name) for name in OWN}
    settings = FormatDefaults(**own)
    if resnet is None:
        return settings
    return dataclasses.replace(
        settings, group_eps=resnet.norm_eps, standardize=resnet.standardize, standardize_eps=resnet.standardize_eps
    )
