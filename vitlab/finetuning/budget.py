"""How long to fine-tune: by the minutes there are and the speed on the first images of the very data."""

from dataclasses import dataclass

from vitlab.data.source import Data
from vitlab.training.recipe import evaluations

MINUTES = 10.0
TRAIN = 3.2  # seconds of a training step on an image, in those of its forward pass
ENOUGH = 8_000  # images: seeing more of a small set brings nothing; see docs/finetuning.md
EPOCHS = 12  # of a large set
LEAST = 1_000  # images: below that, or one pass over all, fine-tuning brings less than the head has
BATCH = 32
FEATURES = 0.7  # share of the time, testing aside, in which frozen features are computed; of large sets, of a part
ENOUGH_ROWS = 1_000  # images that have features before any time is kept for fine-tuning
FEWEST = 100  # images that have features, and that are tested, however short the time is
OVERHEAD = 300  # forward passes that take as long as starting, the review and two reports; measured idle and busy
DRAWING = 100  # forward passes that take as long as the first report and the review
MOST = 1.2  # budgets that the first stage and the test may take, where they cannot be had for less
SLACK = 1.1  # share of the budget at which fine-tuning ends wherever it is


@dataclass(frozen=True)
class Budget:
    """The seconds of the complete command, and those that an image takes in a forward pass, decoding included."""

    seconds: float
    image: float

    @property
    def passes(self) -> int:
        """Forward passes for which there is time at most."""
        return int(MOST * self.seconds / self.image) - OVERHEAD

    def tests(self, data: Data) -> int:
        """How many of the test images are used: all, or half of what there is time for."""
        fits = len(data.test) + min(ENOUGH_ROWS, count_images(data)) <= self.passes
        return len(data.test) if fits else max(FEWEST, self.passes // 2)

    def rows(self, data: Data) -> int:
        """How many of the training and validation images get features."""
        tests = self.tests(data)
        wanted = max(ENOUGH_ROWS, int(FEATURES * (self.seconds / self.image - tests)))
        return max(FEWEST, min(wanted, self.passes - tests))

    def closing(self, data: Data, known: int) -> float:
        """Seconds at the end: features of the fine-tuned model for the images that had frozen ones, and the test."""
        held = 0 if data.validation is None else len(data.validation)
        return self.image * (known + min(held, known) + min(len(data.test), self.tests(data)))

    def steps(self, data: Data, known: int, spent: float, batch: int) -> int:
        """Steps of fine-tuning that fit into what is left; 0 if those are too few to bring anything."""
        n, held = len(data.train), 0 if data.validation is None else len(data.validation)
        left = self.seconds - spent - DRAWING * self.image - self.closing(data, known)
        most = min(max(ENOUGH, EPOCHS * n), left / (TRAIN * self.image))
        tests = evaluations(int(max(0, most)), held) * held if held else 0
        seen = min(max(ENOUGH, EPOCHS * n), (left - tests * self.image) / (TRAIN * self.image))
        return int(seen // batch) if seen >= max(LEAST, n) else 0

    def deadline(self, data: Data, known: int, spent: float) -> float:
        """Seconds from now at which fine-tuning has to end, so that the command does in time."""
        return max(0.0, SLACK * self.seconds - spent - self.closing(data, known))


def count_images(data: Data) -> int:
    """Training and validation images."""
    return len(data.train) + len(data.validation or ())
