"""A run's state on disk: written completely or not at all, checked when read, nothing unpickled.

checkpoints/last        state.safetensors (or the shards of a sharded run) and state.json
checkpoints/last.old    the one before, until the next is complete
checkpoints/last.new    one being written; without its state.json it is ignored
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.files import fsync, largest_number, read_json, save_tensors, sha256
from vitlab.settings import Range, check_types, from_json
from vitlab.text import brief
from vitlab.training.lora import own_state
from vitlab.training.muon import Muon, hidden_matrices
from vitlab.training.optim import Average
from vitlab.training.parallel import place_like

TENSORS, METADATA = "state.safetensors", ".metadata"  # the latter beside the shards of a sharded run
META = "state.json"
NAMES = ("last", "last.new", "last.old", "best")


@dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint holds beside its tensors; raises UserError for values that cannot be."""

    step: Annotated[int, Range(0, 2**62), "steps done"]
    log_bytes: Annotated[int, Range(0, 2**62), "length of log.jsonl at that step"]
    micro: Annotated[int, Range(1, 2**62), "images of a micro-batch: another size would add up in another order"]
    best: Annotated[float | None, Range(), "best score so far"]
    world: Annotated[int, Range(1, 2**62), "world size"] = 1
    tested: Annotated[bool, "false: a signal interrupted the test after this step"] = True
    stale: Annotated[int, Range(0, 2**62), "validations since one was better in score or loss"] = 0
    least: Annotated[float | None, Range(), "least loss of a validation so far"] = None

    def __post_init__(self) -> None:
        check_types(self)


# ---- the state as one flat table of named tensors


Scales = Mapping[str, Tensor]  # of products in 8 bits, by the names of layers


def collect_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, scales: Scales | None = None
) -> dict[str, Tensor]:
    """Everything that training changes, by name: model/..., optimizer/..., ema/..., fp8/...; nothing is copied."""
    state = {f"model/{name}": tensor for name, tensor in own_state(module).items()}
    for name, p in module.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                state[f"optimizer/{name}/{key}"] = value
    if average is not None:
        state |= {f"ema/{name}": tensor for name, tensor in average.weights.items()}
    state |= {f"fp8/{name}": tensor for name, tensor in (scales or {}).items()}
    return {key: tensor.detach() for key, tensor in state.items()}


def expected_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, scales: Scales | None = None
) -> dict[str, Tensor]:
    """For every name that a state may have, the tensor it is copied to or, of an optimizer, belongs to."""
    matrices = hidden_matrices(module) if isinstance(optimizer, Muon) else {}
    adam = isinstance(optimizer, torch.optim.AdamW | Muon)
    expected = {f"model/{name}": tensor for name, tensor in own_state(module).items()}
    for name, p in module.named_parameters():
        fields = ("step", "exp_avg", "exp_avg_sq") if adam and name not in matrices else ("momentum_buffer",)
        expected |= {f"optimizer/{name}/{field}": p for field in fields}
    expected |= {f"fp8/{name}": tensor for name, tensor in (scales or {}).items()}
    return expected | {f"ema/{name}": tensor for name, tensor in (average.weights if average else {}).items()}


@torch.no_grad()
def restore_state(
    state: dict[str, Tensor],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    scales: Scales | None = None,
) -> None:
    """Copy a state into a module, its optimizer, average and scales; raises UserError unless it fits them."""
    expected = expected_state(module, optimizer, average, scales)
    check_state(state, expected)
    for key, tensor in state.items():
        target = expected[key]
        if not key.startswith("optimizer/"):
            target.copy_(place_like(tensor, target))
            continue
        # a fused optimizer counts its steps on the device, the others on the CPU
        step_device = target.device if optimizer.defaults.get("fused") else torch.device("cpu")
        field = key.rpartition("/")[2]
        optimizer.state[target][field] = place_like(tensor, target) if tensor.ndim else tensor.to(step_device)


def check_state(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise UserError for a tensor that is not expected, has another shape, or lacks others that belong to it."""
    for key, tensor in state.items():
        is_count = key.startswith("optimizer/") and key.endswith("/step")
        fits = key in expected and tensor.shape == (torch.Size() if is_count else expected[key].shape)
        if not fits or not tensor.is_floating_point():
            raise UserError(f"the checkpoint's tensor '{key[:100]}' does not belong to this run's model")
    trained = {key.rpartition("/")[0] for key in state if key.startswith("optimizer/")}
    needed = (key for key in expected if key.startswith(("model/", "fp8/")) or key.rpartition("/")[0] in trained)
    missing = [key for key in needed if key not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {len(missing)} tensors of this run's model, such as '{missing[0]}'")


# ---- files


def last_checkpoint(out: Path) -> Path:
    return out / "checkpoints" / "last"


def write_checkpoint(folder: Path, state: dict[str, Tensor], meta: CheckpointMeta) -> None:
    """Write a checkpoint; the one that was there becomes `.old`."""

    def write(new: Path) -> None:
        save_tensors({name: tensor.cpu().contiguous() for name, tensor in state.items()}, new / TENSORS)
        write_meta(new, meta)

    replace_folder(folder, write)


def write_meta(folder: Path, meta: CheckpointMeta) -> None:
    """Complete a checkpoint by its state.json: the metadata and the sha256 of every file beside it."""
    table = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    about = {"format": "vitlab/1", **vars(meta), "sha256": table}
    (folder / META).write_text(json.dumps(about | {"digest": meta_digest(about)}, indent=1))


def meta_digest(about: Mapping[str, Any]) -> str:
    """The sha256 of the content of a state.json, whatever its spacing."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace `folder` by what `write` writes, or leave it: a sibling is written, forced to disk, then renamed."""
    with disk_errors(folder):
        new = make_new_folder(folder)
        try:
            write(new)
            commit_folder(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def make_new_folder(folder: Path) -> Path:
    """An empty `.new` sibling to write to. The `.old` one is removed first: `folder` itself is the backup now."""
    new = sibling(folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(sibling(folder, "old"), ignore_errors=True)
    new.mkdir(parents=True)
    return new


def commit_folder(folder: Path) -> None:
    """Make the `.new` sibling, forced to disk, the folder itself, and the folder its `.old` sibling."""
    new = sibling(folder, "new")
    for path in [*new.iterdir(), new]:
        fsync(path)
    if folder.exists():
        folder.rename(sibling(folder, "old"))
    new.rename(folder)
    fsync(folder.parent)


def sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of a disk that is full or gone into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise UserError(
            f"could not write {folder} ({reason}); the last good checkpoint is kept: free some space, or "
            "repair the disk, and continue with --resume"
        ) from error


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint, and the names of damaged ones beside it, each with the reason."""

    folder: Path
    meta: CheckpointMeta
    damaged: tuple[str, ...]


def find_checkpoint(
    folder: Path, check: Callable[[CheckpointMeta], None] = lambda meta: None
) -> FoundCheckpoint | None:
    """The newest complete checkpoint: `last`, or what a crash left beside it; None before the first.

    `check` raises UserError for one that cannot be used. Raises UserError where all of them are damaged.
    """
    damaged: list[str] = []
    complete: list[tuple[Path, CheckpointMeta]] = []
    for place in (folder, sibling(folder, "new"), sibling(folder, "old")):
        if place.exists():
            try:
                meta = read_meta(place)
            except (UserError, OSError) as error:
                if place != sibling(folder, "new"):  # that one was merely being written
                    damaged.append(f"{place.name} ({error})")
                continue
            try:
                check(meta)
                complete.append((place, meta))
            except UserError as error:
                damaged.append(f"{place.name} ({error})")
    if complete:
        place, meta = max(complete, key=lambda pair: pair[1].step)
        return FoundCheckpoint(place, meta, tuple(damaged))
    if damaged:
        reasons = ", ".join(damaged)
        raise UserError(f"no checkpoint in {folder.parent} is complete: {reasons}; start again in a new --out")
    return None


def read_meta(folder: Path) -> CheckpointMeta:
    """A checkpoint's metadata, if every file is as it was written; raises UserError or OSError."""
    about = read_run_json(folder / META)
    if about.pop("digest", None) != meta_digest(about):
        raise UserError(f"{META} is not as it was written")
    table = about.get("sha256")
    if not isinstance(table, dict) or not {TENSORS, METADATA} & set(table):
        raise UserError(f"{META} lists no tensors")
    for name, expected in table.items():
        path = folder / name
        if Path(name).name != name or path.is_symlink():
            raise UserError(f"{META} names {name[:100]!r}, which is not in its folder")
        if not path.is_file():
            raise UserError(f"{name} is missing")
        if sha256(path) != expected:
            raise UserError(f"{name} is damaged")
    return from_json(CheckpointMeta, {f.name: about[f.name] for f in fields(CheckpointMeta) if f.name in about})


def remove_leftovers(folder: Path, used: Path) -> None:
    """After a crash, make the checkpoint that was used `folder` itself, so that no damaged one becomes the backup."""
    with disk_errors(folder):
        if used != folder:
            if folder.exists():
                shutil.rmtree(folder)
            used.rename(folder)
        shutil.rmtree(sibling(folder, "new"), ignore_errors=True)


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors by name; raises UserError where they cannot be read."""
    try:
        return load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} cannot be read: {brief(error)}") from error


# ---- a run's folder, which may come from anywhere


def read_run_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run's folder; raises UserError for links and for numbers beyond 2^63."""
    try:
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no regular file")
        data = read_json(path)
        if largest_number(data) >= 2**63:
            raise UserError(f"{path} has a number beyond 2^63")
        return data
    except (UserError, OSError, RecursionError) as error:
        raise UserError(f"{path.name} cannot be used: {brief(error)}") from None


def check_own_files(out: Path) -> None:
    """Raise UserError for a link in a run's folder: its author could choose what is read and overwritten here."""
    for folder in (out, out / "checkpoints", *(out / "checkpoints" / name for name in NAMES)):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        link = next((p for p in entries if p.is_symlink() or not (p.is_file() or p.is_dir())), None)
        if link is not None:
            raise UserError(f"{link} is a link or no regular file; put the file itself there, or remove it")
