"""A last block that computes the class token alone: where the head reads nothing else, nothing sees what it would make
of the other tokens, and gradients of zero come back through them. Keys and values are still those of all tokens.

This leaves out most of one block: 7 % of B/16's work and 3.5 % of L/16's, in training as in inference.

Shapes: B images, N tokens, D width, H heads, K head width.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.rotary import Turn
from vitlab.models.vit import Attention, Block, ViT


def use_class_token(module: nn.Module) -> None:
    """Let a transformer of which only features and logits are wanted, not its tokens, leave the rest out, in place.

    Not with relative positions, which all queries have a part in, or where the projection is more than a dense layer.
    """
    for last in [token_block(model) for model in module.modules() if isinstance(model, ViT)]:
        if last is not None and last.attention.relative is None and type(last.attention.qkv) is nn.Linear:
            last.forward = partial(run_block, last)  # type: ignore[method-assign]
            last.attention.forward = partial(attend, last.attention)  # type: ignore[method-assign]


def token_block(model: ViT) -> Block | None:
    """The last block, if only its class token is read."""
    last = model.blocks[-1]
    return last if model.config.pool == "token" and isinstance(last, Block) else None


def run_block(block: Block, x: Tensor, rotary: Turn | None = None) -> Tensor:
    """The class token after the block, (B, 1, D), from all tokens before it, (B, N, D)."""
    x = x[:, :1] + block.drop_path(block.scale1(block.attention(block.norm1(x), rotary)))
    return x + block.drop_path(block.scale2(block.mlp(block.norm2(x))))


def attend(layer: Attention, x: Tensor, rotary: Turn | None = None) -> Tensor:
    """What attention gives the class token, (B, 1, D), in float32: sums that repeat, which torch.compile fuses."""
    q, k, v = project(layer, x, rotary)
    exact = torch.promote_types(q.dtype, torch.float32)
    weights = ((q.to(exact) * k.to(exact)).sum(-1) * q.shape[-1] ** -0.5).softmax(-1)  # (B, H, N)
    y = (weights[..., None] * v.to(exact)).sum(2, keepdim=True)  # (B, H, 1, K)
    return layer.mix(y.to(v.dtype), x[:, :1])


def project(layer: Attention, x: Tensor, rotary: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
    """The class token's queries, (B, H, 1, K), and the keys and values of all, (B, H, N, K)."""
    if type(layer.qkv) is not nn.Linear:  # in 8 bits, without gradients
        q, k, v, _ = layer.project(x, rotary)
        return q[:, :, :1], k, v
    sides = x.shape[-1], 2 * x.shape[-1]
    weights = layer.qkv.weight.split(sides)
    bias = layer.qkv.bias if layer.qv_bias is None else layer.padded_bias()
    biases = (None, None) if bias is None else bias.split(sides)
    parts = (
        F.linear(rows, weight, own).unflatten(-1, (-1, layer.heads, x.shape[-1] // layer.heads))
        for rows, weight, own in zip((x[:, :1], x), weights, biases, strict=True)
    )
    (q,), (k, v) = (part.permute(2, 0, 3, 1, 4).unbind(0) for part in parts)
    k = layer.k_norm(k)
    return layer.q_norm(q), k if rotary is None else rotary(k), v  # the class token does not turn
