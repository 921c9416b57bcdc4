"""A model as a module that can be traced for any batch and image size: kernels standardized once, padding that does not
depend on the image size and, on request, positions that are resampled inside the graph.

Shapes: B batch, N tokens, D width, H heads, K head width, h and w patches down and across, h0 and w0 those the tables
were learned for.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.axial import AxialBlock
from vitlab.models.positions import Axes, Table
from vitlab.models.resnet import ResNet, SameConv, StdConv, Stem
from vitlab.models.variants import Model
from vitlab.models.vit import Attention, ViT


class TracedConv(StdConv):
    """A convolution whose stored kernel is standardized already."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, None, self.stride, self.padding)


class TracedSameConv(SameConv):
    """The same with "SAME" padding: a side of the hybrid's map is always a multiple of the stride."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(even_pad(x, self.kernel_size[0], self.stride[0]), self.weight, None, self.stride)


class TracedStem(Stem):
    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(images)))
        x = F.max_pool2d(even_pad(x, 3, 2), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x


class TracedResNet(ResNet):
    """Images of any size. The border before the pooling is concatenated: ONNX Runtime pads with -inf there."""

    def tokens(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(zero_border(zero_border(self.root(images), 2), 3), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x)).flatten(2).transpose(1, 2)


def even_pad(x: Tensor, size: int, stride: int) -> Tensor:
    """`same_pad` for sides that are multiples of the stride, where it does not depend on them."""
    total = max(0, size - stride)
    before, after = total // 2, total - total // 2
    return F.pad(x, (before, after, before, after))


def zero_border(x: Tensor, axis: int) -> Tensor:
    """A line of zeros on either side."""
    line = torch.zeros_like(x.narrow(axis, 0, 1))
    return torch.cat([line, x, line], axis)


TRACED: dict[type[nn.Module], type[nn.Module]] = {
    StdConv: TracedConv,
    SameConv: TracedSameConv,
    Stem: TracedStem,
    ResNet: TracedResNet,
}


@torch.no_grad()
def traceable(model: Model) -> Model:
    """A copy in eval mode on the CPU that computes the same."""
    model = copy.deepcopy(model).cpu().eval()
    for module in model.modules():
        if isinstance(module, StdConv):
            module.weight.copy_(module.standardized())
        if type(module) in TRACED:
            module.__class__ = TRACED[type(module)]  # the same weights under the same names, another forward
    return model


class Half(nn.Module):
    """Computes in half precision; input and output are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.half()).float()


# ---- images of any size


@dataclass
class Grid:
    """The patches down and across of the images being computed; shared by the modules that need it."""

    h: int = 0
    w: int = 0


def export_module(model: Model, dynamic_size: bool, half: bool = False) -> nn.Module:
    """What is traced: a copy that computes what the model does, for images of one or of any size."""
    module = any_size(traceable(model)) if dynamic_size else traceable(model)
    return Half(module) if half else module


def any_size(model: Model) -> nn.Module:
    """A traceable model for images of any size, as `resize` would make it for each; the model itself is changed."""
    return AnyViT(model) if isinstance(model, ViT) else model  # a ResNet has no positions


class AnyViT(nn.Module):
    """A ViT whose position tables are resampled to the grid of its images in every forward."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model, self.grid = model, Grid()
        if isinstance(model.positions, Table):
            model.positions = AnyTable(model.positions, self.grid)  # type: ignore[assignment]
        elif isinstance(model.positions, Axes):
            model.positions = AnyAxes(model.positions, self.grid)  # type: ignore[assignment]
        for number, block in enumerate(model.blocks):
            if isinstance(block, AxialBlock):
                model.blocks[number] = AnyAxial(block, self.grid)
        for module in model.modules():
            if isinstance(module, Attention) and module.relative is not None:
                module.relative = AnyRelative(module.relative, self.grid)  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        m = self.model
        x = m.embed(images if m.stem is None else m.stem(images))  # (B, D, h, w)
        self.grid.h, self.grid.w = x.shape[2:]
        features = m.pool_tokens(m.encode(x.flatten(2).transpose(1, 2)))
        return features if m.head is None else m.head(features)


class Resampled(nn.Module):
    """Positions of the kind of `old`, resampled to the grid in every forward."""

    def __init__(self, old: Any, grid: Grid) -> None:
        super().__init__()
        self.old, self.grid = old, grid


class AnyTable(Resampled):
    def forward(self, layer: int) -> Tensor:
        table, token = self.old(layer), self.old.token
        rows = resample_grid(table[token:].unflatten(0, self.old.grid), self.grid.h, self.grid.w)
        return torch.cat([table[:token], rows.flatten(0, 1)])  # (N, D)


class AnyAxes(Resampled):
    def forward(self, layer: int) -> Tensor:
        layer = layer if self.old.rows.shape[0] > 1 else 0
        h, w = self.grid.h, self.grid.w
        rows = resample_rows(self.old.rows[layer], h)  # (h, D/2)
        columns = resample_rows(self.old.columns[layer], w)  # (w, D/2)
        both = torch.cat([columns.expand(h, -1, -1), rows[:, None].expand(-1, w, -1)], -1)
        return torch.cat([self.old.token[layer], both.flatten(0, 1)])  # (N, D)


class AnyRelative(Resampled):
    def forward(self, q: Tensor) -> Tensor:
        h, w = self.grid.h, self.grid.w
        offsets = resample_grid(self.old.offsets, 2 * h - 1, 2 * w - 1)
        rows = torch.cat([offsets.flatten(0, 1), self.old.token])  # (R, D)
        keys = rows.unflatten(1, (self.old.heads, -1)).permute(1, 2, 0)  # (H, K, R)
        index = symbolic_offset_index(h, w, len(self.old.token) > 0)
        logits = q @ keys.to(q.dtype)  # (B, H, N, R)
        return logits.gather(-1, index.expand(*logits.shape[:2], -1, -1))  # (B, H, N, N)


class AnyAxial(nn.Module):
    def __init__(self, old: AxialBlock, grid: Grid) -> None:
        super().__init__()
        self.rows, self.columns, self.grid = old.rows, old.columns, grid  # the weights keep their names

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.grid.h, self.grid.w))
        x = self.rows(x)
        x = self.columns(x.transpose(1, 2)).transpose(1, 2)
        return x.flatten(1, 2)


def symbolic_offset_index(h: int, w: int, token: bool) -> Tensor:
    """`vitlab.models.positions.offset_index` in operations that can be traced for any h and w."""
    y = torch.arange(h)[:, None].expand(h, w).flatten()
    x = torch.arange(w)[None].expand(h, w).flatten()
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + (x[:, None] - x + w - 1)  # (hw, hw)
    if not token:
        return index
    first = (2 * h - 1) * (2 * w - 1)
    left, above = torch.zeros_like(index[:, :1]), torch.zeros_like(index[:1])
    corner = torch.zeros_like(index[:1, :1])
    return torch.cat([torch.cat([corner + first, above + first + 1], 1), torch.cat([left + first + 2, index], 1)])


def resample_grid(grid: Tensor, h: int, w: int) -> Tensor:
    """(h0, w0, D) to (h, w, D), bilinear with corners aligned: `resize`, as two matrix products."""
    return resample_rows(resample_rows(grid.flatten(1), h).unflatten(1, grid.shape[1:]), w)


def resample_rows(rows: Tensor, new: int) -> Tensor:
    """(..., old, D) to (..., new, D) by linear interpolation between the nearest two rows.

    Row i of the result is at i (old - 1) / (new - 1); an old row at a distance of one or more has weight zero.
    """
    old = rows.shape[-2]
    number = torch.arange(new, dtype=torch.float32, device=rows.device)
    at = number * (old - 1) / number[-1:].clamp(min=1)
    weight = (1 - (at[:, None] - torch.arange(old, device=rows.device)).abs()).clamp(min=0)
    return weight.to(rows.dtype) @ rows
