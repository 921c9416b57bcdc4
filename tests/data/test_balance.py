"""Uneven classes: weights against torch and scikit-learn, the frequencies of the balanced stream, its restarts."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from pictures import arrays
from sklearn.utils.class_weight import compute_class_weight

from vitlab.data.balance import balanced_order, class_weights
from vitlab.data.loader import TrainLoader
from vitlab.data.source import ArraySource
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.training.objectives import Classification, sigmoid_loss, softmax_loss

UNEVEN = np.repeat([0, 1, 3, 4], [70, 20, 9, 2])  # 101 images, and none of class 2


def uneven() -> ArraySource:
    source = arrays(len(UNEVEN))
    source.truth, source.classes = np.random.default_rng(0).permutation(UNEVEN), tuple("abcde")
    return source


def test_weights_are_scikit_learns() -> None:
    theirs = compute_class_weight("balanced", classes=np.array([0, 1, 3, 4]), y=UNEVEN)
    assert_allclose(class_weights(np.bincount(UNEVEN))[[0, 1, 3, 4]], theirs)
    assert class_weights(np.bincount(UNEVEN))[2] == 0


def test_the_weighted_loss_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 5, generator=generator), torch.tensor([0, 0, 1, 3, 4, 4, 0])
    soft = torch.rand(7, 5, generator=generator)
    weights = torch.from_numpy(class_weights(np.bincount(UNEVEN))).float()
    hard = torch.nn.functional.one_hot(labels, 5).float()
    for targets in (soft, hard):
        theirs = torch.nn.functional.cross_entropy(logits, targets, weight=weights)
        torch.testing.assert_close(softmax_loss(logits, targets, weights), theirs)
    plain = torch.nn.functional.binary_cross_entropy_with_logits(logits, hard, reduction="none").sum(1)
    torch.testing.assert_close(sigmoid_loss(logits, hard, weights), (plain * weights[labels]).mean())
    # over the set that the weights are of, every class has the same share of the loss
    shares = torch.tensor([float(weights[k]) * int(np.bincount(UNEVEN)[k]) for k in (0, 1, 3, 4)])
    torch.testing.assert_close(shares, torch.full((4,), 101 / 4))


def test_the_test_loss_is_not_weighted() -> None:
    batch = next(TrainLoader(uneven(), (8, 8), Augment(), Preprocess(), batch=16).batches())
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    weights = torch.tensor([1.0, 2, 3, 4, 5])
    weighted, plain = Classification(softmax_loss, weights), Classification(softmax_loss)
    assert torch.equal(weighted.sums(head, batch), plain.sums(head, batch))


def test_an_epoch_has_all_classes_equally_often() -> None:
    source = uneven()
    seen = np.zeros(len(source), int)
    for epoch in range(40):
        order = balanced_order(source.labels, 5, epoch)
        assert len(order) == len(source)
        counts = np.bincount(source.labels[order], minlength=5)
        assert sorted(counts[[0, 1, 3, 4]]) == [25, 25, 25, 26]
        each = np.bincount(order, minlength=len(source))
        for label in (0, 1, 3, 4):
            assert np.ptp(each[source.labels == label]) <= 1  # of a class all equally often, up to one
        seen += each
    assert seen.min() > 5  # of the large class other images each time: 1000 draws of 70
    assert_array_equal(balanced_order(source.labels, 5, 3), balanced_order(source.labels, 5, 3))
    assert (balanced_order(source.labels, 5, 3) != balanced_order(source.labels, 6, 3)).any()
    halves = np.array_split(source.labels[balanced_order(source.labels, 5, 0)], 2)
    assert all(np.bincount(half, minlength=5)[[0, 1, 3, 4]].min() > 4 for half in halves)  # shuffled


@pytest.mark.parametrize("resident", [False, True])
def test_copies_of_an_image_are_drawn_anew_and_restarts_change_nothing(resident: bool) -> None:
    def loader(rank: int = 0, world: int = 1) -> TrainLoader:
        augment, options = Augment(area=(0.2, 1.0), mixup=0.3), {"rank": rank, "world": world, "resident": resident}
        return TrainLoader(uneven(), (8, 8), augment, Preprocess(), batch=20, seed=3, balanced=True, **options)  # type: ignore[arg-type]

    batches = [batch for batch, _ in zip(loader().batches(), range(12), strict=False)]
    later = next(loader().batches(9))
    assert torch.equal(later.images, batches[9].images)
    assert torch.equal(later.targets, batches[9].targets)
    ranks = [next(loader(rank=rank, world=2).batches(4)) for rank in (0, 1)]
    assert torch.equal(torch.cat([batch.images for batch in ranks]), batches[4].images)
    plain = [loader().plan(step) for step in range(5)]  # an epoch
    index, key = (np.concatenate([getattr(plan, name) for plan in plain]) for name in ("index", "key"))
    assert len(np.unique(index)) < 90
    assert len(np.unique(key)) == 100


def test_shards_cannot_be_sampled() -> None:
    source = uneven()
    source.groups = np.zeros(len(source), np.int64)
    with pytest.raises(UserError, match="balance=weights"):
        TrainLoader(source, (8, 8), Augment(), Preprocess(), batch=20, balanced=True)
