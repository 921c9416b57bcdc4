"""The models against the paper's equations, written out in plain numpy loops: one image, head and window at a time."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import erf

import vitlab
from vitlab.models.config import ModelConfig, ResNetConfig, StemConfig, ViTConfig

Array = np.ndarray
Weights = dict[str, Array]

# ---- the encoder


def below(weights: Weights, prefix: str) -> Weights:
    return {name[len(prefix) + 1 :]: w for name, w in weights.items() if name.startswith(prefix + ".")}


def dense(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(x: Array, w: Weights, name: str, eps: float) -> Array:
    out = np.empty_like(x)
    for i, row in enumerate(x):
        mean = row.sum() / len(row)
        variance = ((row - mean) ** 2).sum() / len(row)
        out[i] = (row - mean) / np.sqrt(variance + eps)
    return out * w[f"{name}.weight"] + w[f"{name}.bias"]


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def gelu(x: Array, kind: str) -> Array:
    if kind == "exact":
        return x * 0.5 * (1 + erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x: Array, w: Weights, c: ViTConfig) -> Array:
    return dense(gelu(dense(x, w, "up"), c.gelu), w, "down")


def offset_row(w: Weights, c: ViTConfig, i: int, j: int) -> Array:
    """The embedding of the offset of key j from query i."""
    own, patch, back = range(3)
    if c.token:
        if i == 0 or j == 0:
            return w["relative.token"][own if i == j else patch if i == 0 else back]
        i, j = i - 1, j - 1
    (h, across), (yi, xi), (yj, xj) = c.grid, divmod(i, c.grid[1]), divmod(j, c.grid[1])
    return w["relative.offsets"][yi - yj + h - 1, xi - xj + across - 1]


def self_attention(x: Array, w: Weights, c: ViTConfig) -> Array:
    n, k = len(x), c.width // c.heads
    qkv = dense(x, w, "qkv")
    queries, keys, values = qkv[:, : c.width], qkv[:, c.width : 2 * c.width], qkv[:, 2 * c.width :]
    joined = np.zeros_like(x)
    for head in range(c.heads):
        part = slice(head * k, (head + 1) * k)
        for i in range(n):
            logits = np.empty(n)
            for j in range(n):
                key = keys[j, part]
                if c.positions == "relative":
                    key = key + offset_row(w, c, i, j)[part]
                logits[j] = queries[i, part] @ key / math.sqrt(k)
            share = softmax(logits)
            for j in range(n):
                joined[i, part] += share[j] * values[j, part]
    return dense(joined, w, "out")


def block(z: Array, w: Weights, c: ViTConfig) -> Array:
    z = self_attention(layer_norm(z, w, "norm1", c.norm_eps), below(w, "attention"), c) + z
    return mlp(layer_norm(z, w, "norm2", c.norm_eps), below(w, "mlp"), c) + z


def axial_block(z: Array, w: Weights, c: ViTConfig) -> Array:
    h, across = c.grid
    z = z.copy()
    for y in range(h):
        row = [y * across + x for x in range(across)]
        z[row] = block(z[row], below(w, "rows"), c)
    for x in range(across):
        column = [y * across + x for y in range(h)]
        z[column] = block(z[column], below(w, "columns"), c)
    return z


def position(w: Weights, c: ViTConfig, layer: int) -> Array:
    """(N, D): what is added before a layer."""
    if c.positions in ("1d", "sinusoidal", "sincos2d"):
        return w["positions.table"][layer if c.placement == "every" else 0]
    layer = layer if c.placement == "every" else 0
    columns, rows = w["positions.columns"][layer], w["positions.rows"][layer]
    cells = [np.concatenate([columns[x], rows[y]]) for y in range(c.grid[0]) for x in range(c.grid[1])]
    return np.stack([*w["positions.token"][layer], *cells])


def cut(image: Array, w: Weights, patch: int) -> Array:
    """Patches in raster order, flattened and projected."""
    kernel = w["embed.weight"].reshape(len(w["embed.weight"]), -1)
    tokens = []
    for top in range(0, image.shape[1], patch):
        for left in range(0, image.shape[2], patch):
            piece = image[:, top : top + patch, left : left + patch]
            tokens.append(kernel @ piece.reshape(-1) + w["embed.bias"])
    return np.stack(tokens)


def attention_pool(tokens: Array, w: Weights, c: ViTConfig) -> Array:
    k = c.width // c.heads
    query = dense(w["probe"][0], w, "q")[0]
    keys, values = dense(tokens, w, "k"), dense(tokens, w, "v")
    joined = np.zeros((1, c.width))
    for head in range(c.heads):
        part = slice(head * k, (head + 1) * k)
        share = softmax(np.array([query[part] @ key[part] / math.sqrt(k) for key in keys]))
        for a, value in zip(share, values, strict=True):
            joined[0, part] += a * value[part]
    z = dense(joined, w, "out")
    return (z + mlp(layer_norm(z, w, "norm", c.norm_eps), below(w, "mlp"), c))[0]


def vit(image: Array, w: Weights, c: ViTConfig) -> tuple[Array, Array, Array]:
    """Tokens, features and logits of one image."""
    z = cut(image if c.stem is None else stem(image, below(w, "stem"), c.stem), w, c.patch)
    if c.pool == "token":
        z = np.concatenate([w["token"][0], z])
    for layer in range(c.depth):
        if c.positions in ("1d", "2d", "sinusoidal", "sincos2d") and (layer == 0 or c.placement != "stem"):
            z = z + position(w, c, layer)
        step = axial_block if c.attention == "axial" else block
        z = step(z, below(w, f"blocks.{layer}"), c)
    z = layer_norm(z, w, "norm", c.norm_eps)
    if c.pool == "attention":
        y = attention_pool(z, below(w, "pool"), c)
    else:
        y = z[0] if c.pool == "token" else sum(z) / len(z)
    if c.prelogits:
        y = np.tanh(dense(y, w, "prelogits"))
    return z, y, dense(y, w, "head")


# ---- convolutions


def windows(x: Array, size: int, stride: int) -> tuple[list[Array], tuple[int, int]]:
    h, across = (1 + (side - size) // stride for side in x.shape[1:])
    corners = [(y * stride, i * stride) for y in range(h) for i in range(across)]
    return [x[:, top : top + size, left : left + size] for top, left in corners], (h, across)


def same(x: Array, size: int, stride: int, value: float = 0.0) -> Array:
    """Padding after which a window moves over ceil(side / stride) places; an odd cell goes to the end."""
    pads = [(0, 0)]
    for side in x.shape[1:]:
        total = max(0, (math.ceil(side / stride) - 1) * stride + size - side)
        pads.append((math.floor(total / 2), math.ceil(total / 2)))
    return np.pad(x, pads, constant_values=value)


def convolve(x: Array, kernel: Array, stride: int, c: StemConfig | ResNetConfig) -> Array:
    """A standardized convolution: SAME padding in a stem, as much on both sides in BiT."""
    size = kernel.shape[2]
    flat = []
    for one in kernel.reshape(len(kernel), -1):
        mean = one.sum() / one.size
        variance = ((one - mean) ** 2).sum() / one.size
        sigma = math.sqrt(variance) + c.standardize_eps
        flat.append((one - mean) / (sigma if c.standardize == "sigma" else math.sqrt(variance + c.standardize_eps)))
    half = (size - 1) // 2
    x = same(x, size, stride) if isinstance(c, StemConfig) else np.pad(x, ((0, 0), (half, half), (half, half)))
    pieces, shape = windows(x, size, stride)
    return np.stack([np.stack(flat) @ piece.reshape(-1) for piece in pieces], 1).reshape(len(kernel), *shape)


def pool_max(x: Array) -> Array:
    pieces, shape = windows(x, 3, 2)
    return np.stack([piece.max((1, 2)) for piece in pieces], 1).reshape(len(x), *shape)


def group_norm(x: Array, w: Weights, name: str, eps: float, groups: int = 32) -> Array:
    out = np.empty_like(x)
    each = len(x) // groups
    for g in range(groups):
        group = x[g * each : (g + 1) * each]
        mean = group.sum() / group.size
        variance = ((group - mean) ** 2).sum() / group.size
        out[g * each : (g + 1) * each] = (group - mean) / np.sqrt(variance + eps)
    return out * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0)


def stem_unit(x: Array, w: Weights, stride: int, c: StemConfig) -> Array:
    y = relu(group_norm(convolve(x, w["conv1.weight"], 1, c), w, "norm1", c.norm_eps))
    y = relu(group_norm(convolve(y, w["conv2.weight"], stride, c), w, "norm2", c.norm_eps))
    y = group_norm(convolve(y, w["conv3.weight"], 1, c), w, "norm3", c.norm_eps)
    if "shortcut.0.weight" in w:
        x = group_norm(convolve(x, w["shortcut.0.weight"], stride, c), w, "shortcut.1", c.norm_eps)
    return relu(x + y)


def stem(image: Array, w: Weights, c: StemConfig) -> Array:
    x = relu(group_norm(convolve(image, w["root.weight"], 2, c), w, "norm", c.norm_eps))
    x = pool_max(same(x, 3, 2, -math.inf))
    for i, units in enumerate(c.stages):
        for j in range(units):
            x = stem_unit(x, below(w, f"stages.{i}.{j}"), 2 if i > 0 and j == 0 else 1, c)
    return x


def attend_along_rows(x: Array, w: Weights, c: ResNetConfig) -> Array:
    """Eight heads; queries, keys and values have group norms of their own, and a key depends on its offset."""
    channels, k = len(x), len(x) // 8
    qkv = group_norm(convolve(x, w["qkv.weight"], 1, c), w, "norm", c.norm_eps, groups=3 * 32)
    queries, keys, values = (qkv[i * channels : (i + 1) * channels].reshape(8, k, *x.shape[1:]) for i in range(3))
    n = x.shape[2]
    offsets = w["relative.offsets"].reshape(2 * n - 1, 8, k)
    placed = np.stack([[offsets[i - j + n - 1] for j in range(n)] for i in range(n)])  # (n, n, 8, k)
    logits = np.einsum("akyi,akyj->ayij", queries, keys) + np.einsum("akyi,ijak->ayij", queries, placed)
    shares = np.apply_along_axis(softmax, 3, logits / math.sqrt(k))
    return np.einsum("ayij,akyj->akyi", shares, values).reshape(x.shape)


def axial_layer(x: Array, w: Weights, stride: int, c: ResNetConfig) -> Array:
    """Rows, then columns; then the mean of blocks, which at an odd end have a row or column of cells less."""
    x = attend_along_rows(x, below(w, "rows"), c)
    x = attend_along_rows(x.swapaxes(1, 2), below(w, "columns"), c).swapaxes(1, 2)
    h, across = (range(0, side, stride) for side in x.shape[1:])
    return np.stack([[x[:, y : y + stride, i : i + stride].mean((1, 2)) for i in across] for y in h]).transpose(2, 0, 1)


def bit_unit(x: Array, w: Weights, stride: int, c: ResNetConfig) -> Array:
    active = relu(group_norm(x, w, "norm1", c.norm_eps))
    y = convolve(active, w["conv1.weight"], 1, c)
    y = relu(group_norm(y, w, "norm2", c.norm_eps))
    if c.attention == "axial":
        y = axial_layer(y, below(w, "conv2"), stride, c)
    else:
        y = convolve(y, w["conv2.weight"], stride, c)
    y = convolve(relu(group_norm(y, w, "norm3", c.norm_eps)), w["conv3.weight"], 1, c)
    return y + (convolve(active, w["shortcut.weight"], stride, c) if "shortcut.weight" in w else x)


def resnet(image: Array, w: Weights, c: ResNetConfig) -> tuple[Array, Array, Array]:
    x = convolve(image, w["root.weight"], 2, c)
    x = pool_max(np.pad(x, ((0, 0), (1, 1), (1, 1))))
    for i, units in enumerate(c.stages):
        for j in range(units):
            x = bit_unit(x, below(w, f"stages.{i}.{j}"), 2 if i > 0 and j == 0 else 1, c)
    x = relu(group_norm(x, w, "norm", c.norm_eps))
    tokens = np.stack([x[:, y, i] for y in range(x.shape[1]) for i in range(x.shape[2])])
    features = sum(tokens) / len(tokens)
    return tokens, features, dense(features, w, "head")


# ---- the comparison


def small(**settings: Any) -> ViTConfig:
    base: dict[str, Any] = {"image_size": (12, 20), "patch": 4, "depth": 3, "width": 12, "mlp": 20, "heads": 3}
    return ViTConfig(**(base | {"classes": 5} | settings))


POSITIONS = [
    ("none", "stem"),
    *(("1d", place) for place in ("stem", "every", "shared")),
    *(("2d", place) for place in ("stem", "every", "shared")),
    ("relative", "stem"),
    ("sinusoidal", "stem"),
    ("sinusoidal", "shared"),
    ("sincos2d", "shared"),
]
TALL = (20, 12)
STEM = StemConfig((2, 1), width=32)
CONFIGS: dict[str, ModelConfig] = {
    **{
        f"{k}-{p}-{pool}": small(positions=k, placement=p, pool=pool)
        for k, p in POSITIONS
        for pool in ("token", "mean")
    },
    "attention pool": small(pool="attention"),
    "attention pool, relative, prelogits": small(pool="attention", positions="relative", prelogits=7),
    "prelogits": small(prelogits=9, image_size=TALL),
    "tanh gelu": small(gelu="tanh"),
    "tanh gelu, attention pool": small(gelu="tanh", pool="attention"),
    "large norm eps": small(norm_eps=0.1, pool="attention"),
    **{f"axial {k}-{p}": small(attention="axial", pool="mean", positions=k, placement=p) for k, p in POSITIONS[:7]},
    "axial, attention pool, tall": small(attention="axial", pool="attention", image_size=TALL),
    "odd width": small(width=15, image_size=TALL),
    "odd width, sinusoidal": small(width=15, positions="sinusoidal"),
    "heads of width one": small(width=6, heads=6, positions="relative"),
    "one head, one layer": small(heads=1, depth=1, placement="every"),
    "one patch": small(image_size=(4, 4), positions="relative"),
    "one patch, no token": small(image_size=(4, 4), pool="mean", positions="2d"),
    "one row": small(image_size=(4, 20), positions="relative", pool="mean"),
    "one column, axial": small(image_size=(20, 4), attention="axial", pool="mean", positions="2d"),
    "pixels as patches": small(image_size=(3, 2), patch=1, classes=1),
    "hybrid": small(image_size=(16, 24), stem=STEM, patch=1),
    "hybrid, patches of 2, relative": small(image_size=(32, 16), stem=STEM, patch=2, positions="relative"),
    "hybrid, variance": small(
        image_size=(8, 16), patch=1, stem=StemConfig((1, 1), 32, "variance", standardize_eps=1e-3, norm_eps=1e-2)
    ),
    "hybrid, one stage, axial": small(
        image_size=(12, 8), stem=StemConfig((2,), 64), patch=1, attention="axial", pool="mean"
    ),
    "hybrid, root": small(image_size=(32, 64), stem=StemConfig(()), patch=8),
    "BiT": ResNetConfig((24, 40), (2, 1), width=32, classes=5),
    "BiT, sigma": ResNetConfig((40, 24), (1, 2), 64, 5, "sigma", standardize_eps=1e-3, norm_eps=1e-2),
    "BiT, sides that do not halve": ResNetConfig((23, 37), (1, 1, 1), width=32, classes=5),
    "BiT, one cell": ResNetConfig((7, 8), (1, 1), width=64, classes=5),
    "AxialResNet": ResNetConfig((24, 40), (2, 1), width=32, classes=5, attention="axial"),
    "AxialResNet, sides that do not halve": ResNetConfig((23, 37), (1, 1, 1), width=32, classes=5, attention="axial"),
    "AxialResNet, one cell": ResNetConfig((7, 8), (1, 1), width=64, classes=5, attention="axial", norm_eps=1e-2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equations(name: str, randomize: Callable[..., Any]) -> None:
    config = CONFIGS[name]
    model = randomize(vitlab.build(config)).double().eval()
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    images = torch.randn(2, 3, *config.image_size, dtype=torch.float64)
    with torch.no_grad():
        ours = [model.tokens(images), model.features(images), model(images)]
    if isinstance(config, ViTConfig):
        each = [vit(image, weights, config) for image in images.numpy()]
    else:
        each = [resnet(image, weights, config) for image in images.numpy()]
    for got, expected in zip(ours, map(np.stack, zip(*each, strict=True)), strict=True):
        assert got.shape == expected.shape
        assert np.abs(expected).max() > 1e-3
        assert np.abs(got.numpy() - expected).max() / np.abs(expected).max() < 1e-10


def test_named_hybrid(randomize: Callable[..., Any]) -> None:
    """A stem of the paper as `create` makes it: R's root under 8x8 patches."""
    model = randomize(vitlab.create("R+Ti/16", depth=1, image_size=(32, 64), classes=3)).double().eval()
    image = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    logits = vit(image[0].numpy(), weights, model.config)[2]
    assert np.abs(model(image)[0].detach().numpy() - logits).max() / np.abs(logits).max() < 1e-10
