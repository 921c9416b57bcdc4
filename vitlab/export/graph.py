"""The model as a graph that any runtime can run: attention in plain steps, kernels standardized once and for all and,
where asked, positions that follow the size of the images inside the graph.

Shapes: B batch, N tokens, D width, H heads, K head width, h and w patches down and across, h0 and w0 those the tables
were learned for.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.axial import AxialBlock
from vitlab.models.positions import Axes, Relative, Table
from vitlab.models.resnet import ResNet, SameConv, StdConv, Stem
from vitlab.models.variants import Model
from vitlab.models.vit import Attention, AttentionPool, ViT, attention_weights


class PlainAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v, bias = self.project(x)
        y = attention_weights(q, k, bias) @ v  # (B, H, N, K)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class PlainPool(AttentionPool):
    def forward(self, x: Tensor) -> Tensor:
        probe = self.probe.expand(x.shape[0], -1, -1)
        q, k, v = (self.split(y) for y in (self.q(probe), self.k(x), self.v(x)))
        y = attention_weights(q, k, None) @ v  # (B, H, 1, K)
        z = self.out(y.transpose(1, 2).reshape(probe.shape))  # (B, 1, D)
        return (z + self.mlp(self.norm(z)))[:, 0]


class PlainConv(StdConv):
    """A convolution whose kernel has been standardized already."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, None, self.stride, self.padding)


class PlainSameConv(SameConv):
    """The same with "SAME" padding: a side of the hybrid's map is always a multiple of the stride."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(even_pad(x, self.kernel_size[0], self.stride[0]), self.weight, None, self.stride)


class PlainStem(Stem):
    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(images)))
        x = F.max_pool2d(even_pad(x, 3, 2), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x


class PlainResNet(ResNet):
    """Images of any size. The border before the pooling is joined on: ONNX Runtime takes a Pad there for -inf."""

    def tokens(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(border(border(self.root(images), 2), 3), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x)).flatten(2).transpose(1, 2)


def even_pad(x: Tensor, size: int, stride: int) -> Tensor:
    """`same_pad` for sides that are multiples of the stride, where it does not depend on them."""
    total = max(0, size - stride)
    before, after = total // 2, total - total // 2
    return F.pad(x, (before, after, before, after))


def border(x: Tensor, axis: int) -> Tensor:
    """A line of zeros on either side."""
    line = torch.zeros_like(x.narrow(axis, 0, 1))
    return torch.cat([line, x, line], axis)


PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    StdConv: PlainConv,
    SameConv: PlainSameConv,
    Stem: PlainStem,
    ResNet: PlainResNet,
}
SPELLED: dict[type[nn.Module], type[nn.Module]] = {Attention: PlainAttention, AttentionPool: PlainPool}


@torch.no_grad()
def plain(model: Model, *, fused: bool = False) -> Model:
    """A copy in eval mode on the CPU that computes the same in simple steps; `fused` leaves attention to one kernel."""
    model = copy.deepcopy(model).cpu().eval()
    other = PLAIN if fused else PLAIN | SPELLED
    for module in model.modules():
        if isinstance(module, StdConv):
            module.weight.copy_(module.standardized())
        if type(module) in other:
            module.__class__ = other[type(module)]  # the same weights under the same names, another forward
    return model


class Half(nn.Module):
    """Computes in half precision; takes and gives float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.half()).float()


# ---- images of any size


@dataclass
class Place:
    """The grid of the images that are passing through; kept outside the modules, which read it."""

    h: int = 0
    w: int = 0


def any_size(model: Model) -> nn.Module:
    """A plain model for images of any size, as `resize` would make it for each; takes the model apart."""
    return AnyViT(model) if isinstance(model, ViT) else model  # a ResNet has no positions


class AnyViT(nn.Module):
    """A ViT whose tables are stretched to the grid of its images on every pass."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model, self.place = model, Place()
        if isinstance(model.positions, Table):
            model.positions = AnyTable(model.positions, self.place)  # type: ignore[assignment]
        elif isinstance(model.positions, Axes):
            model.positions = AnyAxes(model.positions, self.place)  # type: ignore[assignment]
        for number, block in enumerate(model.blocks):
            if isinstance(block, AxialBlock):
                model.blocks[number] = AnyAxial(block, self.place)
        for module in model.modules():
            if isinstance(module, Attention) and module.relative is not None:
                module.relative = AnyRelative(module.relative, self.place)  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        m = self.model
        x = m.embed(images if m.stem is None else m.stem(images))  # (B, D, h, w)
        self.place.h, self.place.w = x.shape[2:]
        features = m.pool_tokens(m.encode(x.flatten(2).transpose(1, 2)))
        return features if m.head is None else m.head(features)


class AnyTable(nn.Module):
    def __init__(self, old: Table, place: Place) -> None:
        super().__init__()
        self.old, self.place = old, place

    def forward(self, layer: int) -> Tensor:
        table, token = self.old(layer), self.old.token
        rows = stretch(table[token:].unflatten(0, self.old.grid), self.place.h, self.place.w)
        return torch.cat([table[:token], rows.flatten(0, 1)])  # (N, D)


class AnyAxes(nn.Module):
    def __init__(self, old: Axes, place: Place) -> None:
        super().__init__()
        self.old, self.place = old, place

    def forward(self, layer: int) -> Tensor:
        layer = layer if self.old.rows.shape[0] > 1 else 0
        h, w = self.place.h, self.place.w
        rows = along(self.old.rows[layer], h)  # (h, D/2)
        columns = along(self.old.columns[layer], w)  # (w, D/2)
        both = torch.cat([columns.expand(h, -1, -1), rows[:, None].expand(-1, w, -1)], -1)
        return torch.cat([self.old.token[layer], both.flatten(0, 1)])  # (N, D)


class AnyRelative(nn.Module):
    def __init__(self, old: Relative, place: Place) -> None:
        super().__init__()
        self.old, self.place = old, place

    def forward(self, q: Tensor) -> Tensor:
        h, w = self.place.h, self.place.w
        offsets = stretch(self.old.offsets, 2 * h - 1, 2 * w - 1)
        rows = torch.cat([offsets.flatten(0, 1), self.old.token])  # (R, D)
        keys = rows.unflatten(1, (self.old.heads, -1)).permute(1, 2, 0)  # (H, K, R)
        index = offset_rows(h, w, len(self.old.token) > 0)
        logits = q @ keys.to(q.dtype)  # (B, H, N, R)
        return logits.gather(-1, index.expand(*logits.shape[:2], -1, -1))  # (B, H, N, N)


class AnyAxial(nn.Module):
    def __init__(self, old: AxialBlock, place: Place) -> None:
        super().__init__()
        self.rows, self.columns, self.place = old.rows, old.columns, place

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.place.h, self.place.w))
        x = self.rows(x)
        x = self.columns(x.transpose(1, 2)).transpose(1, 2)
        return x.flatten(1, 2)


def offset_rows(h: int, w: int, token: bool) -> Tensor:
    """What `vitlab.models.positions.offset_index` gives, in steps that a graph can take for any h and w."""
    y = torch.arange(h)[:, None].expand(h, w).flatten()
    x = torch.arange(w)[None].expand(h, w).flatten()
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + (x[:, None] - x + w - 1)  # (hw, hw)
    if not token:
        return index
    first = (2 * h - 1) * (2 * w - 1)
    left, above = torch.zeros_like(index[:, :1]), torch.zeros_like(index[:1])
    corner = torch.zeros_like(index[:1, :1])
    return torch.cat([torch.cat([corner + first, above + first + 1], 1), torch.cat([left + first + 2, index], 1)])


def stretch(grid: Tensor, h: int, w: int) -> Tensor:
    """(h0, w0, D) to (h, w, D), bilinear with corners aligned: `resize`, as two matrix products."""
    return along(along(grid.flatten(1), h).unflatten(1, grid.shape[1:]), w)


def along(rows: Tensor, new: int) -> Tensor:
    """(..., old, D) to (..., new, D) by linear interpolation between the nearest two rows.

    Row i of the result lies at i (old - 1) / (new - 1); a row j as far as one or more from there has no part in it.
    """
    old = rows.shape[-2]
    number = torch.arange(new, dtype=torch.float32, device=rows.device)
    at = number * (old - 1) / number[-1:].clamp(min=1)
    weight = (1 - (at[:, None] - torch.arange(old, device=rows.device)).abs()).clamp(min=0)
    return weight.to(rows.dtype) @ rows
