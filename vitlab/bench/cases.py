"""What `vitlab bench compare` measures: models, in training or not, and what is varied. Nothing here imports torch."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from vitlab.cost import quick_cost
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.names import configure
from vitlab.text import listed

What = Literal["train", "infer", "latency"]
Mode = Literal["eager", "compiled"]
Axis = Literal["batch", "size", "depth"]
WHATS: tuple[What, ...] = ("train", "infer", "latency")
MODES: tuple[Mode, ...] = ("eager", "compiled")
AXES: tuple[Axis, ...] = ("batch", "size", "depth")
WORDS = {"train": "training", "infer": "inference", "latency": "one image"}

MOST_ON_GPU, MOST_ELSEWHERE = 16e12, 50e9  # operations of a batch's forward pass, by default
LARGEST_BATCH = 512
Word = TypeVar("Word", bound=str)


@dataclass(frozen=True)
class Case:
    """What is measured side by side."""

    model: str
    what: What
    mode: Mode
    batch: int
    image_size: int
    depth: int | None = None  # None: the variant's own

    @property
    def config(self) -> ModelConfig:
        return configure(self.model, {"image_size": self.image_size, "depth": self.depth})

    @property
    def title(self) -> str:
        parts = [f"{self.model} {WORDS[self.what]}", self.mode, f"{self.image_size} px"]
        parts += [f"batch {self.batch}"] if self.what != "latency" else []
        return ", ".join([*parts, *([] if self.depth is None else [f"depth {self.depth}"])])


@dataclass(frozen=True)
class Group:
    """Cases that are shown together: one, or those along an axis."""

    cases: tuple[Case, ...]
    axis: Axis | None = None


def plan(
    models: Iterable[str],
    whats: Sequence[What],
    modes: Sequence[Mode],
    axes: Sequence[Axis],
    *,
    batch: int | None,
    image_size: int,
    gpu: bool,
) -> list[Group]:
    """All groups in order. Along an axis, training and inference are measured in the last of the modes."""
    groups = []
    for model in models:
        config = configure(model, {"image_size": image_size})
        images = usual_batch(config, gpu) if batch is None else batch
        for what in whats:
            cases = [Case(model, what, mode, 1 if what == "latency" else images, image_size) for mode in modes]
            groups += [Group((case,)) for case in cases]
            groups += [Group(grow(cases[-1], axis), axis) for axis in axes if what != "latency"]
    return groups


def usual_batch(config: ModelConfig, gpu: bool) -> int:
    """Images of a batch: a power of two, enough to keep the device busy for a moment."""
    room = int((MOST_ON_GPU if gpu else MOST_ELSEWHERE) // quick_cost(config).forward_flops)
    return min(LARGEST_BATCH, 1 << max(0, room.bit_length() - 1))


def grow(case: Case, axis: Axis) -> tuple[Case, ...]:
    """The case and others like it along an axis: other batches up to its own, other sizes of images, other depths."""
    config = case.config
    if axis == "batch":
        powers = [1 << k for k in range(case.batch.bit_length()) if 1 << k < case.batch]
        batches = [*powers[:: 2 if len(powers) > 5 else 1], case.batch]
        return tuple(dataclasses.replace(case, batch=n) for n in batches)
    if axis == "size":
        stride = 32 if isinstance(config, ResNetConfig) else config.stride
        sizes = {max(stride, round(share * case.image_size / stride) * stride) for share in (0.5, 1, 1.5, 2)}
        return tuple(dataclasses.replace(case, image_size=size) for size in sorted(sizes))
    if isinstance(config, ResNetConfig):
        raise UserError(f"{case.model} is a ResNet, whose depth is part of its name; leave depth out of --grow")
    depths = {max(1, int(share * config.depth)) for share in (0.25, 0.5, 1, 2)}
    return tuple(dataclasses.replace(case, depth=n) for n in sorted(depths))


def axis_value(case: Case, axis: Axis) -> int:
    values = {"batch": case.batch, "size": case.image_size, "depth": case.depth}
    return values[axis] or 0


def pick(text: str, option: str, known: Iterable[Word]) -> list[Word]:
    """The words of a list such as train,infer, in the order of those that are known; UserError for another one."""
    words, known = [word.strip() for word in text.split(",")], list(known)
    for word in words:
        if word not in known:
            raise UserError(f"{option} must be a list of {listed(known)}, not '{word}'")
    return [word for word in known if word in words]
