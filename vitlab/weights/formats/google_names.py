"""How the authors' code of three generations names a ViT's tensors, recognized by content.

published    the files of the paper and of AugReg: a block's parts are numbered one after the other
linen        the authors' current code: a block's parts are numbered by kind
big_vision   the same under params/, beside optimizer states; its table of positions has no row for the class token
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.weights.tensors import Shape, TensorFile


@dataclass(frozen=True)
class Names:
    """One generation's names; those of a block's parts are below `Transformer/encoderblock_#/`."""

    prefix: str = ""  # of the tree with the model's parameters
    attention: str = "MultiHeadDotProductAttention_1"
    norm2: str = "LayerNorm_2"
    mlp: str = "MlpBlock_3"
    table: str = "Transformer/posembed_input/pos_embedding"
    token_row: bool = True  # whether the table has a row for the class token

    def query(self) -> str:
        """A tensor that every ViT has, with the heads as its second axis."""
        return f"{self.prefix}Transformer/encoderblock_0/{self.attention}/query/kernel"


PUBLISHED = Names()
LINEN = Names(attention="MultiHeadDotProductAttention_0", norm2="LayerNorm_1", mlp="MlpBlock_0")
BIG_VISION = dataclasses.replace(LINEN, prefix="params/", table="pos_embedding", token_row=False)
STYLES = {"published": PUBLISHED, "linen": LINEN, "big_vision": BIG_VISION}

PREFIXES = ("", "params/", "opt/target/")  # the last in big_vision's files of 2021
TABLES = (PUBLISHED.table, "Transformer/pos_embedding", BIG_VISION.table)
NUMBERED = re.compile(r"(?<=/)(standardized_conv2d|group_norm|conv2d)_\d+(?=/)")


def find_names(shapes: Mapping[str, Shape]) -> Names | None:
    """The names of the ViT in a file; None if it holds none. `table` is empty where positions are computed."""
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in shapes), None)
    if prefix is None:
        return None
    linen = dataclasses.replace(LINEN, prefix=prefix)
    names = linen if linen.query() in shapes else dataclasses.replace(PUBLISHED, prefix=prefix)
    table = next((table for table in TABLES if f"{prefix}{table}" in shapes), "")
    if not table:
        computed = names == linen and f"{prefix}conv_root/kernel" not in shapes
        return dataclasses.replace(names, table="", token_row=False) if computed else names
    rows = (*shapes[f"{prefix}{table}"], 0, 0)[1]
    combined = table == PUBLISHED.table or (rows > 1 and math.isqrt(rows - 1) ** 2 == rows - 1)
    return dataclasses.replace(names, table=table, token_row=combined)


def select_tree(file: TensorFile, prefix: str) -> TensorFile:
    """The tensors below a prefix; beside them are an optimizer's states."""
    return dataclasses.replace(file, shapes={name: x for name, x in file.shapes.items() if name.startswith(prefix)})


def strip_numbers(file: TensorFile) -> TensorFile:
    """A BiT file under its published names: some have a number after each layer's kind."""
    names: dict[str, str] = {}
    for name in file.shapes:
        plain = NUMBERED.sub(r"\1", name)
        names[name if plain in names else plain] = name  # of two, one does not belong, and is reported
    shapes = {ours: file.shapes[theirs] for ours, theirs in names.items()}
    return dataclasses.replace(file, shapes=shapes, read=lambda name: file.read(names[name]))


def add_sinusoids(file: TensorFile, names: Names, grid: Size) -> TensorFile:
    """The file with the table that big_vision computes and does not store (`sincos2d`)."""
    kernel = f"{names.prefix}embedding/kernel"
    width = file.shapes[kernel][-1]
    if width % 4 or width < 8:
        raise UserError(
            f"it has no table of positions, and sinusoids in two dimensions need a width of 4k, not {width}"
        )

    def read(name: str) -> Tensor:
        if name != f"{names.prefix}{BIG_VISION.table}":
            return file.read(name)
        return sinusoids(grid, width, torch.promote_types(file.read(kernel).dtype, torch.float32))

    shapes = {**file.shapes, f"{names.prefix}{BIG_VISION.table}": (1, grid[0] * grid[1], width)}
    return dataclasses.replace(file, shapes=shapes, read=read)


def sinusoids(grid: Size, width: int, dtype: torch.dtype) -> Tensor:
    """sin x, cos x, sin y, cos y at D/4 frequencies from 1 to 1/10,000, (1, hw, D)."""
    omega = 10_000 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    y, x = (torch.arange(side, dtype=torch.float64)[:, None] * omega for side in grid)
    down, across = (torch.cat([angles.sin(), angles.cos()], 1).to(dtype) for angles in (y, x))  # (h, D/2), (w, D/2)
    parts = [across[None].expand(grid[0], -1, -1), down[:, None].expand(-1, grid[1], -1)]
    return torch.cat(parts, -1).flatten(0, 1)[None]
