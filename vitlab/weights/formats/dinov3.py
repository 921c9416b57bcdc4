"""DINOv3's own files, `dinov3_vit*_pretrain_*.pth`: the class token's feature at any size, without a head.

Keys have no bias: a mask of zeros stands for that. The periods of the rotary positions are in the file, rounded to
bfloat16 in the published ones; those of the formula are used.
"""

import torch

from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.originals import BODY, IMAGENET, MLP, SCALES, leave_out, log, without
from vitlab.weights.formats.shapes import not_none, read_vit, stored_shape
from vitlab.weights.formats.table import Row, Transform, pair, refuse_foreign, row

NAME = "dinov3"
BASE = 100.0
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-5, preprocess=IMAGENET)
ROTARY = FormatDefaults(rotary="centers", rotary_layout="halves", rotary_base=BASE)
FIELDS = ("registers", "layer_scale", "mlp_kind", "qkv_bias", "rotary")
PERIODS = "rope_embed.periods"
MASK = "blocks.#.attn.qkv.bias_mask"
ROUNDED = 0.01  # relative, more than bfloat16 takes


def drop_keys(bias: torch.Tensor) -> torch.Tensor:
    q, _, v = bias.chunk(3)
    return torch.cat([q, v])


def add_keys(bias: torch.Tensor) -> list[torch.Tensor]:
    """The biases with zeros for the keys, and the mask of those that count."""
    q, v = bias.chunk(2)
    one, zero = torch.ones_like(q), torch.zeros_like(q)
    return [torch.cat([q, zero, v]), torch.cat([one, zero, one])]


JOIN2 = Transform(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(2))  # gate and value
MASKED = Transform(lambda xs: [drop_keys(xs[0])], lambda xs: add_keys(xs[0]))
REST = [row("registers", "storage_tokens"), *SCALES, *pair("norm", "norm")]
SWIGLU = [
    *(
        Row((f"blocks.#.mlp.up.{part}",), (f"blocks.#.mlp.w1.{part}", f"blocks.#.mlp.w2.{part}"), JOIN2)
        for part in ("weight", "bias")
    ),
    *pair("blocks.#.mlp.down", "blocks.#.mlp.w3"),
]
QV_BIAS = Row(("blocks.#.attention.qv_bias",), ("blocks.#.attn.qkv.bias", MASK), MASKED)
QKV_BIAS = row("blocks.#.attention.qkv.bias", "blocks.#.attn.qkv.bias")


def recognizes(source: RawCheckpoint) -> bool:
    return PERIODS in source.shapes or "storage_tokens" in source.shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    source = leave_out(source, is_for_training, "for pre-training alone")
    names = source.shapes
    masked = MASK.replace("#", "0") in names
    mlp = SWIGLU if "blocks.0.mlp.w1.weight" in names else MLP
    table = [*BODY, *REST, *mlp, QV_BIAS if masked else QKV_BIAS]
    rest = without(source, PERIODS.__eq__)
    refuse_foreign(table, rest.tensors)
    width = stored_shape(source, "patch_embed.proj.weight", 4)[0]
    known = given.over(ROTARY)
    known = known.over(FormatDefaults(heads=read_heads(source, width, not_none(known.rotary_base))))
    if masked:
        check_masks(source, width)
    values = {"prefix_positions": "none"}
    return read_vit(rest, table, known, DEFAULT, image_size, positions="none", fields=FIELDS, values=values)


def is_for_training(name: str) -> bool:
    return name == "mask_token" or name.startswith("local_cls_norm.")


def read_heads(source: RawCheckpoint, width: int, base: float) -> int:
    """The number of heads, each of which has four times as many channels as there are periods."""
    (count,) = stored_shape(source, PERIODS, 1)
    if width % (4 * count):
        raise UserError(f"'{PERIODS}' of {source.name} has {count} periods, which do not fit its width {width}")
    periods, exact = source.tensors.read(PERIODS).double(), base ** (torch.arange(count).double() / count)
    error = ((periods - exact) / exact).abs().max().item()
    if not error <= ROUNDED:  # NaN too
        raise UserError(
            f"'{PERIODS}' of {source.name} are not those of rotary_base={base:g}; give another rotary_base="
        )
    if error > 1e-6:
        log.info("%s: its rotary periods are rounded by up to %.1g; the exact ones are used", source.name, error)
    return width // (4 * count)


def check_masks(source: RawCheckpoint, width: int) -> None:
    """Raise a UserError unless the biases that count are exactly those of queries and values."""
    expected = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(width)
    before, after = MASK.split("#")
    for name, shape in source.shapes.items():
        is_mask = name.startswith(before) and name.endswith(after) and shape == (3 * width,)
        if is_mask and not torch.equal(source.tensors.read(name).float(), expected):
            raise UserError(f"'{name}' of {source.name} is not 1 for queries and values and 0 for keys")
