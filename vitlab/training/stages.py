"""stages.json, the record of a run in stages: its budget, and what each stage brought on the validation images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitlab.errors import UserError
from vitlab.files import read_json, write_text
from vitlab.settings import Range, check_types, from_json, to_json
from vitlab.text import brief

STAGES = "stages.json"
RATE = Range(0, 1)


@dataclass(frozen=True)
class Stages:
    """What is known about a run in stages; kept in stages.json."""

    weights: Annotated[str, "weights the head was put on"]
    seconds: Annotated[float, Range(above=0), "of the complete command"]
    image: Annotated[float, Range(above=0), "seconds of a forward pass, decoding included"]
    spent: Annotated[float, Range(0), "seconds so far"]
    l2: Annotated[float, Range(above=0), "penalty of the head"]
    cross_validation: Annotated[float, RATE, "accuracy of the head by cross-validation"]
    head: Annotated[float, RATE, "accuracy of the head on the validation images"]
    balanced: Annotated[bool, "whether every class weighs the same"]
    steps: Annotated[int, Range(0), "of fine-tuning; 0: none"]
    tuned: Annotated[float | None, RATE, "accuracy on the validation images after fine-tuning"] = None
    finished: Annotated[bool, "whether the last stage is done"] = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def improved(self) -> bool:
        """Whether fine-tuning is kept; of equals it is: on small sets it is the better one nearly every time."""
        return self.tuned is not None and self.tuned >= self.head


def read_stages(out: Path) -> Stages | None:
    """The stages of the run in a folder, or None; raises UserError where stages.json is damaged."""
    path = out / STAGES
    if not path.exists():
        return None
    try:
        return from_json(Stages, read_json(path)["stages"])
    except (UserError, OSError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({brief(error)}); use a new --out") from None


def write_stages(out: Path, stages: Stages) -> None:
    about = {"format": "vitlab/1", "stages": to_json(stages)}
    write_text(out / STAGES, json.dumps(about, indent=1) + "\n")
