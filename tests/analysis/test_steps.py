"""The five steps as arrays: each against the model itself, colors against scikit-learn's PCA."""

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from torch import Tensor

import vitlab
from vitlab.analysis.rollout import rollout, to_grid
from vitlab.analysis.steps import five_steps, principal_components
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, StemConfig, ViTConfig
from vitlab.plots.steps import Steps

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"pool": "mean", "positions": "2d", "image_size": (20, 12)},
    "attention pool": {"pool": "attention", "positions": "sinusoidal"},
    "axial": {"pool": "mean", "attention": "axial"},
    "every layer": {"placement": "every"},
    "relative": {"positions": "relative"},
    "no positions, no head": {"positions": "none", "classes": 0},
    "hybrid": {"stem": StemConfig((1,), 32), "patch": 1, "image_size": (12, 20)},
    **FAMILIES,
}


def build(name: str, randomize: Any, **settings: Any) -> tuple[Any, Tensor]:
    base: dict[str, Any] = {"image_size": (12, 20), "patch": 4, "depth": 2, "width": 12, "mlp": 20, "heads": 3}
    base |= {"classes": 5, "dropout": 0.2}
    model = randomize(vitlab.build(ViTConfig(**(base | MODELS[name] | settings)))).double()
    return model, torch.randn(3, *model.config.image_size, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, randomize: Any) -> None:
    model, image = build(name, randomize)
    c, (h, w) = model.config, model.config.grid
    maps = vitlab.attention(model, image[None])
    got = five_steps(model, image)
    shapes = {
        "pixels": (*c.image_size, 3),
        "tokens": (h, w, 3),
        "positions": (h, w, 3),
        "depths": (c.depth, h, w, 3),
        "attention": (len(maps), c.heads, h, w),
        "rollout": (h, w),
        "logits": (c.classes,),
        "prefix": (c.depth, c.prefix, 3),
        "prefix_attention": (len(maps), c.heads, c.prefix),
    }
    assert {key: getattr(got, key).shape for key in shapes} == shapes
    for key in shapes:
        assert getattr(got, key).dtype == np.float32
        if key != "logits" and getattr(got, key).size:
            assert getattr(got, key).min() >= 0
            assert getattr(got, key).max() <= 1
    np.testing.assert_allclose(got.attention.sum((2, 3)), 1, rtol=1e-5)
    assert got.rollout.sum() == pytest.approx(1)
    for layer, one in enumerate(maps):
        np.testing.assert_allclose(got.attention[layer], to_grid(model, one)[0], rtol=1e-5)
        rows = one[0, :, :1] if c.pool in ("token", "token_mean") else one[0, :, c.prefix :]
        lead = rows[..., : c.prefix].mean(1)
        np.testing.assert_allclose(got.prefix_attention[layer], lead, rtol=1e-5, atol=1e-7)
        patches = rows[..., c.prefix :].mean(1)  # together they are all of the attention
        np.testing.assert_allclose(lead.sum(-1) + patches.sum(-1), 1, rtol=1e-6)
        np.testing.assert_allclose(
            got.attention[layer].reshape(c.heads, -1), patches / patches.sum(-1, keepdim=True), rtol=1e-5
        )
    np.testing.assert_allclose(got.rollout, to_grid(model, rollout(maps))[0], rtol=1e-5)
    if c.classes:
        np.testing.assert_allclose(got.logits, model.eval()(image[None])[0].detach(), rtol=1e-5, atol=1e-6)
    assert got.positions.any() == (c.positions in ("1d", "2d", "sinusoidal", "sincos2d"))


def matches(colors: np.ndarray, rows: np.ndarray) -> None:
    """Each channel is a principal component of the rows, up to its sign, stretched to [0, 1]."""
    decomposition = pytest.importorskip("sklearn.decomposition")
    projected = decomposition.PCA(3, svd_solver="full").fit_transform(rows)
    for channel in range(3):
        mine, theirs = colors.reshape(-1, 3)[:, channel], projected[:, channel]
        assert abs(np.corrcoef(mine, theirs)[0, 1]) == pytest.approx(1, abs=1e-5)
        assert (mine.min(), mine.max()) == (0, 1)


@pytest.mark.parametrize("name", ["plain", "mean", "axial"])
def test_colors_are_principal_components(name: str, randomize: Any) -> None:
    model, image = build(name, randomize)
    got = five_steps(model, image)
    model.eval()
    with torch.no_grad():
        x = model.patches(image[None])
        matches(got.tokens, x[0].numpy())
        lead = int(model.config.token)
        matches(got.positions, model.positions(0)[lead:].numpy())
        if lead:
            x = torch.cat([model.token, x], 1)
        x = x + model.positions(0)
        for block, colors in zip(model.blocks, got.depths, strict=True):
            x = block(x)
            matches(colors, x[0, lead:].numpy())


def test_registers_have_colors_on_the_axes_of_the_patches(randomize: Any) -> None:
    """A register that equals a patch has its color; one beyond all patches has the color of the outermost."""
    decomposition = pytest.importorskip("sklearn.decomposition")
    model, image = build("DINOv2 with registers", randomize)
    got = five_steps(model, image)
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: outputs.append(out[0])) for block in model.blocks]
    with torch.no_grad():
        model.eval()(image[None])
    for hook in hooks:
        hook.remove()
    for x, cells, colors in zip(outputs, got.prefix, got.depths, strict=True):
        lead, patches = x[:5].numpy(), x[5:].numpy()
        pca = decomposition.PCA(3, svd_solver="full").fit(patches)
        scores, own = pca.transform(patches), pca.transform(lead)
        for channel in range(3):
            flip = np.corrcoef(scores[:, channel], colors[..., channel].ravel())[0, 1]
            low, high = scores[:, channel].min(), scores[:, channel].max()
            share = (own[:, channel] - low) / (high - low)
            expected = np.clip(share if flip > 0 else 1 - share, 0, 1)
            np.testing.assert_allclose(cells[:, channel], expected, rtol=1e-4, atol=1e-5)


def test_colors_keep_their_sign_from_layer_to_layer(randomize: Any) -> None:
    """Blocks that change next to nothing must not flip a color into its opposite."""
    model, image = build("plain", randomize, depth=4, image_size=(24, 24), positions="none")
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attention.out, block.mlp.down):
                layer.weight.mul_(1e-4)
                layer.bias.zero_()
    got = five_steps(model, image)
    for colors in got.depths:
        for channel in range(3):
            assert np.corrcoef(colors[..., channel].ravel(), got.tokens[..., channel].ravel())[0, 1] > 0.99


def test_signs_are_determined() -> None:
    rows = torch.tensor([[0.0, 0], [0, 0], [3, 0]])
    for sign in (1, -1):
        found = principal_components(sign * rows)
        assert found[2, 0] > 0  # the largest score is positive, whatever the axis's sign
        assert found[:, 1:].abs().max() < 1e-9
    assert principal_components(rows, like=-found)[2, 0] < 0


def test_one_patch_is_gray(randomize: Any) -> None:
    model, image = build("plain", randomize, image_size=(4, 4))
    got = five_steps(model, image)
    assert got.tokens.tolist() == [[[0.5, 0.5, 0.5]]]
    assert got.rollout.tolist() == [[1.0]]


def test_pixels_are_the_photo(tmp_path: Any, randomize: Any) -> None:
    """Normalizing is undone by the mean and deviation that travel with the weights."""
    model, _ = build("plain", randomize)
    preprocess = Preprocess(mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    vitlab.save(model.float(), tmp_path / "run", preprocess=preprocess)
    loaded: Any = vitlab.load(tmp_path / "run")
    photo = torch.rand(3, 12, 20)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (preprocess.mean, preprocess.std))
    got = five_steps(loaded, (photo - mean) / std)
    np.testing.assert_allclose(got.pixels, photo.permute(1, 2, 0), atol=1e-6)


def test_leaves_the_model_as_it_was(randomize: Any) -> None:
    model, image = build("plain", randomize)
    model.train()
    compiled: Any = torch.compile(model, backend="eager")
    first, again = five_steps(model, image), five_steps(compiled, image)
    assert isinstance(first, Steps)
    np.testing.assert_array_equal(first.logits, again.logits)  # no dropout, even while training
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_failure_leaves_no_hooks(randomize: Any) -> None:
    model, image = build("plain", randomize)
    with pytest.raises(UserError, match="resize"):
        five_steps(model, image[..., :8])
    with pytest.raises(UserError, match="one image"):
        five_steps(model, image[None])
    assert not any(module._forward_hooks for module in model.modules())


def test_other_models_are_an_error() -> None:
    resnet: Any = vitlab.create("R50x1", classes=2, image_size=32)
    with pytest.raises(UserError, match="this model is a ResNet; patches"):
        five_steps(resnet, torch.zeros(3, 32, 32))
    with pytest.raises(UserError, match="not Linear"):
        five_steps(torch.nn.Linear(1, 1), torch.zeros(3, 32, 32))  # type: ignore[arg-type]
