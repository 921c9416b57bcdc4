"""One table per format, used in both directions: which of their tensors make which of ours, and by what move.

A move is a pair of inverse functions on short lists of tensors. The shapes a file must have are found by moving
our own shapes outwards, so that a wrong tensor is named before anything is read.

Shapes: D width, H heads, K head width, C channels.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.weights.tensors import Shape, TensorFile

Many = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Move:
    """`inward` makes our tensors of theirs, `outward` theirs of ours."""

    inward: Many
    outward: Many
    loose: bool = False  # axes of length 1 in front do not count


@dataclass(frozen=True)
class Row:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    move: Move


def each(inward: Callable[[Tensor], Tensor], outward: Callable[[Tensor], Tensor], loose: bool = False) -> Move:
    return Move(lambda xs: [inward(x) for x in xs], lambda xs: [outward(x) for x in xs], loose)


SAME = each(lambda x: x, lambda x: x)
TRANSPOSE = each(lambda x: x.T, lambda x: x.T)
CONV = each(lambda x: x.permute(3, 2, 0, 1), lambda x: x.permute(2, 3, 1, 0))  # (h, w, in, out) to (out, in, h, w)
POINT = each(lambda x: x.flatten(1), lambda x: x[:, :, None, None])  # a 1x1 convolution as a dense layer
POINT_LAST = each(lambda x: x.flatten(0, 2).T, lambda x: x.T[None, None])  # the same, (1, 1, in, out)
MAP_NORM = each(lambda x: x.flatten(), lambda x: x[None, None, None], loose=True)  # (1, 1, 1, C), or (C) in newer files
JOIN3 = Move(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(3))  # queries, keys and values
SPLIT2 = Move(lambda xs: xs[0].chunk(2), lambda xs: [torch.cat(list(xs))])  # keys and values


def join_heads(heads: int) -> Move:
    """Three kernels (D, H, K) as one matrix (3D, D)."""
    return Move(
        lambda xs: [torch.cat([x.flatten(1).T for x in xs])],
        lambda xs: [x.T.unflatten(1, (heads, -1)) for x in xs[0].chunk(3)],
    )


def join_head_biases(heads: int) -> Move:
    """Three biases (H, K) as one vector (3D)."""
    return Move(
        lambda xs: [torch.cat([x.flatten() for x in xs])],
        lambda xs: [x.unflatten(0, (heads, -1)) for x in xs[0].chunk(3)],
    )


def merge_heads(heads: int) -> Move:
    """A kernel (H, K, D) as a matrix (D, D)."""
    return each(lambda x: x.flatten(0, 1).T, lambda x: x.T.unflatten(0, (heads, -1)))


def row(ours: str, theirs: str, move: Move = SAME) -> Row:
    return Row((ours,), (theirs,), move)


def pair(ours: str, theirs: str) -> list[Row]:
    """A layer's weight and bias under PyTorch's names."""
    return [row(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


# ---- applying a table


def inward(table: Sequence[Row], ours: Mapping[str, Tensor], file: TensorFile) -> dict[str, Tensor]:
    """Our tensors, made of a file's; `ours` gives the shapes they must have."""
    check(table, ours, file)
    tensors: dict[str, Tensor] = {}
    for r in table:
        made = r.move.inward([file.read(name) for name in r.theirs])
        tensors |= {name: x.contiguous() for name, x in zip(r.ours, made, strict=True)}
    return tensors


def outward(table: Sequence[Row], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, made of ours."""
    theirs: dict[str, Tensor] = {}
    for r in table:
        made = r.move.outward([ours[name] for name in r.ours])
        theirs |= {name: x.contiguous() for name, x in zip(r.theirs, made, strict=True)}
    return theirs


def check(table: Sequence[Row], ours: Mapping[str, Tensor], file: TensorFile) -> None:
    """Refuse a file with a leftover, missing or misshapen tensor, naming each."""
    faults = name_faults(table, file)
    for r in table:
        wanted = r.move.outward([ours[name].to("meta") for name in r.ours])
        for name, tensor in zip(r.theirs, wanted, strict=True):
            found, due = file.shapes.get(name), tuple(tensor.shape)
            if found is not None and found != due and not (r.move.loose and trimmed(found) == trimmed(due)):
                faults.append(f"'{name}' has shape {found} where {due} is due")
    if faults:
        raise UserError(f"{file.path} is no checkpoint this package knows: {'; '.join(faults)}")


def check_names(table: Sequence[Row], file: TensorFile) -> None:
    if faults := name_faults(table, file):
        raise UserError(f"{file.path} is no checkpoint this package knows: {'; '.join(faults)}")


def name_faults(table: Sequence[Row], file: TensorFile) -> list[str]:
    wanted = dict.fromkeys(name for r in table for name in r.theirs)
    faults = []
    if leftover := [name for name in file.shapes if name not in wanted]:
        faults.append(f"{named(leftover)} {'does' if len(leftover) == 1 else 'do'} not belong")
    if missing := [name for name in wanted if name not in file.shapes]:
        faults.append(f"{named(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return faults


def trimmed(shape: Shape) -> Shape:
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape


def named(names: Sequence[str], limit: int = 40) -> str:
    """All the names, those that differ in one number only written as a range: blocks.0-11.gamma."""
    pattern = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)")
    groups: dict[str, list[int]] = {}
    for name in names:
        number = pattern.search(name)
        key = pattern.sub("\0", name, count=1)
        groups.setdefault(key, []).append(int(number[0]) if number else 0)
    words = [f"'{key.replace(chr(0), ranges(numbers))}'" for key, numbers in groups.items()]
    more = f" and {len(words) - limit} more kinds" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def ranges(numbers: Sequence[int]) -> str:
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return "+".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
