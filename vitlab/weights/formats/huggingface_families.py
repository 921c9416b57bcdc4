"""transformers' families of Vision Transformers: a flat table of names for each, and what its classes can hold.

The names are those in files. Since version 5 some differ in memory, and those are read too; the files' are written.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vitlab.models.config import Pool, PositionKind, Preprocess, ViTConfig
from vitlab.weights.formats.base import FormatDefaults
from vitlab.weights.formats.table import Row, Transform, pair, per_tensor, row

Replacements = tuple[tuple[str, str], ...]

JOIN = Transform(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(3))  # queries, keys and values
JOIN2 = Transform(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(2))  # gates and values; two biases
SPLIT = Transform(lambda xs: xs[0].chunk(3), lambda xs: [torch.cat(list(xs))])
ADD_AXIS = per_tensor(lambda x: x[None], lambda x: x[0])
ADD_AXES = per_tensor(lambda x: x[None, None], lambda x: x[0, 0])
# a projection without bias: ours is zero, and `write` refuses any other
NO_BIAS = Transform(lambda xs: [xs[0], xs[0].new_zeros(len(xs[0]))], lambda xs: xs[:1])


# How the families' own processors prepare photos, where a file has none with it.
STRETCHED = Preprocess(fit="stretch")
SIGLIP_PREPROCESS = Preprocess(fit="stretch", interpolation="bicubic")
DINOV3_PREPROCESS = Preprocess((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), fit="stretch")
DINOV2_PREPROCESS = Preprocess((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", crop=0.875)
CLIP_PREPROCESS = Preprocess(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), "bicubic", crop=1.0
)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    kind: str  # the config's model_type
    body: str  # the class without a head
    table: list[Row]  # of the body, without what is in `mlps`
    mlps: Sequence[list[Row]]  # a plain MLP's rows, a gated one's, and the latter's in memory
    default: FormatDefaults  # what a config that leaves them out has
    mark: str  # a tensor by which a file without a config is known
    holds: Mapping[str, Container[Any] | None]  # the later switches of our config, with their values; None: all
    headed: str = ""  # the class with a head, if there is one
    head_kind: str = ""  # its model_type, where it is another
    head: list[Row] = field(default_factory=lambda: pair("head", "classifier"))
    prefix: str = ""  # of the body's names under a head
    bare_prefix: str = ""  # and without one
    pools: tuple[Pool, ...] = ("token",)  # without a head; the first is what is read
    head_pool: Pool = "token"
    positions: PositionKind = "1d"
    table_rank: int = 3  # axes of the table of positions
    square: bool = False  # whether images must be
    pooler: bool = False  # whether its body may have one: our pre-logits
    left_out: Mapping[str, str] = field(default_factory=dict)  # tensors that an image's features do not need, in words
    zeros: Mapping[str, int] = field(default_factory=dict)  # those of them that a file must have, and their axes
    memory: Replacements = ()  # names in files and in memory
    extra: Callable[[ViTConfig], dict[str, Any]] = lambda c: {"intermediate_size": c.mlp}  # keys of its config

    @property
    def kinds(self) -> set[str]:
        return {self.kind, self.head_kind or self.kind}

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.prefix, self.bare_prefix, "")))

    @property
    def patches(self) -> str:
        return self.table[0].theirs[0]

    def rows(self, prefix: str, mlp: list[Row], in_memory: bool = False) -> list[Row]:
        """The table of a file whose body has this prefix."""
        body = [r.rename(str, lambda name: prefix + name) for r in [*self.table, *mlp]]
        if in_memory:
            body = [r.rename(str, self.name_in_memory) for r in body]
        return [*body, *self.head]

    def name_in_memory(self, name: str) -> str:
        for file, memory in self.memory:
            name = name.replace(file, memory, 1)
        return name

    def values(self) -> dict[str, Any]:
        """The switches that all its models have in common."""
        one = {name: held[0] for name, held in self.holds.items() if isinstance(held, tuple) and len(held) == 1}
        return {name: value for name, value in one.items() if name not in vars(self.default)}  # the rest are settings


def qkv_rows(names: str, q: str, k: str, v: str) -> list[Row]:
    """Three layers of a block as one; the biases of all, or of queries and values."""
    weights, biases = ([f"{names}.{part}.{kind}" for part in (q, k, v)] for kind in ("weight", "bias"))
    return [
        Row(("blocks.#.attention.qkv.weight",), tuple(weights), JOIN),
        Row(("blocks.#.attention.qkv.bias",), tuple(biases), JOIN),
        Row(("blocks.#.attention.qv_bias",), (biases[0], biases[2]), JOIN2),
    ]


def mlp_rows(up: str, down: str) -> list[Row]:
    return [*pair("blocks.#.mlp.up", up), *pair("blocks.#.mlp.down", down)]


def gated_rows(names: str) -> list[Row]:
    """A gated MLP of three layers: ours has the first two in one."""
    parts = ("weight", "bias")
    up = [Row((f"blocks.#.mlp.up.{p}",), (f"{names}.gate_proj.{p}", f"{names}.up_proj.{p}"), JOIN2) for p in parts]
    return [*up, *pair("blocks.#.mlp.down", f"{names}.down_proj")]


# ---- ViT, DeiT and MAE

PATCHES = "embeddings.patch_embeddings.projection"
BLOCK = "encoder.layer.#"
BIASES = ("all", "none")
VIT = Family(
    kind="vit",
    body="ViTModel",
    headed="ViTForImageClassification",
    prefix="vit.",
    mark=f"{PATCHES}.weight",
    default=FormatDefaults(heads=12, gelu="exact", norm_eps=1e-12, preprocess=STRETCHED),
    table=[
        *pair("embed", PATCHES),
        row("token", "embeddings.cls_token"),
        row("positions.table", "embeddings.position_embeddings"),
        *pair("blocks.#.norm1", f"{BLOCK}.layernorm_before"),
        *qkv_rows(f"{BLOCK}.attention.attention", "query", "key", "value"),
        *pair("blocks.#.attention.out", f"{BLOCK}.attention.output.dense"),
        *pair("blocks.#.norm2", f"{BLOCK}.layernorm_after"),
        *pair("norm", "layernorm"),
        *pair("prelogits", "pooler.dense"),
    ],
    mlps=[mlp_rows(f"{BLOCK}.intermediate.dense", f"{BLOCK}.output.dense")],
    holds={"qkv_bias": BIASES},
    pooler=True,
    memory=(
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("encoder.layer.", "layers."),
    ),
    extra=lambda c: {"intermediate_size": c.mlp, "qkv_bias": c.qkv_bias == "all"} | describe_pooler(c),
)
# The token that a teacher's answer is distilled into is a register here: the head of these classes does not see it.
DEIT = dataclasses.replace(
    VIT,
    kind="deit",
    body="DeiTModel",
    headed="DeiTForImageClassification",
    prefix="deit.",
    mark="embeddings.distillation_token",
    table=[*VIT.table, row("registers", "embeddings.distillation_token")],
    holds={"registers": (1,), "prefix_positions": ("all",), "qkv_bias": BIASES},
)
MAE = dataclasses.replace(
    VIT,
    kind="vit_mae",
    body="ViTMAEModel",
    headed="",
    head=[],
    mark="decoder.decoder_pred.weight",
    table=[r for r in VIT.table if not r.ours[0].startswith("prelogits")],
    left_out={"decoder.": "the decoder"},
)
# Its files have ViT's names, so only a config shows that the epsilon is another.
MSN = dataclasses.replace(
    VIT,
    kind="vit_msn",
    body="ViTMSNModel",
    headed="ViTMSNForImageClassification",
    default=dataclasses.replace(VIT.default, norm_eps=1e-6),
    table=MAE.table,
    pooler=False,
)


def describe_pooler(c: ViTConfig) -> dict[str, Any]:
    return {"pooler_output_size": c.prelogits, "pooler_act": "tanh"} if c.prelogits else {}


# ---- CLIP and SigLIP

LAYER = "encoder.layers.#"
TEXT = {"text_model.": "the text half", "text_projection.": "the text half", "logit_": "the scale of its logits"}
NUMBERS = {"embeddings.position_ids": "the positions' numbers"}
CLIP_BODY = [
    *pair("embed", "embeddings.patch_embedding"),
    row("positions.table", "embeddings.position_embedding.weight", ADD_AXIS),
    *pair("blocks.#.norm1", f"{LAYER}.layer_norm1"),
    *qkv_rows(f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj"),
    *pair("blocks.#.attention.out", f"{LAYER}.self_attn.out_proj"),
    *pair("blocks.#.norm2", f"{LAYER}.layer_norm2"),
    *pair("norm", "post_layernorm"),
]
CLIP = Family(
    kind="clip_vision_model",
    head_kind="clip",
    body="CLIPVisionModel",
    headed="CLIPVisionModelWithProjection",
    head=[Row(("head.weight", "head.bias"), ("visual_projection.weight",), NO_BIAS)],
    prefix="vision_model.",
    bare_prefix="vision_model.",  # without it before version 5 and with it since: both read this
    mark="pre_layrnorm.weight",
    default=FormatDefaults(heads=12, gelu="quick", norm_eps=1e-5, preprocess=CLIP_PREPROCESS),
    table=[
        *CLIP_BODY,
        row("token", "embeddings.class_embedding", ADD_AXES),
        *pair("norm_before", "pre_layrnorm"),
    ],
    mlps=[mlp_rows(f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.fc2")],
    holds={"norm_before": (True,), "embed_bias": (False,)},
    table_rank=2,
    square=True,
    left_out=TEXT | NUMBERS,
    extra=lambda c: {"intermediate_size": c.mlp} | ({"projection_dim": c.classes} if c.classes else {}),
)
SIGLIP = Family(
    kind="siglip_vision_model",
    head_kind="siglip",
    body="SiglipVisionModel",
    headed="SiglipForImageClassification",
    prefix="vision_model.",
    bare_prefix="vision_model.",
    mark="embeddings.patch_embedding.weight",
    default=FormatDefaults(heads=12, gelu="tanh", norm_eps=1e-6, preprocess=SIGLIP_PREPROCESS),
    table=[
        *CLIP_BODY,
        row("pool.probe", "head.probe"),
        Row(tuple(f"pool.{x}.weight" for x in "qkv"), ("head.attention.in_proj_weight",), SPLIT),
        Row(tuple(f"pool.{x}.bias" for x in "qkv"), ("head.attention.in_proj_bias",), SPLIT),
        *pair("pool.out", "head.attention.out_proj"),
        *pair("pool.norm", "head.layernorm"),
        *pair("pool.mlp.up", "head.mlp.fc1"),
        *pair("pool.mlp.down", "head.mlp.fc2"),
    ],
    mlps=CLIP.mlps,
    holds={},
    pools=("attention", "mean"),
    head_pool="mean",
    table_rank=2,
    square=True,
    left_out=TEXT | NUMBERS,
    extra=lambda c: {"intermediate_size": c.mlp, "vision_use_head": c.pool == "attention"},
)


# ---- DINOv2 and DINOv3

REGISTERS = "embeddings.register_tokens"
MASK = {"embeddings.mask_token": "the mask token"}
DINOV2 = Family(
    kind="dinov2",
    body="Dinov2Model",
    headed="Dinov2ForImageClassification",
    prefix="dinov2.",
    mark="encoder.layer.0.layer_scale1.lambda1",
    default=FormatDefaults(heads=12, gelu="exact", norm_eps=1e-6, preprocess=DINOV2_PREPROCESS),
    table=[
        *pair("embed", PATCHES),
        row("token", "embeddings.cls_token"),
        row("positions.table", "embeddings.position_embeddings"),
        *pair("blocks.#.norm1", f"{BLOCK}.norm1"),
        *qkv_rows(f"{BLOCK}.attention.attention", "query", "key", "value"),
        *pair("blocks.#.attention.out", f"{BLOCK}.attention.output.dense"),
        row("blocks.#.scale1.factor", f"{BLOCK}.layer_scale1.lambda1"),
        *pair("blocks.#.norm2", f"{BLOCK}.norm2"),
        row("blocks.#.scale2.factor", f"{BLOCK}.layer_scale2.lambda1"),
        *pair("norm", "layernorm"),
    ],
    mlps=[
        mlp_rows(f"{BLOCK}.mlp.fc1", f"{BLOCK}.mlp.fc2"),
        mlp_rows(f"{BLOCK}.mlp.weights_in", f"{BLOCK}.mlp.weights_out"),
        gated_rows(f"{BLOCK}.mlp"),
    ],
    holds={"layer_scale": (True,), "qkv_bias": BIASES, "mlp_kind": None},
    head_pool="token_mean",
    square=True,
    left_out=MASK,
    zeros={"embeddings.mask_token": 2},
    memory=VIT.memory[:4],
    extra=lambda c: {
        "mlp_ratio": find_ratio(c),
        "use_swiglu_ffn": c.mlp_kind == "swiglu",
        "qkv_bias": c.qkv_bias == "all",
    },
)
DINOV2_REGISTERS = dataclasses.replace(
    DINOV2,
    kind="dinov2_with_registers",
    body="Dinov2WithRegistersModel",
    headed="Dinov2WithRegistersForImageClassification",
    prefix="dinov2_with_registers.",
    mark=REGISTERS,
    table=[*DINOV2.table, row("registers", REGISTERS)],
    holds={**DINOV2.holds, "registers": None},
    extra=lambda c: {**DINOV2.extra(c), "num_register_tokens": c.registers},
)
DINOV3_BLOCK = "layer.#"
DINOV3 = Family(
    kind="dinov3_vit",
    body="DINOv3ViTModel",
    head=[],
    mark="embeddings.patch_embeddings.weight",
    default=FormatDefaults(
        heads=6,
        gelu="exact",
        norm_eps=1e-5,
        rotary="centers",
        rotary_layout="halves",
        rotary_base=100.0,
        preprocess=DINOV3_PREPROCESS,
    ),
    table=[
        *pair("embed", "embeddings.patch_embeddings"),
        row("token", "embeddings.cls_token"),
        row("registers", REGISTERS),
        *pair("blocks.#.norm1", f"{DINOV3_BLOCK}.norm1"),
        *qkv_rows(f"{DINOV3_BLOCK}.attention", "q_proj", "k_proj", "v_proj"),
        *pair("blocks.#.attention.out", f"{DINOV3_BLOCK}.attention.o_proj"),
        row("blocks.#.scale1.factor", f"{DINOV3_BLOCK}.layer_scale1.lambda1"),
        *pair("blocks.#.norm2", f"{DINOV3_BLOCK}.norm2"),
        row("blocks.#.scale2.factor", f"{DINOV3_BLOCK}.layer_scale2.lambda1"),
        *pair("norm", "norm"),
    ],
    mlps=[
        mlp_rows(f"{DINOV3_BLOCK}.mlp.up_proj", f"{DINOV3_BLOCK}.mlp.down_proj"),
        gated_rows(f"{DINOV3_BLOCK}.mlp"),
    ],
    holds={
        "layer_scale": (True,),
        "prefix_positions": ("none",),
        "rotary": ("centers",),
        "rotary_layout": ("halves",),
        "rotary_base": None,
        "registers": None,
        "qkv_bias": None,
        "mlp_kind": None,
    },
    positions="none",
    left_out=MASK,
    zeros={"embeddings.mask_token": 3},
    memory=(("layer.", "model.layer."),),
    extra=lambda c: {
        "intermediate_size": c.mlp,
        "use_gated_mlp": c.mlp_kind == "swiglu",
        "num_register_tokens": c.registers,
        "rope_theta": c.rotary_base,
        "query_bias": c.qkv_bias != "none",
        "key_bias": c.qkv_bias == "all",
        "value_bias": c.qkv_bias != "none",
    },
)


def find_ratio(c: ViTConfig) -> int:
    """The integer from which the classes of DINOv2 compute the width of the hidden layer, 0 if none gives this one.

    Of a gated MLP's they keep two thirds, rounded up to a multiple of 8.
    """
    near = round(c.mlp * (1.5 if c.mlp_kind == "swiglu" else 1) / c.width)
    return next((ratio for ratio in (near, near - 1) if hidden_width(c, ratio) == c.mlp), 0)


def hidden_width(c: ViTConfig, ratio: int) -> int:
    return (int(c.width * ratio * 2 / 3) + 7) // 8 * 8 if c.mlp_kind == "swiglu" else c.width * ratio


# Where a file has no config, the first whose mark it has.
FAMILIES = (CLIP, SIGLIP, DINOV3, DINOV2_REGISTERS, DINOV2, DEIT, MAE, VIT, MSN)
