"""The base of low-rank updates: naming it when they are trained, finding it again when they are loaded."""

import logging
import os
from pathlib import Path

from vitlab.errors import UserError
from vitlab.files import sha256
from vitlab.weights import box, hub
from vitlab.weights.lora import Adapter
from vitlab.weights.open import open_source

log = logging.getLogger("vitlab")


def find_base(adapter: Adapter, folder: Path, name: str) -> str:
    """Where the base of an adapter in `folder` is; `name` is for messages. UserError where it is gone or another."""
    places = adapter.places(folder)
    if not places:
        raise UserError(f"{name} has low-rank updates alone; name the weights they are for: vitlab.load(..., base=)")
    reason = ""
    for place in places:
        if not os.path.exists(place) and not adapter.is_on_hub:
            continue
        log.info("%s: low-rank updates of %s", name, place)  # before it is opened: others may have chosen it
        try:
            if sha256(open_source(place).tensors.path) == adapter.sha256:
                return place
            reason = reason or f"{place} is not the base of {name}: its sha256 differs"
        except (UserError, OSError) as error:  # the base may still be at the next place
            reason = reason or f"{place} cannot be the base of {name}: {error}"
    fix = f"put back the weights it was trained on, or copy them to {adapter.inside(folder)}"
    raise UserError(f"{reason or f'{name} needs its base {adapter.source}, which is missing'}; {fix}")


def name_base(weights: str, rank: int, alpha: float = 1.0) -> Adapter:
    """An adapter for these weights: named by their absolute path, by their id and commit on the hub, or as box."""
    file = open_source(weights).tensors.path
    path, commit = Path(weights).expanduser(), hub.commit_of(file)
    is_file = path.exists() and weights != box.NAME
    source = os.path.abspath(path) if is_file else weights.partition("@")[0] + (f"@{commit}" if commit else "")
    return Adapter(rank, alpha, sha256(file), source)
