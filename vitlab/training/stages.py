"""stages.json, the record of a run in stages: its budget, and what each stage brought on the validation images."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitlab.errors import UserError
from vitlab.files import write_text
from vitlab.settings import Range, check_types, from_json, to_json
from vitlab.text import brief
from vitlab.training.checkpoint import read_run_json

STAGES = "stages.json"
RATE, STEPS = Range(0, 1), Range(0, 10**12)


@dataclass(frozen=True)
class Stages:
    """What is known about a run in stages; kept in stages.json."""

    weights: Annotated[str, "weights the head was put on"]
    seconds: Annotated[float, Range(above=0), "of the complete command"]
    timed: Annotated[bool, "whether the length follows from the time; else it is the user's"]
    spent: Annotated[float, Range(0), "seconds so far"] = 0.0
    start: Annotated[float, Range(0), "seconds in which the program started"] = 0.0
    measured: Annotated[float, Range(0), "seconds until the next number was known"] = 0.0
    image: Annotated[float | None, Range(above=0), "seconds of a forward pass, decoding included"] = None
    l2: Annotated[float, Range(above=0), "penalty of the head"] = 1.0
    cross_validation: Annotated[float, RATE, "accuracy of the head by cross-validation"] = 0.0
    head: Annotated[float, RATE, "accuracy of the head on the validation images"] = 0.0
    balanced: Annotated[bool, "whether every class weighs the same"] = False
    steps: Annotated[int, STEPS, "of fine-tuning; 0: none"] = 0
    ready: Annotated[bool, "whether the first stage is done"] = False
    tuned: Annotated[float | None, RATE, "accuracy on the validation images after fine-tuning"] = None
    kept: Annotated[bool, "whether the fine-tuned model is the result"] = False
    finished: Annotated[bool, "whether the last stage is done"] = False

    def __post_init__(self) -> None:
        check_types(self)


def read_stages(out: Path) -> Stages | None:
    """The stages of the run in a folder, or None; raises UserError where stages.json is damaged."""
    path = out / STAGES
    if not os.path.lexists(path):
        return None
    try:
        return from_json(Stages, read_run_json(path)["stages"])
    except (UserError, OSError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({brief(error)}); use a new --out") from None


def is_staged(out: Path) -> bool:
    """Whether a folder has a run in stages."""
    return os.path.lexists(out / STAGES)


def write_stages(out: Path, stages: Stages) -> None:
    about = {"format": "vitlab/1", "stages": to_json(stages)}
    write_text(out / STAGES, json.dumps(about, indent=1) + "\n")
