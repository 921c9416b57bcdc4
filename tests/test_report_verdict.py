"""The report's verdict: its tests against scipy, and the advice on numbers for which the right advice is known."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vitlab.report.chance import as_few, at_least, falls
from vitlab.report.facts import Curve, Facts, Pair
from vitlab.report.verdict import Commands, confusion, judge


@pytest.mark.parametrize("seed", range(20))
def test_probabilities_are_those_of_scipy(seed: int) -> None:
    g = np.random.default_rng(seed)
    n, m = g.integers(1, 400, 2).tolist()
    hits, others = int(g.integers(0, n + 1)), int(g.integers(0, m + 1))
    share = float(g.uniform())
    assert at_least(hits, n, share) == pytest.approx(stats.binomtest(hits, n, share, "greater").pvalue, rel=1e-8)
    table = [[hits, n - hits], [others, m - others]]
    assert as_few(hits, n, others, m) == pytest.approx(stats.fisher_exact(table, "less")[1], rel=1e-8)
    values = g.normal(size=int(g.integers(2, 9))) - 0.5 * np.arange(9)[: g.integers(2, 9)].mean()
    found = stats.kendalltau(np.arange(len(values)), values, method="exact", alternative="less").pvalue
    assert falls(values) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(("hits", "n", "others", "m"), [(0, 5, 0, 7), (5, 5, 7, 7), (0, 3, 9, 9), (3, 3, 0, 9)])
def test_probabilities_at_the_ends(hits: int, n: int, others: int, m: int) -> None:
    table = [[hits, n - hits], [others, m - others]]
    assert as_few(hits, n, others, m) == pytest.approx(stats.fisher_exact(table, "less")[1])
    for share in (0.0, 0.3, 1.0):
        assert at_least(hits, n, share) == pytest.approx(stats.binom.sf(hits - 1, n, share))


def test_ties_are_no_trend() -> None:
    assert falls([1.0, 1.0, 1.0, 1.0]) > 0.4
    assert falls([4.0, 3.0, 2.0, 1.0]) == pytest.approx(1 / 24)
    assert falls([4.0, 2.0, 2.0, 1.0]) >= falls([4.0, 3.0, 2.0, 1.0])


# ---- what the numbers show


def facts(matrix: list[list[int]], **more: Any) -> Facts:
    counts = np.array(matrix)
    names = tuple("abcdefghijklmnopqrstuvwxyz"[: len(counts)])
    right, images, found = int(np.trace(counts)), counts.sum(1), np.diagonal(counts)
    return Facts("test", names, right, int(counts.sum()), found, images, counts, **more)


def even(k: int, right: int, wrong: int) -> list[list[int]]:
    """Mistakes that go everywhere alike."""
    return [[right if i == j else wrong for j in range(k)] for i in range(k)]


def curve(score: list[float], loss: list[float] | None = None, **more: Any) -> Curve:
    steps, values = np.arange(1, len(score) + 1) * 10, np.array(score)
    settings = {"steps": 10 * len(score), "done": 10 * len(score), "patience": None} | more
    return Curve(evaluated=steps, score=values, loss=None if loss is None else np.array(loss), **settings)


FALLING = [1.0, 0.7, 0.5, 0.4, 0.33, 0.28, 0.24, 0.21]
RISING = [0.5, 0.6, 0.7, 0.75, 0.78, 0.80, 0.82, 0.84]


def test_a_pair_that_is_confused_is_a_pattern_and_may_be_looked_at() -> None:
    matrix = even(6, 34, 0)
    matrix[2][4], matrix[4][2], matrix[0][1] = 9, 4, 1
    found = facts(matrix)
    assert found.pair == Pair(2, 4, 9, True)
    remark = confusion(found)
    assert remark is not None
    low, high = stats.binomtest(9, 43).proportion_ci(method="wilson")
    assert remark.text.startswith(f"c is taken for e in 9 of 43 images ({100 * low:.1f} to {100 * high:.1f} %)")
    assert "e for c in 4 of 38" in remark.text
    assert "chance" not in remark.text
    assert remark.cell == (2, 4)


def test_a_rare_mistake_may_be_chance() -> None:
    matrix = even(6, 10, 0)
    matrix[2][4], matrix[1][0], matrix[5][3] = 2, 1, 1
    remark = confusion(facts(matrix))
    assert remark is not None
    assert "with 12 test images of c that may be chance" in remark.text


def test_chance_alone_is_seldom_taken_for_a_pattern() -> None:
    """Ten equal classes whose mistakes are random: the tests are wrong in about 5 % of the cases, or fewer."""
    g, alarms = np.random.default_rng(0), np.zeros(3)
    for _ in range(300):
        labels = np.repeat(np.arange(10), 20)
        guesses = np.where(g.random(200) < 0.8, labels, g.integers(0, 10, 200))
        matrix = np.zeros((10, 10), int)
        np.add.at(matrix, (labels, guesses), 1)
        found = facts(matrix.tolist())
        assert found.pair is not None
        alarms += [found.pair.is_pattern, found.weakest is not None, found.is_useless]
    assert (alarms <= 0.08 * 300).all(), alarms


def test_the_weakest_class_is_the_one_with_evidence_and_not_the_one_with_one_image() -> None:
    matrix = even(4, 40, 0)
    matrix[1] = [10, 22, 8, 0]
    matrix[3] = [1, 0, 0, 0]  # one image, wrong: a recall of 0 that shows nothing
    found = facts(matrix)
    assert found.weakest == 1
    assert found.share_of_others(1) == pytest.approx(80 / 81)
    (step,) = [s for s in judge(found, Commands("vitlab finetune photos/")).steps if "Add training images" in s.what]
    assert step.what == "Add training images of b"
    assert step.gain == pytest.approx((40 * 80 / 81 - 22) / 121)
    assert f"{100 * step.gain:.1f} points" in step.why
    assert facts(even(4, 9, 1)).weakest is None
    for others in ([0, 0], [0, 0, 0]):  # where test images of one class are left
        alone = facts([[1, 3, *others[2:]], *[others] * (len(others) - 1)])
        assert alone.weakest is None
        assert judge(alone, Commands()).headline


def test_two_classes_have_no_pair_without_a_weak_one() -> None:
    assert facts([[20, 5], [4, 21]]).weakest is None
    lopsided = facts([[50, 0], [15, 35]])
    assert lopsided.weakest == 1
    assert lopsided.pair == Pair(1, 0, 15, True)


def test_a_model_no_better_than_the_largest_class_is_called_so() -> None:
    found = facts([[58, 2], [37, 3]])
    assert found.is_useless
    assert stats.binomtest(61, 100, 0.6, "greater").pvalue > 0.05
    assert judge(found, Commands()).headline == "it has not learned these classes"
    assert not facts([[55, 5], [10, 30]]).is_useless


@pytest.mark.parametrize(
    ("given", "trend"),
    [
        (curve(RISING, FALLING), "better"),
        (curve(RISING), "better"),
        (curve(RISING[:3], FALLING[:3]), "unknown"),
        (curve([0.9] * 8, [0.5, 0.4, 0.31, 0.301, 0.3, 0.299, 0.298, 0.297]), "flat"),  # 1 % in the last half
        (curve([0.9] * 8, [0.5, 0.4, 0.31, 0.30, 0.33, 0.36, 0.4, 0.45]), "worse"),
        (curve([0.8, 0.9, 0.85, 0.8, 0.9, 0.8, 0.85, 0.9]), "flat"),  # up and down
        (curve(list(np.linspace(0.1, 0.9, 500)), list(np.linspace(3, 1, 500))), "better"),
    ],
)
def test_the_end_of_the_curve(given: Curve, trend: str) -> None:
    assert given.trend == trend


def test_advice_by_the_curve() -> None:
    wrong, longer = even(5, 30, 1), Commands(longer="vitlab finetune photos/ --minutes 20")

    def what(**more: Any) -> tuple[str, list[str]]:
        verdict = judge(facts(wrong, **more), longer)
        return " ".join(r.text for r in verdict.remarks), [s.what for s in verdict.steps]

    text, steps = what(curve=curve(RISING, FALLING))
    assert "still learning: from step 50 to step 80 validation accuracy went from 78\xa0% to 84\xa0%" in text
    assert "its loss from 0.33 to 0.21" in text
    assert steps[0] == "Train longer"
    assert judge(facts(wrong, curve=curve(RISING, FALLING)), longer).headline == "it has not finished learning"
    text, steps = what(curve=curve([0.9] * 8, [0.5, 0.4, 0.31, 0.30, 0.33, 0.36, 0.4, 0.45]))
    assert "by heart" in text
    assert "Train longer" not in steps
    text, steps = what(curve=curve([0.8, 0.9, 0.85, 0.9, 0.88], steps=100, patience=3))
    assert "Training ended at step 50 of 100, since validation accuracy had not improved for 3 evaluations" in text
    assert "Train longer" not in steps
    text, steps = what(curve=curve([0.8, 0.9, 0.85, 0.9, 0.88], steps=100, patience=5))
    assert "at step 50 of 100, when its time was up" in text
    assert "Train longer" in steps
    text, steps = what(curve=curve([0.9], steps=10))
    assert "1 evaluation during training cannot show it" in text
    for stage, words in (("head", "too short"), ("pending", "follow"), ("dropped", "the head stayed")):
        text, steps = what(stage=stage)
        assert words in text
        assert ("Give it more time" in steps) == (stage == "head")
    assert "Nothing was validated" in what()[0]


def test_a_model_that_does_not_know_its_training_images_has_not_finished() -> None:
    """A learning rate that ends at 0 ends every curve flat; the training loss shows what that means."""
    flat = curve([0.6] * 8, [1.1, 1.05, 1.01, 1.001, 1.0, 1.0, 1.0, 1.0])
    under = facts(even(5, 20, 3), curve=flat, train_loss=0.95)
    assert (flat.trend, under.is_underfit, under.is_by_heart) == ("flat", True, False)
    verdict = judge(under, Commands(setting="epochs=20"))
    assert "hardly easier for it than others (loss 0.95, on validation images 1)" in " ".join(
        r.text for r in verdict.remarks
    )
    assert verdict.steps[0].what == "Train longer"
    assert "Repeat the command of this run with epochs=20 and a new --out." in verdict.steps[0].why
    known = facts(even(5, 20, 3), curve=flat, train_loss=0.1)
    assert (known.is_underfit, known.is_unfinished, known.is_by_heart) == (False, False, True)
    assert "Train longer" not in [step.what for step in judge(known, Commands()).steps]


def test_the_training_loss_bounds_the_training_error() -> None:
    g = np.random.default_rng(0)
    for scale in (0.5, 2.0, 8.0):
        logits, labels = scale * g.normal(size=(500, 4)), g.integers(0, 4, 500)
        logits[np.arange(500), labels] += scale
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        wrong = (logits.argmax(1) != labels).mean()
        bound = facts(even(4, 9, 1), train_loss=-logs[np.arange(500), labels].mean()).train_error
        assert bound is not None
        assert wrong <= bound
    memorized = facts(even(5, 20, 5), train_loss=0.02)
    assert memorized.is_by_heart
    assert f"at most {2 / np.log(2):.1f}\xa0% of them were wrong" in " ".join(
        r.text for r in judge(memorized, Commands()).remarks
    )
    assert not facts(even(5, 20, 5), train_loss=0.5).is_by_heart
    assert not facts([[2, 1], [0, 3]], train_loss=0.02).is_by_heart  # six images do not show it


def test_few_images_leave_the_number_open() -> None:
    few = judge(facts([[5, 1], [0, 6]]), Commands())
    low, high = stats.binomtest(11, 12).proportion_ci(method="wilson")
    assert f"probably {100 * low:.1f} to {100 * high:.1f} %" in few.remarks[0].text
    middle = (low + high) / 2
    assert f"about {10 * int(np.ceil(1.96**2 * middle * (1 - middle) / 0.025)):,}" in few.remarks[0].text
    assert few.steps[-1].what == "Test it on more images"
    many = judge(facts(even(4, 300, 10)), Commands())
    assert "So few" not in many.remarks[0].text
    assert "Test it on more images" not in [s.what for s in many.steps]


def test_no_mistakes_leave_nothing_but_more_tests() -> None:
    verdict = judge(facts(even(3, 10, 0), curve=curve(RISING, FALLING), scratch=True), Commands())
    assert verdict.headline == "no mistakes in 30 test images"
    assert [step.what for step in verdict.steps] == ["Test it on more images"]


def test_other_images_and_refusals() -> None:
    shifted = facts(even(4, 60, 10), validation=(98, 100))
    assert shifted.is_shifted
    assert not facts(even(4, 60, 10), validation=(9, 10)).is_shifted
    close = facts(even(4, 60, 10), validation=(41, 50))  # 1 in 54 by chance, but of 8 states it was the best
    assert close.is_shifted
    assert 0.05 / 8 < stats.fisher_exact([[240, 120], [41, 9]], "less")[1] < 0.05
    assert not dataclasses.replace(close, curve=curve(RISING)).is_shifted
    assert not dataclasses.replace(shifted, split="validation").is_shifted
    assert any("another camera" in remark.text for remark in judge(shifted, Commands()).remarks)
    assert facts(even(4, 20, 2), refused=(20, 0.05), refused_before=(20, 400)).refuses_too_many
    assert not facts(even(4, 20, 2), refused=(8, 0.05), refused_before=(20, 400)).refuses_too_many
    assert not facts(even(4, 20, 2), refused=(20, 0.05), refused_before=(1, 20)).refuses_too_many  # a limit of few
    assert not facts(even(4, 20, 2), refused=(4, 0.05), refused_before=(0, 400)).refuses_too_many  # as promised
    doubt = judge(facts(even(4, 60, 10), unsure=(12, 36, 0.6)), Commands(predict="vitlab predict run photos/"))
    assert "Of its 120 mistakes, 24 are among the 36 answers of which it was less than 60\xa0% sure." in [
        s.why for s in doubt.steps
    ]
    assert not facts(even(4, 60, 10), unsure=(24, 36, 0.6)).knows_doubt


def test_refusals_by_a_limit_from_few_images_raise_few_alarms() -> None:
    """Images like those that set the limit: however few these are, at most 5 % of all cases are called unlike them."""
    g, alarms = np.random.default_rng(0), 0
    for _ in range(400):
        held, new = np.sort(g.normal(size=40)), g.normal(size=200)
        limit = held[-2]  # two of 41 are beyond it on average
        number = int((new > limit).sum())
        alarms += facts(even(4, 44, 2), refused=(number, 0.05), refused_before=(1, 40)).refuses_too_many
    assert alarms <= 0.07 * 400


def test_steps_are_in_the_order_of_their_gain() -> None:
    matrix = even(5, 40, 0)
    matrix[1] = [20, 20, 0, 0, 0]
    many = np.full(5, 200)
    commands = Commands("again", "longer", review="review")
    found = judge(facts(matrix, train_images=many, doubtful=800, curve=curve(RISING, FALLING)), commands).steps
    assert [step.gain for step in found] == sorted((step.gain for step in found), reverse=True)
    assert [step.command for step in found][:3] == ["again", "review", "longer"]  # 10, 8 and 6 points
    few = judge(facts(matrix, train_images=many, doubtful=4, curve=curve(RISING, FALLING)), commands).steps
    assert [step.command for step in few][:3] == ["again", "longer", "review"]


def test_several_labels_of_an_image() -> None:
    found = Facts("test", ("sea", "sky"), 40, 60, np.array([10, 38]), np.array([30, 40]))
    verdict = judge(found, Commands())
    assert "of 60 test images are without any mistake" in verdict.remarks[0].text
    assert verdict.headline == "its weakest class is sea"
    assert "of the labels would be found" in verdict.steps[0].why
