"""The authors' npz files, compared with their models in plain numpy."""

from pathlib import Path
from typing import Any

import authors
import numpy as np
import pytest
import torch
from peers import agree, head_of, images, randomize, table_of, vit_config
from scipy.ndimage import zoom

from vitlab.errors import UserError
from vitlab.models.config import StemConfig, ViTConfig
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.formats.google import check_expressible
from vitlab.weights.formats.google_names import STYLES

FILES: dict[str, tuple[Any, int]] = {
    "ViT": (authors.vit(8, 4, 64, 100, 4, 2, 7), 32),
    "pre-logits": (authors.vit(8, 3, 96, 80, 3, 3, 5, prelogits=48), 24),
    "hybrid": (authors.hybrid((2, 1, 2), 1, 3, flat=False), 48),
    "hybrid, flat norms": (authors.hybrid((1, 1, 1, 1), 1, 2, flat=True), 64),
    "root alone": (authors.hybrid((), 4, 3, flat=False), 48),
    "BiT": (authors.bit((2, 1, 2), 32, 9), 48),
    "BiT, odd side": (authors.bit((1, 2), 64, 9), 37),
    "BiT, numbered": (authors.bit((1, 2), 32, 9, numbered=True), 40),
    "gap": (authors.vit(8, 4, 64, 100, 4, 2, 7, pool="mean"), 32),
    "gap, pre-logits": (authors.vit(8, 3, 64, 80, 2, 2, 5, prelogits=48, pool="mean"), 24),
    "hybrid, gap": (authors.hybrid((1, 1), 2, 3, flat=False, pool="mean"), 48),
    "linen": (authors.vit(8, 4, 64, 100, 4, 2, 7, style="linen"), 32),
    "linen, gap, pre-logits": (authors.vit(8, 4, 64, 100, 4, 2, 7, prelogits=32, style="linen", pool="mean"), 32),
    "linen, hybrid": (authors.hybrid((1, 1), 2, 3, flat=True, style="linen"), 48),
    "big_vision, token": (authors.vit(8, 4, 64, 100, 4, 2, 7, style="big_vision"), 32),
    "big_vision, one patch": (authors.vit(8, 1, 64, 100, 4, 2, 7, style="big_vision"), 8),
    "big_vision, gap": (authors.vit(8, 4, 64, 100, 4, 2, 7, prelogits=32, style="big_vision", pool="mean"), 32),
    "big_vision, map": (authors.vit(8, 4, 64, 100, 4, 2, 7, style="big_vision", pool="map"), 32),
    "big_vision, sincos": (authors.vit(8, 4, 64, 100, 4, 2, 7, style="big_vision", pool="mean", fixed=True), 32),
    "big_vision, sincos, token": (authors.vit(8, 4, 64, 90, 4, 1, 7, style="big_vision", fixed=True), 32),
}


def forward(w: authors.Weights, x: torch.Tensor) -> torch.Tensor:
    run = authors.bit_forward if any(name.startswith("resnet/") for name in w) else authors.vit_forward
    return torch.from_numpy(run(w, x.double().permute(0, 2, 3, 1).numpy())).to(x.dtype)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_load_theirs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    drawn, size = FILES[name]
    kind = "f4" if dtype == torch.float32 else "f8"
    arrays = {key: array.astype(kind) for key, array in drawn.w.items()}
    np.savez(tmp_path / "theirs.npz", **arrays)
    ours = load(tmp_path / "theirs.npz", image_size=size if name.startswith("BiT") or "sincos" in name else None)
    assert ours.config.image_size == (size, size)
    x = images(size, dtype)
    with torch.no_grad():
        agree(ours(x), forward({key: array.astype("f8") for key, array in arrays.items()}, x))
    assert ours.card.preprocess.mean == ours.card.preprocess.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", [name for name in FILES if "sincos" not in name])
def test_round_trip_is_bit_identical(name: str, tmp_path: Path) -> None:
    theirs = {key: array.astype("f4") for key, array in FILES[name][0].w.items()}
    if "token" in name:
        theirs["params/cls"][0, 0, :2] = -0.0, 0.0
    np.savez(tmp_path / "theirs.npz", **theirs)
    convert(tmp_path / "theirs.npz", tmp_path / "ours", "vitlab")
    style = name.partition(",")[0]
    convert(tmp_path / "ours", tmp_path / "back.npz", "google", names=style if style in STYLES else None)
    back = np.load(tmp_path / "back.npz")
    if "numbered" in name:  # written under the published names
        theirs = dict(zip(FILES["BiT, odd side"][0].w, theirs.values(), strict=True))
    assert set(back) == set(theirs)
    for key, array in theirs.items():
        flat = name in ("hybrid, flat norms", "linen, hybrid")  # written as the published files have it
        assert back[key].shape == (back[key].shape if flat else array.shape)
        assert back[key].tobytes() == array.tobytes()


@pytest.mark.parametrize("names", STYLES)
@pytest.mark.parametrize("pool", ["token", "mean", "attention"])
def test_write_every_style(names: str, pool: Any, tmp_path: Path) -> None:
    """The same model under every style of names gives the same logits by the authors' arithmetic."""
    config = ViTConfig((32, 32), patch=8, depth=2, width=64, mlp=90, heads=4, classes=5, pool=pool, gelu="tanh")
    ours = randomize(build(config), torch.float64)
    save(ours, tmp_path / "ours")
    if pool == "attention" and names != "big_vision":
        with pytest.raises(UserError, match="cannot express pool='attention'"):
            convert(tmp_path / "ours", tmp_path / "theirs.npz", "google", names=names)
        return
    convert(tmp_path / "ours", tmp_path / "theirs.npz", "google", names=names)
    x = images(32, torch.float64)
    with torch.no_grad():
        agree(ours(x), forward(dict(np.load(tmp_path / "theirs.npz")), x))
        agree(ours(x), load(tmp_path / "theirs.npz")(x))


def test_other_trees_of_big_vision_are_ignored(tmp_path: Path) -> None:
    drawn = FILES["big_vision, gap"][0].w
    state: dict[str, Any] = {f"opt/0/mu/{name}": 2 * x for name, x in drawn.items()} | {"extra/step": np.array(3)}
    np.savez(tmp_path / "theirs.npz", **drawn, **state)
    with torch.no_grad():
        agree(load(tmp_path / "theirs.npz")(images(32, torch.float64)), forward(drawn, images(32, torch.float64)))
    np.savez(tmp_path / "more.npz", **(drawn | {"params/extra/scale": np.ones(3)}))
    with pytest.raises(UserError, match="params/extra/scale' does not belong"):
        load(tmp_path / "more.npz")
    old = {name.replace("params/", "opt/target/"): x for name, x in drawn.items()}
    np.savez(tmp_path / "old.npz", **old)
    assert torch.equal(head_of(load(tmp_path / "old.npz")).bias.detach(), torch.from_numpy(drawn["params/head/bias"]))


@pytest.mark.parametrize("place", ["params/pos_embedding", "params/Transformer/pos_embedding"])
def test_a_table_with_a_row_for_the_token(place: str, tmp_path: Path) -> None:
    """Files of big_vision's first year: the sum is formed in our order."""
    drawn = FILES["linen"][0].w
    inner = "Transformer/posembed_input/pos_embedding"
    named = {place if name == inner else f"params/{name}": x for name, x in drawn.items()}
    np.savez(tmp_path / "old.npz", **named)
    x = images(32, torch.float64)
    with torch.no_grad():
        agree(load(tmp_path / "old.npz")(x), forward(drawn, x))


@pytest.mark.parametrize("size", [(32, 48), (16, 64)])
def test_sinusoids_are_for_the_size_that_is_asked_for(
    size: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = FILES["big_vision, sincos"][0].w
    np.savez(tmp_path / "theirs.npz", **drawn)
    x = images(size, torch.float64)
    with torch.no_grad(), caplog.at_level("INFO", "vitlab"):
        agree(load(tmp_path / "theirs.npz", image_size=size)(x), forward(drawn, x))  # 16 patches, and not 4x4
    assert f"sinusoids for {size[0] // 8}x{size[1] // 8} patches" in caplog.text
    convert(tmp_path / "theirs.npz", tmp_path / "ours", "vitlab", image_size=32)
    convert(tmp_path / "ours", tmp_path / "back.npz", "google", names="big_vision")
    back = np.load(tmp_path / "back.npz")  # the table is a learned one from now on
    assert np.abs(back["params/pos_embedding"][0] - authors.sincos(4, 4, 64)).max() < 1e-12


def test_damaged_files_of_every_style_are_refused(tmp_path: Path) -> None:
    for name, (drawn, size) in FILES.items():
        for part in ("bias", "kernel"):
            key, array = next((key, array) for key, array in drawn.w.items() if key.endswith(part))
            np.savez(tmp_path / "bad.npz", **{**drawn.w, key: array[..., :-1] if part == "bias" else array[..., None]})
            with pytest.raises(UserError, match=r"bad\.npz"):
                load(tmp_path / "bad.npz", image_size=size if "sincos" in name else None)
    twice = FILES["BiT, numbered"][0].w
    key = next(key for key in twice if "group_norm_" in key)
    np.savez(tmp_path / "twice.npz", **(twice | {key.replace("group_norm_", "group_norm_9"): twice[key]}))
    with pytest.raises(UserError, match="does not belong"):
        load(tmp_path / "twice.npz")


@pytest.mark.parametrize(
    ("to", "names", "message"), [("timm", "linen", "names="), ("google", "keras", "no names 'keras'")]
)
def test_wrong_names(to: str, names: str, message: str, tmp_path: Path) -> None:
    save(build(ViTConfig((16, 16), patch=8, depth=1, width=32, mlp=40, heads=2, gelu="tanh")), tmp_path / "ours")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "ours", tmp_path / "x.npz", to, names=names)


def test_a_resnet_has_published_names_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "bit.npz", **FILES["BiT"][0].w)
    with pytest.raises(UserError, match="linen names cannot express a ResNet"):
        convert(tmp_path / "bit.npz", tmp_path / "x.npz", "google", names="linen")


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
        check_expressible(configure(name, {"gelu": "tanh"}))
        with pytest.raises(UserError, match="gelu"):
            check_expressible(configure(name, {"gelu": "exact"}))
    check_expressible(configure("R50x1", {}))
