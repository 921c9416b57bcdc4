"""DINOv2, DINOv3, MAE and CLIP from their descriptions: random tensors under their authors' names, and forward passes.

Everything is plain numpy in float64. Weights are (out, in), as in the authors' files; images (B, 3, height, width).
"""

from collections.abc import Mapping
from math import erf, pi, sqrt
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import zoom
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]
Weights = Mapping[str, Array]
PATCH, GRID, WIDTH, HEADS, HIDDEN, LAYERS, CLASSES = 8, 4, 32, 2, 48, 2, 7


class Draw:
    """Random arrays, every one of them away from zero and from one."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.w: dict[str, Array] = {}

    def matrix(self, name: str, *shape: int) -> None:
        self.w[name] = self.rng.normal(size=shape) / sqrt(np.prod(shape[1:]))

    def vector(self, name: str, *shape: int, center: float = 0.0) -> None:
        self.w[name] = center + 0.3 * self.rng.normal(size=shape)

    def dense(self, name: str, cin: int, cout: int) -> None:
        self.matrix(f"{name}.weight", cout, cin)
        self.vector(f"{name}.bias", cout)

    def norm(self, name: str, width: int = WIDTH) -> None:
        self.vector(f"{name}.weight", width, center=1.0)
        self.vector(f"{name}.bias", width)

    def block(self, name: str, width: int, scaled: bool = False, swiglu: str = "") -> None:
        """A block under the names that DINOv2, DINOv3 and MAE share; `swiglu` is "packed" (w12) or "apart" (w1, w2)."""
        self.norm(f"{name}.norm1", width)
        self.dense(f"{name}.attn.qkv", width, 3 * width)
        self.dense(f"{name}.attn.proj", width, width)
        self.norm(f"{name}.norm2", width)
        if swiglu == "packed":
            self.dense(f"{name}.mlp.w12", width, 2 * HIDDEN)
        elif swiglu:
            self.dense(f"{name}.mlp.w1", width, HIDDEN)
            self.dense(f"{name}.mlp.w2", width, HIDDEN)
        else:
            self.dense(f"{name}.mlp.fc1", width, HIDDEN)
        self.dense(f"{name}.mlp.{'w3' if swiglu else 'fc2'}", HIDDEN, width)
        for part in ("ls1", "ls2") if scaled else ():
            self.vector(f"{name}.{part}.gamma", width, center=0.5)


# ---- arrays under the authors' names


def dinov2(registers: int = 0, swiglu: bool = False) -> dict[str, Array]:
    d = Draw()
    d.vector("cls_token", 1, 1, WIDTH)
    d.vector("pos_embed", 1, 1 + GRID * GRID, WIDTH)
    if registers:
        d.vector("register_tokens", 1, registers, WIDTH)
    d.vector("mask_token", 1, WIDTH)
    d.matrix("patch_embed.proj.weight", WIDTH, 3, PATCH, PATCH)
    d.vector("patch_embed.proj.bias", WIDTH)
    for i in range(LAYERS):
        d.block(f"blocks.{i}", WIDTH, scaled=True, swiglu="packed" if swiglu else "")
    d.norm("norm")
    return d.w


def dinov3(registers: int = 4, swiglu: bool = False, bias: bool = True, untied: bool = False) -> dict[str, Array]:
    d = Draw()
    d.vector("cls_token", 1, 1, WIDTH)
    if registers:
        d.vector("storage_tokens", 1, registers, WIDTH)
    d.vector("mask_token", 1, WIDTH)
    d.matrix("patch_embed.proj.weight", WIDTH, 3, PATCH, PATCH)
    d.vector("patch_embed.proj.bias", WIDTH)
    quarter = WIDTH // HEADS // 4
    d.w["rope_embed.periods"] = np.array([100.0 ** (i / quarter) for i in range(quarter)])
    for i in range(LAYERS):
        d.block(f"blocks.{i}", WIDTH, scaled=True, swiglu="apart" if swiglu else "")
        if bias:
            d.w[f"blocks.{i}.attn.qkv.bias_mask"] = np.repeat([1.0, 0.0, 1.0], WIDTH)
        else:
            del d.w[f"blocks.{i}.attn.qkv.bias"]
    d.norm("norm")
    if untied:
        d.norm("local_cls_norm")
    return d.w


def mae(decoder: bool = False, tuned: bool = False) -> dict[str, Array]:
    d = Draw()
    d.vector("cls_token", 1, 1, WIDTH)
    d.w["pos_embed"] = sines(GRID, WIDTH)[None]
    if tuned:
        d.vector("pos_embed", 1, 1 + GRID * GRID, WIDTH)  # no longer fixed
    d.matrix("patch_embed.proj.weight", WIDTH, 3, PATCH, PATCH)
    d.vector("patch_embed.proj.bias", WIDTH)
    for i in range(LAYERS):
        d.block(f"blocks.{i}", WIDTH)
    d.norm("fc_norm" if tuned else "norm")
    if tuned:
        d.dense("head", WIDTH, CLASSES)
    if decoder:
        narrow = 16
        d.vector("mask_token", 1, 1, narrow)
        d.w["decoder_pos_embed"] = sines(GRID, narrow)[None]
        d.dense("decoder_embed", WIDTH, narrow)
        d.block("decoder_blocks.0", narrow)
        d.norm("decoder_norm", narrow)
        d.dense("decoder_pred", narrow, 3 * PATCH * PATCH)
    return d.w


def sines(grid: int, width: int) -> Array:
    """Entry by entry: sine and cosine of the column, then of the row; the class token has zeros."""
    table = np.zeros((1 + grid * grid, width))
    quarter = width // 4
    for place in range(grid * grid):
        for c in range(width):
            coordinate = place % grid if c < width // 2 else place // grid
            angle = coordinate / 10_000 ** ((c % quarter) / quarter)
            table[1 + place, c] = np.cos(angle) if c // quarter % 2 else np.sin(angle)
    return table


def clip(projection: bool = True, text: bool = True) -> dict[str, Array]:
    d = Draw()
    if text:
        d.vector("positional_embedding", 9, 24)
        d.matrix("text_projection", 24, CLASSES)
        d.w["logit_scale"] = np.array(4.6)
    d.vector("visual.class_embedding", WIDTH)
    d.vector("visual.positional_embedding", 1 + GRID * GRID, WIDTH)
    if projection:
        d.matrix("visual.proj", WIDTH, CLASSES)
    d.matrix("visual.conv1.weight", WIDTH, 3, PATCH, PATCH)
    d.norm("visual.ln_pre")
    for i in range(LAYERS):
        clip_block(d, f"visual.transformer.resblocks.{i}", WIDTH)
    d.norm("visual.ln_post")
    if text:
        clip_block(d, "transformer.resblocks.0", 24)
        d.matrix("token_embedding.weight", 11, 24)
        d.norm("ln_final", 24)
        for name, value in {"input_resolution": PATCH * GRID, "context_length": 9, "vocab_size": 11}.items():
            d.w[name] = np.array(value)
    return d.w


def clip_block(d: Draw, name: str, width: int) -> None:
    d.matrix(f"{name}.attn.in_proj_weight", 3 * width, width)
    d.vector(f"{name}.attn.in_proj_bias", 3 * width)
    d.dense(f"{name}.attn.out_proj", width, width)
    d.norm(f"{name}.ln_1", width)
    d.dense(f"{name}.mlp.c_fc", width, HIDDEN)
    d.dense(f"{name}.mlp.c_proj", HIDDEN, width)
    d.norm(f"{name}.ln_2", width)


def as_tensors(w: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    """As `torch.save` would have them: numbers that count are integers."""
    return {name: torch.tensor(x) if x.dtype.kind == "i" else torch.tensor(x, dtype=dtype) for name, x in w.items()}


# ---- forward: the class token's feature, or logits where there is a head


def dino_forward(w: Weights, images: Array, eps: float) -> Array:
    """DINOv2 and DINOv3: registers after the class token have no position; layer scales; the class token."""
    x, grid = embed(w["patch_embed.proj.weight"], images)
    x = x + w["patch_embed.proj.bias"]
    lead = [repeat(w["cls_token"], len(x))]
    if "pos_embed" in w:
        table = stretched(w["pos_embed"][0], grid)
        x, lead[0] = x + table[1:], lead[0] + table[:1]
    lead += [repeat(w[name], len(x)) for name in ("register_tokens", "storage_tokens") if name in w]
    prefix = sum(part.shape[1] for part in lead)
    x = np.concatenate([*lead, x], 1)
    angle = rope(w["rope_embed.periods"], grid) if "rope_embed.periods" in w else None
    for i in range(LAYERS):
        x = shared_block(w, f"blocks.{i}", x, eps, prefix, angle)
    return layer_norm(w, "norm", x, eps)[:, 0]


def mae_forward(w: Weights, images: Array) -> Array:
    """The encoder on all patches: its class token; fine-tuned, the norm of the patches' mean, and the head."""
    x, grid = embed(w["patch_embed.proj.weight"], images)
    x = np.concatenate([repeat(w["cls_token"], len(x)), x + w["patch_embed.proj.bias"]], 1)
    x = x + stretched(w["pos_embed"][0], grid)
    for i in range(LAYERS):
        x = shared_block(w, f"blocks.{i}", x, 1e-6)
    if "head.weight" not in w:
        return layer_norm(w, "norm", x, 1e-6)[:, 0]
    return dense(w, "head", layer_norm(w, "fc_norm", x[:, 1:].mean(1), 1e-6))


def clip_forward(w: Weights, images: Array) -> Array:
    """The image's embedding, or the class token's feature where there is no projection."""
    x, grid = embed(w["visual.conv1.weight"], images)
    x = np.concatenate([repeat(w["visual.class_embedding"][None, None], len(x)), x], 1)
    x = x + stretched(w["visual.positional_embedding"], grid)
    x = layer_norm(w, "visual.ln_pre", x, 1e-5)
    for i in range(LAYERS):
        name = f"visual.transformer.resblocks.{i}"
        y = layer_norm(w, f"{name}.ln_1", x, 1e-5)
        y = attend(y @ w[f"{name}.attn.in_proj_weight"].T + w[f"{name}.attn.in_proj_bias"])
        x = x + dense(w, f"{name}.attn.out_proj", y)
        y = dense(w, f"{name}.mlp.c_fc", layer_norm(w, f"{name}.ln_2", x, 1e-5))
        x = x + dense(w, f"{name}.mlp.c_proj", y / (1 + np.exp(-1.702 * y)))
    feature = layer_norm(w, "visual.ln_post", x[:, 0], 1e-5)
    return feature @ w["visual.proj"] if "visual.proj" in w else feature


def shared_block(w: Weights, name: str, x: Array, eps: float, prefix: int = 0, angle: Array | None = None) -> Array:
    qkv = layer_norm(w, f"{name}.norm1", x, eps) @ w[f"{name}.attn.qkv.weight"].T
    if f"{name}.attn.qkv.bias" in w:
        mask = w.get(f"{name}.attn.qkv.bias_mask", np.ones(qkv.shape[-1]))
        qkv = qkv + np.where(mask > 0, w[f"{name}.attn.qkv.bias"], 0)
    scale1, scale2 = (w.get(f"{name}.{part}.gamma", np.ones(1)) for part in ("ls1", "ls2"))
    x = x + scale1 * dense(w, f"{name}.attn.proj", attend(qkv, prefix, angle))
    y = layer_norm(w, f"{name}.norm2", x, eps)
    if f"{name}.mlp.w12.weight" in w:
        y = dense(w, f"{name}.mlp.w12", y)
        y = dense(w, f"{name}.mlp.w3", silu(y[..., :HIDDEN]) * y[..., HIDDEN:])
    elif f"{name}.mlp.w1.weight" in w:
        y = dense(w, f"{name}.mlp.w3", silu(dense(w, f"{name}.mlp.w1", y)) * dense(w, f"{name}.mlp.w2", y))
    else:
        y = dense(w, f"{name}.mlp.fc2", gelu(dense(w, f"{name}.mlp.fc1", y)))
    return x + scale2 * y


def attend(qkv: Array, prefix: int = 0, angle: Array | None = None) -> Array:
    """Head by head; with rotary angles, queries and keys of the patches turn."""
    width = qkv.shape[-1] // 3
    size = width // HEADS
    out = np.zeros((*qkv.shape[:2], width))
    for head in range(HEADS):
        q, k, v = (qkv[..., part * width + head * size :][..., :size] for part in range(3))
        if angle is not None:
            q, k = (np.concatenate([x[:, :prefix], turned(x[:, prefix:], angle)], 1) for x in (q, k))
        logits = q @ k.transpose(0, 2, 1) / sqrt(size)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[..., head * size : (head + 1) * size] = weights / weights.sum(-1, keepdims=True) @ v
    return out


def rope(periods: Array, grid: tuple[int, int]) -> Array:
    """(N, K/2): for each patch the angles of its row, then of its column; centers of patches from -1 to 1."""
    rows = []
    for y in range(grid[0]):
        for x in range(grid[1]):
            row, column = 2 * (y + 0.5) / grid[0] - 1, 2 * (x + 0.5) / grid[1] - 1
            rows.append(np.concatenate([2 * pi * row / periods, 2 * pi * column / periods]))
    return np.array(rows)


def turned(x: Array, angle: Array) -> Array:
    """Channel c and channel c + K/2 are a point in the plane."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def embed(kernel: Array, images: Array) -> tuple[Array, tuple[int, int]]:
    """Tokens of the patches, (B, N, D), and their grid."""
    size = kernel.shape[-1]
    windows = sliding_window_view(images, (size, size), (2, 3))[:, :, ::size, ::size]  # (B, 3, h, w, size, size)
    x = np.einsum("bchwij,dcij->bhwd", windows, kernel)
    return x.reshape(len(x), -1, x.shape[-1]), (x.shape[1], x.shape[2])


def stretched(table: Array, grid: tuple[int, int]) -> Array:
    """A table for another grid, as scipy's zoom has it; the class token's row stays."""
    if grid == (GRID, GRID):
        return table
    new = zoom(table[1:].reshape(GRID, GRID, -1), (grid[0] / GRID, grid[1] / GRID, 1), order=1)
    return np.concatenate([table[:1], new.reshape(grid[0] * grid[1], -1)])


def repeat(x: Array, batch: int) -> Array:
    return np.repeat(x, batch, 0)


def dense(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w: Weights, name: str, x: Array, eps: float) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(erf)(x / sqrt(2)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))
