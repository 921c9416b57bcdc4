"""Which recipes this user started: a run's folder may come from anywhere, and its recipe names data and weights.

The record is kept outside all run folders: an empty file per recipe.json, named by its sha256, in
~/.local/state/vitlab/runs. So a folder that was moved is still trusted, and one with a single changed byte is not.
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


def remember_recipe(recipe: Path) -> None:
    """Record that this user started the run of this recipe.json; a warning where that cannot be written."""
    try:
        folder = state_folder() / "runs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / sha256(recipe)).touch()
    except OSError as error:
        warn(f"{state_folder()} cannot be written ({error.strerror}), so --resume will ask for this run's data again")


def is_trusted(recipe: Path) -> bool:
    try:
        return (state_folder() / "runs" / sha256(recipe)).exists()
    except OSError:
        return False


def check_trusted_data(spec: str, recipe: Path, command: str) -> None:
    """Raise UserError unless the data that a recipe.json names may be opened; the message is to type `command` DATA."""
    if spec in BUILT_IN:
        return
    if spec.startswith(PIPE):
        raise UserError(
            f"{recipe} asks to run the command {quote(spec.removeprefix(PIPE))}; a command is only taken from the "
            f"command line: {command}'pipe:COMMAND'"
        )
    if not is_trusted(recipe):
        raise UserError(
            f"{recipe.parent} was not started here by you, so its data {quote(spec)} is not opened unasked; name the "
            f"data to use: {command}DATA"
        )


def check_trusted_weights(name: str, recipe: Path) -> None:
    """Raise UserError unless the weights that a recipe.json names may be opened."""
    if not is_trusted(recipe):
        run = shlex.quote(str(recipe.parent))
        raise UserError(
            f"{recipe.parent} was not started here by you, so its weights {quote(name)} are not opened unasked; to "
            f"use them, name them: vitlab train --out {run} --resume weights=WEIGHTS data=DATA"
        )


def check_trusted_teacher(name: str, recipe: Path) -> None:
    """Raise UserError unless the teacher that a recipe.json names may be opened."""
    if not is_trusted(recipe):
        raise UserError(
            f"{recipe.parent} was not started here by you, so its teacher {quote(name)} is not opened unasked; to use "
            "it, name it: teacher=WEIGHTS"
        )


def check_trusted_review(name: str, recipe: Path) -> None:
    """Raise UserError unless the review that a recipe.json names may be opened."""
    if not is_trusted(recipe):
        raise UserError(
            f"{recipe.parent} was not started here by you, so its review {quote(name)} is not opened unasked; to use "
            "it, name it: review=FILE, or review=none"
        )


def quote(text: str) -> str:
    """Untrusted text in quotes, without control characters and at most 120 characters of it."""
    return repr(text if len(text) <= 120 else text[:120] + "...")
