"""plain_end: Mixup, CutMix and RandAugment end at a place of the stream of images, wherever a run resumes; small
images are those before a place of it."""

import itertools
from typing import Any

import pytest
import torch
from pictures import arrays

from vitlab.data.loader import Batch, TrainLoader
from vitlab.data.transforms import Augment
from vitlab.models.config import Preprocess, Size

STRONG = Augment(area=(0.5, 1.0), mixup=0.5, cutmix=0.5, randaugment=(2, 9.0), label_smoothing=0.1, plain_end=0.4)
PLAIN = Augment(area=(0.5, 1.0), label_smoothing=0.1)


def batches(augment: Augment, step: int, count: int, size: Size = (16, 16), **settings: Any) -> list[Batch]:
    settings = {"batch": 6, "seed": 3} | settings
    loader = TrainLoader(arrays(), size, augment, Preprocess(), **settings)
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


@pytest.mark.parametrize("resident", [True, False])
def test_the_start_has_smaller_images(resident: bool) -> None:
    """Those of a loader of that size up to a place, its own from there on; with a plain end before or after it."""
    for end in (12, 30):
        shared: dict[str, Any] = {"resident": resident, "plain_from": end}
        small, full = (batches(STRONG, 0, 8, size=size, **shared) for size in ((12, 12), (16, 16)))
        expected = small[:3] + full[3:]
        for start in (0, 2, 3, 6):
            found = batches(STRONG, start, 8 - start, small_size=(12, 12), small_until=18, **shared)
            for ours, theirs in zip(found, expected[start:], strict=True):
                assert torch.equal(ours.images, theirs.images)
                assert torch.equal(ours.targets, theirs.targets)
