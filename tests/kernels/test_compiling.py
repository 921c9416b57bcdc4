"""Compiled models of one process."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import vitlab
from vitlab.kernels import compiling


def test_models_of_one_shape_share_a_graph_and_many_shapes_have_each_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own limit is of 8 graphs, after which models run as they are."""
    counter = CompileCounter()
    monkeypatch.setattr(compiling, "HOW", {"dynamic": False, "backend": counter})
    widths = [*range(16, 26), 20, 25]
    for width in widths:
        model = vitlab.create("Ti/8", classes=3, image_size=16, depth=1, width=16, mlp=width, heads=2)
        images = torch.rand(2, 3, 16, 16)
        plain = model(images)
        compiling.compile_in_place(model)
        torch.testing.assert_close(model(images), plain)
    assert counter.frame_count == len(set(widths))
