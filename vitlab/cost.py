"""The cost of a model: its parameters, the operations of one image, and the memory that training keeps of it.

`cost` counts them on the model itself. The closed forms give the same numbers at once, without torch, for tables of
many models.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vitlab.errors import UserError
from vitlab.models.config import GROUPS, ModelConfig, ResNetConfig, Size, StemConfig, ViTConfig, stages

if TYPE_CHECKING:
    from vitlab.models.variants import Model

BACKWARD = 2  # a backward pass costs two forward ones: gradients of the inputs and of the weights
STATE = 16  # bytes a parameter takes: itself, its gradient and Adam's two moments, in float32
BF16, F32, CHOICE = 2, 4, 8  # bytes of a number, and of the place of a maximum
STATISTICS = 2 * GROUPS * F32  # of a group norm: mean and deviation of each group


@dataclass(frozen=True)
class Cost:
    """Per image, as training has it: forward operations, bytes a GPU keeps for the backward pass in mixed bf16; and the
    model's size."""

    parameters: int
    length: int
    forward_flops: int
    activation_bytes: int

    @property
    def train_flops(self) -> int:
        return (1 + BACKWARD) * self.forward_flops

    def run_flops(self, images: float, epochs: float) -> float:
        """Operations of a complete training run."""
        return self.train_flops * images * epochs

    def gpu_bytes(self, images: float, gpus: int, sharded: bool) -> float:
        """Memory of each GPU for the model's state and the activations of `images` at a time."""
        return STATE * self.parameters / (gpus if sharded else 1) + self.activation_bytes * images


def days(flops: float, tflops: float) -> float:
    """Days that a machine takes for `flops` operations at a sustained speed in TFLOP/s."""
    if tflops <= 0:
        raise UserError(f"the speed must be positive TFLOP/s, not {tflops:g}")
    return flops / (tflops * 1e12) / 86_400


def cost(make: Callable[[], "Model"]) -> Cost:
    """Count on the model that `make` builds, whatever it is; neither building nor running it takes storage."""
    from vitlab.counting import count  # imports torch

    return Cost(*count(make))


def count_cost(config: ModelConfig) -> Cost:
    from vitlab.models.variants import build  # imports torch

    return cost(lambda: build(config))


# ---- the same in closed form, for tables of many models


def quick_cost(config: ModelConfig) -> Cost:
    """The cost of a model at once, by the formulas of the layers; rarer kinds of models are counted as above."""
    if not is_plain(config):
        return count_cost(config)
    return Cost(parameters(config), config.length, forward_flops(config), activation_bytes(config))


def is_plain(config: ModelConfig) -> bool:
    """Whether a model is a ResNet or a transformer as a name alone makes it, of any shape."""
    if isinstance(config, ResNetConfig):
        return config.attention == "none"
    c = config
    return c == ViTConfig(c.image_size, c.patch, c.depth, c.width, c.mlp, c.heads, c.classes, c.stem)


# ---- operations


@functools.cache
def forward_flops(config: ModelConfig) -> int:
    """Operations of one image, at once, by the formulas of the layers; rarer kinds of models are counted as above."""
    if isinstance(config, ResNetConfig):
        return convolution_flops(config, config.image_size) + 2 * config.channels * config.classes
    c, rows = config, config.grid[0] * config.grid[1]
    if c.attention == "axial" or c.positions == "relative" or c.pool == "attention":
        return count_cost(c).forward_flops
    stem = 0 if c.stem is None else convolution_flops(c.stem, c.image_size)
    embed = 2 * rows * (3 if c.stem is None else c.stem.channels) * c.patch**2 * c.width
    mlp = (3 if c.mlp_kind == "swiglu" else 2) * c.width * c.mlp
    tokens = c.training_length
    block = 2 * tokens * (4 * c.width**2 + mlp) + 4 * tokens**2 * c.width  # dense layers, attention
    head = 2 * c.width * c.prelogits + 2 * c.features * c.classes
    return stem + embed + c.depth * block + head


def masked_flops(config: ViTConfig, target: str) -> int:
    """Operations of one image in masked patch prediction: every patch has a head, and there is no other."""
    # of patch_targets.py, which imports torch: 512 colors, of 16 cells, or the patch's values
    outputs = {"mean": 512, "4x4": 16 * 512, "pixels": 3 * config.stride**2}[target]
    body = forward_flops(replace(config, classes=0, prelogits=0))
    return body + 2 * config.grid[0] * config.grid[1] * config.width * outputs


@dataclass(frozen=True)
class Unit:
    """A bottleneck of a ResNet: its channels, and the sides of its input and output."""

    cin: int
    mid: int
    stride: int
    before: Size
    after: Size

    @property
    def is_projected(self) -> bool:
        """Whether its shortcut is a convolution."""
        return self.stride == 2 or self.cin != 4 * self.mid


def units(config: ResNetConfig | StemConfig, size: Size) -> Iterator[Unit]:
    """The units after the root and its pooling, which halve the image twice; every stride of 2 rounds up."""
    size = halve(halve(size))
    for stage in stages(config):
        for cin, mid, stride in stage:
            after = halve(size) if stride == 2 else size
            yield Unit(cin, mid, stride, size, after)
            size = after


def convolution_flops(config: ResNetConfig | StemConfig, size: Size) -> int:
    """Operations of a ResNet's root, 7x7, and its units."""
    is_axial = isinstance(config, ResNetConfig) and config.attention == "axial"
    flops = 2 * area(halve(size)) * 3 * 49 * config.width
    for u in units(config, size):
        flops += 2 * area(u.before) * u.cin * u.mid
        flops += axial_flops(u) if is_axial else 2 * area(u.after) * 9 * u.mid**2
        flops += 2 * area(u.after) * (u.mid * 4 * u.mid + (u.cin * 4 * u.mid if u.is_projected else 0))
    return flops


def axial_flops(u: Unit) -> int:
    """Operations of a unit's attention along both axes: projections, their products, relative positions."""
    return sum(2 * area(u.before) * u.mid * (3 * u.mid + 2 * side + (2 * side - 1)) for side in u.before)


def halve(size: Size) -> Size:
    return -(-size[0] // 2), -(-size[1] // 2)


def area(size: Size, margin: int = 0) -> int:
    return (size[0] + margin) * (size[1] + margin)


# ---- parameters of plain models


def parameters(config: ModelConfig) -> int:
    if isinstance(config, ResNetConfig):
        head = (config.channels + 1) * config.classes
        return convolution_weights(config, config.image_size) + 2 * config.channels + head
    c = config
    stem = 0 if c.stem is None else convolution_weights(c.stem, c.image_size)
    embed = ((3 if c.stem is None else c.stem.channels) * c.patch**2 + 1) * c.width
    attention = (3 * c.width + c.width) * (c.width + 1)  # qkv and out, with biases
    mlp = c.mlp * (c.width + 1) + c.width * (c.mlp + 1)
    norm, tables = 2 * c.width, (1 + c.length) * c.width  # the class token and positions
    return stem + embed + tables + c.depth * (2 * norm + attention + mlp) + norm + (c.width + 1) * c.classes


def convolution_weights(config: ResNetConfig | StemConfig, size: Size) -> int:
    """Parameters of a ResNet's root and units: convolutions without biases, norms with two numbers a channel.

    A stem has its norms after the convolutions, the projected shortcut's too, and BiT before them.
    """
    is_stem = isinstance(config, StemConfig)
    weights = 3 * 49 * config.width + (2 * config.width if is_stem else 0)
    for u in units(config, size):
        norms = 2 * u.mid + 4 * u.mid * (1 + u.is_projected) if is_stem else u.cin + 2 * u.mid
        shortcut = u.cin * 4 * u.mid if u.is_projected else 0
        weights += u.cin * u.mid + 9 * u.mid**2 + 4 * u.mid**2 + shortcut + 2 * norms
    return weights


# ---- activations of plain models: bytes that autograd keeps of an image in mixed bf16


def activation_bytes(config: ModelConfig) -> int:
    if isinstance(config, ResNetConfig):
        size, channels = config.image_size, config.channels
        end = area(config.grid) * channels * 2 * F32 + STATISTICS  # norm and ReLU
        head = channels * BF16 if config.classes else 0
        return root_bytes(config, size) + sum(map(bit_bytes, units(config, size))) + end + head
    c, tokens = config, config.length
    norm = tokens * (c.width * F32 + 2 * F32)  # its input, mean and deviation
    attention = tokens * (c.width * BF16 * (1 + 3 + 1) + c.heads * F32)  # input, q k v, output; log-sums
    mlp = tokens * (c.width + 2 * c.mlp) * BF16  # input, and the hidden layer before and after GELU
    head = c.width * BF16 if c.classes else 0
    first = 3 * area(c.image_size) * BF16  # the image, cast
    if c.stem is not None:
        first = root_bytes(c.stem, c.image_size) + sum(map(stem_bytes, units(c.stem, c.image_size)))
        first += area(c.grid) * c.patch**2 * c.stem.channels * BF16  # its map, cast
    return first + c.depth * (2 * norm + attention + mlp) + norm + head


def root_bytes(config: ResNetConfig | StemConfig, size: Size) -> int:
    """The image, cast, and what pooling keeps: its input with margins and its choices; a stem's norm and ReLU too.

    A stem pads the image, by as much as its 7x7 windows of stride 2 reach over.
    """
    half, is_stem = halve(size), isinstance(config, StemConfig)
    image = same_area(size, 7, 2) if is_stem else area(size)
    pooled = (same_area(half, 3, 2) * F32 + 2 * area(half) * F32) if is_stem else area(half, 2) * BF16
    choices = area(halve(half)) * CHOICE
    return 3 * image * BF16 + (pooled + choices) * config.width + (STATISTICS if is_stem else 0)


def bit_bytes(u: Unit) -> int:
    """Three times a norm's input and the ReLU after it in float32, and the cast of that, once for each convolution."""
    first = u.cin * (2 * F32 + BF16 * (1 + u.is_projected))
    inner = u.mid * (2 * F32 + BF16)
    return area(u.before) * (first + inner) + area(u.after) * inner + 3 * STATISTICS


def stem_bytes(u: Unit) -> int:
    """The input, cast for each convolution that has it; then norms' inputs, ReLUs and casts; the last ReLU."""
    first = u.cin * BF16 * (1 + u.is_projected) + u.mid * 2 * F32
    padded = same_area(u.before, 3, u.stride) * u.mid * BF16
    rest = u.mid * (2 * F32 + BF16) + 4 * u.mid * F32 * (2 + u.is_projected)
    return area(u.before) * first + padded + area(u.after) * rest + (3 + u.is_projected) * STATISTICS


def same_area(size: Size, window: int, stride: int) -> int:
    """Cells of a map with "SAME" padding."""
    height, width = (max(side, (-(-side // stride) - 1) * stride + window) for side in size)
    return height * width
