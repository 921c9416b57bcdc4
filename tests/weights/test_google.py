"""The authors' npz files, compared with their models in plain numpy."""

from pathlib import Path
from typing import Any

import authors
import numpy as np
import pytest
import torch
from peers import agree, head_of, images, randomize, table_of, vit_config
from scipy.ndimage import zoom

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import StemConfig, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.formats.google import check_expressible

FILES: dict[str, tuple[Any, int]] = {
    "ViT": (authors.vit(8, 4, 64, 100, 4, 2, 7), 32),
    "pre-logits": (authors.vit(8, 3, 96, 80, 3, 3, 5, prelogits=48), 24),
    "hybrid": (authors.hybrid((2, 1, 2), 1, 3, flat=False), 48),
    "hybrid, flat norms": (authors.hybrid((1, 1, 1, 1), 1, 2, flat=True), 64),
    "root alone": (authors.hybrid((), 4, 3, flat=False), 48),
    "BiT": (authors.bit((2, 1, 2), 32, 9), 48),
    "BiT, odd side": (authors.bit((1, 2), 64, 9), 37),
}


def forward(w: authors.Weights, x: torch.Tensor) -> torch.Tensor:
    run = authors.bit_forward if "resnet/group_norm/gamma" in w else authors.vit_forward
    return torch.from_numpy(run(w, x.double().permute(0, 2, 3, 1).numpy())).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FILES)
def test_load_theirs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    drawn, size = FILES[name]
    kind = "f4" if dtype == torch.float32 else "f8"
    arrays = {key: array.astype(kind) for key, array in drawn.w.items()}
    np.savez(tmp_path / "theirs.npz", **arrays)
    ours = load(tmp_path / "theirs.npz", image_size=size if name.startswith("BiT") else None)
    assert ours.config.image_size == (size, size)
    x = images(size, dtype)
    with torch.no_grad():
        agree(ours(x), forward({key: array.astype("f8") for key, array in arrays.items()}, x))
    assert ours.card.preprocess.mean == ours.card.preprocess.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", FILES)
def test_round_trip_is_bit_identical(name: str, tmp_path: Path) -> None:
    theirs = {key: array.astype("f4") for key, array in FILES[name][0].w.items()}
    np.savez_compressed(tmp_path / "theirs.npz", **theirs)
    convert(tmp_path / "theirs.npz", tmp_path / "ours", "vitlab")
    convert(tmp_path / "ours", tmp_path / "back.npz", "google")
    back = np.load(tmp_path / "back.npz")
    assert set(back) == set(theirs)
    for key, array in theirs.items():
        shape = array.shape if name != "hybrid, flat norms" else back[key].shape  # written as the public files have it
        assert back[key].shape == shape
        assert back[key].tobytes() == array.tobytes()


def test_write_ours(tmp_path: Path) -> None:
    stem = StemConfig((1, 2), width=32)
    config = ViTConfig((48, 48), patch=2, depth=2, width=96, mlp=130, heads=3, classes=5, stem=stem, gelu="tanh")
    ours = randomize(build(config), torch.float64)
    save(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs.npz", "google")
    x = images(48, torch.float64)
    with torch.no_grad():
        agree(ours(x), forward(dict(np.load(tmp_path / "theirs.npz")), x))


def test_without_a_head_there_are_no_classes(tmp_path: Path) -> None:
    arrays = {key: array for key, array in FILES["ViT"][0].w.items() if not key.startswith("head/")}
    np.savez(tmp_path / "body.npz", **arrays)
    assert load(tmp_path / "body.npz").config.classes == 0


def test_heads_are_stored_and_cannot_be_overridden(tmp_path: Path) -> None:
    np.savez(tmp_path / "theirs.npz", **FILES["ViT"][0].w)
    assert vit_config(load(tmp_path / "theirs.npz", heads=4)).heads == 4  # 16 each, not 64
    with pytest.raises(UserError, match="4 heads"):
        load(tmp_path / "theirs.npz", heads=8)


def test_bfloat16_comes_as_two_bytes_without_a_name(tmp_path: Path) -> None:
    arrays = {key: torch.from_numpy(array).bfloat16() for key, array in FILES["ViT"][0].w.items()}
    half: dict[str, Any] = {key: x.view(torch.int16).numpy().view("V2") for key, x in arrays.items()}
    np.savez(tmp_path / "half.npz", **half)
    ours = load(tmp_path / "half.npz")
    assert torch.equal(head_of(ours).bias, arrays["head/bias"].float())


@pytest.mark.parametrize("size", [(48, 48), (16, 64), (72, 40)])
def test_positions_are_resampled_as_the_authors_do(size: tuple[int, int], tmp_path: Path) -> None:
    drawn, _ = FILES["ViT"]
    np.savez(tmp_path / "theirs.npz", **drawn.w)
    ours = load(tmp_path / "theirs.npz", image_size=size)
    table = drawn.w["Transformer/posembed_input/pos_embedding"][0]
    height, width = size[0] // 8, size[1] // 8
    grid = zoom(table[1:].reshape(4, 4, -1), (height / 4, width / 4, 1), order=1)
    expected = np.concatenate([table[:1], grid.reshape(height * width, -1)])
    assert np.abs(table_of(ours)[0].detach().numpy() - expected).max() < 1e-6
    assert ours(images(size, torch.float64)).shape == (2, 7)


def test_hybrid_and_bit_by_name_have_the_authors_math() -> None:
    """What `create` builds can be written in the authors' format, if it has their GELU."""
    for name in ("R50+B/16", "R26+S/32", "R+Ti/16"):
        check_expressible(vitlab.models.variants.configure(name, {"gelu": "tanh"}))
        with pytest.raises(UserError, match="gelu"):
            check_expressible(vitlab.models.variants.configure(name, {"gelu": "exact"}))
    check_expressible(vitlab.models.variants.configure("R50x1", {}))
