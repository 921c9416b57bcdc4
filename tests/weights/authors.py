"""The authors' models in plain numpy, written from their description: arrays under their names, and a forward pass.

Everything is channels-last and in float64. Kernels: (in, out) and (height, width, in, out). Styles of names: those of
the published files, of the authors' current code (linen), and big_vision's, which has its own order of adding
positions, attention pooling and fixed sinusoids.
"""

import re
from collections.abc import Mapping
from math import pi, sqrt
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, np.dtype[np.float64]]
Weights = Mapping[str, Array]


class Draw:
    """Random arrays, every one of them away from zero and from one."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.w: dict[str, Array] = {}

    def kernel(self, name: str, *shape: int, fan: int) -> None:
        self.w[name] = self.rng.normal(size=shape) / sqrt(fan)

    def vector(self, name: str, *shape: int, center: float = 0.0) -> None:
        self.w[name] = center + 0.3 * self.rng.normal(size=shape)

    def dense(self, name: str, cin: int, cout: int) -> None:
        self.kernel(f"{name}/kernel", cin, cout, fan=cin)
        self.vector(f"{name}/bias", cout)

    def norm(self, name: str, *shape: int, scale: str = "scale", bias: str = "bias") -> None:
        self.vector(f"{name}/{scale}", *shape, center=1.0)
        self.vector(f"{name}/{bias}", *shape)

    def conv(self, name: str, size: int, cin: int, cout: int) -> None:
        self.kernel(f"{name}/kernel", size, size, cin, cout, fan=size * size * cin)


# ---- arrays under the authors' names


NUMBERS = {"published": (1, 2, 3), "linen": (0, 1, 0), "big_vision": (0, 1, 0)}  # attention, second norm, MLP


def vit(
    patch: int,
    grid: int,
    width: int,
    mlp: int,
    heads: int,
    layers: int,
    classes: int,
    prelogits: int = 0,
    style: str = "published",
    pool: str = "token",
    fixed: bool = False,
) -> Draw:
    d = Draw(0)
    d.conv("embedding", patch, 3, width)
    encoder(d, grid, width, mlp, heads, layers, classes, prelogits, style, pool)
    if fixed:
        del d.w["pos_embedding"]
    if style == "big_vision":
        d.w = {f"params/{name}": x for name, x in d.w.items()}
    return d


def encoder(
    d: Draw,
    grid: int,
    width: int,
    mlp: int,
    heads: int,
    layers: int,
    classes: int,
    prelogits: int,
    style: str = "published",
    pool: str = "token",
) -> None:
    d.vector("embedding/bias", width)
    if pool == "token":
        d.vector("cls", 1, 1, width)
    if style == "big_vision":
        d.vector("pos_embedding", 1, grid * grid, width)
    else:
        d.vector("Transformer/posembed_input/pos_embedding", 1, grid * grid + (pool == "token"), width)
    attention, norm2, block_mlp = NUMBERS[style]
    for i in range(layers):
        block = f"Transformer/encoderblock_{i}"
        d.norm(f"{block}/LayerNorm_0", width)
        draw_attention(d, f"{block}/MultiHeadDotProductAttention_{attention}", width, heads)
        d.norm(f"{block}/LayerNorm_{norm2}", width)
        d.dense(f"{block}/MlpBlock_{block_mlp}/Dense_0", width, mlp)
        d.dense(f"{block}/MlpBlock_{block_mlp}/Dense_1", mlp, width)
    d.norm("Transformer/encoder_norm", width)
    if pool == "map":
        d.vector("MAPHead_0/probe", 1, 1, width)
        draw_attention(d, "MAPHead_0/MultiHeadDotProductAttention_0", width, heads)
        d.norm("MAPHead_0/LayerNorm_0", width)
        d.dense("MAPHead_0/MlpBlock_0/Dense_0", width, mlp)
        d.dense("MAPHead_0/MlpBlock_0/Dense_1", mlp, width)
    if prelogits:
        d.dense("pre_logits", width, prelogits)
    d.dense("head", prelogits or width, classes)


def draw_attention(d: Draw, name: str, width: int, heads: int) -> None:
    for part in ("query", "key", "value"):
        d.kernel(f"{name}/{part}/kernel", width, heads, width // heads, fan=width)
        d.vector(f"{name}/{part}/bias", heads, width // heads)
    d.kernel(f"{name}/out/kernel", heads, width // heads, width, fan=width)
    d.vector(f"{name}/out/bias", width)


def hybrid(
    stages: tuple[int, ...], patch: int, grid: int, flat: bool, style: str = "published", pool: str = "token"
) -> Draw:
    d = Draw(1)

    def norm(name: str, channels: int) -> None:
        d.norm(name, *(() if flat else (1, 1, 1)), channels)

    d.conv("conv_root", 7, 3, 32)
    norm("gn_root", 32)
    cin = 32
    for i, units in enumerate(stages):
        mid = 32 * 2**i
        for j in range(units):
            unit = f"block{i + 1}/unit{j + 1}"
            for k, (size, a, b) in enumerate(((1, cin, mid), (3, mid, mid), (1, mid, 4 * mid)), 1):
                d.conv(f"{unit}/conv{k}", size, a, b)
                norm(f"{unit}/gn{k}", b)
            if j == 0:
                d.conv(f"{unit}/conv_proj", 1, cin, 4 * mid)
                norm(f"{unit}/gn_proj", 4 * mid)
            cin = 4 * mid
    d.conv("embedding", patch, cin, 64)
    encoder(d, grid, 64, 100, 4, 2, 6, 0, style, pool)
    return d


def bit(stages: tuple[int, ...], width: int, classes: int, numbered: bool = False) -> Draw:
    d = Draw(2)
    d.conv("resnet/root_block/standardized_conv2d", 7, 3, width)
    cin = width
    for i, units in enumerate(stages):
        mid = width * 2**i
        for j in range(units):
            unit = f"resnet/block{i + 1}/unit{j + 1:02d}"
            for letter, size, a, b in (("a", 1, cin, mid), ("b", 3, mid, mid), ("c", 1, mid, 4 * mid)):
                d.norm(f"{unit}/{letter}/group_norm", a, scale="gamma", bias="beta")
                d.conv(f"{unit}/{letter}/standardized_conv2d", size, a, b)
            if j == 0:
                d.conv(f"{unit}/a/proj/standardized_conv2d", 1, cin, 4 * mid)
            cin = 4 * mid
    d.norm("resnet/group_norm", cin, scale="gamma", bias="beta")
    d.conv("resnet/head/conv2d", 1, cin, classes)
    d.vector("resnet/head/conv2d/bias", classes)
    if numbered:  # as Keras counts the layers of a program
        layers = {name.rpartition("/")[0]: 3 * i for i, name in enumerate(d.w, 1)}
        d.w = {
            f"{name.rpartition('/')[0]}_{layers[name.rpartition('/')[0]]}/{name.rpartition('/')[2]}": x
            for name, x in d.w.items()
        }
    return d


# ---- forward, images (B, h, w, 3)


def vit_forward(w: Weights, images: Array) -> Array:
    w = {name.removeprefix("params/"): x for name, x in w.items()}
    linen = any("MultiHeadDotProductAttention_0" in name for name in w if name.startswith("Transformer"))
    attention, norm2, block_mlp = NUMBERS["linen" if linen else "published"]
    x = images
    if "conv_root/kernel" in w:
        x = stem_forward(w, x)
    patch = w["embedding/kernel"].shape[0]
    x = convolve(x, w["embedding/kernel"], patch, (0, 0)) + w["embedding/bias"]
    _, height, width, _ = x.shape
    x = x.reshape(len(x), height * width, -1)
    outer = "Transformer/posembed_input/pos_embedding" in w
    if not outer:  # the positions of patches, before there is a token
        x = x + (w["pos_embedding"] if "pos_embedding" in w else sincos(height, width, x.shape[-1]))
    if "cls" in w:
        x = np.concatenate([np.repeat(w["cls"], len(x), 0), x], 1)
    if outer:
        x = x + w["Transformer/posembed_input/pos_embedding"]
    i = 0
    while (block := f"Transformer/encoderblock_{i}") + "/LayerNorm_0/scale" in w:
        y = layer_norm(w, f"{block}/LayerNorm_0", x)
        x = x + attend(w, f"{block}/MultiHeadDotProductAttention_{attention}", y, y)
        y = layer_norm(w, f"{block}/LayerNorm_{norm2}", x)
        x = x + mlp_forward(w, f"{block}/MlpBlock_{block_mlp}", y)
        i += 1
    y = layer_norm(w, "Transformer/encoder_norm", x)
    if "MAPHead_0/probe" in w:
        probe = np.repeat(w["MAPHead_0/probe"], len(y), 0)
        y = attend(w, "MAPHead_0/MultiHeadDotProductAttention_0", probe, y)
        y = y + mlp_forward(w, "MAPHead_0/MlpBlock_0", layer_norm(w, "MAPHead_0/LayerNorm_0", y))
    y = y[:, 0] if "cls" in w or "MAPHead_0/probe" in w else y.mean(1)
    if "pre_logits/kernel" in w:
        y = np.tanh(dense(w, "pre_logits", y))
    return dense(w, "head", y)


def sincos(height: int, width: int, channels: int) -> Array:
    """Entry by entry: the quarters are sin x, cos x, sin y and cos y, the frequency falls within each."""
    quarter = channels // 4
    table = np.zeros((height * width, channels))
    for place in range(height * width):
        for c in range(channels):
            coordinate = place % width if c < 2 * quarter else place // width
            angle = coordinate / 10_000 ** ((c % quarter) / (quarter - 1))
            table[place, c] = np.sin(angle) if c // quarter % 2 == 0 else np.cos(angle)
    return table


def mlp_forward(w: Weights, name: str, x: Array) -> Array:
    return dense(w, f"{name}/Dense_1", gelu(dense(w, f"{name}/Dense_0", x)))


def dense(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def layer_norm(w: Weights, name: str, x: Array) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * w[f"{name}/scale"] + w[f"{name}/bias"]


def attend(w: Weights, name: str, queries: Array, x: Array) -> Array:
    q, k, v = (
        np.einsum("bnd,dhk->bhnk", y, w[f"{name}/{p}/kernel"]) + w[f"{name}/{p}/bias"][None, :, None]
        for p, y in (("query", queries), ("key", x), ("value", x))
    )
    logits = q @ k.transpose(0, 1, 3, 2) / sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bhnk,hkd->bnd", weights @ v, w[f"{name}/out/kernel"]) + w[f"{name}/out/bias"]


def convolve(x: Array, kernel: Array, stride: int, pads: tuple[int, int]) -> Array:
    x = np.pad(x, ((0, 0), pads, pads, (0, 0)))
    size = kernel.shape[0]
    windows = sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]  # (B, h, w, C, size, size)
    return np.einsum("bhwcij,ijco->bhwo", windows, kernel)


def same(side: int, size: int, stride: int) -> tuple[int, int]:
    total = max(0, (-(-side // stride) - 1) * stride + size - side)
    return total // 2, total - total // 2


def max_pool(x: Array, pads: tuple[int, int]) -> Array:
    x = np.pad(x, ((0, 0), pads, pads, (0, 0)))
    return sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2].max((-1, -2))


def group_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    b, h, width, c = x.shape
    g = x.reshape(b, h, width, 32, c // 32)
    mean, variance = g.mean((1, 2, 4), keepdims=True), g.var((1, 2, 4), keepdims=True)
    return ((g - mean) / np.sqrt(variance + eps)).reshape(x.shape) * scale.ravel() + bias.ravel()


def stem_forward(w: Weights, x: Array) -> Array:
    def conv(name: str, x: Array, stride: int = 1) -> Array:
        kernel = w[f"{name}/kernel"]
        kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
        return convolve(x, kernel, stride, same(x.shape[1], kernel.shape[0], stride))

    def norm(name: str, x: Array) -> Array:
        return group_norm(x, w[f"{name}/scale"], w[f"{name}/bias"], 1e-6)

    x = np.maximum(norm("gn_root", conv("conv_root", x, 2)), 0)
    x = max_pool(x, same(x.shape[1], 3, 2))
    i = 1
    while f"block{i}/unit1/conv1/kernel" in w:
        j = 1
        while (unit := f"block{i}/unit{j}") + "/conv1/kernel" in w:
            stride = 2 if i > 1 and j == 1 else 1
            shortcut = norm(f"{unit}/gn_proj", conv(f"{unit}/conv_proj", x, stride)) if j == 1 else x
            y = np.maximum(norm(f"{unit}/gn1", conv(f"{unit}/conv1", x)), 0)
            y = np.maximum(norm(f"{unit}/gn2", conv(f"{unit}/conv2", y, stride)), 0)
            x = np.maximum(shortcut + norm(f"{unit}/gn3", conv(f"{unit}/conv3", y)), 0)
            j += 1
        i += 1
    return x


def bit_forward(w: Weights, x: Array) -> Array:
    w = {re.sub(r"_[0-9]+/(?=[a-z]+$)", "/", name): array for name, array in w.items()}

    def conv(name: str, x: Array, stride: int = 1) -> Array:
        kernel = w[f"{name}/standardized_conv2d/kernel"]
        kernel = (kernel - kernel.mean((0, 1, 2))) / np.sqrt(kernel.var((0, 1, 2)) + 1e-10)
        pad = kernel.shape[0] // 2  # the same on both sides, whatever the stride
        return convolve(x, kernel, stride, (pad, pad))

    def norm(name: str, x: Array) -> Array:
        return np.maximum(group_norm(x, w[f"{name}/group_norm/gamma"], w[f"{name}/group_norm/beta"], 1e-5), 0)

    x = max_pool(conv("resnet/root_block", x, 2), (1, 1))
    i = 1
    while f"resnet/block{i}/unit01/a/standardized_conv2d/kernel" in w:
        j = 1
        while (unit := f"resnet/block{i}/unit{j:02d}") + "/a/standardized_conv2d/kernel" in w:
            stride = 2 if i > 1 and j == 1 else 1
            y = norm(f"{unit}/a", x)
            shortcut = conv(f"{unit}/a/proj", y, stride) if j == 1 else x
            y = conv(f"{unit}/b", norm(f"{unit}/b", conv(f"{unit}/a", y)), stride)
            x = shortcut + conv(f"{unit}/c", norm(f"{unit}/c", y))
            j += 1
        i += 1
    x = norm("resnet", x).mean((1, 2))
    return x @ w["resnet/head/conv2d/kernel"][0, 0] + w["resnet/head/conv2d/bias"]
