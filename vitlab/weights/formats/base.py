"""What every format has to find out about a file, and the small steps they share.

A file's shapes tell the dimensions. Some traits no shape tells (heads, GELU, epsilons, preprocessing): the caller's
word goes first, then what a config beside the weights says, then the format's default, which is said aloud.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import Gelu, ModelConfig, Preprocess, ResNetConfig, Size, Standardize, StemConfig, ViTConfig
from vitlab.models.variants import SIZES
from vitlab.settings import POSITIVE, Range
from vitlab.text import listed
from vitlab.weights.formats.table import Row, check_names
from vitlab.weights.tensors import Shape, TensorFile

T = TypeVar("T")
IMAGE_SIZE = (224, 224)  # where nothing in a file depends on it
HEADS = {width: heads for _, width, _, heads in SIZES.values()} | {
    1152: 16,
    1536: 16,
    1664: 16,
}  # SigLIP's two largest, and G/14


@dataclass(frozen=True)
class FormatDefaults:
    """What shapes do not tell; None: not said."""

    heads: Annotated[int | None, Range(1), "attention heads"] = None
    gelu: Annotated[Gelu | None, "exact GELU or its tanh approximation"] = None
    norm_eps: Annotated[float | None, POSITIVE, "eps of the layer norms"] = None
    group_eps: Annotated[float | None, POSITIVE, "eps of a stem's or ResNet's group norms"] = None
    standardize: Annotated[Standardize | None, "what weight standardization divides by"] = None
    standardize_eps: Annotated[float | None, POSITIVE, "eps of the weight standardization"] = None
    preprocess: Annotated[Preprocess | None, "how photos become the model's input"] = None

    def over(self, other: "FormatDefaults") -> "FormatDefaults":
        pairs = zip(_values(self), _values(other), strict=True)
        return FormatDefaults(*(mine if mine is not None else theirs for mine, theirs in pairs))

    def without(self, other: "FormatDefaults") -> list[str]:
        """The names of those that this says and the other does not."""
        pairs = zip(dataclasses.fields(self), _values(self), _values(other), strict=True)
        return [f.name for f, mine, theirs in pairs if mine is not None and theirs is None]


def _values(traits: FormatDefaults) -> list[Any]:
    return [getattr(traits, f.name) for f in dataclasses.fields(traits)]


@dataclass(frozen=True)
class RawCheckpoint:
    """An opened checkpoint: a file's tensors and the JSON beside it in a hub's folder (empty where there is none)."""

    name: str
    tensors: TensorFile
    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self.tensors.shapes


@dataclass(frozen=True)
class Description:
    """What a format makes of a source."""

    config: ModelConfig
    card: Card
    guessed: tuple[str, ...]  # names of the traits that are the format's default
    table: list[Row]


class Format(Protocol):
    """The face of a format's module."""

    @property
    def WRITES(self) -> tuple[str, ...]: ...  # the endings of its files; "" stands for a folder

    def fits(self, source: RawCheckpoint) -> bool: ...

    def read(self, source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description: ...

    def write(self, config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None: ...


# ---- from shapes


def dims(source: RawCheckpoint, name: str, rank: int) -> Shape:
    """A tensor's shape, which must have so many axes."""
    shape = source.shapes.get(name)
    if shape is None:
        raise UserError(f"{source.name} lacks '{name}'")
    if len(shape) != rank or min(shape) < 1:
        raise UserError(f"'{name}' in {source.name} has shape {shape} where {rank} axes are due")
    return shape


def count(source: RawCheckpoint, pattern: str, first: int = 0) -> int:
    """How many there are of `blocks.#.`, numbered from `first` on."""
    before, after = pattern.split("#")
    number = re.compile(re.escape(before) + r"(\d{1,6})" + re.escape(after))
    found = {int(match[1]) for name in source.shapes if (match := number.match(name))}
    total = 0
    while first + total in found:
        total += 1
    return total


def patch_side(source: RawCheckpoint, name: str, sides: tuple[int, int]) -> int:
    if sides[0] != sides[1]:
        raise UserError(f"'{name}' in {source.name} has patches of {sides[0]}x{sides[1]}; only square ones are known")
    return sides[0]


def find_size(source: RawCheckpoint, rows: int, stride: int, told: Size | None, wanted: Size | None) -> Size:
    """The image size whose grid has so many rows.

    What the checkpoint says goes first; then a square; then the size the caller wants, if it has just this many
    patches. The table itself does not tell 14x14 from 7x28. Pixels beyond the last whole patch are left out, as
    public code does (384 pixels in patches of 14 are 378).
    """
    side = math.isqrt(max(0, rows))
    sizes = [told] if told else [(side * stride, side * stride), *([wanted] if wanted else [])]
    for height, width in sizes:
        if rows > 0 and (height // stride) * (width // stride) == rows:
            return height // stride * stride, width // stride * stride
    if told:
        raise UserError(
            f"{source.name} has positions for {rows} patches of {stride} pixels, and its config says images of "
            f"{told[0]}x{told[1]}"
        )
    raise UserError(
        f"{source.name} has positions for {rows} patches, which is no square; give image_size=(height, width) with "
        f"that many patches of {stride} pixels"
    )


def with_size(
    source: RawCheckpoint, config: ViTConfig, table: list[Row], rows: int, told: Size | None, wanted: Size | None
) -> ViTConfig:
    """The config at the size its rows of positions are for; if there is none, a foreign tensor may be why."""
    try:
        return dataclasses.replace(config, image_size=find_size(source, rows, config.stride, told, wanted))
    except UserError:
        check_names(table, source.tensors)
        raise


def find_heads(source: RawCheckpoint, width: int, traits: FormatDefaults) -> int:
    if traits.heads is not None:
        return traits.heads
    if width not in HEADS and width % 64:
        raise UserError(f"{source.name} does not say how many heads share its width {width}; give heads=")
    return HEADS.get(width, width // 64)


def find_labels(source: RawCheckpoint, names: object, classes: int) -> tuple[str, ...] | None:
    """Class names from a list, or from an object with the class number as key."""
    if isinstance(names, Mapping):
        numbers = [str(i) for i in range(len(names))]
        names = [names[i] for i in numbers] if set(numbers) == set(names) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the class names of {source.name} must be a list of words, one per class")
    return tuple(names) if len(names) == classes else None


def stem_config(stages: tuple[int, ...], width: int, traits: FormatDefaults) -> StemConfig:
    return StemConfig(stages, width, *convolution_defaults(traits))


def resnet_config(
    size: Size, stages: tuple[int, ...], width: int, classes: int, traits: FormatDefaults
) -> ResNetConfig:
    return ResNetConfig(size, stages, width, classes, *convolution_defaults(traits))


def convolution_defaults(traits: FormatDefaults) -> tuple[Standardize, float, float]:
    return said(traits.standardize), said(traits.standardize_eps), said(traits.group_eps)


def said(value: T | None) -> T:
    """A trait that a format's default settles."""
    assert value is not None
    return value


def guessed(default: FormatDefaults, known: FormatDefaults) -> tuple[str, ...]:
    return tuple(default.without(known))


def refuse_vit_defaults(source: RawCheckpoint, given: FormatDefaults) -> None:
    for name in ("heads", "gelu", "norm_eps"):
        if getattr(given, name) is not None:
            raise UserError(f"{source.name} is a ResNet and has no {name}; its norms have group_eps")


# ---- what a format cannot say


def refuse(target: str, part: str, mend: str = "") -> UserError:
    return UserError(f"{target} cannot express {part}" + (f"; {mend}" if mend else ""))


def require_plain(c: ModelConfig, target: str) -> ViTConfig:
    """A ViT with learned 1-D positions at the stem and full attention, as everyone has; else refuse."""
    if isinstance(c, ResNetConfig):
        raise refuse(target, "a ResNet")
    if c.attention == "axial":
        raise refuse(target, "axial attention")
    if c.positions != "1d":
        raise refuse(target, f"positions='{c.positions}'")
    if c.placement != "stem":
        raise refuse(target, f"positions at every layer (placement='{c.placement}')")
    return c


def require_defaults(c: ModelConfig, target: str, wanted: FormatDefaults) -> None:
    """The traits a target builds in must be the model's."""
    names = [field.name for field in dataclasses.fields(FormatDefaults)]
    trios = [(name, getattr(defaults_of(c), name), getattr(wanted, name)) for name in names]
    odd = [(name, mine, due) for name, mine, due in trios if None not in (mine, due) and mine != due]
    if odd:
        part = " and ".join(f"{name}={mine} (only {due})" for name, mine, due in odd)
        mend = " ".join(f"{name}={due}" for name, _, due in odd)
        raise refuse(target, part, f"to accept slightly other logits, read the model with {mend}")


def defaults_of(c: ModelConfig) -> FormatDefaults:
    if isinstance(c, ResNetConfig):
        return FormatDefaults(group_eps=c.norm_eps, standardize=c.standardize, standardize_eps=c.standardize_eps)
    said = FormatDefaults(c.heads, c.gelu, c.norm_eps)
    if c.stem is None:
        return said
    stem = FormatDefaults(
        group_eps=c.stem.norm_eps, standardize=c.stem.standardize, standardize_eps=c.stem.standardize_eps
    )
    return said.over(stem)


def require_square(c: ViTConfig, target: str) -> None:
    if c.image_size[0] != c.image_size[1]:
        raise refuse(target, f"images that are not square ({c.image_size[0]}x{c.image_size[1]})")


def require_pools(c: ViTConfig, target: str, *pools: str) -> None:
    if c.pool not in pools:
        raise refuse(target, f"pool='{c.pool}', only {listed(pools)}")
