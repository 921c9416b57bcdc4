"""DINOv2's own files, `dinov2_vit*14[_reg4]_pretrain.pth`: the class token's feature at 518 pixels, without a head."""

from vitlab.models.config import Size
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.originals import BODY, IMAGENET, MLP, SCALES, leave_out
from vitlab.weights.formats.shapes import read_vit, stored_shape
from vitlab.weights.formats.table import pair, refuse_foreign, row

NAME = "dinov2"
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-6, preprocess=IMAGENET)
FIELDS = ("registers", "layer_scale", "mlp_kind")
REST = [
    row("registers", "register_tokens"),
    row("positions.table", "pos_embed"),
    row("blocks.#.attention.qkv.bias", "blocks.#.attn.qkv.bias"),
    *SCALES,
    *pair("norm", "norm"),
]
SWIGLU = [*pair("blocks.#.mlp.up", "blocks.#.mlp.w12"), *pair("blocks.#.mlp.down", "blocks.#.mlp.w3")]  # the giant's


def recognizes(source: RawCheckpoint) -> bool:
    """By what timm's names for the same models do not have."""
    own = {"mask_token", "pos_embed", "blocks.0.ls1.gamma"}
    return "register_tokens" in source.shapes or own <= source.shapes.keys()


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    source = leave_out(source, "mask_token".__eq__, "it is for pre-training alone")
    mlp = SWIGLU if "blocks.0.mlp.w12.weight" in source.shapes else MLP
    table = [*BODY, *REST, *mlp]
    refuse_foreign(table, source.tensors)
    width = stored_shape(source, "patch_embed.proj.weight", 4)[0]
    default = FormatDefaults(heads=None if width % 64 else width // 64).over(DEFAULT)
    return read_vit(source, table, given, default, image_size, fields=FIELDS)
