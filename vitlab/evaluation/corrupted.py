"""Images under a corruption: framed as for the model first, then corrupted, whatever size the files have."""

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitlab.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from vitlab.data.decoder import DecodeHint, frame_image
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.text import listed


@dataclass(frozen=True)
class Corrupting:
    """A corruption of a severity, and the seed of its draws."""

    name: str
    severity: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.severity}"

    def fingerprint(self) -> str:
        """A digest of what becomes of a picture, so that values kept under another definition are not taken for its."""
        picture = (np.arange(64 * 64 * 3).reshape(64, 64, 3) * 37 % 251).astype(np.uint8)
        changed = corrupt(Image.fromarray(picture), self.name, self.severity, 0, self.seed)
        return hashlib.sha256(changed.tobytes()).hexdigest()


class Corrupted(ImageSource):
    """A source whose images have the size of the model's input, and a corruption."""

    def __init__(self, source: ImageSource, how: Corrupting, size: Size, preprocess: Preprocess) -> None:
        super().__init__(source.truth, source.classes)
        self.source, self.how, self.size, self.preprocess = source, how, size, preprocess
        self.groups = source.groups

    def name(self, index: int) -> str:
        return self.source.name(index)

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        framed = frame_image(self.source.image(index), self.size, self.preprocess)
        return corrupt(framed, self.how.name, self.how.severity, index, self.how.seed)


def parse_corruptions(text: str, seed: int = 0) -> list[Corrupting]:
    """The corruptions of `fog:3,snow` or `all`, in the order of the table; a name alone is all five severities."""
    found = set()
    for word in text.split(","):
        name, colon, level = word.strip().partition(":")
        if name != "all" and name not in CORRUPTIONS:
            raise UserError(f"there is no corruption '{name}'; there are {listed([*CORRUPTIONS, 'all'])}")
        if colon and level not in map(str, SEVERITIES):
            raise UserError(f"the severity of {name} must be an integer from 1 to 5, as in {name}:3, not '{level}'")
        names = CORRUPTIONS if name == "all" else (name,)
        found |= {(each, severity) for each in names for severity in ((int(level),) if colon else SEVERITIES)}
    return [Corrupting(name, s, seed) for name in CORRUPTIONS for s in SEVERITIES if (name, s) in found]
