"""Low-rank updates (LoRA, Hu et al. 2021), kept apart from the weights that they are for.

A dense layer with the weight W becomes W + alpha / rank * B A, with A (rank, inputs) and B (outputs, rank). A folder
of updates has A and B of the layers `qkv`, `out`, `up` and `down` of every block, and the head, which is the
adapter's own. Everything else is in the base: another file, which must have the sha256 it had when they were trained.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import MOST_WIDTH, RATES, ModelConfig, Size
from vitlab.settings import Range, check_types, check_value, from_json
from vitlab.weights import box
from vitlab.weights.hub import is_id

LAYERS = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
A, B = "lora_a.weight", "lora_b.weight"
LARGEST_ALPHA = 1e6
OWN_FILE = "model.safetensors"  # of the updates themselves, in their folder
MOST_GROWTH = 1 << 24  # parameters: positions of a base at another image size
FREE = ("classes", "prelogits", *RATES)  # in which a base may differ from the adapted model


@dataclass(frozen=True)
class Adapter:
    """Low-rank updates without their tensors: rank, scale, and the weights that they are for."""

    rank: Annotated[int, Range(0, MOST_WIDTH), "inner width of the updates; 0: the head alone is another"]
    alpha: Annotated[float, Range(above=0, most=LARGEST_ALPHA), "updates are scaled by alpha / rank"]
    sha256: Annotated[str, "of the base's file of weights"]
    source: Annotated[str, "of the base: an absolute path, a hub id or box; empty where it is unknown"] = ""
    near: Annotated[str, "its path from the adapter's folder, for when both have moved"] = ""

    def __post_init__(self) -> None:
        check_types(self)
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise UserError(f"the base's sha256 must be 64 hexadecimal digits, not {self.sha256[:80]!r}")
        if "\0" in self.source + self.near:
            raise UserError("the path of the base has a character that no path has")
        if self.source and not is_absolute(self.source) and not is_id(self.source) and self.source != box.NAME:
            raise UserError(f"the base must be an absolute path or a hub id, not {self.source[:120]!r}")

    @property
    def is_on_hub(self) -> bool:
        return bool(self.source) and not is_absolute(self.source)

    def places(self, folder: Path) -> list[str]:
        """Where the base may be, seen from the adapter's folder: as it was named, as near as it was, or inside."""
        if not self.source:
            return []
        inside = self.inside(folder)
        if self.is_on_hub:
            return [*([inside] if os.path.exists(inside) else []), self.source]
        near = [os.path.normpath(folder.absolute() / self.near)] if self.near else []
        return list(dict.fromkeys([self.source, *near, inside]))

    def inside(self, folder: Path) -> str:
        """Where a copy of the base in the adapter's own folder has its place."""
        *above, name = [part for part in re.split(r"[/\\]", self.source.partition("@")[0]) if part] or ["base"]
        is_taken = name == OWN_FILE  # by the updates, so the base is in a folder of the name that its own had
        return str(folder / (above[-1] if above else "base") / name if is_taken else folder / name)


def is_absolute(path: str) -> bool:
    """On any system: a run may have been trained on another."""
    return PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute()


# ---- JSON: what the updates are is in the header of their file, where the base is in config.json beside it


def header_json(adapter: Adapter) -> dict[str, Any]:
    return {"rank": adapter.rank, "alpha": adapter.alpha, "sha256": adapter.sha256}


def base_json(adapter: Adapter, folder: Path) -> dict[str, str]:
    """Where the base is, for an adapter in `folder`."""
    if adapter.is_on_hub:
        return {"source": adapter.source}
    return {"source": adapter.source, "near": path_from(folder, adapter.source)}


def path_from(folder: Path, path: str) -> str:
    try:
        return Path(os.path.relpath(path, folder.absolute())).as_posix()
    except ValueError:  # on another drive
        return ""


def read_adapter(header: object, base: object) -> Adapter:
    """The inverse, for untrusted JSON."""
    about: dict[str, Any] = check_value(header, dict, "lora")
    place: dict[str, Any] = {} if base is None else check_value(base, dict, "base")
    if twice := sorted(about.keys() & place.keys()):
        raise UserError(f"base must not have '{twice[0]}'")
    return from_json(Adapter, {**about, **place})


# ---- tensors


def updated_layers(state: Mapping[str, Tensor]) -> list[str]:
    """The names of the layers that have updates, without `.weight`, of a model's state."""
    found = [name for name in state if name.startswith("blocks.") and name.endswith(LAYERS)]
    return [name.removesuffix(".weight") for name in found]


def adapter_state(state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tensors that an adapter must have for a model of this state, as shapes: the head's and the updates'."""
    shapes = {name: x.shape for name, x in state.items() if name.startswith("head.")}
    for layer in updated_layers(state) if rank else ():
        outputs, inputs = state[f"{layer}.weight"].shape
        shapes |= {f"{layer}.{A}": torch.Size((rank, inputs)), f"{layer}.{B}": torch.Size((outputs, rank))}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def check_base(adapted: ModelConfig, base: ModelConfig) -> None:
    """Raise UserError for a base whose model is not the one that the updates are for."""
    ours, theirs = vars(adapted), vars(base)
    if type(adapted) is not type(base):
        raise UserError("it is a model of another kind")
    for field in fields(adapted):
        key = field.name
        if key not in FREE and ours[key] != theirs[key]:
            raise UserError(f"it has {key}={theirs[key]}, and the adapter is for {key}={ours[key]}")


def check_growth(state: Mapping[str, Tensor], base: Mapping[str, Tensor], image_size: Size) -> None:
    """Raise UserError where tables for the adapter's image size, which no file holds, would be the most of a model."""
    need, have = (sum(x.numel() for x in tensors.values()) for tensors in (state, base))
    if need > 2 * have + MOST_GROWTH:
        at = f"{image_size[0]}x{image_size[1]} pixels"
        raise UserError(f"the adapter is for {at}, at which {have:,} parameters would become {need:,}")


def merge(
    state: Mapping[str, Tensor], base: Mapping[str, Tensor], own: Mapping[str, Tensor], adapter: Adapter
) -> dict[str, Tensor]:
    """The tensors of the adapted model, whose shapes `state` has: the base's, updated, with the adapter's head."""
    merged = {name: own[name].to(next(iter(base.values())).dtype) for name in own if name.startswith("head.")}
    for name, x in state.items():
        if name not in merged:
            if name not in base or base[name].shape != x.shape:
                raise UserError(f"it has no '{name}' of shape {tuple(x.shape)}")
            merged[name] = base[name]
    for layer in updated_layers(state) if adapter.rank else ():
        weight, a, b = merged[f"{layer}.weight"], own[f"{layer}.{A}"], own[f"{layer}.{B}"]
        exact = torch.promote_types(weight.dtype, a.dtype)  # float32 at least, as the base is
        update = b.to(exact) @ a.to(exact) * (adapter.alpha / adapter.rank)
        merged[f"{layer}.weight"] = (weight.to(exact) + update).to(weight.dtype)
    return {name: merged[name] for name in state}
