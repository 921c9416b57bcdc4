"""How long to fine-tune: by the minutes there are and the speed of the first stage, which was measured on the data."""

from dataclasses import dataclass

from vitlab.data.source import Data
from vitlab.training.recipe import evaluations

MINUTES = 10.0
TRAIN = 3.2  # seconds of a training step on an image, in those of its forward pass
ENOUGH = 8_000  # images: seeing more of a small set brings nothing; see docs/finetuning.md
EPOCHS = 12  # of a large set
LEAST = 1_000  # images: below that, fine-tuning brings less than the head has
BATCH = 32
SLACK = 1.1  # share of the budget at which fine-tuning ends wherever it is


@dataclass(frozen=True)
class Budget:
    """The seconds of the complete command, and those that an image takes in a forward pass, decoding included."""

    seconds: float
    image: float

    def closing(self, data: Data) -> float:
        """Seconds at the end: features of the fine-tuned model for all images that it learned from, and the test."""
        held = 0 if data.validation is None else len(data.validation)
        return self.image * (len(data.train) + 2 * held + len(data.test))

    def steps(self, data: Data, spent: float) -> int:
        """Steps of fine-tuning that fit into what is left; 0 if those are too few to bring anything."""
        n, held = len(data.train), 0 if data.validation is None else len(data.validation)
        left = self.seconds - spent - self.closing(data)
        most = min(max(ENOUGH, EPOCHS * n), left / (TRAIN * self.image))
        tests = evaluations(int(max(0, most)), held) * held if held else 0
        seen = min(max(ENOUGH, EPOCHS * n), (left - tests * self.image) / (TRAIN * self.image))
        return int(seen // BATCH) if seen >= LEAST else 0

    def deadline(self, data: Data, spent: float) -> float:
        """Seconds from now at which fine-tuning has to end, so that the command does in time."""
        return max(0.0, SLACK * self.seconds - spent - self.closing(data))
