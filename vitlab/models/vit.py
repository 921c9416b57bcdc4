"""The Vision Transformer, top to bottom.

    1  cut the image into patches              (B, 3, height, width) -> N = hw patches
    2  project each patch to a token           (B, N, D)
    3  put a class token first, add positions  (B, N+1, D)
    4  L encoder blocks                        (B, N+1, D)
    5  norm, pool, classify                    (B, classes)

Shapes: B batch, N tokens, D width, H heads, K = D/H head width, h and w patches down and across. For brevity N
counts the class token too from step 3 on.
"""

import dataclasses
import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models.axial import AxialBlock
from vitlab.models.base import ImageModel
from vitlab.models.card import Card
from vitlab.models.config import Size, ViTConfig, as_size
from vitlab.models.images import check_images
from vitlab.models.positions import Relative, Resample, check_mode, make_positions
from vitlab.models.resnet import Stem

CUT_STD = 0.8796256610342398  # standard deviation of a normal distribution that is cut off at -2 and 2


class ViT(ImageModel):
    """The model that a config describes, with fresh weights, initialized as the authors do."""

    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c = self.config = config
        self.card = Card()  # preprocessing, class names and provenance travel with the weights
        self.stem = Stem(c.stem) if c.stem else None
        channels = c.stem.channels if c.stem else 3
        self.embed = nn.Conv2d(channels, c.width, c.patch, stride=c.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, c.width)) if c.token else None
        self.positions = make_positions(c)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(make_block(c, layer) for layer in range(c.depth))
        self.norm = nn.LayerNorm(c.width, c.norm_eps)
        self.pool = AttentionPool(c) if c.pool == "attention" else None
        self.prelogits = nn.Linear(c.width, c.prelogits) if c.prelogits else None
        self.head = nn.Linear(c.prelogits or c.width, c.classes) if c.classes else None
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (B, classes); the features where the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """The input of the head, (B, D)."""
        return self.pool_tokens(self.tokens(images))

    def tokens(self, images: Tensor) -> Tensor:
        """The sequence after the final norm, (B, N, D)."""
        check_images(images, self.config.image_size, self.embed.weight)
        return self.encode(self.patches(images))

    def patches(self, images: Tensor) -> Tensor:
        """Steps 1 and 2: a convolution whose stride is its size cuts, flattens and projects at once."""
        x = images if self.stem is None else self.stem(images)
        return self.embed(x).flatten(2).transpose(1, 2)  # (B, N, D)

    def encode(self, x: Tensor) -> Tensor:
        """Steps 3 and 4, on patch embeddings, and the final norm."""
        if self.token is not None:
            x = torch.cat([self.token.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        if self.positions is not None:
            x = x + self.positions(0)
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            if layer and self.positions is not None and self.config.placement != "stem":
                x = x + self.positions(layer)
            x = block(x)
        return self.norm(x)

    def pool_tokens(self, tokens: Tensor) -> Tensor:
        """Step 5 up to the head: (B, N, D) to (B, D)."""
        if self.pool is not None:
            x = self.pool(tokens)
        else:
            x = tokens[:, 0] if self.token is not None else tokens.mean(1)
        return x if self.prelogits is None else torch.tanh(self.prelogits(x))

    def resize(self, image_size: int | Size, mode: Resample = "bilinear") -> Self:
        """Take images of another size, in place: positions are resampled on their grid, the rest stays.

        Learned tables become new parameters: resize before making an optimizer.
        """
        check_mode(mode)
        config = dataclasses.replace(self.config, image_size=as_size(image_size))
        if config == self.config:
            return self  # the same parameters, so that an optimizer keeps them
        for module in self.modules():
            if module is self.positions or isinstance(module, Relative):
                module.resize(config.grid, mode)
            elif isinstance(module, AxialBlock):
                module.grid = config.grid
        self.config = config
        return self

    def _initialize(self) -> None:
        xavier(self.embed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                xavier(module)
        for module in self.modules():
            if isinstance(module, Attention):  # each by itself, not as one wide matrix
                for part in module.qkv.weight.chunk(3):
                    nn.init.xavier_uniform_(part)
            elif isinstance(module, MLP):
                nn.init.normal_(module.up.bias, std=1e-6)
                nn.init.normal_(module.down.bias, std=1e-6)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)


def xavier(layer: nn.Linear | nn.Conv2d) -> None:
    nn.init.xavier_uniform_(layer.weight.flatten(1))  # a patch convolution is a dense layer too
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def lecun_normal(layer: nn.Linear | nn.Conv2d) -> None:
    """Flax's default: normal, cut off at two deviations, with a variance of 1 / inputs after the cut."""
    std = layer.weight[0].numel() ** -0.5 / CUT_STD
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)


def make_block(c: ViTConfig, layer: int) -> nn.Module:
    rate = c.drop_path * layer / max(1, c.depth - 1)
    if c.attention == "axial":
        return AxialBlock(Block(c, rate), Block(c, rate), c.grid)
    return Block(c, rate)


class Block(nn.Module):
    """Pre-norm encoder block: z' = MSA(LN(z)) + z, then z = MLP(LN(z')) + z'."""

    def __init__(self, c: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, c.norm_eps)
        self.attention = Attention(c)
        self.norm2 = nn.LayerNorm(c.width, c.norm_eps)
        self.mlp = MLP(c)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D), or (B, h, w, D) in an axial block
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Multi-head self-attention along the last axis but one, on fused kernels."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.out = nn.Linear(c.width, c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.relative = Relative(c) if c.positions == "relative" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, bias = self.project(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # (B, H, N, K)
        return self.dropout(self.out(y.transpose(1, 2).reshape(x.shape)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, (B, H, N, K), and the position logits, (B, H, N, N); leading axes join B."""
        length, width = x.shape[-2:]
        qkv = self.qkv(x).reshape(-1, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = None if self.relative is None else self.relative(q) / math.sqrt(q.shape[-1])
        return q, k, v, bias


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias), (B, H, N, N): what the fused kernel computes and does not keep."""
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (logits if bias is None else logits + bias).softmax(-1)


class MLP(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(c.width, c.mlp)
        self.gelu = nn.GELU("tanh" if c.gelu == "tanh" else "none")
        self.down = nn.Linear(c.mlp, c.width)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(self.gelu(self.up(x)))))


class DropPath(nn.Module):
    """Stochastic depth: while training, leave the branch out for a random share of the images."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep


class AttentionPool(nn.Module):
    """Pooling by attention: a learned probe attends to all tokens, then an MLP with a residual."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.probe = nn.Parameter(torch.empty(1, 1, c.width))
        nn.init.xavier_uniform_(self.probe)
        self.q = nn.Linear(c.width, c.width)
        self.k = nn.Linear(c.width, c.width)
        self.v = nn.Linear(c.width, c.width)
        self.out = nn.Linear(c.width, c.width)
        self.norm = nn.LayerNorm(c.width, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        probe = self.probe.expand(x.shape[0], -1, -1)
        q, k, v = (self.split(y) for y in (self.q(probe), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(q, k, v)  # (B, H, 1, K)
        z = self.out(y.transpose(1, 2).reshape(probe.shape))  # (B, 1, D)
        return (z + self.mlp(self.norm(z)))[:, 0]

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, K)
