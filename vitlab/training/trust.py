"""Which recipes this user started: a run's folder may come from anybody, and its recipe names data and weights.

What is remembered lies outside all run folders: an empty file per recipe.json, named by its sha256, in
~/.local/state/vitlab/runs. So a folder that was moved is still known, and one with a single other letter is not.
"""

import os
import shlex
from pathlib import Path

from vitlab.data.builtin import SETS
from vitlab.data.shards import PIPE
from vitlab.errors import UserError
from vitlab.files import sha256
from vitlab.terminal import warn

BUILT_IN = ("digits", *SETS)


def state_folder() -> Path:
    """$XDG_STATE_HOME/vitlab, else ~/.local/state/vitlab."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vitlab"


def remember(recipe: Path) -> None:
    """This user vouches for what this recipe.json names."""
    try:
        place = state_folder() / "runs"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / sha256(recipe)).touch()
    except OSError as error:
        warn(f"{state_folder()} cannot be written ({error.strerror}), so --resume will ask for this run's data again")


def known(recipe: Path) -> bool:
    try:
        return (state_folder() / "runs" / sha256(recipe)).exists()
    except OSError:
        return False


def vet_data(spec: str, recipe: Path, command: str) -> None:
    """Raise unless the data that a recipe.json names may be opened; `command` and the data is what to type instead."""
    if spec in BUILT_IN:
        return
    if spec.startswith(PIPE):
        raise UserError(
            f"{recipe} asks to run the command {short(spec.removeprefix(PIPE))}; a command is only taken from the "
            f"command line: {command}'pipe:COMMAND'"
        )
    if not known(recipe):
        raise UserError(
            f"{recipe.parent} was not started here by you, so its data {short(spec)} is not opened unasked; name the "
            f"data to use: {command}DATA"
        )


def vet_weights(name: str, recipe: Path) -> None:
    if not known(recipe):
        run = shlex.quote(str(recipe.parent))
        raise UserError(
            f"{recipe.parent} was not started here by you, so its weights {short(name)} are not opened unasked; if "
            f"you want them, name them: vitlab train --out {run} --resume weights=WEIGHTS data=DATA"
        )


def short(text: str) -> str:
    """A stranger's words, without control characters and not too many."""
    return repr(text if len(text) <= 120 else text[:120] + "...")
