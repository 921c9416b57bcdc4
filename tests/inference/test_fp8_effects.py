"""What layers in 8 bits do to the best class: first-order predictions against what happens, and closed forms."""

import numpy as np
import pytest
import torch
from conftest import Randomize
from scipy.stats import norm

import vitlab
from vitlab.inference.calibration import largest_inputs, logits_of, rounding_variance
from vitlab.inference.effects import (
    AGAIN,
    SAVED,
    Plan,
    fastest_plan,
    harmless_first,
    margin_changes,
    second_look,
)
from vitlab.inference.fp8 import in_8_bits
from vitlab.inference.scales import Scales
from vitlab.inference.values import margins
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
    nothing = Scales("", {}, 1.0, 40, separate=True, layers=8, work=0.0, closer=0.0, again=0.0, rest="bfloat16")
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


def test_a_second_look_is_as_long_as_random_numbers_need() -> None:
    """Margins with normal errors, of which those near 0 get small ones: as many keep their sign as asked."""
    draw = np.random.default_rng(0)
    margins, quick, exact, aim = draw.exponential(2.0, 1_000_000), 0.5, 0.05, 0.99
    look = second_look(torch.from_numpy(margins[:20_000]), quick**2, exact**2, aim)
    assert look is not None
    seen = margins + quick * draw.normal(size=len(margins))
    assert (seen > 0).mean() < 0.93
    near = np.flatnonzero(np.abs(seen) < look[0])
    assert len(near) / len(seen) == pytest.approx(look[1], abs=0.01)
    seen[near] = margins[near] + exact * draw.normal(size=len(near))
    assert (seen > 0).mean() == pytest.approx(aim, abs=1e-3)


def test_nothing_is_looked_at_again_where_nothing_changes() -> None:
    apart = torch.tensor([1.0, 3.0])
    kept = (norm.cdf(1 / 0.7) + norm.cdf(3 / 0.7)) / 2
    assert second_look(apart, 0.49, 1e-4, kept - 1e-6) == (0, 0)
    assert min(second_look(apart, 0.49, 1e-4, kept + 1e-6) or (0,)) > 0
    assert second_look(apart, 0.49, 0.49, 0.99) is None  # what 16 bits cannot do either
    assert second_look(apart, 0.0, 0.0, 0.9999) == (0, 0)


def test_the_plan_is_the_fastest() -> None:
    """Layers are taken while what they save is more than what their errors cost."""
    apart, work = torch.linspace(0, 8, 1001), {"a": 2, "b": 2, "c": 1, "d": 1}
    for variances in ([1e-4, 1e-4, 1e-4, 1e-4], [1e-4, 1e-4, 0.02, 5.0], [1e-4, 5.0, 5.0, 5.0], [9.0] * 4):
        by_name, times = dict(zip(work, variances, strict=True)), [1.0]
        for count in range(1, 5):
            look = second_look(apart, 1e-6 + sum(variances[:count]), 1e-6, 0.99)
            done = sum(list(work.values())[:count]) / 6
            times.append(9.0 if look is None else 1 - SAVED * done + AGAIN * look[1])
        plan = fastest_plan(by_name, work, 1e-6, apart, 0.99)
        assert (plan.time if plan else 1.0) == pytest.approx(min(times))
        assert len(plan.layers if plan else ()) == times.index(min(times))
    assert fastest_plan(dict.fromkeys(work, 0.0), work, 0.0, apart, 0.9) == Plan(tuple(work), 0.0, 0.0, 1 - SAVED)
