"""A run's state on disk: written whole or not at all, checked when read, nothing unpickled.

checkpoints/last        state.safetensors (or the pieces of a sharded run) and state.json
checkpoints/last.old    the one before, until the next is complete
checkpoints/last.new    one being written; without its state.json it does not count
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitlab import files
from vitlab.errors import UserError
from vitlab.files import fsync, largest_number, sha256
from vitlab.text import brief
from vitlab.training.optim import Average
from vitlab.training.parallel import place_like

TENSORS, METADATA = "state.safetensors", ".metadata"  # the latter beside the pieces of a sharded run
META = "state.json"
NAMES = ("last", "last.new", "last.old", "best")


@dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint says beside its tensors."""

    step: int  # steps done
    log_bytes: int  # length of log.jsonl at that step
    micro: int  # images of a micro-batch: another would add up in another order
    best: float | None  # best score so far
    world: int = 1  # processes, which shared the batch
    tested: bool = True  # false: the step was due for a test, which a signal cut short

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("log_bytes", 0), ("micro", 1), ("world", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**62:
                raise UserError(f"{name} is no sensible number")
        if self.best is not None and not (type(self.best) in (int, float) and abs(self.best) < float("inf")):
            raise UserError("best is no number")
        if type(self.tested) is not bool:
            raise UserError("tested is neither true nor false")


# ---- the state as one flat table of named tensors


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Everything that changes as a run goes on, by name; nothing is copied."""
    state = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
    for name, p in module.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                state[f"optimizer/{name}/{key}"] = value
    if average is not None:
        state |= {f"ema/{name}": tensor for name, tensor in average.weights.items()}
    return {key: tensor.detach() for key, tensor in state.items()}


def restore(
    state: dict[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
) -> None:
    """Put a state back; the recipe is the same, so the names and the shapes are."""
    check_names(state, module, optimizer, average)
    parameters = dict(module.named_parameters())
    own = module.state_dict()
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        if part == "model":
            with torch.no_grad():
                like = own.pop(name)
                like.copy_(place_like(tensor, like))
        elif part == "ema" and average is not None:
            average.weights[name].copy_(place_like(tensor, average.weights[name]))
        else:
            name, _, field = name.rpartition("/")
            p = parameters[name]
            # a fused optimizer counts its steps on the device, the others on the CPU
            counts = tensor.to(p.device if optimizer.defaults.get("fused") else "cpu")
            optimizer.state[p][field] = place_like(tensor, p) if tensor.ndim else counts
    if own:
        raise UserError(f"the checkpoint lacks {len(own)} tensors of the model, '{next(iter(own))}' among them")


def check_names(
    state: dict[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
) -> None:
    """Every tensor belongs to the model and has its parameter's shape; the optimizer's counts are single numbers."""
    parameters = dict(module.named_parameters())
    homes: dict[str, Mapping[str, Tensor]] = {"model": module.state_dict(), "optimizer": parameters}
    homes["ema"] = average.weights if average is not None else {}
    kept = {"step", "exp_avg", "exp_avg_sq"} if isinstance(optimizer, torch.optim.AdamW) else {"momentum_buffer"}
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        name, field = (name.rpartition("/")[::2]) if part == "optimizer" else (name, "")
        like = homes.get(part, {}).get(name)
        shape = torch.Size() if like is None or field == "step" else like.shape
        fits = tensor.shape == shape and tensor.is_floating_point()
        complete = part != "optimizer" or all(f"{part}/{name}/{other}" in state for other in kept)
        if like is None or not fits or not complete or field not in {"", *kept}:
            raise UserError(f"the checkpoint's tensor '{key[:100]}' does not belong to this run's model")


# ---- files


def save(folder: Path, state: dict[str, Tensor], facts: CheckpointMeta) -> None:
    """Write a checkpoint; the one that was there becomes `.old`."""

    def write(new: Path) -> None:
        save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, new / TENSORS)
        seal(new, facts)

    replace(folder, write)


def seal(folder: Path, facts: CheckpointMeta) -> None:
    """Finish a checkpoint: a JSON file with what it says and the digest of every file beside it."""
    table = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    about = {"format": "vitlab/1", **vars(facts), "sha256": table}
    (folder / META).write_text(json.dumps(about | {"digest": digest(about)}, indent=1))


def digest(about: Mapping[str, Any]) -> str:
    """The sha256 of what a state.json says, whatever its spacing."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill `folder` anew by `write`, whole or not at all: a sibling is written, forced to disk, then renamed."""
    with disk_errors(folder):
        new = make_room(folder)
        try:
            write(new)
            put_in_place(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def make_room(folder: Path) -> Path:
    """An empty sibling to write to. The spare goes first: while a new one is written, `folder` itself is the spare."""
    new = sibling(folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(sibling(folder, "old"), ignore_errors=True)
    new.mkdir(parents=True)
    return new


def put_in_place(folder: Path) -> None:
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
    """A disk that is full or gone, as a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise UserError(
            f"could not write {folder} ({reason}); the last good checkpoint stays: make room, or repair the disk, "
            "and continue with --resume"
        ) from error


@dataclass(frozen=True)
class Found:
    folder: Path
    facts: CheckpointMeta
    torn: tuple[str, ...]  # what was passed over, and why


def find(folder: Path, check: Callable[[CheckpointMeta], None] = lambda facts: None) -> Found | None:
    """The newest complete checkpoint: `last`, or what a crash left beside it. `check` raises at one that cannot be."""
    torn: list[str] = []
    good: list[tuple[Path, CheckpointMeta]] = []
    for place in (folder, sibling(folder, "new"), sibling(folder, "old")):
        if place.exists():
            try:
                facts = read_meta(place)
                check(facts)
                good.append((place, facts))
            except (UserError, OSError) as error:
                if place != sibling(folder, "new"):  # that one was merely being written
                    torn.append(f"{place.name} ({error})")
    if not good:
        if torn:
            why = ", ".join(torn)
            raise UserError(f"no checkpoint in {folder.parent} is complete: {why}; start again in a new --out")
        return None
    place, facts = max(good, key=lambda found: found[1].step)
    return Found(place, facts, tuple(torn))


def read_meta(folder: Path) -> CheckpointMeta:
    """What a checkpoint says, if every file is as it was written; raises UserError or OSError."""
    about = read_json(folder / META)
    if about.pop("digest", None) != digest(about):
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
            raise UserError(f"{name} is torn")
    missing = [f.name for f in fields(CheckpointMeta) if f.name not in about and f.default is MISSING]
    if missing:
        raise UserError(f"{META} lacks {', '.join(missing)}")
    return CheckpointMeta(**{f.name: about[f.name] for f in fields(CheckpointMeta) if f.name in about})


def tidy(folder: Path, used: Path) -> None:
    """After a crash: what was used becomes `folder`, and no torn one is left to be taken for the spare."""
    with disk_errors(folder):
        if used != folder:
            if folder.exists():
                shutil.rmtree(folder)
            used.rename(folder)
        shutil.rmtree(sibling(folder, "new"), ignore_errors=True)


def load(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} cannot be read: {brief(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run's folder, which may be anybody's: no link, no number beyond reason."""
    try:
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no file of its own")
        found = files.read_json(path)
        if largest_number(found) >= 2**63:
            raise UserError(f"{path} has a number beyond 2^63")
        return found
    except (UserError, OSError, RecursionError) as error:
        raise UserError(f"{path.name} cannot be used: {brief(error)}") from None


def check_own_files(out: Path) -> None:
    """A run's folder holds its own files: a link in it would let its maker choose what is read and overwritten here."""
    for folder in (out, out / "checkpoints", *(out / "checkpoints" / name for name in NAMES)):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        strange = next((p for p in entries if p.is_symlink() or not (p.is_file() or p.is_dir())), None)
        if strange is not None:
            raise UserError(f"{strange} is a link or no plain file; put the file itself there, or remove it")
