"""The model in the box: a small classifier inside the package, used where no model is named.

`vitlab.load("box")` is always this one; a folder of the same name is "./box".
"""

from pathlib import Path

from vitlab.errors import UserError

NAME = "box"
WEIGHTS = "model.safetensors"  # as in every folder of vitlab
PACKAGED = Path(__file__).parents[1] / "box"
FOLDER = PACKAGED  # tests have a small model elsewhere
PHOTO = PACKAGED / "photo.jpg"  # for `vitlab demo`


def is_there() -> bool:
    """Whether this copy of the package has its weights."""
    return (FOLDER / WEIGHTS).is_file()


def find_folder() -> Path:
    """The folder of the model; a UserError where this copy of the package has no weights."""
    if not is_there():
        raise UserError(
            f"this copy of vitlab has no model in the box ({FOLDER / WEIGHTS} is missing); name a model, such as a run "
            "folder or google/vit-base-patch16-224, or install a release"
        )
    return FOLDER


def describe() -> str:
    """One line for who has named no model."""
    card = find_folder() / "README.md"
    return f"no model is named, so the small one of the package answers; its classes and limits: {card}"
