"""The attention weights of every layer and head, whatever kernel the model runs on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.models.resnet import ResNet
from vitlab.models.rotary import Rotary
from vitlab.models.variants import Model
from vitlab.models.vit import Attention, ViT, attention_weights

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]


def attention(model: Model, images: Tensor) -> list[Tensor]:
    """The attention weights of every layer and head.

    The model runs as it is, on fused kernels and without dropout; hooks keep the input of each layer, from which its
    weights are computed separately.

    Args:
        model: a vitlab ViT, compiled by torch or not; its mode and hooks are left as they were.
        images: normalized RGB images of the model's size, (B, 3, height, width).

    Returns:
        Per layer a tensor (B, heads, N, N) of float32 or wider: row i is the distribution of token i's attention over
        all N tokens, and sums to 1. Token 0 is the class token if the model has one, registers follow it, then the
        patches. An axial block gives two tensors, for rows and for columns, with zeros outside them.

    Raises:
        UserError: for a ResNet, which has no attention, another kind of model, or images of another size.

    >>> import torch, vitlab
    >>> model = vitlab.create("Ti/16", image_size=32, depth=2)
    >>> [tuple(layer.shape) for layer in vitlab.attention(model, torch.zeros(1, 3, 32, 32))]
    [(1, 3, 5, 5), (1, 3, 5, 5)]
    """
    return list(each_attention(model, images))


@torch.no_grad()
def each_attention(model: Model, images: Tensor) -> Iterator[Tensor]:
    """Yield the same a layer at a time: all layers of H/14 at 518 pixels would take 3.8 GB an image."""
    vit = check_vit(model)
    layers = [module for module in vit.blocks.modules() if isinstance(module, Attention)]
    inputs = record_inputs(vit, layers, images)
    grid = vit.config.grid if vit.config.attention == "axial" else None
    return (layer_weights(layer, inputs[i], grid, i % 2, vit.rotary) for i, layer in enumerate(layers))


def check_vit(model: nn.Module) -> ViT:
    """Return the ViT, without torch.compile's wrapper; any other model is a UserError."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, ResNet):
        raise UserError("this model is a ResNet; patches, tokens and attention are those of transformers alone")
    if not isinstance(inner, ViT):
        raise UserError(f"this takes a vitlab model, not {type(inner).__name__}")
    return inner


def record_inputs(model: ViT, layers: list[Attention], images: Tensor) -> list[Tensor]:
    """Run the model in eval mode and return each layer's input; hooks and modes are restored."""
    inputs: dict[nn.Module, Tensor] = {}
    # a compiled part would bypass the hooks; the stance is the process's, so others that compile would lose by it
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    with ExitStack() as undo, eager:
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        for layer in layers:
            hook = on_this_thread(lambda layer, args, _: inputs.update({layer: args[0]}))
            undo.enter_context(layer.register_forward_hook(hook))
        model.eval()(images)
    return [inputs[layer] for layer in layers]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch has compiled the model or a part of it, in place."""
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in model.modules())


def on_this_thread(hook: Hook) -> Hook:
    """The hook, for passes of the calling thread alone: others may run the same model meanwhile."""
    own = threading.get_ident()

    def called(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if threading.get_ident() == own:
            hook(layer, args, out)

    return called


@torch.no_grad()
def layer_weights(layer: Attention, x: Tensor, grid: Size | None, axis: int, rotary: Rotary | None = None) -> Tensor:
    """Compute a layer's weights from its input; with a grid, of attention along one of its axes."""
    q, k, _, bias = layer.project(x, rotary)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        weights = attention_weights(q.to(wide), k.to(wide), None if bias is None else bias.to(wide))
    return weights if grid is None else dense(weights, grid, axis)


def dense(weights: Tensor, grid: Size, axis: int) -> Tensor:
    """Expand attention within rows (axis 0) or columns (axis 1) of the grid to weights (B, H, hw, hw) over all."""
    h, w = grid
    weights = weights.unflatten(0, (-1, grid[axis])).transpose(1, 2)  # (B, H, lines, length, length)
    out = weights.new_zeros(*weights.shape[:2], h, w, h, w)  # (B, H, query row and column, key row and column)
    for line in range(grid[axis]):
        out.select(2 + axis, line).select(3 + axis, line).copy_(weights[:, :, line])
    return out.reshape(*out.shape[:2], h * w, h * w)
