"""The Vision Transformer, top to bottom.

    1  cut the image into patches              (B, 3, height, width) -> N = hw patches
    2  project each patch to a token           (B, N, D)
    3  put a class token first, add positions  (B, N+1, D)
    4  L encoder blocks                        (B, N+1, D)
    5  norm, pool, classify                    (B, classes)

What later families changed is a switch of the config each, off by default: registers, norms, SwiGLU, rotary positions.

Shapes: B batch, N tokens, D width, H heads, K = D/H head width, h and w patches down and across. For brevity N
counts the class token and registers too from step 3 on.
"""

import dataclasses
import math
from typing import Literal, Self

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
from vitlab.models.rotary import Rotary, Turn, turn

GELUS: dict[str, Literal["none", "tanh"]] = {"exact": "none", "tanh": "tanh"}
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
        self.embed = nn.Conv2d(channels, c.width, c.patch, stride=c.patch, bias=c.embed_bias)
        self.token = nn.Parameter(torch.zeros(1, 1, c.width)) if c.token else None
        self.registers = nn.Parameter(torch.empty(1, c.registers, c.width)) if c.registers else None
        self.positions = make_positions(c)
        self.rotary = Rotary(c) if c.rotary != "none" else None
        self.dropout = nn.Dropout(c.dropout)
        self.norm_before = norm_if(c.norm_before, c.width, c)
        self.blocks = nn.ModuleList(make_block(c, layer) for layer in range(c.depth))
        self.norm = norm_if(c.final_norm != "none", c.pooled if c.final_norm == "pooled" else c.width, c)
        self.pool = AttentionPool(c) if c.pool == "attention" else None
        self.prelogits = nn.Linear(c.width, c.prelogits) if c.prelogits else None
        self.head = nn.Linear(c.features, c.classes) if c.classes else None
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (B, classes); the features where the model has no head."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """The input of the head, (B, D)."""
        return self.pool_tokens(self.tokens(images))

    def tokens(self, images: Tensor) -> Tensor:
        """The sequence after the blocks and, unless it comes after pooling, the final norm, (B, N, D)."""
        check_images(images, self.shown or self.config.image_size, self.embed.weight)
        return self.encode(self.patches(images))

    def patches(self, images: Tensor) -> Tensor:
        """Steps 1 and 2: a convolution whose stride is its size cuts, flattens and projects at once."""
        x = images if self.stem is None else self.stem(images)
        return self.embed(x).flatten(2).transpose(1, 2)  # (B, N, D)

    def encode(self, x: Tensor) -> Tensor:
        """Steps 3 and 4, on patch embeddings, and the final norm."""
        x, kept = self.drop_patches(self.place(x))
        x = self.norm_before(self.dropout(x))
        rotary = None if self.rotary is None else self.rotary.of(kept)
        for layer, block in enumerate(self.blocks):
            if layer and self.positions is not None and self.config.placement != "stem":
                x = x + self.positions(layer)
            x = block(x) if rotary is None else block(x, rotary)
        return self.norm(x) if self.config.final_norm == "tokens" else x

    def place(self, x: Tensor) -> Tensor:
        """Step 3: the class token and registers go first, and those that have one get a position with the patches."""
        lead = [t.to(x.dtype).expand(x.shape[0], -1, -1) for t in (self.token, self.registers) if t is not None]
        placed = {"none": 0, "token": int(self.config.token), "all": len(lead)}[self.config.prefix_positions]
        if lead[:placed]:
            x = torch.cat([*lead[:placed], x], 1)
        if self.positions is not None:
            x = x + self.positions(0)
        if lead[placed:]:
            first = self.config.placed
            x = torch.cat([x[:, :first], *lead[placed:], x[:, first:]], 1)
        return x

    def drop_patches(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """In training, leave random patches out, equally many of each image; the numbers of the others, (B, n)."""
        if not self.training or self.config.patch_dropout == 0:
            return x, None
        lead, patches = x[:, : self.config.prefix], x[:, self.config.prefix :]
        kept = torch.rand(patches.shape[:2], device=x.device).topk(self.config.count_kept(patches.shape[1]), 1).indices
        return torch.cat([lead, patches.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))], 1), kept

    def pool_tokens(self, tokens: Tensor) -> Tensor:
        """Step 5 up to the head: (B, N, D) to (B, D); twice as wide where it sees the class token and the mean."""
        kind, patches = self.config.pool, tokens[:, self.config.prefix :]
        if self.pool is not None:
            x = self.pool(tokens)
        elif kind == "token_mean":
            x = torch.cat([tokens[:, 0], patches.mean(1)], -1)
        else:
            x = tokens[:, 0] if kind == "token" else patches.mean(1)
        x = self.norm(x) if self.config.final_norm == "pooled" else x
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
            elif isinstance(module, Rotary):
                module.place(config)
        self.config, self.shown = config, None
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
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02)  # unlike the class token, they must differ
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


def norm_if(wanted: bool, width: int, c: ViTConfig) -> nn.Module:
    return nn.LayerNorm(width, c.norm_eps) if wanted else nn.Identity()


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
        self.scale1 = LayerScale(c.width) if c.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(c.width, c.norm_eps)
        self.mlp = MLP(c)
        self.scale2 = LayerScale(c.width) if c.layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rotary: Turn | None = None) -> Tensor:  # (B, N, D), or (B, h, w, D) if axial
        x = x + self.drop_path(self.scale1(self.attention(self.norm1(x), rotary)))
        return x + self.drop_path(self.scale2(self.mlp(self.norm2(x))))


class LayerScale(nn.Module):
    """A learned factor for each channel, small at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Attention(nn.Module):
    """Multi-head self-attention along the last axis but one, on fused kernels."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=c.qkv_bias == "all")
        self.qv_bias = nn.Parameter(torch.zeros(2 * c.width)) if c.qkv_bias == "qv" else None
        self.q_norm, self.k_norm = (norm_if(c.qk_norm, c.width // c.heads, c) for _ in range(2))
        self.norm = norm_if(c.attention_norm, c.width, c)
        self.out = nn.Linear(c.width, c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.relative = Relative(c.grid, c.width, c.heads, c.token) if c.positions == "relative" else None

    def forward(self, x: Tensor, rotary: Turn | None = None) -> Tensor:
        q, k, v, bias = self.project(x, rotary)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # (B, H, N, K)
        return self.mix(y, x)

    def mix(self, y: Tensor, x: Tensor) -> Tensor:
        """The heads' values (B, H, N, K), side by side and projected, in the shape of x."""
        return self.dropout(self.out(self.norm(y.transpose(1, 2).reshape(x.shape))))

    def project(self, x: Tensor, rotary: Turn | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, (B, H, N, K), and the position logits, (B, H, N, N); leading axes join B."""
        q, k, v = self.pack(x).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = turn(self.q_norm(q), self.k_norm(k), rotary)
        bias = None if self.relative is None else self.relative(q) / math.sqrt(q.shape[-1])
        return q, k, v, bias

    def pack(self, x: Tensor) -> Tensor:
        """Queries, keys and values as one tensor, (B, N, 3, H, K)."""
        qkv = self.qkv(x)
        qkv = qkv if self.qv_bias is None else qkv + self.padded_bias().to(qkv.dtype)
        return qkv.reshape(-1, x.shape[-2], 3, self.heads, x.shape[-1] // self.heads)

    def padded_bias(self) -> Tensor:
        """The biases of queries and values, with zeros for the keys between them."""
        assert self.qv_bias is not None
        q, v = self.qv_bias.chunk(2)
        return torch.cat([q, torch.zeros_like(q), v])


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias), (B, H, N, N): what the fused kernel computes and does not keep."""
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (logits if bias is None else logits + bias).softmax(-1)


class MLP(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        gated = c.mlp_kind == "swiglu"
        self.up = nn.Linear(c.width, c.mlp * (2 if gated else 1))
        self.gelu = SwiGLU() if gated else QuickGELU() if c.gelu == "quick" else nn.GELU(GELUS[c.gelu])
        self.norm = norm_if(c.mlp_norm, c.mlp, c)
        self.down = nn.Linear(c.mlp, c.width)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.norm(self.dropout(self.gelu(self.up(x))))))


class SwiGLU(nn.Module):
    """The second half of the channels, each times the SiLU of one of the first half."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


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
