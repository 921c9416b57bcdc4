"""The later part of a model as a linear function of its tokens: what depends on them nonlinearly is held constant.

A ViT multiplies its tokens by matrices, and by numbers that depend on them: attention weights, the scales of norms, the
slopes f(x) / x of GELU and tanh, the gates of SwiGLU. With these numbers held at the values they have, the logits are a
sum over tokens plus a constant of the biases, so token times gradient is the part of a token exactly, not to first
order.

Shapes: B batch, N tokens, D width, H heads, K head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.axial import AxialBlock
from vitlab.models.rotary import Rotary
from vitlab.models.vit import MLP, Attention, AttentionPool, Block, SwiGLU, ViT

TINY = 1e-6  # a slope at 0 is the one here


def encode_until(model: ViT, x: Tensor, start: int) -> Tensor:
    """The tokens that enter block `start`, (B, N, D), from patch embeddings: steps 3 and 4 of the model, up to it."""
    x = model.norm_before(model.place(x))
    for layer in range(start):
        x = add_positions(model, x, layer)
        x = model.blocks[layer](x) if model.rotary is None else model.blocks[layer](x, model.rotary)
    return add_positions(model, x, start)


def held_logits(model: ViT, x: Tensor, start: int) -> Tensor:
    """The logits (B, classes) of the tokens that enter block `start`: equal to the model's, with other gradients."""
    for layer in range(start, len(model.blocks)):
        x = x if layer == start else add_positions(model, x, layer)
        x = held_block(model.blocks[layer], x, model.rotary)
    x = held_norm(model.norm, x) if model.config.final_norm == "tokens" else x
    patches = x[:, model.config.prefix :]
    if model.pool is not None:
        x = held_pool(model.pool, x)
    elif model.config.pool == "token_mean":
        x = torch.cat([x[:, 0], patches.mean(1)], -1)
    else:
        x = x[:, 0] if model.config.pool == "token" else patches.mean(1)
    x = held_norm(model.norm, x) if model.config.final_norm == "pooled" else x
    if model.prelogits is not None:
        x = held(torch.tanh, model.prelogits(x))
    assert model.head is not None
    return model.head(x)


def add_positions(model: ViT, x: Tensor, layer: int) -> Tensor:
    """Those that are added before a layer again; the first ones are added where the tokens get their places."""
    if model.positions is None or layer == 0 or model.config.placement == "stem":
        return x
    return x + model.positions(layer)


# ---- the parts


def held(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) as x times a constant slope."""
    away = torch.where(x.abs() < TINY, TINY, x)
    return x * (function(away) / away).detach()


def held_norm(norm: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(norm, nn.LayerNorm):  # a place without a norm
        return x
    scale = (x.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt().detach()
    return (x - x.mean(-1, keepdim=True)) * scale * norm.weight + norm.bias


def held_block(block: nn.Module, x: Tensor, rotary: Rotary | None = None) -> Tensor:
    if isinstance(block, AxialBlock):
        x = held_block(block.rows, x.unflatten(1, block.grid))
        return held_block(block.columns, x.transpose(1, 2)).transpose(1, 2).flatten(1, 2)
    assert isinstance(block, Block)
    x = x + block.scale1(held_attention(block.attention, held_norm(block.norm1, x), rotary))
    return x + block.scale2(held_mlp(block.mlp, held_norm(block.norm2, x)))


def held_attention(layer: Attention, x: Tensor, rotary: Rotary | None) -> Tensor:
    q, k, v, bias = layer.project(x, rotary)
    y = F.scaled_dot_product_attention(q.detach(), k.detach(), v, attn_mask=None if bias is None else bias.detach())
    return layer.out(held_norm(layer.norm, y.transpose(1, 2).reshape(x.shape)))


def held_mlp(mlp: MLP, x: Tensor) -> Tensor:
    hidden = mlp.up(x)
    if isinstance(mlp.gelu, SwiGLU):  # the gate is one more number that depends on the tokens
        gate, value = hidden.chunk(2, -1)
        hidden = F.silu(gate).detach() * value
    else:
        hidden = held(mlp.gelu, hidden)
    return mlp.down(held_norm(mlp.norm, hidden))


def held_pool(pool: AttentionPool, x: Tensor) -> Tensor:
    probe = pool.probe.expand(x.shape[0], -1, -1)
    q, k, v = (pool.split(y) for y in (pool.q(probe), pool.k(x), pool.v(x)))
    y = F.scaled_dot_product_attention(q.detach(), k.detach(), v)  # (B, H, 1, K)
    z = pool.out(y.transpose(1, 2).reshape(probe.shape))
    return (z + held_mlp(pool.mlp, held_norm(pool.norm, z)))[:, 0]
