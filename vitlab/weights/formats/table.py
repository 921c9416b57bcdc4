"""One table per format, used in both directions: which tensors of a file make which of ours, by which transform.

A transform is a pair of inverse functions on short lists of tensors. The shapes that a file must have are computed by
applying `from_vitlab` to our own shapes, so that a wrong tensor is reported before any is read.

Shapes: D width, H heads, K head width, C channels.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.meta import meta_model
from vitlab.weights.tensors import Shape, TensorFile

TensorsFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Transform:
    """`to_vitlab` makes our tensors from a file's, `from_vitlab` a file's from ours."""

    to_vitlab: TensorsFunction
    from_vitlab: TensorsFunction
    loose: bool = False  # leading axes of length 1 are optional in the file


def per_tensor(
    to_vitlab: Callable[[Tensor], Tensor], from_vitlab: Callable[[Tensor], Tensor], loose: bool = False
) -> Transform:
    return Transform(lambda xs: [to_vitlab(x) for x in xs], lambda xs: [from_vitlab(x) for x in xs], loose)


SAME = per_tensor(lambda x: x, lambda x: x)


# ---- rows


@dataclass(frozen=True)
class Row:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform

    def rename(self, ours: Callable[[str], str], theirs: Callable[[str], str]) -> "Row":
        return Row(tuple(map(ours, self.ours)), tuple(map(theirs, self.theirs)), self.transform)


def row(ours: str, theirs: str, transform: Transform = SAME) -> Row:
    return Row((ours,), (theirs,), transform)


def pair(ours: str, theirs: str) -> list[Row]:
    """A layer's weight and bias under PyTorch's names."""
    return [row(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def expand(table: Sequence[Row], c: ModelConfig) -> list[Row]:
    """The rows of one model: those of the tensors it has, those with a `#` once for each block."""
    own = tensor_names(c)
    present = [r for r in table if own.issuperset(r.ours)]
    rows: list[Row] = []
    for is_block, group in groupby(present, lambda r: "#" in r.ours[0]):
        if is_block and isinstance(c, ViTConfig):
            block = list(group)
            rows += [r.rename(number_block(i), number_block(i)) for i in range(c.depth) for r in block]
        else:
            rows += group
    return rows


def tensor_names(c: ModelConfig) -> set[str]:
    """The names of a model's tensors, with `#` for a block's number: all blocks have the same."""
    one = dataclasses.replace(c, depth=1) if isinstance(c, ViTConfig) else c
    return {name.replace("blocks.0.", "blocks.#.") for name in meta_model(one).state_dict()}


def number_block(i: int) -> Callable[[str], str]:
    return lambda name: name.replace("#", str(i))


def stage_rows(
    stages: Sequence[int], unit: Sequence[Row], shortcut: Sequence[Row], ours: str, theirs: str
) -> list[Row]:
    """The rows of a ResNet's units: `unit` for each, and `shortcut` for the first of a stage.

    `ours` and `theirs` are put before the names, with the number of the stage for {i} and of the unit for {j}, or for
    {stage} and {unit} where they count from one.
    """
    rows: list[Row] = []
    for i, units in enumerate(stages):
        for j in range(units):
            numbers = {"i": i, "j": j, "stage": i + 1, "unit": j + 1}
            before = ours.format(**numbers), theirs.format(**numbers)
            rows += [r.rename(before[0].__add__, before[1].__add__) for r in (*unit, *(() if j else shortcut))]
    return rows


# ---- applying a table


def to_vitlab(table: Sequence[Row], ours: Mapping[str, Tensor], file: TensorFile) -> dict[str, Tensor]:
    """Our tensors, made from a file's; `ours` gives the shapes they must have."""
    check_tensors(table, ours, file)
    tensors: dict[str, Tensor] = {}
    for r in table:
        made = r.transform.to_vitlab([file.read(name) for name in r.theirs])
        tensors |= {name: x.contiguous() for name, x in zip(r.ours, made, strict=True)}
    return tensors


def from_vitlab(table: Sequence[Row], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors, made from ours."""
    theirs: dict[str, Tensor] = {}
    for r in table:
        made = r.transform.from_vitlab([ours[name] for name in r.ours])
        theirs |= {name: x.contiguous() for name, x in zip(r.theirs, made, strict=True)}
    used = {name for r in table for name in r.ours}
    if left := [name for name in ours if name not in used]:
        raise UserError(f"the target format has no tensors for {quote_names(left)}")
    return theirs


def check_tensors(table: Sequence[Row], ours: Mapping[str, Tensor], file: TensorFile) -> None:
    """Raise an error that names every tensor of a file that is unexpected, missing or of a wrong shape."""
    faults = name_faults(table, file)
    for r in table:
        made = r.transform.from_vitlab([ours[name].to("meta") for name in r.ours])
        for name, tensor in zip(r.theirs, made, strict=True):
            shape, expected = file.shapes.get(name), tuple(tensor.shape)
            if shape in (None, expected) or (r.transform.loose and strip_ones(shape) == strip_ones(expected)):
                continue
            faults.append(f"'{name}' has shape {shape}, expected {expected}")
    raise_faults(faults, file)


def check_names(table: Sequence[Row], file: TensorFile) -> None:
    """The same for names alone."""
    raise_faults(name_faults(table, file), file)


def refuse_foreign(table: Sequence[Row], file: TensorFile) -> None:
    """Raise a UserError for tensors that no model of a table has, whatever their numbers; other faults come of them."""
    patterns = (re.escape(name).replace(re.escape("#"), r"\d{1,6}") for r in table for name in r.theirs)
    known = re.compile("|".join(patterns))
    if others := [name for name in file.shapes if not known.fullmatch(name)]:
        raise_faults([f"{quote_names(others)} {'does' if len(others) == 1 else 'do'} not belong"], file)


def raise_faults(faults: Sequence[str], file: TensorFile) -> None:
    if faults:
        raise UserError(f"{file.path} is not a supported checkpoint: {'; '.join(faults)}")


def name_faults(table: Sequence[Row], file: TensorFile) -> list[str]:
    expected = dict.fromkeys(name for r in table for name in r.theirs)
    faults = []
    if unexpected := [name for name in file.shapes if name not in expected]:
        faults.append(f"{quote_names(unexpected)} {'does' if len(unexpected) == 1 else 'do'} not belong")
    if missing := [name for name in expected if name not in file.shapes]:
        faults.append(f"{quote_names(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return faults


def strip_ones(shape: Shape | None) -> Shape:
    """A shape without its leading axes of length 1."""
    shape = shape or ()
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape


def quote_names(names: Sequence[str], limit: int = 40) -> str:
    """All the names, those that differ in one number only written as a range: 'blocks.0-11.gamma'."""
    pattern = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)")
    groups: dict[str, list[int]] = {}
    for name in names:
        number = pattern.search(name)
        key = pattern.sub("\0", name, count=1)
        groups.setdefault(key, []).append(int(number[0]) if number else 0)
    words = [f"'{key.replace(chr(0), format_ranges(numbers))}'" for key, numbers in groups.items()]
    more = f" and {len(words) - limit} more kinds" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def format_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as 0-2+5."""
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return "+".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
