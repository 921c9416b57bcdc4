"""Losses against torch's own and plain sums; counts over every image."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.data.loader import Batch
from vitlab.evaluation.accuracy import count_hits
from vitlab.training.objectives import (
    SIGMOID_BIAS,
    Classification,
    blank_batch,
    measure_sums,
    sigmoid_loss,
    softmax_loss,
    start_sigmoid,
)
from vitlab.training.parallel import Cluster


def test_softmax_accepts_soft_targets() -> None:
    logits, targets = torch.randn(6, 5), torch.rand(6, 5).softmax(-1)
    torch.testing.assert_close(softmax_loss(logits, targets), F.cross_entropy(logits, targets))


def test_sigmoid_sums_over_classes() -> None:
    logits, targets = torch.randn(4, 3), torch.rand(4, 3)
    total = 0.0
    for b in range(4):
        for k in range(3):
            p, t = 1 / (1 + math.exp(-logits[b, k].item())), targets[b, k].item()
            total -= t * math.log(p) + (1 - t) * math.log(1 - p)
    assert sigmoid_loss(logits, targets).item() == pytest.approx(total / 4, rel=1e-5)


def test_a_fresh_sigmoid_head_answers_no() -> None:
    head = nn.Linear(4, 21_000)
    nn.init.zeros_(head.weight)
    start_sigmoid(head)
    answers = head(torch.randn(1, 4)).sigmoid()
    assert torch.allclose(answers, torch.tensor(1 / (1 + math.exp(-SIGMOID_BIAS))))
    assert SIGMOID_BIAS == -10


def test_hits_against_a_sort() -> None:
    logits, labels = torch.randn(50, 12), torch.randint(12, (50,))
    top1 = top5 = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        order = sorted(range(12), key=lambda k: -row[k])
        top1 += order[0] == label
        top5 += label in order[:5]
    assert count_hits(logits, labels).tolist() == [50, top1, top5]


def test_three_classes_are_all_among_the_first_five() -> None:
    assert count_hits(torch.randn(9, 3), torch.randint(3, (9,))).tolist()[2] == 9


def batches(sizes: list[int]) -> list[Batch]:
    out = []
    for n in sizes:
        labels = torch.randint(4, (n,))
        out.append(Batch(torch.randn(n, 3, 2, 2), labels, F.one_hot(labels, 4).float(), labels))
    return out


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1))


def test_uneven_batches_are_counted_completely() -> None:
    torch.manual_seed(1)
    model, parts = Plain(), batches([7, 7, 3])
    images, labels = torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts])
    right = int((model(images).argmax(-1) == labels).sum())
    counts = torch.stack([count_hits(model(p.images), p.labels) for p in parts]).sum(0)
    assert counts.tolist() == [17, right, 17]  # four classes: all among the first five
    cpu = torch.device("cpu")
    spare = blank_batch((2, 2), cpu)
    objective = Classification(softmax_loss)
    report = objective.report(measure_sums(objective, model, parts, spare, Cluster(cpu), passes=5))
    assert report["accuracy"] == right / 17
    assert report["loss"] == pytest.approx(F.cross_entropy(model(images), labels).item(), rel=1e-6)
