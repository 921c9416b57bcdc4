"""MAE's own files: `mae_pretrain_vit_*.pth`, with or without the decoder, and `mae_finetuned_vit_*.pth`.

The names of the encoder are timm's. It is known by its decoder or by its fixed table of positions; the fine-tuned
model by the norm after the mean of the patches, though it has a class token.
"""

import math

import torch
from torch import Tensor

from vitlab.models.config import Size
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.originals import BODY, IMAGENET, MLP, leave_out
from vitlab.weights.formats.shapes import read_vit
from vitlab.weights.formats.table import pair, refuse_foreign, row

NAME = "mae"
EVA = (1024, 3, 14, 14)  # patches of EVA's large model, whose names are those of a fine-tuned MAE; MAE has 16 pixels
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-6, preprocess=IMAGENET)
TABLE = [
    *BODY,
    row("positions.table", "pos_embed"),
    row("blocks.#.attention.qkv.bias", "blocks.#.attn.qkv.bias"),
    *MLP,
]
ENCODER, TUNED = [*TABLE, *pair("norm", "norm")], [*TABLE, *pair("norm", "fc_norm")]


def recognizes(source: RawCheckpoint) -> bool:
    """A config or a JSON with the weights settles what a guess by the names would."""
    if "patch_embed.proj.weight" not in source.shapes or source.config or source.beside:
        return False
    if "decoder_embed.weight" in source.shapes:
        return True
    if "head.weight" in source.shapes:
        known = {name.replace("#", "0") for r in TUNED for name in r.theirs}
        own = {name for name in source.shapes if not name.startswith("blocks.") or name.startswith("blocks.0.")}
        return own == known and source.shapes["patch_embed.proj.weight"] != EVA
    return has_fixed_table(source)


def has_fixed_table(source: RawCheckpoint) -> bool:
    """Whether the positions are MAE's sinusoids on a square grid, after zeros for the class token."""
    shape = source.shapes.get("pos_embed", ())
    side = math.isqrt(max(0, shape[1] - 1)) if len(shape) == 3 else 0
    if not side or shape != (1, 1 + side * side, shape[2]) or shape[2] % 4:
        return False
    table = source.tensors.read("pos_embed")[0].double()
    return not table[0].any() and torch.allclose(table[1:], sinusoids(side, shape[2]), atol=1e-3)


def sinusoids(side: int, width: int) -> Tensor:
    """Sine and cosine of the column, then of the row: (side * side, width)."""
    rate = 10000 ** -(torch.arange(width // 4).double() / (width // 4))
    angle = torch.arange(side).double()[:, None] * rate
    axis = torch.cat([angle.sin(), angle.cos()], 1)
    return torch.cat([axis.repeat(side, 1), axis.repeat_interleave(side, 0)], 1)


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    source = leave_out(source, is_decoder, "the decoder is for pre-training alone")
    tuned = "fc_norm.weight" in source.shapes
    table = TUNED if tuned else ENCODER
    refuse_foreign(table, source.tensors)
    if not tuned:
        return read_vit(source, table, given, DEFAULT, image_size)
    values = {"final_norm": "pooled", "extra_token": True}
    return read_vit(source, table, given, DEFAULT, image_size, pool="mean", values=values)


def is_decoder(name: str) -> bool:
    return name == "mask_token" or name.startswith("decoder_")
