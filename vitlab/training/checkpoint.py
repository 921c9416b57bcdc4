"""A run's state on disk: written whole or not at all, checked when read, nothing unpickled.

checkpoints/last        state.safetensors (or the pieces of a sharded run) and state.json
checkpoints/last.old    the one before, until the next is complete
checkpoints/last.new    one being written; without its state.json it does not count
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitlab.config import UserError
from vitlab.training.optim import Average
from vitlab.training.parallel import placed
from vitlab.weights.files import flush, sha256

TENSORS = "state.safetensors"
FACTS = "state.json"


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says beside its tensors."""

    step: int  # steps done
    log_bytes: int  # length of log.jsonl at that step
    micro: int  # images of a micro-batch: another would add up in another order
    best: float | None  # best score so far
    world: int = 1  # processes, which shared the batch


# ---- the state as one flat table of named tensors


def state_of(module: nn.Module, optimiser: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Everything that changes as a run goes on, by name; nothing is copied."""
    state = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
    for name, p in module.named_parameters():
        for key, value in optimiser.state.get(p, {}).items():
            if value is not None:
                state[f"optimiser/{name}/{key}"] = value
    if average is not None:
        state |= {f"ema/{name}": tensor for name, tensor in average.weights.items()}
    return {key: tensor.detach() for key, tensor in state.items()}


def restore(
    state: dict[str, Tensor], module: nn.Module, optimiser: torch.optim.Optimizer, average: Average | None
) -> None:
    """Put a state back; the recipe is the same, so the names are."""
    parameters = dict(module.named_parameters())
    own = module.state_dict()
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        if part == "model":
            with torch.no_grad():
                like = own.pop(name)
                like.copy_(placed(tensor, like))
        elif part == "ema" and average is not None:
            average.weights[name].copy_(placed(tensor, average.weights[name]))
        else:
            name, _, field = name.rpartition("/")
            p = parameters[name]
            # a fused optimiser counts its steps on the device, the others on the CPU
            counts = tensor.to(p.device if optimiser.defaults.get("fused") else "cpu")
            optimiser.state[p][field] = placed(tensor, p) if tensor.ndim else counts
    if own:
        raise UserError(f"the checkpoint lacks {len(own)} tensors of the model, '{next(iter(own))}' among them")


# ---- files


def save(folder: Path, state: dict[str, Tensor], facts: Facts) -> None:
    """Write a checkpoint; the one that was there becomes `.old`."""

    def write(new: Path) -> None:
        save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, new / TENSORS)
        seal(new, facts)

    replace(folder, write)


def seal(folder: Path, facts: Facts) -> None:
    """Finish a checkpoint: a JSON file with what it says and the digest of every file beside it."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / FACTS).write_text(json.dumps({"format": "vitlab/1", **vars(facts), "sha256": files}, indent=1))


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
        flush(path)
    if folder.exists():
        folder.rename(sibling(folder, "old"))
    new.rename(folder)
    flush(folder.parent)


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
            f"could not write {folder} ({reason}); the last good checkpoint stays: make room, or mend the disk, "
            "and continue with --resume"
        ) from error


@dataclass(frozen=True)
class Found:
    folder: Path
    facts: Facts
    torn: tuple[str, ...]  # what was passed over, and why


def find(folder: Path) -> Found | None:
    """The newest complete checkpoint: `last`, or what a crash left beside it."""
    torn: list[str] = []
    good: list[tuple[Path, Facts]] = []
    for place in (folder, sibling(folder, "new"), sibling(folder, "old")):
        if place.exists():
            try:
                good.append((place, read_facts(place)))
            except (UserError, OSError, ValueError, KeyError) as error:
                if place != sibling(folder, "new"):  # that one was merely being written
                    torn.append(f"{place.name} ({error})")
    if not good:
        if torn:
            raise UserError(f"no checkpoint in {folder.parent} is whole: {', '.join(torn)}; start again in a new --out")
        return None
    place, facts = max(good, key=lambda found: found[1].step)
    return Found(place, facts, tuple(torn))


def read_facts(folder: Path) -> Facts:
    """What a checkpoint says, if every file is as it was written."""
    said = json.loads((folder / FACTS).read_text())
    for name, expected in said["sha256"].items():
        if not (folder / name).exists():
            raise UserError(f"{name} is missing")
        if sha256(folder / name) != expected:
            raise UserError(f"{name} is torn")
    return Facts(said["step"], said["log_bytes"], said["micro"], said["best"], said["world"])


def tidy(folder: Path, used: Path) -> None:
    """After a crash: what was used becomes `folder`, and no torn one is left to be taken for the spare."""
    if used != folder:
        shutil.rmtree(folder, ignore_errors=True)
        used.rename(folder)
    shutil.rmtree(sibling(folder, "new"), ignore_errors=True)


def load(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / TENSORS)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); start again in a new --out") from error
