"""The later part of a model as a linear function of its tokens: what depends on them nonlinearly is held constant.

A ViT multiplies its tokens by matrices, and by numbers that depend on them: attention weights, the scales of norms, and
the slopes f(x) / x of GELU and tanh. With these numbers held at the values they have, the logits are a sum over tokens
plus a constant of the biases, so token times gradient is the part of a token exactly, not to first order.

Shapes: B batch, N tokens, D width, H heads, K head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.axial import AxialBlock
from vitlab.models.vit import MLP, Attention, AttentionPool, Block, ViT

TINY = 1e-6  # a slope at 0 is the one here


def encode_until(model: ViT, x: Tensor, start: int) -> Tensor:
    """The tokens that enter block `start`, (B, N, D), from patch embeddings: steps 3 and 4 of the model, up to it."""
    if model.token is not None:
        x = torch.cat([model.token.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
    for layer in range(start):
        x = model.blocks[layer](add_positions(model, x, layer))
    return add_positions(model, x, start)


def held_logits(model: ViT, x: Tensor, start: int) -> Tensor:
    """The logits (B, classes) of the tokens that enter block `start`: equal to the model's, with other gradients."""
    for layer in range(start, len(model.blocks)):
        x = x if layer == start else add_positions(model, x, layer)
        x = held_block(model.blocks[layer], x)
    x = held_norm(model.norm, x)
    if model.pool is not None:
        x = held_pool(model.pool, x)
    else:
        x = x[:, 0] if model.token is not None else x.mean(1)
    if model.prelogits is not None:
        x = held(torch.tanh, model.prelogits(x))
    assert model.head is not None
    return model.head(x)


def add_positions(model: ViT, x: Tensor, layer: int) -> Tensor:
    if model.positions is None or (layer > 0 and model.config.placement == "stem"):
        return x
    return x + model.positions(layer)


# ---- the parts


def held(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) as x times a constant slope."""
    away = torch.where(x.abs() < TINY, TINY, x)
    return x * (function(away) / away).detach()


def held_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    scale = (x.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt().detach()
    return (x - x.mean(-1, keepdim=True)) * scale * norm.weight + norm.bias


def held_block(block: nn.Module, x: Tensor) -> Tensor:
    if isinstance(block, AxialBlock):
        x = held_block(block.rows, x.unflatten(1, block.grid))
        return held_block(block.columns, x.transpose(1, 2)).transpose(1, 2).flatten(1, 2)
    assert isinstance(block, Block)
    x = x + held_attention(block.attention, held_norm(block.norm1, x))
    return x + held_mlp(block.mlp, held_norm(block.norm2, x))


def held_attention(layer: Attention, x: Tensor) -> Tensor:
    q, k, v, bias = layer.project(x)
    y = F.scaled_dot_product_attention(q.detach(), k.detach(), v, attn_mask=None if bias is None else bias.detach())
    return layer.out(y.transpose(1, 2).reshape(x.shape))


def held_mlp(mlp: MLP, x: Tensor) -> Tensor:
    return mlp.down(held(mlp.gelu, mlp.up(x)))


def held_pool(pool: AttentionPool, x: Tensor) -> Tensor:
    probe = pool.probe.expand(x.shape[0], -1, -1)
    q, k, v = (pool.split(y) for y in (pool.q(probe), pool.k(x), pool.v(x)))
    y = F.scaled_dot_product_attention(q.detach(), k.detach(), v)  # (B, H, 1, K)
    z = pool.out(y.transpose(1, 2).reshape(probe.shape))
    return (z + held_mlp(pool.mlp, held_norm(pool.norm, z)))[:, 0]
