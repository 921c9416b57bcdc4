"""Models from the shapes in a file: the steps that the formats of other libraries share."""

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import Pool, PositionKind, ResNetConfig, Size, Standardize, StemConfig, ViTConfig, as_size
from vitlab.models.names import SIZES
from vitlab.weights.formats.base import OWN, ROTARY, FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.table import Row, check_names, expand, quote_names
from vitlab.weights.tensors import Shape

T = TypeVar("T")
log = logging.getLogger("vitlab")
IMAGE_SIZE = (224, 224)  # where nothing in a file depends on it
HEADS = {width: heads for _, width, _, heads in SIZES.values()} | dict.fromkeys((1152, 1536, 1664), 16)  # SigLIP, G/14


def read_vit(
    source: RawCheckpoint,
    table: Sequence[Row],
    known: FormatDefaults,
    default: FormatDefaults,
    image_size: Size | None,
    *,
    config_size: Size | None = None,
    stem: tuple[tuple[int, ...], int] | None = None,
    pool: Pool = "token",
    positions: PositionKind = "1d",
    table_rank: int = 3,
    fields: Collection[str] = (),
    values: Mapping[str, Any] | None = None,
    labels: object = None,
) -> ParsedCheckpoint:
    """A ViT by the shapes of its tensors, its format's table (with `#` for a block's number) and the settings.

    `image_size` is the caller's, `config_size` that of the config with the weights; `stem` has the stages and the
    width of a hybrid's ResNet; `pool` is what the tensors have, unless the settings name another; `table_rank` counts
    the axes of the file's positions. `fields` names the switches of later families that the format has: they follow
    from the tensors, except those in `values`. A UserError names what is missing or does not agree.
    """
    config_size = config_size or beside_size(source)
    settings = known.over(default)
    width, _, *patch = find_shape(source, table, "embed.weight", 4)
    if patch[0] != patch[1]:
        raise UserError(f"{source.name} has patches of {patch[0]}x{patch[1]}; only square ones are supported")
    stem_config = StemConfig(stem[0], stem[1], *convolution_settings(settings)) if stem else None
    stride = patch[0] * (stem_config.stride if stem_config else 1)
    before, after = find_row(table, "blocks.#.norm1.weight").theirs[0].split("#")
    pool = find_pool(source, table, settings.pool, pool)
    switches = find_switches(source, table, pool, fields) | rotary_values(source, known, default, fields)
    switches |= values or {}
    up = find_shape(source, table, "blocks.#.mlp.up.weight", 2)[0]
    config = ViTConfig(
        image_size=(stride, stride),
        patch=patch[0],
        depth=count(source, f"{before}#{after[0]}"),
        width=width,
        mlp=up // 2 if switches.get("mlp_kind") == "swiglu" else up,
        heads=settings.heads if settings.heads is not None else default_heads(source, width),
        classes=find_outputs(source, table, "head.weight", 2),
        stem=stem_config,
        pool=pool,
        prelogits=find_outputs(source, table, "prelogits.weight", 2),
        positions=positions,
        gelu=not_none(settings.gelu),
        norm_eps=not_none(settings.norm_eps),
        **switches,
    )
    rows = expand(table, config)
    size = config_size or image_size or IMAGE_SIZE
    if positions != "none":
        length = find_shape(source, table, "positions.table", table_rank)[1]
        free = "prefix_positions" in fields and "prefix_positions" not in switches
        try:
            config, size = place_table(source, config, length, config_size, image_size, free)
        except UserError:
            check_names(rows, source.tensors)  # a tensor of another architecture may be the reason
            raise
    config = dataclasses.replace(config, image_size=size)
    defaulted = FormatDefaults(heads=config.heads).over(default).missing_in(known)
    card = Card(not_none(settings.preprocess), find_labels(source, labels, config.classes))
    return ParsedCheckpoint(config, card, defaulted, rows, source.tensors)


def read_resnet(
    source: RawCheckpoint,
    table: Sequence[Row],
    known: FormatDefaults,
    default: FormatDefaults,
    image_size: Size | None,
    stages: tuple[int, ...],
    labels: object = None,
) -> ParsedCheckpoint:
    """A BiT ResNet by the shapes of its tensors, its format's table and the settings."""
    for name in OWN:
        if getattr(known, name) is not None:
            raise UserError(f"{source.name} is a ResNet and has no {name}; its norms have group_eps")
    image_size = beside_size(source) or image_size
    settings = known.over(default)
    width, classes = find_shape(source, table, "root.weight", 4)[0], find_outputs(source, table, "head.weight", 4)
    config = ResNetConfig(image_size or IMAGE_SIZE, stages, width, classes, *convolution_settings(settings))
    defaulted = default.missing_in(known) + (() if image_size else ("image_size",))
    card = Card(not_none(settings.preprocess), find_labels(source, labels, classes))
    return ParsedCheckpoint(config, card, defaulted, expand(table, config), source.tensors)


# ---- what follows from the tensors that a file has


def find_switches(source: RawCheckpoint, table: Sequence[Row], pool: Pool, fields: Collection[str]) -> dict[str, Any]:
    """The fields of later families that follow from a file's tensors, those that its format has."""

    def has(ours: str) -> bool:
        return is_stored(source, table, ours)

    up, down = (find_shape(source, table, f"blocks.#.mlp.{part}.weight", 2) for part in ("up", "down"))
    biases = {"all": "blocks.#.attention.qkv.bias", "qv": "blocks.#.attention.qv_bias"}
    found = {
        "extra_token": has("token") and pool not in ("token", "token_mean"),
        "registers": find_shape(source, table, "registers", 3)[1] if has("registers") else 0,
        "embed_bias": has("embed.bias"),
        "norm_before": has("norm_before.weight"),
        "final_norm": "tokens" if has("norm.weight") else "none",
        "layer_scale": has("blocks.#.scale1.factor"),
        "qkv_bias": next((kind for kind, name in biases.items() if has(name)), "none"),
        "qk_norm": has("blocks.#.attention.q_norm.weight"),
        "attention_norm": has("blocks.#.attention.norm.weight"),
        "mlp_kind": "swiglu" if up[0] == 2 * down[1] else "gelu",
        "mlp_norm": has("blocks.#.mlp.norm.weight"),
    }
    return {name: value for name, value in found.items() if name in fields}


def find_pool(source: RawCheckpoint, table: Sequence[Row], wanted: Pool | None, stored: Pool) -> Pool:
    """The pooling that the caller or the config names, if the tensors allow it."""
    if wanted is None or wanted == stored:
        return stored
    if "attention" in (wanted, stored):
        raise UserError(f"{source.name} pools by pool='{stored}' alone, by its tensors, not by '{wanted}'")
    if wanted in ("token", "token_mean") and not is_stored(source, table, "token"):
        raise UserError(f"{source.name} has no class token for pool='{wanted}'; leave it at '{stored}'")
    return wanted


def rotary_values(
    source: RawCheckpoint, known: FormatDefaults, default: FormatDefaults, fields: Collection[str]
) -> dict[str, Any]:
    """The fields of rotary positions; those that a format usually has count only where they are on."""
    settings = known.over(default)
    settings = known if settings.rotary in (None, "none") else settings
    values = {name: vars(settings)[name] for name in ROTARY if vars(settings)[name] is not None}
    other = [name for name, value in values.items() if value != getattr(ViTConfig, name)]
    if other and "rotary" not in fields:
        raise UserError(f"{source.name} is of a format without rotary positions; leave out {other[0]}=")
    return values


def place_table(
    source: RawCheckpoint,
    config: ViTConfig,
    length: int,
    config_size: Size | None,
    image_size: Size | None,
    free: bool,
) -> tuple[ViTConfig, Size]:
    """The config and the image size for a table of so many positions.

    Where the format is free to give the tokens before the patches a position or not, what fits the size decides.
    """
    placed = {config.placed: config}
    if free and config.prefix:
        placed = {0: dataclasses.replace(config, prefix_positions="none"), **placed}
    if free and config.registers:
        placed[config.prefix] = dataclasses.replace(config, prefix_positions="all")
    alone, asked = (find_sizes(source, config, length, placed, size) for size in (config_size, image_size))
    if config_size is None and config.placed in asked and alone and config.placed not in alone:
        raise UserError(
            f"{source.name} has {length} positions: of a square of patches, or of the class token and {image_size}; "
            "leave out image_size= and resize the model, or put a config.json with its size beside the file"
        )
    if config_size is None and config.placed and 0 in alone and length > 1:
        side = math.isqrt(length)
        log.warning(
            f"{source.name} has {length} positions, taken as those of {side}x{side} patches; {side - 1}x{side + 1} "
            "patches and a class token have as many, and only a config.json with the image size beside the file decides"
        )
    fits = alone or ({} if config_size else asked)
    for lead, size in fits.items():
        return placed[lead], size
    return config, find_size(source, length - config.placed, config.stride, config_size, image_size)


def find_sizes(
    source: RawCheckpoint, config: ViTConfig, length: int, leads: Collection[int], size: Size | None
) -> dict[int, Size]:
    """The image sizes for which a table has a row for each patch after so many others; squares, unless one is given."""
    sizes = {}
    for lead in leads:
        with contextlib.suppress(UserError):
            sizes[lead] = find_size(source, length - lead, config.stride, size, None)
    return sizes


def is_stored(source: RawCheckpoint, table: Sequence[Row], ours: str) -> bool:
    """Whether the file has the tensors of one of ours; of blocks, the first block's."""
    return any(ours in r.ours and r.theirs[0].replace("#", "0") in source.shapes for r in table)


def find_row(table: Sequence[Row], ours: str) -> Row:
    return next(r for r in table if ours in r.ours)


def find_shape(source: RawCheckpoint, table: Sequence[Row], ours: str, rank: int) -> Shape:
    """The shape that our tensor gets from the file, whose own tensors must have `rank` axes; of blocks, the first."""
    r = find_row(table, ours)
    shapes = [stored_shape(source, name.replace("#", "0"), rank) for name in r.theirs]
    try:
        made = r.transform.to_vitlab([torch.empty(shape, device="meta") for shape in shapes])
    except RuntimeError:  # several tensors that make one of ours
        words = " and ".join(map(str, shapes))
        raise UserError(f"{quote_names(r.theirs)} in {source.name} have shapes {words}, which do not fit") from None
    return tuple(made[r.ours.index(ours)].shape)


def find_outputs(source: RawCheckpoint, table: Sequence[Row], ours: str, rank: int) -> int:
    """The number of outputs of a layer, 0 if the file does not have it."""
    return find_shape(source, table, ours, rank)[0] if is_stored(source, table, ours) else 0


def stored_shape(source: RawCheckpoint, name: str, rank: int) -> Shape:
    """The shape of a file's tensor, which must have `rank` axes."""
    shape = source.shapes.get(name)
    if shape is None:
        raise UserError(f"{source.name} lacks '{name}'")
    if len(shape) != rank or min(shape) < 1:
        raise UserError(f"'{name}' in {source.name} has shape {shape}, expected {rank} axes")
    return shape


def count(source: RawCheckpoint, pattern: str, first: int = 0) -> int:
    """How many there are of `blocks.#.`, numbered from `first` on without a gap."""
    before, after = pattern.split("#")
    number = re.compile(re.escape(before) + r"(\d{1,6})" + re.escape(after))
    numbers = {int(match[1]) for name in source.shapes if (match := number.match(name))}
    total = 0
    while first + total in numbers:
        total += 1
    return total


def count_units(source: RawCheckpoint, stage: str, unit: str, first: int = 0) -> tuple[int, ...]:
    """How many units each stage of a ResNet has, such as `stages.#.` with `blocks.#.`."""
    stages = [stage.replace("#", str(first + i)) for i in range(count(source, stage, first))]
    return tuple(count(source, name + unit, first) for name in stages)


def find_size(
    source: RawCheckpoint, patches: int, stride: int, config_size: Size | None, image_size: Size | None
) -> Size:
    """The image size whose grid has so many patches.

    The config's size comes first; then a square; then the caller's size, if it has just this many patches. The table
    of positions itself is the same for 14x14 and 7x28. Pixels beyond the last complete patch are left out, as public
    code does (384 pixels in patches of 14 are 378).
    """
    side = math.isqrt(max(0, patches))
    sizes = [config_size] if config_size else [(side * stride, side * stride), *([image_size] if image_size else [])]
    for height, width in sizes:
        if patches > 0 and (height // stride) * (width // stride) == patches:
            return height // stride * stride, width // stride * stride
    if config_size:
        raise UserError(
            f"{source.name} has positions for {patches} patches of {stride} pixels, and its config has images of "
            f"{config_size[0]}x{config_size[1]}"
        )
    raise UserError(
        f"{source.name} has positions for {patches} patches, which is no square; give image_size=(height, width) with "
        f"that many patches of {stride} pixels"
    )


def beside_size(source: RawCheckpoint) -> Size | None:
    return as_size(source.beside["image_size"]) if "image_size" in source.beside else None


def default_heads(source: RawCheckpoint, width: int) -> int:
    if width not in HEADS and width % 64:
        raise UserError(f"{source.name} does not give the number of heads for its width {width}; give heads=")
    return HEADS.get(width, width // 64)


def find_labels(source: RawCheckpoint, names: object, classes: int) -> tuple[str, ...] | None:
    """Class names from a list, or from an object with the class number as key; None unless there is one per class."""
    if not names:
        return None
    if isinstance(names, Mapping):
        numbers = [str(i) for i in range(len(names))]
        names = [names[i] for i in numbers] if set(numbers) == set(names) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the class names of {source.name} must be a list of words, one per class")
    return tuple(names) if len(names) == classes else None


def convolution_settings(settings: FormatDefaults) -> tuple[Standardize, float, float]:
    return not_none(settings.standardize), not_none(settings.standardize_eps), not_none(settings.group_eps)


def not_none(value: T | None) -> T:
    """A setting for which the format has a default."""
    assert value is not None
    return value
