"""Exported files: run by their own runtimes and compared with the model, at sizes and batches that are new to them."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import fill
from PIL import Image
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.export import Report, compare, export
from vitlab.export import onnx as onnx_file
from vitlab.export.graph import Half, any_size, plain, stretch
from vitlab.export.images import open_pictures
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitlab.models.variants import Model, build
from vitlab.predict import Classifier

SMALL: dict[str, Any] = {"classes": 5, "depth": 1, "width": 32, "mlp": 64, "heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {"positions": "2d"},
    "sinusoidal": {"positions": "sinusoidal"},
    "none": {"positions": "none"},
    "relative": {"positions": "relative"},
    "relative mean": {"positions": "relative", "pool": "mean"},
    "every": {"placement": "every", "depth": 2},
    "2d shared mean": {"positions": "2d", "placement": "shared", "pool": "mean"},
    "attention pool": {"pool": "attention"},
    "axial": {"attention": "axial"},
    "axial 2d": {"attention": "axial", "positions": "2d", "placement": "every", "depth": 2},
    "prelogits tanh": {
        "prelogits": 24,
        "gelu": "tanh",
        "positions": "sinusoidal",
        "placement": "shared",
        "pool": "mean",
    },
    "no head": {"classes": 0, "positions": "none"},
}
ALL = [*KINDS, "hybrid", "resnet"]
WRITTEN = ["relative", "every", "attention pool", "axial 2d", "prelogits tanh", "no head", "hybrid", "resnet"]


def small(kind: str) -> Model:
    if kind == "resnet":
        model = build(ResNetConfig((48, 40), (1, 1), 32, 5))
    elif kind == "hybrid":
        model = build(ViTConfig((32, 48), 1, 1, 32, 64, 2, 5, StemConfig((1, 1), 32)))
    else:
        model = vitlab.create("Ti/8", image_size=(24, 32), **SMALL | KINDS[kind])
    return fill(model).eval()


def sizes(model: Model) -> list[tuple[int, int]]:
    """The model's own and three more: larger, of another shape, and down to one row."""
    step = onnx_file.stride_of(model)
    h, w = model.config.image_size
    return [(h, w), (h + 2 * step, w + step), (h, 2 * w), (h // 2 if step == 1 else step, w)]


@torch.no_grad()
def wanted(model: Model, images: Tensor) -> np.ndarray:
    size = (images.shape[2], images.shape[3])
    return copy.deepcopy(model).resize(size)(images).numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    model = fill(vitlab.create("Ti/8", image_size=16, classes=5, depth=1, width=32, mlp=64, heads=2))
    vitlab.save(model, folder, labels=["a", "b", "c", "d", "고양이"], preprocess=Preprocess(crop=0.8))
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(40):
        coarse = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((30, 24 + i), Image.Resampling.BICUBIC).save(folder / f"{i:02d}.png")
    (folder / "broken.png").write_text("not a picture")
    return folder


# ---- the graph, before any file


@pytest.mark.parametrize("kind", ALL)
def test_the_plain_graph_is_the_model_at_every_size(kind: str) -> None:
    model = small(kind).double()
    graph = any_size(plain(model))
    for size in sizes(model):
        images = torch.randn(2, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            got = graph(images).numpy()
        np.testing.assert_allclose(got, wanted(model, images), atol=1e-5, err_msg=f"{size}")  # positions are float32


def test_stretching_is_bilinear_with_aligned_corners() -> None:
    grid = torch.randn(4, 5, 3)
    for h, w in [(7, 5), (1, 9), (4, 1), (2, 2)]:
        new = nn.functional.interpolate(grid.permute(2, 0, 1)[None], (h, w), mode="bilinear", align_corners=True)
        np.testing.assert_allclose(stretch(grid, h, w).numpy(), new[0].permute(1, 2, 0).numpy(), atol=1e-6)
    assert torch.equal(stretch(grid, 4, 5), grid)


def test_the_model_is_left_as_it_was() -> None:
    model = small("hybrid")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Half(any_size(plain(model)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model.stem).__name__ == "Stem"


# ---- ONNX


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def exported(run: str, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A file for images of any size; most of what is asked of a file is asked of this one."""
    path = tmp_path_factory.mktemp("files") / "x.onnx"
    return path, export(run, path, dynamic_size=True, check=str(photos))


def agrees_at_every_size(path: Path, model: Model) -> None:
    file = session(path)
    assert [put.name for put in file.get_inputs()] == ["images"]
    assert [got.name for got in file.get_outputs()] == ["logits" if model.config.classes else "features"]
    for size in sizes(model):
        for batch in (1, 5):
            images = torch.randn(batch, 3, *size)
            (got,) = file.run(None, {"images": images.numpy()})
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, wanted(model, images), atol=1e-4, err_msg=f"{size} {batch}")


def test_onnx_runtime_computes_the_model(run: str, exported: tuple[Path, Report]) -> None:
    path, report = exported
    assert [(entry.size, entry.images) for entry in report.checks] == [((16, 16), 40), ((24, 24), 40)]
    assert max(entry.difference for entry in report.checks) <= 1e-4
    said = report.lines()
    assert said[0].startswith(f"{path} is written: ")
    assert f"{report.checks[1].difference:.2g}" in said[2]
    agrees_at_every_size(path, vitlab.load(run))


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_onnx_runtime_computes_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    vitlab.save(model, tmp_path / "run")
    report = export(tmp_path / "run", tmp_path / "x.onnx", dynamic_size=True)
    assert [entry.images for entry in report.checks] == [64, 64]
    assert max(entry.difference for entry in report.checks) <= 1e-4
    agrees_at_every_size(tmp_path / "x.onnx", model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relative", "resnet"])
def test_a_file_for_one_size_refuses_others(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    vitlab.save(model, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "x.onnx")
    file = session(tmp_path / "x.onnx")
    own, other = sizes(model)[:2]
    images = torch.randn(7, 3, *own)
    np.testing.assert_allclose(file.run(None, {"images": images.numpy()})[0], wanted(model, images), atol=1e-4)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="Got invalid dimensions"):
        file.run(None, {"images": np.zeros((1, 3, *other), np.float32)})


def test_a_consumer_needs_nothing_but_the_file(
    run: str, photos: Path, exported: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own lines, which use nothing of ours, give what the model gives."""
    page = (Path(__file__).parents[1] / "docs" / "using.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in block)
    assert "vitlab" not in code
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets.onnx").symlink_to(exported[0])
    classifier = Classifier(run, "cpu")
    for path in sorted(photos.glob("0*.png")):
        Image.open(path).save("cat.jpg", "PNG")
        got: dict[str, Any] = {}
        exec(code, got)
        ours = classifier.logits(classifier.pixels(Image.open(path))[None])
        np.testing.assert_allclose(got["logits"], ours.numpy(), atol=1e-5)
    facts = {key: got["facts"][key] for key in ("fit", "any_size", "stride")}
    assert facts == {"fit": "crop", "any_size": "true", "stride": "8"}
    assert json.loads(got["facts"]["labels"]) == ["a", "b", "c", "d", "고양이"]
    assert json.loads(got["facts"]["model"])["patch"] == 8


def test_the_file_is_plain_and_tells_nothing_of_this_machine(exported: tuple[Path, Report]) -> None:
    path, _ = exported
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert {"MatMul", "Softmax", "Gelu", "LayerNormalization"} <= {node.op_type for node in proto.graph.node}
    assert {node.domain for node in proto.graph.node} == {""}
    data = path.read_bytes()
    assert str(Path(vitlab.__file__).parent).encode() not in data
    assert b"site-packages" not in data
    assert [each.name for each in path.parent.iterdir()] == ["x.onnx"]


@pytest.mark.slow
def test_half_precision_halves_the_file_and_keeps_its_doors_float32(run: str, tmp_path: Path) -> None:
    whole, half = (export(run, tmp_path / f"{p}.onnx", precision=p) for p in ("fp32", "fp16"))
    assert half.bytes < 0.7 * whole.bytes
    assert 1e-6 < half.checks[0].difference < 0.05
    file = session(tmp_path / "fp16.onnx")
    assert [put.type for put in (*file.get_inputs(), *file.get_outputs())] == ["tensor(float)"] * 2
    types = {tensor.data_type for tensor in onnx.load(tmp_path / "fp16.onnx").graph.initializer if len(tensor.dims) > 1}
    assert types == {onnx.TensorProto.FLOAT16}


@pytest.mark.slow
def test_a_model_beyond_one_file_gets_a_second(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 10_000)
    report = export(run, tmp_path / "x.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    images = torch.randn(3, 3, 16, 16)
    (got,) = session(tmp_path / "x.onnx").run(None, {"images": images.numpy()})
    np.testing.assert_allclose(got, wanted(vitlab.load(run), images), atol=1e-5)


@pytest.mark.parametrize("target", ["x.pt2", pytest.param("x.onnx", marks=pytest.mark.slow)])
def test_a_file_that_differs_is_not_written(
    run: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 10_000)  # weights of their own go as well
    monkeypatch.setitem(compare.LIMITS, "fp32", -1.0)
    with pytest.raises(UserError, match=r"nothing is written: .* differ from the model's by up to \d"):
        export(run, tmp_path / target)
    assert list(tmp_path.iterdir()) == []


# ---- torch.export


def test_torch_export(run: str, tmp_path: Path) -> None:
    report = export(run, tmp_path / "x.pt2", dynamic_size=True)
    assert max(entry.difference for entry in report.checks) <= 1e-4
    extra = {"vitlab.json": ""}
    program = torch.export.load(tmp_path / "x.pt2", extra_files=extra).module()
    model = vitlab.load(run)
    for size in sizes(model)[:3]:  # torch.export takes no image of a single row
        for batch in (1, 5):
            images = torch.randn(batch, 3, *size)
            np.testing.assert_allclose(program(images).detach().numpy(), wanted(model, images), atol=1e-5)
    assert json.loads(json.loads(extra["vitlab.json"])["labels"])[0] == "a"


# ---- requests


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("x.txt", {}, "should end in .onnx"),
        ("x.pt2", {"precision": "int8", "calibrate": "digits"}, "int8 is written to .onnx files only"),
        ("x.onnx", {"precision": "int8"}, "add --calibrate FOLDER"),
        ("x.onnx", {"calibrate": "digits"}, "--calibrate goes with --int8"),
        ("x.onnx", {"precision": "int8", "calibrate": "digits", "least": 1.5}, "at most 1, not 1.5"),
        ("x.onnx", {"check": "nowhere"}, "there is no data set 'nowhere'"),
    ],
)
def test_requests_that_cannot_be_met(run: str, target: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        export(run, tmp_path / target, **options)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_overwritten(run: str, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_text("precious")
    with pytest.raises(UserError, match="exists"):
        export(run, tmp_path / "x.onnx")
    assert (tmp_path / "x.onnx").read_text() == "precious"


def test_missing_packages_are_named(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"needs onnxruntime: pip install 'vitlab\[export\]'"):
        export(run, tmp_path / "x.onnx")


# ---- pictures


def test_pictures_are_spread_over_a_set_and_broken_ones_left_out(photos: Path) -> None:
    pictures = open_pictures(str(photos))
    assert len(pictures) == 41
    assert pictures.pixels((16, 16), Preprocess()).shape == (40, 3, 16, 16)
    some = pictures.some(5)
    assert list(some.indices) == [0, 10, 20, 30, 40]
    assert len(pictures.without(some)) == 36
    assert len(open_pictures("digits")) == 1797
    assert len(open_pictures(str(photos / "0*.png"))) == 10


def test_generated_pictures_differ_and_have_detail() -> None:
    pixels = open_pictures(None).pixels((32, 32), Preprocess()).float()
    assert pixels.shape == (64, 3, 32, 32)
    assert (pixels.flatten(1).std(1) > 20).all()
    assert len({tuple(x.flatten().tolist()) for x in pixels}) == 64
