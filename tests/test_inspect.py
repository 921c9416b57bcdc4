"""`vitlab inspect` from the command line: the files that appear, their contents, and the errors."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import mostly_slow
from PIL import Image

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.analysis.distance import mean_distance
from vitlab.analysis.embeddings import patch_filters, position_similarity
from vitlab.analysis.gallery import FIGURES, folder_names
from vitlab.analysis.steps import five_steps
from vitlab.cli import main
from vitlab.data.open import open_data
from vitlab.data.transforms import eval_image
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitlab.plots import style

pytest.importorskip("matplotlib")

LABELS = ("cat", "dog", "owl", "emu", "yak")
BASE: dict[str, Any] = {"image_size": (24, 32), "patch": 8, "depth": 2, "width": 12, "mlp": 12, "heads": 3}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"pool": "mean", "positions": "2d"},
    "attention pool": {"pool": "attention", "positions": "sinusoidal", "classes": 0},
    "axial": {"pool": "mean", "attention": "axial"},
    "hybrid": {"stem": StemConfig((1,), 32), "patch": 2},
}


def photo(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 255, (5, 5, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "DPI", 40)  # fewer pixels are drawn faster


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for i, name in enumerate(("b.png", "a.jpg", "more/a.png")):
        photo(i).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def run(tmp_path: Path, randomize: Any) -> Path:
    return save(tmp_path / "run", randomize)


def save(folder: Path, randomize: Any, **settings: Any) -> Path:
    model = randomize(vitlab.build(ViTConfig(**(BASE | {"classes": 3} | settings))))
    labels = LABELS[: model.config.classes] or None
    vitlab.save(model, folder, labels=labels, preprocess=Preprocess(crop=1.0))
    return folder


def inspect(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["vitlab", "inspect", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0


@pytest.mark.slow
def test_everything(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "b"
    inspect(monkeypatch, run, pictures / "b.png", "--out", out)
    printed = capsys.readouterr().out
    assert "rank correlation of similarity with grid distance" in printed
    assert f"all figures are in {out}" in printed
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    of_model = {f"{name}.{kind}" for name in ("filters", "positions", "distance") for kind in ("png", "svg", "npz")}
    drawn = ("classes", "rollout", "layers", "heads", "steps")
    of_picture = {f"b/{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    assert names == of_model | of_picture | {"b/arrays.npz", ".vitlab-pictures"}
    for name in names:
        if name.endswith("png"):
            with Image.open(out / name) as picture:
                assert min(picture.size) > 70
    svg = (out / "b" / "steps.svg").read_text()
    assert "of the class token" in svg  # text is text, not curves
    assert "dog" in svg


def test_arrays_are_what_the_functions_give(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect(monkeypatch, run, pictures, "--out", tmp_path / "out", "--figures", "filters,positions,distance,rollout")
    model: Any = vitlab.load(run)
    files = [pictures / "a.jpg", pictures / "b.png", pictures / "more" / "a.png"]
    images = [eval_image(Image.open(file), (24, 32), Preprocess(crop=1.0)) for file in files]
    with np.load(tmp_path / "out" / "filters.npz") as found:
        np.testing.assert_array_equal(found["filters"], patch_filters(model).filters)
    with np.load(tmp_path / "out" / "positions.npz") as found:
        np.testing.assert_array_equal(found["similarity"], position_similarity(model))
    with np.load(tmp_path / "out" / "distance.npz") as found:
        np.testing.assert_allclose(found["distance"], mean_distance(model, [torch.stack(images)]), rtol=1e-6)
        assert found["images"].tolist() == [str(file) for file in files]
    for name, image in zip(("a", "b", "a-2"), images, strict=True):
        steps = five_steps(model, image)
        with np.load(tmp_path / "out" / name / "arrays.npz") as found:
            assert sorted(found) == sorted(vars(steps))
            for key in found:
                np.testing.assert_allclose(found[key], getattr(steps, key), rtol=1e-5, atol=1e-6)
        assert not (tmp_path / "out" / name / "steps.png").exists()


@pytest.mark.parametrize("name", mostly_slow([name for name in MODELS if name != "plain"], "axial"))
def test_every_kind_of_model(
    name: str, pictures: Path, tmp_path: Path, randomize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save(tmp_path / "run", randomize, **MODELS[name])
    inspect(monkeypatch, run, pictures / "a.jpg", "--out", tmp_path / "out", "--figures", "distance,steps")
    with np.load(tmp_path / "out" / "a" / "arrays.npz") as arrays:
        model = vitlab.load(run)
        assert arrays["rollout"].shape == model.config.grid
        assert arrays["rollout"].sum() == pytest.approx(1)
    assert (tmp_path / "out" / "a" / "steps.png").exists()
    if name == "hybrid":
        with np.load(tmp_path / "out" / "distance.npz") as arrays:
            assert arrays["distance"].max() > 8  # pixels: the stem's stride counts


@pytest.mark.parametrize("kind", ["none", "relative"])
def test_without_positions_the_rest_is_drawn(
    kind: str,
    pictures: Path,
    tmp_path: Path,
    randomize: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = save(tmp_path / "run", randomize, positions=kind)
    inspect(monkeypatch, run, pictures / "a.jpg", "--out", tmp_path / "out", "--figures", "positions,rollout")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"positions: no figure, this model adds no position embeddings at its stem (positions='{kind}'" in printed
    assert not (tmp_path / "out" / "positions.png").exists()
    assert (tmp_path / "out" / "a" / "rollout.png").exists()


def test_another_resolution_and_no_picture(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect(monkeypatch, run, "--figures", "positions", "--image-size", "16x48", "--out", tmp_path / "out")
    with np.load(tmp_path / "out" / "positions.npz") as arrays:
        assert arrays["similarity"].shape == (2, 6, 2, 6)


def test_figures_among_photos_are_no_class(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        (tmp_path / "pets" / LABELS[i % 2] / "scans").mkdir(parents=True, exist_ok=True)
        photo(i).save(tmp_path / "pets" / LABELS[i % 2] / "scans" / f"{i}.png")
    inspect(monkeypatch, run, "--figures", "filters", "--out", "pets/inside")
    inspect(monkeypatch, run, "--figures", "filters", "--out", f"pets/{LABELS[0]}/figures")
    data = open_data("pets")
    assert data.classes == tuple(sorted(LABELS[:2]))
    assert len(data.train) + len(data.test) == 6
    assert "'pets/inside' holds pictures that vitlab drew and is not used" in caplog.text
    inspect(
        monkeypatch, run, "--figures", "filters", "--out", f"pets/{LABELS[0]}/scans"
    )  # a folder of photos stays one
    data = open_data("pets")
    assert len(data.train) + len(data.test) == 7  # with the figure, which its user put there


def test_chosen_heads(run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--figures", "heads", "--layer", "2", "--head", "3,1", "--out", tmp_path / "out")
    inspect(monkeypatch, run, pictures / "a.jpg", *words)
    svg = (tmp_path / "out" / "a" / "heads.svg").read_text()
    assert [word in svg for word in ("layer 2", "head 3", "head 1", "layer 1", "head 2")] == [True] * 3 + [False] * 2


def test_the_three_most_probable_classes(
    pictures: Path, tmp_path: Path, randomize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save(tmp_path / "run", randomize, classes=5)
    inspect(monkeypatch, run, pictures / "a.jpg", "--figures", "classes", "--out", tmp_path / "out")
    model: Any = vitlab.load(run)
    image = eval_image(Image.open(pictures / "a.jpg"), (24, 32), Preprocess(crop=1.0))
    logits = model(image[None])[0].detach().double().numpy()
    shares = np.exp(logits) / np.exp(logits).sum()
    best = np.argsort(-shares)[:3]
    with np.load(tmp_path / "out" / "a" / "arrays.npz") as found:
        assert found["classes"].tolist() == best.tolist()
        np.testing.assert_allclose(found["probabilities"], shares[best], rtol=1e-5)
        for label, one in zip(best, found["class_maps"], strict=True):
            np.testing.assert_allclose(one, class_map(model, image[None], int(label))[0], rtol=1e-5, atol=1e-7)
    svg = (tmp_path / "out" / "a" / "classes.svg").read_text()
    assert [f">{LABELS[k]}<" in svg for k in range(5)] == [k in best for k in range(5)]


def test_chosen_classes(run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--figures", "classes", "--class", "Owl", "--class", "0", "--out", tmp_path / "out")
    inspect(monkeypatch, run, pictures / "a.jpg", *words)
    with np.load(tmp_path / "out" / "a" / "arrays.npz") as found:
        assert found["classes"].tolist() == [2, 0]
        assert found["class_maps"].shape == (2, 3, 4)


def test_without_a_head_the_rest_is_drawn(
    pictures: Path,
    tmp_path: Path,
    randomize: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = save(tmp_path / "run", randomize, classes=0)
    inspect(monkeypatch, run, pictures / "a.jpg", "--out", tmp_path / "out", "--figures", "classes,rollout")
    assert "classes: no figure, this model has no head" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out" / "a").glob("*.png")) == ["rollout.png"]
    assert "there is no class 'cat': this model has no head" in run_with_error(
        monkeypatch, capsys, run, pictures / "a.jpg", "--class", "cat", "--out", tmp_path / "out"
    )


def test_names_of_folders() -> None:
    files = [Path(name) for name in ("x/a.jpg", "y/a.png", "y/A.png", "a-2.png", "b.tar.png")]
    assert folder_names(files) == ["a", "a-2", "A-3", "a-2-2", "b.tar"]


def run_with_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["vitlab", "inspect", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    printed = capsys.readouterr()
    assert stop.value.code == 1
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_errors_in_options(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: object) -> str:
        return run_with_error(monkeypatch, capsys, run, *words, "--out", tmp_path / "out")

    image = pictures / "a.jpg"
    assert "name at least one image" in error()
    assert f"there is no figure 'rolout'; there are {', '.join(FIGURES)}" in error(image, "--figures", "rolout")
    assert "there is no layer 3; this model has layers 1 to 2" in error(image, "--layer", "1,3")
    assert "there is no head 4; this model has heads 1 to 3" in error(image, "--head", "4")
    wrong = "there is no class 'caat'; give the name of one of the 3 classes, did you mean 'cat'?"
    assert wrong in error(image, "--class", "caat")
    assert "there is no class '3'; give the name of one of the 3 classes, such as 'cat'" in error(image, "--class", "3")
    assert "--layer must be integers from 1 on, as in 1,5,10, not '0'" in error(image, "--layer", "0")
    assert "--head must be integers from 1 on, as in 1,5,10, not 'all'" in error(image, "--head", "all")
    assert "do not divide an image of 25x25" in error(image, "--image-size", "25")
    assert "--image-size" in error(image, "--image-size", "large")
    assert "there is no device 'gpu'" in error(image, "--device", "gpu")
    assert not (tmp_path / "out").exists()


def test_errors_in_files(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: object) -> str:
        return run_with_error(monkeypatch, capsys, *words, "--figures", "distance")

    out = ("--out", tmp_path / "out")
    cut = pictures / "cut.jpg"
    cut.write_bytes((pictures / "a.jpg").read_bytes()[:300])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"'{cut}' cannot be read as an image" in error(run, pictures, *out)
    assert f"'{pictures / 'notes.txt'}' cannot be read as an image" in error(run, pictures / "notes.txt", *out)
    assert f"there is no file or folder '{tmp_path / 'gone.jpg'}'" in error(run, tmp_path / "gone.jpg", *out)
    assert f"the folder '{empty}' holds no images" in error(run, empty, *out)
    assert "there is no file or folder" in error(tmp_path / "norun", pictures / "a.jpg", *out)
    taken = pictures / "b.png"
    assert f"{taken} is a file; name a folder" in error(run, pictures / "a.jpg", "--out", taken)


def test_a_resnet_has_classes_alone(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = vitlab.build(ResNetConfig((40, 56), (1, 1), width=32, classes=2))
    torch.nn.init.normal_(model.head.weight)
    vitlab.save(model, tmp_path / "resnet", preprocess=Preprocess(crop=1.0))
    words = (tmp_path / "resnet", pictures / "a.jpg", "--out", tmp_path / "out")
    printed = run_with_error(monkeypatch, capsys, *words, "--figures", "classes,rollout")
    assert "is a ResNet; only transformers have the other figures" in printed
    assert not (tmp_path / "out").exists()
    inspect(monkeypatch, *words)
    assert sorted(file.name for file in (tmp_path / "out" / "a").iterdir()) == [
        "arrays.npz",
        "classes.png",
        "classes.svg",
    ]
    with np.load(tmp_path / "out" / "a" / "arrays.npz") as found:
        assert found["class_maps"].shape == (2, 5, 7)
