"""What a model is, as data: frozen dataclasses whose values are checked once. Nothing here imports torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from vitlab.errors import UserError
from vitlab.settings import POSITIVE, RATE, Range, check_types, is_list
from vitlab.text import listed

Pool = Literal["token", "mean", "attention", "token_mean"]
PositionKind = Literal["none", "1d", "2d", "relative", "sinusoidal", "sincos2d"]
Placement = Literal["stem", "every", "shared"]
AttentionKind = Literal["full", "axial"]
UnitAttention = Literal["none", "axial"]
PrefixPositions = Literal["token", "all", "none"]
FinalNorm = Literal["tokens", "pooled", "none"]
QkvBias = Literal["all", "qv", "none"]
MLPKind = Literal["gelu", "swiglu"]
Gelu = Literal["exact", "tanh", "quick"]
Rotary = Literal["none", "cells", "centers"]
RotaryLayout = Literal["pairs", "halves"]
Standardize = Literal["sigma", "variance"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Fit = Literal["crop", "stretch"]
Size = tuple[int, int]
Color = tuple[float, float, float]

# Limits for configs from untrusted files: without them one number could take all memory.
LARGEST_SIDE = 8192  # of the model's input, in pixels
MOST_ANGLES = 1 << 22  # of rotary positions, which no file holds: a config alone must not fill the memory
MOST_OFFSETS = 1 << 27  # pairs of tokens or cells in all layers of relative positions, for the same reason
MOST_LAYERS, MOST_WIDTH, MOST_CLASSES, MOST_REGISTERS = 1000, 1 << 16, 1_000_000, 1024
GROUPS = 32  # of a ResNet's group norms
ROTARY_LAYOUT, ROTARY_BASE = "pairs", 1e4  # where there are no rotary positions
RATES = ("dropout", "drop_path", "patch_dropout")  # settings of training alone, which any weights can have

Classes = Annotated[int, Range(0, MOST_CLASSES), "classes of the head; 0: no head, the model returns its features"]
ImageSize = Annotated[Size, "height and width of the input in pixels; one number for a square"]


@dataclass(frozen=True)
class StemConfig:
    """The hybrid's ResNet stem: a root (stride 4), then stages of post-activation bottlenecks."""

    stages: Annotated[tuple[int, ...], "units of each stage"]
    width: Annotated[int, Range(most=MOST_WIDTH), "channels of the root"] = 64
    # (w - mean) / (sigma + eps), or (w - mean) / sqrt(variance + eps)
    standardize: Annotated[Standardize, "what weight standardization divides by"] = "sigma"
    standardize_eps: Annotated[float, POSITIVE, "eps of the weight standardization"] = 1e-5
    norm_eps: Annotated[float, POSITIVE, "eps of the group norms"] = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        check_stages(self)

    @property
    def channels(self) -> int:
        return self.width * 4 * 2 ** (len(self.stages) - 1) if self.stages else self.width

    @property
    def stride(self) -> int:
        return int(4 * 2 ** max(0, len(self.stages) - 1))


@dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer: plain, hybrid (with a stem) or axial."""

    image_size: ImageSize
    patch: Annotated[int, Range(1, LARGEST_SIDE), "side of a patch, in pixels, or in cells of the stem's map"]
    depth: Annotated[int, Range(1, MOST_LAYERS), "transformer layers"]
    width: Annotated[int, Range(1, MOST_WIDTH), "width of the tokens"]
    mlp: Annotated[int, Range(1, 1 << 20), "width of the MLPs' hidden layer"]
    heads: Annotated[int, Range(1, MOST_WIDTH), "attention heads; they divide the width"]
    classes: Classes = 1000
    stem: Annotated[StemConfig | None, "ResNet before the patches, for a hybrid"] = None
    pool: Annotated[
        Pool, "what the head sees: the class token, the mean of the patches, both of them, or attention pooling"
    ] = "token"
    prelogits: Annotated[int, Range(0, MOST_WIDTH), "width of the tanh layer before the head; 0: none"] = 0
    positions: Annotated[PositionKind, "kind of position embedding"] = "1d"
    placement: Annotated[Placement, "where positions are added: once, at every layer, or one table shared"] = "stem"
    attention: Annotated[AttentionKind, "full attention, or axial: along rows, then along columns"] = "full"
    gelu: Annotated[Gelu, "exact GELU, its tanh approximation, or x sigmoid(1.702 x)"] = "exact"
    norm_eps: Annotated[float, POSITIVE, "eps of the layer norms"] = 1e-6
    dropout: Annotated[float, RATE, "dropout rate after every dense layer but qkv"] = 0.0
    drop_path: Annotated[float, RATE, "stochastic depth: rate of the last layer, growing linearly from 0"] = 0.0
    patch_dropout: Annotated[float, RATE, "share of every image's patches that the blocks do not see in training"] = 0.0

    # what later families of Vision Transformers changed; by default nothing
    extra_token: Annotated[bool, "a class token although the head does not see it"] = False
    registers: Annotated[int, Range(0, MOST_REGISTERS), "register tokens after the class token"] = 0
    prefix_positions: Annotated[PrefixPositions, "which of these have a position: the class token, all, none"] = "token"
    embed_bias: Annotated[bool, "bias of the patch projection"] = True
    norm_before: Annotated[bool, "layer norm before the blocks"] = False
    final_norm: Annotated[FinalNorm, "layer norm after the blocks: of the tokens, after pooling, or none"] = "tokens"
    layer_scale: Annotated[bool, "a learned factor for each channel of a branch"] = False
    qkv_bias: Annotated[QkvBias, "biases of queries, keys and values; of queries and values; none"] = "all"
    qk_norm: Annotated[bool, "layer norms of queries and keys, head by head"] = False
    attention_norm: Annotated[bool, "layer norm of the heads' values before they are mixed"] = False
    mlp_kind: Annotated[MLPKind, "GELU, or SwiGLU: a gated hidden layer"] = "gelu"
    mlp_norm: Annotated[bool, "layer norm of the MLPs' hidden layer"] = False
    rotary: Annotated[Rotary, "rotary positions of patches: none, by cell, or by cell centers from -1 to 1"] = "none"
    rotary_layout: Annotated[RotaryLayout, "channels that turn together: neighbors, or those half a head apart"] = (
        "pairs"
    )
    rotary_base: Annotated[float, Range(above=1, most=1e9), "ratio of the longest to the shortest wavelength"] = 1e4
    rotary_grid: Annotated[int, Range(0, LARGEST_SIDE), "cells to which rotary='cells' scales any grid; 0: its own"] = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.width % self.heads:
            fit = [h for h in range(1, min(self.width, 1024) + 1) if self.width % h == 0]
            near = sorted(sorted(fit, key=lambda h: abs(h - self.heads))[:3])
            raise UserError(f"{self.heads} heads do not divide the width {self.width}; {listed(near)} would")
        check_size(self.image_size, self.stride)
        self._check_positions()
        if self.attention == "axial" and self.prefix:
            raise UserError(
                "axial attention has no class token or registers, only the grid; use pool='mean' or pool='attention'"
            )
        self._check_families()
        self._check_patch_dropout()

    def _check_positions(self) -> None:
        kind, place = self.positions, self.placement
        if kind in ("none", "relative") and place != "stem":
            why = "has nothing to place" if kind == "none" else "is part of every attention layer already"
            raise UserError(f"positions='{kind}' {why}; placement='{place}' is meaningless")
        if kind in ("sinusoidal", "sincos2d") and place == "every":
            raise UserError(f"{kind} tables are fixed, so one per layer is the same as placement='shared'; use that")
        if kind == "relative" and self.attention == "axial":
            raise UserError("relative positions are offsets in the full grid; use another kind with axial attention")
        if kind == "relative" and self.depth * self.length**2 > MOST_OFFSETS:
            shape = f"{self.image_size[0]}x{self.image_size[1]}"
            raise UserError(f"images of {shape} have too many patches for relative positions; use smaller ones")
        if kind == "2d" and self.width % 2:
            raise UserError(f"positions='2d' halves the width for its two axes, and {self.width} is odd")
        if kind == "sincos2d" and self.width % 4:
            raise UserError(f"positions='sincos2d' needs a width that 4 divides, and {self.width} is none; set another")

    def _check_families(self) -> None:
        if self.extra_token and self.pool in ("token", "token_mean"):
            raise UserError(f"pool='{self.pool}' has a class token already; extra_token is for the others")
        if self.prefix_positions == "all" and not self.registers:
            raise UserError("without registers the class token is all there is; use prefix_positions='token'")
        if self.prefix_positions == "none" and not self.prefix:
            raise UserError("prefix_positions='none' is about a class token or registers, and there are none")
        if self.placed < self.prefix and self.placement != "stem":
            raise UserError(f"placement='{self.placement}' adds positions to all tokens; use prefix_positions='all'")
        if self.positions == "relative" and self.prefix > self.token:
            raise UserError("relative positions know a class token and patches; leave registers out")
        if self.mlp_kind == "swiglu" and (self.gelu != "exact" or self.pool == "attention"):
            raise UserError("SwiGLU has no GELU and no attention pooling; leave gelu and pool as they are")
        if self.prelogits and self.pool == "token_mean":
            raise UserError("pool='token_mean' has no pre-logits; set prelogits=0")
        if self.rotary == "none" and self.rotary_fields != (ROTARY_LAYOUT, ROTARY_BASE, 0):
            raise UserError("rotary_layout, rotary_base and rotary_grid are settings of rotary positions; set rotary")
        if self.rotary != "none" and self.positions == "relative":
            raise UserError("relative and rotary positions both give offsets to attention; choose one of them")
        if self.rotary != "none" and self.attention == "axial":
            raise UserError("rotary positions turn queries and keys of the complete grid; use full attention")
        if self.rotary != "none" and (self.width // self.heads) % 4:
            raise UserError(f"rotary positions need heads whose width 4 divides, not {self.width // self.heads}")
        if self.rotary != "none" and self.grid[0] * self.grid[1] * (self.width // self.heads) > 2 * MOST_ANGLES:
            height, width = self.image_size
            raise UserError(f"images of {height}x{width} have too many patches for rotary positions; use smaller ones")
        if self.rotary == "centers" and self.rotary_grid:
            raise UserError("rotary='centers' knows no cells; leave rotary_grid")

    def _check_patch_dropout(self) -> None:
        parts = {
            "axial attention": self.attention == "axial",
            "positions='relative'": self.positions == "relative",
            f"placement='{self.placement}'": self.placement != "stem",
        }
        part = next((part for part, is_there in parts.items() if is_there), None)
        if self.patch_dropout and part is not None:
            raise UserError(f"{part} needs the patches of the complete grid in every layer; set patch_dropout=0")

    @property
    def rotary_fields(self) -> tuple[str, float, int]:
        return self.rotary_layout, self.rotary_base, self.rotary_grid

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next."""
        return self.patch * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> Size:
        """Patches down and across."""
        return self.image_size[0] // self.stride, self.image_size[1] // self.stride

    @property
    def token(self) -> bool:
        """Whether a class token leads the sequence."""
        return self.pool in ("token", "token_mean") or self.extra_token

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return self.token + self.registers

    @property
    def placed(self) -> int:
        """Tokens before the patches that have a position of their own."""
        return {"none": 0, "token": int(self.token), "all": self.prefix}[self.prefix_positions]

    @property
    def length(self) -> int:
        """Tokens in the sequence, the prefix included."""
        return self.grid[0] * self.grid[1] + self.prefix

    @property
    def training_length(self) -> int:
        """Tokens in the sequence in training, the prefix included."""
        return self.count_kept(self.grid[0] * self.grid[1]) + self.prefix

    def count_kept(self, patches: int) -> int:
        """How many of an image's patches the blocks see in training."""
        return max(1, round((1 - self.patch_dropout) * patches))

    @property
    def pooled(self) -> int:
        """Width of what pooling makes of the tokens."""
        return self.width * (2 if self.pool == "token_mean" else 1)

    @property
    def features(self) -> int:
        """Width of the head's input."""
        return self.prelogits or self.pooled


@dataclass(frozen=True)
class ResNetConfig:
    """A BiT ResNet: pre-activation bottlenecks, group norm, weight-standardized convolutions; plain or axial."""

    image_size: ImageSize
    stages: Annotated[tuple[int, ...], "units of each stage"]
    width: Annotated[int, Range(most=MOST_WIDTH), "channels of the root: 64 times the width factor"] = 64
    classes: Classes = 1000
    standardize: Annotated[Standardize, "what weight standardization divides by"] = "variance"
    standardize_eps: Annotated[float, POSITIVE, "eps of the weight standardization"] = 1e-10
    norm_eps: Annotated[float, POSITIVE, "eps of the group norms"] = 1e-5
    attention: Annotated[UnitAttention, "none, or axial attention in place of the 3x3 convolutions"] = "none"

    def __post_init__(self) -> None:
        check_types(self)
        check_stages(self)
        if not self.stages:
            raise UserError("a ResNet needs at least one stage")
        check_size(self.image_size, 1)
        if self.attention == "axial" and sum(h**2 + w**2 for h, w in unit_grids(self)) > MOST_OFFSETS:
            shape = f"{self.image_size[0]}x{self.image_size[1]}"
            raise UserError(f"images of {shape} have too many cells for axial attention; use smaller ones")

    @property
    def channels(self) -> int:
        return int(self.width * 4 * 2 ** (len(self.stages) - 1))

    @property
    def grid(self) -> Size:
        """Cells of the final map, down and across: every stride-2 step rounds up."""
        stride = 2 ** (len(self.stages) + 1)
        return -(-self.image_size[0] // stride), -(-self.image_size[1] // stride)

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def training_length(self) -> int:
        return self.length


ModelConfig = ViTConfig | ResNetConfig


def stages(c: StemConfig | ResNetConfig) -> Iterator[list[tuple[int, int, int]]]:
    """Per stage, the (input channels, inner channels, stride) of its units; all stages but the first halve the map."""
    cin = c.width
    for i, units in enumerate(c.stages):
        mid = c.width * 2**i
        yield [(cin, mid, 1 if i == 0 else 2)] + [(4 * mid, mid, 1)] * (units - 1)
        cin = 4 * mid


def unit_grids(c: ResNetConfig) -> Iterator[Size]:
    """Cells of each unit's input, down and across: the root's stride is 4, and every stride-2 step rounds up."""
    total = 4
    for stage in stages(c):
        for _, _, stride in stage:
            yield -(-c.image_size[0] // total), -(-c.image_size[1] // total)
            total *= stride


@dataclass(frozen=True)
class Preprocess:
    """How a photo becomes the model's input; it travels with the weights."""

    mean: Annotated[Color, Range(-255, 255), "subtracted from each channel's values from 0 to 1"] = (0.5, 0.5, 0.5)
    std: Annotated[Color, Range(1e-4, 255), "divides each channel after that"] = (0.5, 0.5, 0.5)
    interpolation: Annotated[Interpolation, "filter for scaling photos"] = "bilinear"
    fit: Annotated[Fit, "scale to cover the input and crop the center, or stretch to its shape"] = "crop"
    # a photo is scaled to size / crop before its center is cut out, so small shares cost memory
    crop: Annotated[float, Range(0.1, 1), "with fit=crop: share of the scaled photo that the center keeps"] = 0.875

    def __post_init__(self) -> None:
        check_types(self)


def as_size(size: object) -> Size:
    """An image size as (height, width), from an int or a pair."""
    pair = (size, size) if isinstance(size, int) else tuple(size) if is_list(size) else ()
    if len(pair) != 2 or not all(type(side) is int for side in pair):
        raise UserError(f"image_size must be an integer or (height, width), not {size!r}")
    if min(pair) < 1:
        raise UserError(f"image_size must be positive, not {size!r}")
    if max(pair) > LARGEST_SIDE:
        raise UserError(f"image_size must be at most {LARGEST_SIDE}, not {size!r}")
    return pair


# ---- checks shared by the configs


def check_size(size: Size, stride: int) -> None:
    as_size(size)
    for side in size:
        if side % stride:
            below, above = side // stride * stride, (side // stride + 1) * stride
            fit = f"{below} or {above}" if below else f"{above}"
            fix = f"use {fit} for {side}, or any other multiple of {stride}"
            raise UserError(f"patches of {stride} pixels do not divide an image of {size[0]}x{size[1]}: {fix}")


def check_stages(config: StemConfig | ResNetConfig) -> None:
    if any(units < 1 for units in config.stages):
        raise UserError(f"every stage needs at least one unit, not {config.stages}")
    if len(config.stages) > 10 or sum(config.stages) > MOST_LAYERS:
        raise UserError(f"a ResNet has at most 10 stages and {MOST_LAYERS} units")
    if config.width < 1 or config.width % GROUPS:
        raise UserError(f"a ResNet's width must be a multiple of its {GROUPS} norm groups, not {config.width}")
