"""The image half of OpenAI's CLIP, and of files with the same names (open_clip's): `visual.*` of a state dict.

The projection to the space that images and texts share is the head, whose bias is zero: the model gives what
`encode_image` gives, before its norm is set to one. What is for texts is left out.
"""

from collections.abc import Sequence

from torch import Tensor

from vitlab.models.config import Preprocess, Size
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.originals import leave_out
from vitlab.weights.formats.shapes import read_vit
from vitlab.weights.formats.table import Row, Transform, pair, per_tensor, refuse_foreign, row

NAME = "clip"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DEFAULT = FormatDefaults(gelu="quick", norm_eps=1e-5, preprocess=Preprocess(MEAN, STD, "bicubic", crop=1.0))
VALUES = {"norm_before": True, "embed_bias": False}  # those without the norm (CLIPA) pool by the mean, and are refused
HALF = "visual."
TEXT = {"positional_embedding", "text_projection", "token_embedding.weight", "logit_scale", "logit_bias", "attn_mask"}
TEXT |= {"input_resolution", "context_length", "vocab_size"}


def with_bias(xs: Sequence[Tensor]) -> list[Tensor]:
    """A head from a projection, (D, classes)."""
    return [xs[0].t(), xs[0].new_zeros(xs[0].shape[1])]


TOKEN = per_tensor(lambda x: x[None, None], lambda x: x[0, 0])
ROWS = per_tensor(lambda x: x[None], lambda x: x[0])
PROJECTION = Transform(with_bias, lambda xs: [xs[0].t()])
BLOCK = f"{HALF}transformer.resblocks.#"
TABLE = [
    row("embed.weight", f"{HALF}conv1.weight"),
    row("token", f"{HALF}class_embedding", TOKEN),
    row("positions.table", f"{HALF}positional_embedding", ROWS),
    *pair("norm_before", f"{HALF}ln_pre"),
    *pair("blocks.#.norm1", f"{BLOCK}.ln_1"),
    row("blocks.#.attention.qkv.weight", f"{BLOCK}.attn.in_proj_weight"),
    row("blocks.#.attention.qkv.bias", f"{BLOCK}.attn.in_proj_bias"),
    *pair("blocks.#.attention.out", f"{BLOCK}.attn.out_proj"),
    *pair("blocks.#.norm2", f"{BLOCK}.ln_2"),
    *pair("blocks.#.mlp.up", f"{BLOCK}.mlp.c_fc"),
    *pair("blocks.#.mlp.down", f"{BLOCK}.mlp.c_proj"),
    *pair("norm", f"{HALF}ln_post"),
    Row(("head.weight", "head.bias"), (f"{HALF}proj",), PROJECTION),
]


def recognizes(source: RawCheckpoint) -> bool:
    return f"{HALF}class_embedding" in source.shapes or f"{HALF}conv1.weight" in source.shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    half = leave_out(source, is_for_texts, "not for images")
    refuse_foreign(TABLE, half.tensors)
    return read_vit(half, TABLE, given, DEFAULT, image_size, values=VALUES, table_rank=2)


def is_for_texts(name: str) -> bool:
    return name in TEXT or name.startswith(("transformer.", "text.", "ln_final."))
