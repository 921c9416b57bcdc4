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
FEWEST, FEWEST_TESTS = 100, 50  # images that have features, and that are tested, however short the time is
SPEED = 0.03  # share of the time in which the speed is measured, on a few images at least
# What is left to do in Python, on one thread, takes a share of the seconds in which the program started: as a start it
# takes longer on a slow or busy machine. Measured idle and at a load of 8, see docs/finetuning.md.
START = 30  # forward passes that a start takes at least; in a Python program it may be over before the clock runs
FITS = 0.9  # starts: heads, what refuses images, the review
PAGE = 0.3  # starts: a report without drawings
FIGURES = 1.0  # starts: its figures
MAPS = 30  # forward passes: where the model looked
MOST = 1.1  # budgets that the first stage and the test may take, where they cannot be had for less
SLACK = 1.1  # share of the budget at which fine-tuning ends wherever it is, and drawing is left out


@dataclass(frozen=True)
class Budget:
    """The seconds of the complete command, and those that an image takes in a forward pass, decoding included.

    `start` are the seconds in which the program started, `spent` those until the image's were known.
    """

    seconds: float
    image: float
    start: float = 0.0
    spent: float = 0.0

    @property
    def unit(self) -> float:
        """Seconds of a start on this machine, as busy as it is."""
        return max(self.start, START * self.image)

    @property
    def passes(self) -> int:
        """Forward passes for which there is time at most."""
        return int((MOST * self.seconds - self.spent - (FITS + PAGE) * self.unit) / self.image)

    @property
    def drawing(self) -> float:
        """Seconds of a report's drawings."""
        return FIGURES * self.unit + MAPS * self.image

    def draws(self, spent: float) -> bool:
        """Whether there is time for them."""
        return spent + PAGE * self.unit + self.drawing <= SLACK * self.seconds

    def tests(self, data: Data) -> int:
        """How many of the test images are used: all, or half of what there is time for."""
        fits = len(data.test) + min(ENOUGH_ROWS, count_images(data)) <= self.passes
        return len(data.test) if fits else max(FEWEST_TESTS, self.passes // 2)

    def rows(self, data: Data) -> int:
        """How many of the training and validation images get features."""
        tests = self.tests(data)
        wanted = max(ENOUGH_ROWS, int(FEATURES * (self.seconds / self.image - tests)))
        return max(FEWEST, min(wanted, self.passes - tests))

    def closing(self, data: Data, known: int) -> float:
        """Seconds at the end: features of the fine-tuned model for the images that had frozen ones, test and report."""
        held = 0 if data.validation is None else len(data.validation)
        features = self.image * (known + min(held, known) + min(len(data.test), self.tests(data)))
        return features + (FITS + PAGE) * self.unit + self.drawing

    def steps(self, data: Data, known: int, spent: float, batch: int) -> int:
        """Steps of fine-tuning that fit into what is left; 0 if those are too few to bring anything."""
        n, held = len(data.train), 0 if data.validation is None else len(data.validation)
        left = self.seconds - spent - (FITS + PAGE) * self.unit - self.drawing - self.closing(data, known)
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
