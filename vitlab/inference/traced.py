"""A model as a module that can be traced for any batch and image size: kernels standardized once, padding that does not
depend on the image size and, on request, positions that are resampled inside the graph.

Shapes: B batch, N tokens, D width, H heads, K head width, h and w patches down and across, h0 and w0 those the tables
were learned for.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.kernels.class_token import run_block, token_block
from vitlab.models.axial import AxialBlock
from vitlab.models.positions import Axes, Relative, Table
from vitlab.models.resnet import AxialAttention, ResNet, SameConv, StdConv, Stem
from vitlab.models.rotary import Rotary, Turn, channel_tables, coordinates, turn_rates
from vitlab.models.variants import Model
from vitlab.models.vit import Attention, Block, ViT


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


class TokenAttention(Attention):
    """Attention of the first token to all: (B, N, D) to (B, 1, D)."""

    def forward(self, x: Tensor, rotary: Turn | None = None) -> Tensor:
        q, k, v, bias = self.project(x, rotary)
        y = F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=None if bias is None else bias[:, :, :1])
        return self.mix(y, x[:, :1])


class TokenBlock(Block):
    """A last block of which only the class token is pooled: nothing sees what it would make of the others."""

    def forward(self, x: Tensor, rotary: Turn | None = None) -> Tensor:
        return run_block(self, x, rotary)


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
        module.__class__ = TRACED.get(type(module), type(module))  # the same weights, another forward
    if isinstance(model, ViT) and (last := token_block(model)) is not None:
        last.__class__, last.attention.__class__ = TokenBlock, TokenAttention
    return model


class Half(nn.Module):
    """Computes in half precision; input and output are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.half()).float()


# ---- images of any size


class AnySize:
    """A module that needs the patches or cells down and across, h and w, of the images being computed."""

    new_grid: list[int]  # shared by all modules of a model


class AnyViT(ViT, AnySize):
    """A ViT whose position tables are resampled to the grid of its images in every forward."""

    def tokens(self, images: Tensor) -> Tensor:
        x = self.embed(images if self.stem is None else self.stem(images))  # (B, D, h, w)
        self.new_grid[:] = x.shape[2:]
        return self.encode(x.flatten(2).transpose(1, 2))


class AnyTable(Table, AnySize):
    def forward(self, layer: int) -> Tensor:
        table = super().forward(layer)
        rows = resample_grid(table[self.lead :].unflatten(0, self.grid), *self.new_grid)
        return torch.cat([table[: self.lead], rows.flatten(0, 1)])  # (N, D)


class AnyAxes(Axes, AnySize):
    def forward(self, layer: int) -> Tensor:
        layer = layer if self.rows.shape[0] > 1 else 0
        h, w = self.new_grid
        rows, columns = resample_rows(self.rows[layer], h), resample_rows(self.columns[layer], w)  # (h, D/2), (w, D/2)
        both = torch.cat([columns.expand(h, -1, -1), rows[:, None].expand(-1, w, -1)], -1)
        return torch.cat([self.token[layer], both.flatten(0, 1)])  # (N, D)


class AnyRelative(Relative, AnySize):
    def forward(self, q: Tensor) -> Tensor:
        h, w = self.new_grid
        offsets = resample_grid(self.offsets, 2 * h - 1, 2 * w - 1)
        rows = torch.cat([offsets.flatten(0, 1), self.token])  # (R, D)
        keys = rows.unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # (H, K, R)
        index = symbolic_offset_index(h, w, len(self.token) > 0)
        logits = q @ keys.to(q.dtype)  # (B, H, N, R)
        return logits.gather(-1, index.expand(*logits.shape[:2], -1, -1))  # (B, H, N, N)


class AnyAxialAttention(AxialAttention, AnySize):
    def forward(self, x: Tensor) -> Tensor:
        self.new_grid[:] = 1, x.shape[3]  # of its relative positions: every map of a ResNet has other sides
        return super().forward(x)


class AnyRotary(Rotary, AnySize):
    """Rotary positions whose cosines and sines are computed in the graph."""

    def tables(self) -> tuple[Tensor, Tensor]:
        h, w = self.new_grid
        rate = turn_rates(self.config).to(torch.float32)
        rows, columns = (coordinates(self.config, torch.arange(side), side)[:, None] * rate for side in (h, w))
        both = [rows[:, None].expand(-1, w, -1), columns[None].expand(h, -1, -1)]  # (h, w, K/4) each
        return channel_tables(torch.cat(both, -1).flatten(0, 1), self.halves)


ANY_SIZE: dict[type[nn.Module], type[nn.Module]] = {
    ViT: AnyViT,
    Table: AnyTable,
    Axes: AnyAxes,
    Relative: AnyRelative,
    AxialAttention: AnyAxialAttention,
    Rotary: AnyRotary,
}


def any_size(model: Model) -> Model:
    """Change a traceable model, in place, to one for images of any size, as `resize` would make it for each."""
    grid = [0, 0]
    for module in model.modules():  # a plain ResNet has none of these
        module.__class__ = ANY_SIZE.get(type(module), type(module))
        if isinstance(module, AnySize):
            module.new_grid = grid
        elif isinstance(module, AxialBlock):
            module.grid = grid  # type: ignore[assignment]
    return model


def export_module(model: Model, dynamic_size: bool, half: bool = False) -> nn.Module:
    """What is traced: a copy that computes what the model does, for images of one or of any size."""
    module = any_size(traceable(model)) if dynamic_size else traceable(model)
    return Half(module) if half else module


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
