"""Convolutions: the BiT ResNet, the paper's baseline, and the ResNet stem of the hybrids.

Both are made of bottlenecks with group norm and weight-standardized convolutions. BiT's are pre-activation
(norm, ReLU, convolution) with symmetric padding; the hybrid's are post-activation with "SAME" padding, which for
an even side pads one more after than before.

AxialResNet (the paper's appendix D.6) is BiT with axial attention in place of the 3x3 convolutions.

Shapes: B batch, C channels, h and w cells down and across, H heads, K = C/H head width.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.base import ImageModel
from vitlab.models.card import Card
from vitlab.models.config import GROUPS, ResNetConfig, Size, StemConfig, as_size, stages, unit_grids
from vitlab.models.images import check_images
from vitlab.models.positions import Relative, Resample, check_mode

HEADS = 8  # of axial attention in a ResNet


class StdConv(nn.Conv2d):
    """A convolution without bias whose kernels have mean 0 and deviation 1."""

    fixed: Tensor | None = None  # its kernels as `fixed_kernels` keeps them

    def __init__(self, c: StemConfig | ResNetConfig, cin: int, cout: int, size: int, stride: int = 1) -> None:
        super().__init__(cin, cout, size, stride=stride, padding=size // 2, bias=False)
        self.form, self.eps = c.standardize, c.standardize_eps
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")

    def standardized(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        if self.form == "sigma":
            return (self.weight - mean) / (variance.sqrt() + self.eps)
        return (self.weight - mean) * (variance + self.eps).rsqrt()

    def kernels(self) -> Tensor:
        return self.standardized() if self.fixed is None or self.training else self.fixed

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernels(), None, self.stride, self.padding)


class SameConv(StdConv):
    """The same with "SAME" padding."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(same_pad(x, self.kernel_size[0], self.stride[0]), self.kernels(), None, self.stride)


@contextmanager
def fixed_kernels(model: nn.Module) -> Iterator[None]:
    """Standardize the kernels of a model in eval mode once, as long as its weights do not change.

    In every pass it would take as long as the convolutions of dozens of small images.
    """
    convolutions = [module for module in model.modules() if isinstance(module, StdConv)]
    try:
        with torch.no_grad():
            for convolution in convolutions:
                convolution.fixed = convolution.standardized()
        yield
    finally:
        for convolution in convolutions:
            convolution.fixed = None


def same_pad(x: Tensor, size: int, stride: int) -> Tensor:
    """Zeros around x so that a window gives ceil(side / stride) outputs, the odd one at the end."""
    pads: list[int] = []
    for side in (x.shape[3], x.shape[2]):  # F.pad starts from the last axis
        total = max(0, (-(-side // stride) - 1) * stride + size - side)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads)


def group_norm(c: StemConfig | ResNetConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, c.norm_eps)


# ---- BiT


class BiTUnit(nn.Module):
    """Pre-activation bottleneck; a projected shortcut starts from the activated input."""

    def __init__(self, c: ResNetConfig, cin: int, mid: int, stride: int, grid: Size) -> None:
        super().__init__()
        is_axial = c.attention == "axial"
        self.norm1, self.conv1 = group_norm(c, cin), StdConv(c, cin, mid, 1)
        self.norm2 = group_norm(c, mid)
        self.conv2 = AxialLayer(c, mid, stride, grid) if is_axial else StdConv(c, mid, mid, 3, stride)
        self.norm3, self.conv3 = group_norm(c, mid), StdConv(c, mid, 4 * mid, 1)
        project = stride != 1 or cin != 4 * mid
        self.shortcut = StdConv(c, cin, 4 * mid, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv2(F.relu(self.norm2(self.conv1(y))))
        return shortcut + self.conv3(F.relu(self.norm3(y)))


class ResNet(ImageModel):
    """BiT: root, stages, norm, mean over the map, head."""

    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        c = self.config = config
        self.card = Card()
        self.root = StdConv(c, 3, c.width, 7, stride=2)
        grids = unit_grids(c)
        self.stages = nn.ModuleList(
            nn.Sequential(*(BiTUnit(c, *unit, next(grids)) for unit in stage)) for stage in stages(c)
        )
        self.norm = group_norm(c, c.channels)
        self.head = nn.Linear(c.channels, c.classes) if c.classes else None
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (B, classes); the features where the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """The input of the head, (B, C)."""
        return self.tokens(images).mean(1)

    def tokens(self, images: Tensor) -> Tensor:
        """The final map as a sequence, (B, hw, C)."""
        check_images(images, self.shown or self.config.image_size, self.root.weight)
        x = F.pad(self.root(images), (1, 1, 1, 1))  # zeros, not -inf: there is no ReLU before
        x = F.max_pool2d(x, 3, 2)
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x)).flatten(2).transpose(1, 2)

    def resize(self, image_size: int | Size, mode: Resample = "bilinear") -> Self:
        """Take images of another size, in place: convolutions stay, the positions of axial attention are resampled.

        These become new parameters: resize before making an optimizer.
        """
        check_mode(mode)
        config = dataclasses.replace(self.config, image_size=as_size(image_size))
        layers = [module for module in self.modules() if isinstance(module, AxialLayer)]
        if config != self.config and layers:
            for layer, grid in zip(layers, unit_grids(config), strict=True):
                layer.resize(grid, mode)
        self.config, self.shown = config, None
        return self


# ---- axial attention in place of BiT's 3x3 convolutions


class AxialLayer(nn.Module):
    """Attention along rows, then along columns; the mean of 2x2 cells follows where the convolution has stride 2."""

    def __init__(self, c: ResNetConfig, channels: int, stride: int, grid: Size) -> None:
        super().__init__()
        self.rows, self.columns = (AxialAttention(c, channels, side) for side in reversed(grid))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        x = self.columns(self.rows(x).mT).mT
        return F.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x

    def resize(self, grid: Size, mode: Resample) -> None:
        for attention, side in zip((self.rows, self.columns), reversed(grid), strict=True):
            attention.relative.resize((1, side), mode)


class AxialAttention(nn.Module):
    """Multi-head self-attention among the cells of each row of a map, with learned relative positions.

    As in Axial-DeepLab (Wang et al. 2020), queries, keys and values are normed and the heads are not projected: the
    convolution after them does that. Its norms are BiT's here, and a position adds to the logits of a query alone.
    """

    def __init__(self, c: ResNetConfig, channels: int, side: int) -> None:
        super().__init__()
        self.qkv = StdConv(c, channels, 3 * channels, 1)
        self.norm = nn.GroupNorm(3 * GROUPS, 3 * channels, c.norm_eps)  # no group has channels of two of them
        self.relative = Relative((1, side), channels, HEADS, token=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, h, w)
        qkv = self.norm(self.qkv(x)).unflatten(1, (3, HEADS, -1))  # (B, 3, H, K, h, w)
        q, k, v = qkv.permute(1, 0, 4, 2, 5, 3).flatten(1, 2).unbind(0)  # (Bh, H, w, K)
        bias = self.relative(q) / math.sqrt(q.shape[-1])  # (Bh, H, w, w)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y.unflatten(0, (x.shape[0], x.shape[2])).permute(0, 2, 4, 1, 3).flatten(1, 2)


# ---- the hybrid's stem


class StemUnit(nn.Module):
    """Post-activation bottleneck; its last norm starts at scale zero, so the unit starts as its shortcut."""

    def __init__(self, c: StemConfig, cin: int, mid: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = SameConv(c, cin, mid, 1), group_norm(c, mid)
        self.conv2, self.norm2 = SameConv(c, mid, mid, 3, stride), group_norm(c, mid)
        self.conv3, self.norm3 = SameConv(c, mid, 4 * mid, 1), group_norm(c, 4 * mid)
        nn.init.zeros_(self.norm3.weight)
        project = stride != 1 or cin != 4 * mid
        self.shortcut = nn.Sequential(SameConv(c, cin, 4 * mid, 1, stride), group_norm(c, 4 * mid)) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(F.relu(self.norm2(self.conv2(y)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Stem(nn.Module):
    """Root (stride 4) and stages: (B, 3, height, width) to (B, C, h, w)."""

    def __init__(self, c: StemConfig) -> None:
        super().__init__()
        self.root, self.norm = SameConv(c, 3, c.width, 7, stride=2), group_norm(c, c.width)
        self.stages = nn.ModuleList(nn.Sequential(*(StemUnit(c, *unit) for unit in stage)) for stage in stages(c))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(images)))
        x = F.max_pool2d(same_pad(x, 3, 2), 3, 2)  # zeros are harmless after a ReLU
        for stage in self.stages:
            x = stage(x)
        return x
