"""plain_end: Mixup, CutMix and RandAugment end at a place of the stream of images, wherever a run resumes."""

import itertools
from typing import Any

import pytest
import torch
from pictures import arrays

from vitlab.data.loader import Batch, TrainLoader
from vitlab.data.transforms import Augment
from vitlab.models.config import Preprocess

STRONG = Augment(area=(0.5, 1.0), mixup=0.5, cutmix=0.5, randaugment=(2, 9.0), label_smoothing=0.1, plain_end=0.4)
PLAIN = Augment(area=(0.5, 1.0), label_smoothing=0.1)


def batches(augment: Augment, step: int, count: int, **settings: Any) -> list[Batch]:
    settings = {"batch": 6, "seed": 3} | settings
    loader = TrainLoader(arrays(), (16, 16), augment, Preprocess(), **settings)
    return list(itertools.islice(loader.batches(step), count))


@pytest.mark.parametrize(
    "settings", [{"resident": True}, {"resident": False}, {"resident": False, "rank": 1, "world": 2}]
)
def test_the_end_is_plain(settings: dict[str, Any]) -> None:
    """Before the place batches are those of the strong augmentation, from it on those without; at any start."""
    strong, plain = (batches(augment, 0, 8, **settings) for augment in (STRONG, PLAIN))
    assert not torch.equal(strong[5].images, plain[5].images)
    expected = strong[:5] + plain[5:]
    for start in (0, 3, 5, 6):
        found = batches(STRONG, start, 8 - start, plain_from=30, **settings)
        for ours, theirs in zip(found, expected[start:], strict=True):
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.targets, theirs.targets)
            assert torch.equal(ours.index, theirs.index)
