"""What layers in 8 bits do to the best class: first-order predictions against what happens, and closed forms."""

import pytest
import torch
from conftest import Randomize
from scipy.stats import norm

import vitlab
from vitlab.inference.calibration import largest_inputs, logits_of, rounding_variance
from vitlab.inference.effects import count_harmless, harmless_first, margin_changes, margins
from vitlab.inference.fp8 import in_8_bits
from vitlab.inference.scales import Scales
from vitlab.models.variants import Model

CPU = torch.device("cpu")


@pytest.fixture
def small(randomize: Randomize) -> Model:
    return randomize(vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=5)).eval()


def test_changes_of_margins_are_those_of_a_model_with_the_layer(small: Model) -> None:
    """Put into the model, one layer moves best and second logit nearly as predicted, by image and by layer."""
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)
    maxima = largest_inputs(small, pixels, CPU)
    changes = margin_changes(small, maxima, torch.float16, pixels, CPU)
    assert list(changes) == list(maxima)
    assert not any(module._forward_hooks for module in small.modules())
    images = pixels / 255 * 2 - 1
    with torch.no_grad():
        exact = small(images)
        best, second = exact.topk(2).indices.unbind(1)
        rows = torch.arange(40)
        for name, layer in in_8_bits(small, maxima, torch.float16).items():
            target = small.get_submodule(name)
            with target.register_forward_hook(lambda _, inputs, out, layer=layer: layer(inputs[0]).to(out.dtype)):
                logits = small(images)
            actual = logits[rows, best] - logits[rows, second] - margins(exact)
            assert float((changes[name] - actual).norm()) < 0.25 * float(actual.norm()), name


def test_the_variance_of_16_bits(small: Model) -> None:
    nothing = Scales("", {}, 1.0, 40, separate=True, layers=8, work=0.0, rest="bfloat16")
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)
    exact, half = (logits_of(small, pixels, CPU, scales).double() for scales in (None, nothing))
    squares = []
    for one, other in zip(exact, half, strict=True):
        best, second = one.argsort(descending=True)[:2]
        squares.append(float((other[best] - other[second]) - (one[best] - one[second])) ** 2)
    assert rounding_variance(small, pixels, CPU, nothing) == pytest.approx(sum(squares) / 40, rel=1e-3)
    assert sum(squares) > 0


def test_layers_are_ordered_by_variance_for_their_work() -> None:
    changes = {"small": torch.tensor([1.0, -1.0]), "large": torch.tensor([2.0, 0.0]), "none": torch.zeros(2)}
    found = harmless_first(changes, {"small": 1, "large": 4, "none": 1})
    assert list(found.items()) == [("none", 0.0), ("large", 2.0), ("small", 1.0)]


def test_as_many_layers_as_the_normal_distribution_allows() -> None:
    """An image with margin 2 keeps its class with probability Phi(2 / deviation), two the mean of both."""
    aim, variances, before = 0.9, [0.5] * 8, 0.25
    most = (2 / norm.ppf(aim)) ** 2  # variance
    expected = int((most - before) / 0.5)
    assert 0 < expected < 8
    assert count_harmless(variances, before, torch.tensor([2.0]), aim) == expected
    shares = [(norm.cdf(1 / v**0.5) + norm.cdf(3 / v**0.5)) / 2 for v in (0.25 + 0.5 * k for k in range(9))]
    both = torch.tensor([1.0, 3.0])
    for count in range(1, 9):
        assert count_harmless(variances, before, both, shares[count] - 1e-9) == count
    assert count_harmless(variances, before, both, 0.9999) == 0
    assert count_harmless([0.0] * 3, 0.0, both, 0.99) == 3
