"""The verdict of a report: what its numbers mean, in words, and what to do next, by expected gain."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitlab.evaluation.scores import rate
from vitlab.report.describe import percent, percent_range, plural
from vitlab.report.facts import PRECISE, Curve, Facts, Stage, Trend

# For the order of what to do, as shares of the mistakes: rules of thumb, which are not shown.
DOUBLED = 0.2  # twice as many training images
LONGER = 0.2  # longer training of a model that does not know its training images
AUGMENTED = 0.05
MISLABELED = 0.1  # of the labels that are worth a look, one in ten is wrong
FINETUNED = 0.3  # all weights after a head alone, see docs/finetuning.md
PRETRAINED = 0.5  # weights to start from

WITHIN = f"to within {100 * PRECISE:.0f} points"
STAGES: dict[Stage, str] = {
    "pending": "Only a head on frozen features is trained so far; fine-tuning and its report follow.",
    "head": "Only a head on frozen features was trained: the time was too short for fine-tuning.",
    "dropped": "Fine-tuning was tried and was worse than the head on the validation images, so the head stayed.",
}
TRENDS: dict[Trend, str] = {
    "better": "It was still learning: {}. Longer training may help.",
    "worse": "It began to learn the training images by heart: {}. Longer training would not help.",
    "flat": "It was learning little at the end: {}. Longer training would hardly help.",
    "unknown": "It is open whether it was still learning: {}.",
}
LONGEST = "Train longer"
UNDERFIT = "it has not finished learning, and longer training or a larger model may help."


@dataclass(frozen=True)
class Commands:
    """What to type; None where it cannot be known from the run."""

    again: str | None = None  # the run once more, with the images as they are then
    longer: str | None = None  # the same for longer
    stronger: str | None = None  # the same with stronger augmentation
    review: str | None = None
    pretrained: str | None = None
    predict: str | None = None
    setting: str | None = None  # with which the run's own command trains longer


@dataclass(frozen=True)
class Remark:
    """A statement; `cell` is the (truth, guess) of the images that show it, `count` of the class's `images`."""

    text: str
    cell: tuple[int, int] | None = None
    count: int = 0
    images: int = 0


@dataclass(frozen=True)
class Step:
    """Something to do next, why, and the command for it; `gain` is a share of the images, for the order."""

    what: str
    why: str
    command: str | None
    gain: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What a report begins with."""

    headline: str
    remarks: list[Remark]
    steps: list[Step]


def judge(facts: Facts, commands: Commands) -> Verdict:
    """The verdict on a tested model."""
    makers = (how_sure, useless, learning, by_heart, confusion, weakness, other_images, refusals)
    remarks = [remark for make in makers if (remark := make(facts)) is not None]
    steps = sorted(next_steps(facts, commands), key=lambda step: -step.gain)
    return Verdict(headline(facts, steps), remarks, steps)


def headline(facts: Facts, steps: list[Step]) -> str:
    """The most important of it."""
    if not facts.mistakes:
        return f"no mistakes in {plural(facts.total, f'{facts.split} image')}"
    if facts.is_useless:
        return "it has not learned these classes"
    if steps and steps[0].what == LONGEST:
        return "it has not finished learning"
    if facts.weakest is not None:
        return f"its weakest class is {facts.names[facts.weakest]}"
    if facts.pair is not None and facts.pair.is_pattern:
        return f"its main mistake is {facts.names[facts.pair.truth]} taken for {facts.names[facts.pair.guess]}"
    return "no class stands out among its mistakes"


# ---- how sure the number is


def how_sure(facts: Facts) -> Remark:
    found, images = facts.accuracy, plural(facts.total, f"{facts.split} image")
    what = "are right" if facts.matrix is not None else "are without any mistake"
    text = f"{percent(found.value)} of {images} {what}; of other images of this kind probably "
    text += f"{percent_range(found.low, found.high)}."
    if facts.wanted > facts.total:
        text += f" So few images leave it that open: it takes about {facts.wanted:,} to have it {WITHIN}."
    return Remark(text)


def useless(facts: Facts) -> Remark | None:
    if not facts.is_useless:
        return None
    name, share = facts.names[facts.largest], facts.images[facts.largest] / facts.total
    return Remark(f"Always answering {name} would be right in {percent(share)}: it cannot be shown to be better.")


# ---- whether it is still learning


def learning(facts: Facts) -> Remark:
    """What the curve of validation shows."""
    curve = facts.curve
    if facts.stage != "trained":
        return Remark(STAGES[facts.stage])
    if curve is None or not len(curve.score):
        return Remark("Nothing was validated during training, so it is open whether longer training would help.")
    end = f"Training ended at step {curve.done:,} of {curve.steps:,}"
    if curve.is_stale:
        times = plural(curve.patience or 0, "evaluation")
        why = f"since validation {curve.metric} had not improved for {times}"
        return Remark(f"{end}, {why}: longer training would hardly help.")
    text = f"{end}, when its time was up. " if curve.is_cut else ""
    if facts.is_underfit and curve.trend != "better":
        loss = f"loss {facts.train_loss:.3g}, on validation images {0 if curve.loss is None else curve.loss[-1]:.3g}"
        return Remark(f"{text}Its training images are hardly easier for it than others ({loss}): {UNDERFIT}")
    return Remark(text + TRENDS[curve.trend].format(describe_end(curve)))


def describe_end(curve: Curve) -> str:
    """What validation did towards the end."""
    if curve.trend == "unknown":
        return f"{plural(len(curve.score), 'evaluation')} during training cannot show it"
    first = curve.half
    text = (
        f"from step {curve.evaluated[first]:,} to step {curve.evaluated[-1]:,} validation {curve.metric} went from "
        f"{percent(curve.score[first])} to {percent(curve.score[-1])}"
    )
    return text if curve.loss is None else f"{text}, its loss from {curve.loss[first]:.3g} to {curve.loss[-1]:.3g}"


def by_heart(facts: Facts) -> Remark | None:
    if not facts.is_by_heart or facts.train_error is None:
        return None
    return Remark(
        f"In the last pass over the training images at most {percent(facts.train_error)} of them were wrong (by the "
        f"training loss), of the {facts.split} images {percent(facts.error)}: other training images would help, or "
        "stronger augmentation."
    )


# ---- which classes suffer


def confusion(facts: Facts) -> Remark | None:
    """The most frequent mistake, and whether it may be chance."""
    pair = facts.pair
    if pair is None or facts.matrix is None:
        return None
    truth, guess, images = facts.names[pair.truth], facts.names[pair.guess], int(facts.images[pair.truth])
    found, back = rate(pair.count, images), int(facts.matrix[pair.guess, pair.truth])
    text = f"{truth} is taken for {guess} in {pair.count:,} of {plural(images, 'image')}"
    text += f" ({percent_range(found.low, found.high)})"
    text += f", {guess} for {truth} in {back:,} of {int(facts.images[pair.guess]):,}." if back else "."
    if not pair.is_pattern:
        of = f"{plural(images, f'{facts.split} image')} of {truth}"
        text += f" It is the most frequent mistake, but with {of} that may be chance."
    return Remark(text, (pair.truth, pair.guess), pair.count, images)


def weakness(facts: Facts) -> Remark | None:
    """The class that is found more rarely than the others, if there is one."""
    k, filled = facts.weakest, facts.images[facts.images > 0]
    if k is not None:
        found, images = rate(int(facts.found[k]), int(facts.images[k])), plural(int(facts.images[k]), "image")
        return Remark(
            f"{facts.names[k]} is found in {facts.found[k]:,} of {images} ({percent_range(found.low, found.high)}), "
            f"the other classes in {percent(facts.share_of_others(k))}: a gap beyond chance."
        )
    if not facts.mistakes or len(filled) < 2:
        return None
    typical = plural(int(np.median(filled)), "image")
    return Remark(f"No class is weaker than the others beyond chance, as far as {typical} of a class can show.")


# ---- whether the images are alike


def other_images(facts: Facts) -> Remark | None:
    """Test images that are harder than those of the validation."""
    if not facts.is_shifted:
        return None
    right, held = facts.validation_counts
    return Remark(
        f"Of {plural(held, 'validation image')} {percent(right / held)} were right, more than of the test images "
        "beyond chance: these differ from the images that it learned from (another camera, place or day), or some "
        "of those are copies of each other."
    )


def refusals(facts: Facts) -> Remark | None:
    if not facts.refuses_too_many or facts.refused is None:
        return None
    number, promised = facts.refused
    return Remark(
        f"It refuses {number:,} of {plural(facts.total, f'{facts.split} image')} as none of its classes, more than the "
        f"promised {percent(promised)} beyond chance: these images are unlike those that it learned from."
    )


# ---- what to do next


def next_steps(facts: Facts, commands: Commands) -> Iterator[Step]:
    """What may help; of equal gain, in this order."""
    if facts.mistakes and facts.scratch:
        why = "It began with random weights; with fewer than millions of images, trained ones are nearly always better."
        yield Step("Start from trained weights", why, commands.pretrained, PRETRAINED * facts.error)
    if facts.mistakes and facts.stage != "pending":
        yield from more_training(facts, commands)
        yield more_images(facts, commands)
    if facts.is_by_heart and commands.stronger is not None:
        why = "It knows its training images; changed at random, they are harder to learn by heart."
        yield Step("Try stronger augmentation", why, commands.stronger, AUGMENTED * facts.error)
    images = 0 if facts.train_images is None else int(facts.train_images.sum())
    if facts.doubtful:
        gain = min(facts.error, MISLABELED * facts.doubtful / max(1, images))
        why = f"{plural(facts.doubtful, 'label')} in it may be wrong: models that had not seen the image find another "
        why += "class more likely. Write down what you decide, and train again."
        yield Step("Check the labels in review.csv", why, commands.review, gain)
    if facts.knows_doubt and facts.unsure is not None:
        right, number, below = facts.unsure
        why = (
            f"Of its {plural(facts.mistakes, 'mistake')}, {number - right:,} are among the {number:,} answers of which"
        )
        why += f" it was less than {percent(below)} sure."
        yield Step("Let a person check its least confident answers", why, commands.predict)
    if facts.wanted > facts.total:
        yield Step("Test it on more images", f"About {facts.wanted:,} would give its accuracy {WITHIN}.", None)


def more_training(facts: Facts, commands: Commands) -> Iterator[Step]:
    """Longer training, where there is a reason to."""
    if facts.stage == "head":
        why = "In more time all weights are fine-tuned, not the head alone."
        yield Step("Give it more time", why, commands.longer, FINETUNED * facts.error)
    elif facts.is_unfinished and facts.curve is not None:
        score = facts.curve.score
        gain = float(score[-1] - score[facts.curve.half]) if len(score) else 0.0
        if facts.is_underfit:
            gain = max(gain, LONGER * facts.error)
        why = "Its training images are hardly easier for it than others."
        why = "Validation was still getting better when training ended." if facts.curve.trend == "better" else why
        why = "Its time was up before the last step." if facts.curve.is_cut else why
        if commands.longer is None and commands.setting is not None:
            why += f" Repeat the command of this run with {commands.setting} and a new --out."
        yield Step(LONGEST, why, commands.longer, min(facts.error, max(gain, 0.0)))


def more_images(facts: Facts, commands: Commands) -> Step:
    """More images of the weakest class, or of all."""
    k = facts.weakest
    if k is None:
        why = "No class is weaker than the others beyond chance; images like those that it gets wrong help most."
        return Step("Add training images of every class", why, commands.again, DOUBLED * facts.error)
    gain = float(facts.share_of_others(k) * facts.images[k] - facts.found[k]) / float(facts.images.sum())
    unit = "of the images would be right" if facts.matrix is not None else "of the labels would be found"
    why = f"If it were found as often as the others, {100 * gain:.1f} points more {unit}."
    if facts.train_images is not None:
        own, typical = int(facts.train_images[k]), float(np.median(facts.train_images))
        if own < typical:
            why += f" It has {plural(own, 'training image')}, the typical class {typical:,.0f}."
    return Step(f"Add training images of {facts.names[k]}", why, commands.again, gain)
