"""Exported files: run by their own runtimes and compared with the model, at sizes and batches not traced."""

import copy
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import fill
from families import FAMILIES, family, mostly_slow
from numpy.typing import NDArray
from PIL import Image
from preloaded import program
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.export import ExportResult, compare, export
from vitlab.export.images import open_images
from vitlab.inference import onnx_file
from vitlab.inference.traced import Half, any_size, resample_grid, traceable
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitlab.models.variants import Model, build
from vitlab.prediction import Classifier

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
ALL = [*KINDS, "hybrid", "resnet", "axial resnet", *FAMILIES]
WRITTEN: list[Any] = ["relative", "every", "attention pool", "axial 2d", "prelogits tanh", "no head"]
WRITTEN += ["hybrid", "resnet", "CLIP", "DINOv2", "DINOv2 with registers", "DINOv3", "EVA-02", "MAE"]
WRITTEN += [pytest.param(kind, marks=pytest.mark.long) for kind in ("SigLIP", "DeiT III")]  # no switch that these lack


def small(kind: str) -> Model:
    if "resnet" in kind:
        model = build(ResNetConfig((48, 40), (1, 1), 32, 5, attention="axial" if "axial" in kind else "none"))
    elif kind == "hybrid":
        model = build(ViTConfig((32, 48), 1, 1, 32, 64, 2, 5, StemConfig((1, 1), 32)))
    elif kind in FAMILIES:
        model = build(family(kind, image_size=(24, 32), patch=8, depth=1))
    else:
        model = vitlab.create("Ti/8", image_size=(24, 32), **SMALL | KINDS[kind])
    return fill(model).eval()


def sizes(model: Model) -> list[tuple[int, int]]:
    """The model's own and three more: larger, of another shape, and down to one row."""
    step = onnx_file.stride_of(model)
    h, w = model.config.image_size
    return [(h, w), (h + 2 * step, w + step), (h, 2 * w), (h // 2 if step == 1 else step, w)]


@torch.no_grad()
def expected(model: Model, images: Tensor) -> NDArray[Any]:
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
def test_the_traceable_module_is_the_model_at_every_size(kind: str) -> None:
    model = small(kind).double()
    graph = any_size(traceable(model))
    for size in sizes(model):
        images = torch.randn(2, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            got = graph(images).numpy()
        np.testing.assert_allclose(got, expected(model, images), atol=1e-5, err_msg=f"{size}")  # positions are float32


def test_positions_are_resampled_bilinearly_with_aligned_corners() -> None:
    grid = torch.randn(4, 5, 3)
    for h, w in [(7, 5), (1, 9), (4, 1), (2, 2)]:
        new = nn.functional.interpolate(grid.permute(2, 0, 1)[None], (h, w), mode="bilinear", align_corners=True)
        np.testing.assert_allclose(resample_grid(grid, h, w).numpy(), new[0].permute(1, 2, 0).numpy(), atol=1e-6)
    assert torch.equal(resample_grid(grid, 4, 5), grid)


def test_the_model_is_not_changed() -> None:
    model = small("hybrid")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Half(any_size(traceable(model)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model.stem).__name__ == "Stem"


# ---- ONNX


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def exported(run: str, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportResult]:
    """A file for images of any size, which most tests share."""
    path = tmp_path_factory.mktemp("files") / "x.onnx"
    return path, export(run, path, dynamic_size=True, check=str(photos))


def check_every_size(path: Path, model: Model) -> None:
    file = session(path)
    assert [put.name for put in file.get_inputs()] == ["images"]
    assert [got.name for got in file.get_outputs()] == ["logits" if model.config.classes else "features"]
    for size in sizes(model):
        for batch in (1, 5):
            images = torch.randn(batch, 3, *size)
            (got,) = file.run(None, {"images": images.numpy()})
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected(model, images), atol=1e-4, err_msg=f"{size} {batch}")


@pytest.mark.slow
def test_onnx_runtime_computes_the_model(run: str, exported: tuple[Path, ExportResult]) -> None:
    path, result = exported
    assert [(entry.size, entry.images) for entry in result.comparisons] == [((16, 16), 40), ((24, 24), 40)]
    assert max(entry.difference for entry in result.comparisons) <= 1e-4
    lines = result.lines()
    assert lines[0].startswith(f"{path} is written: ")
    assert f"{result.comparisons[1].difference:.2g}" in lines[2]
    check_every_size(path, vitlab.load(run))


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_onnx_runtime_computes_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    vitlab.save(model, tmp_path / "run")
    result = export(tmp_path / "run", tmp_path / "x.onnx", dynamic_size=True)
    assert [entry.images for entry in result.comparisons] == [64, 64]
    assert max(entry.difference for entry in result.comparisons) <= 1e-4
    check_every_size(tmp_path / "x.onnx", model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relative", "resnet"])
def test_a_file_for_one_size_refuses_others(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    vitlab.save(model, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "x.onnx")
    file = session(tmp_path / "x.onnx")
    own, other = sizes(model)[:2]
    images = torch.randn(7, 3, *own)
    np.testing.assert_allclose(file.run(None, {"images": images.numpy()})[0], expected(model, images), atol=1e-4)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="Got invalid dimensions"):
        file.run(None, {"images": np.zeros((1, 3, *other), np.float32)})


@pytest.mark.slow
def test_the_file_is_enough_to_use_the_model(
    run: str, photos: Path, exported: tuple[Path, ExportResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example in the documentation, which does not import vitlab, computes what the model does."""
    page = (Path(__file__).parents[1] / "docs" / "using.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in block)
    assert "vitlab" not in code
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets.onnx").symlink_to(exported[0])
    classifier = Classifier(run, "cpu")
    for path in sorted(photos.glob("0*.png")):
        photo, rotation = Image.open(path), Image.Exif()
        ours = classifier.logits(classifier.pixels(photo)[None]).numpy()
        photo.save("cat.jpg", "PNG")
        got: dict[str, Any] = {}
        exec(code, got)
        np.testing.assert_allclose(got["logits"], ours, atol=1e-5)
        rotation[0x112] = 6  # a phone that was held upright: to be shown, its pixels are turned by 90° clockwise
        photo.transpose(Image.Transpose.ROTATE_90).save("cat.jpg", "PNG", exif=rotation)
        exec(code, got)
        np.testing.assert_allclose(got["logits"], ours, atol=1e-5)
    meta = {key: got["meta"][key] for key in ("fit", "any_size", "stride")}
    assert meta == {"fit": "crop", "any_size": "true", "stride": "8"}
    assert json.loads(got["meta"]["labels"]) == ["a", "b", "c", "d", "고양이"]
    assert json.loads(got["meta"]["model"])["patch"] == 8


@pytest.mark.slow
def test_the_file_has_standard_operators_and_no_paths_of_this_machine(exported: tuple[Path, ExportResult]) -> None:
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
def test_half_precision_halves_the_file_and_keeps_float32_inputs_and_outputs(run: str, tmp_path: Path) -> None:
    full, half = (export(run, tmp_path / f"{p}.onnx", precision=p) for p in ("fp32", "fp16"))
    assert half.bytes < 0.7 * full.bytes
    assert 1e-6 < half.comparisons[0].difference < 0.05
    file = session(tmp_path / "fp16.onnx")
    assert [put.type for put in (*file.get_inputs(), *file.get_outputs())] == ["tensor(float)"] * 2
    types = {tensor.data_type for tensor in onnx.load(tmp_path / "fp16.onnx").graph.initializer if len(tensor.dims) > 1}
    assert types == {onnx.TensorProto.FLOAT16}


@pytest.mark.slow
def test_a_model_beyond_one_file_gets_a_second(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 10_000)
    result = export(run, tmp_path / "x.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]
    assert result.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    images = torch.randn(3, 3, 16, 16)
    (got,) = session(tmp_path / "x.onnx").run(None, {"images": images.numpy()})
    np.testing.assert_allclose(got, expected(vitlab.load(run), images), atol=1e-5)


def test_a_file_that_differs_is_not_written(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_zeros(module: nn.Module, model: Model, dynamic_size: bool, path: Path) -> onnx_file.Runner:
        path.write_bytes(b"x")
        return lambda images: torch.zeros(len(images), 5)

    monkeypatch.setattr("vitlab.export.run.write_pt2", write_zeros)
    with pytest.raises(UserError, match=r"nothing is written: .* differ from the model's by up to \d"):
        export(run, tmp_path / "x.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x.pt2", "x.onnx"])
def test_a_file_beyond_the_limit_is_not_written(
    run: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 10_000)  # the second file is removed as well
    monkeypatch.setitem(compare.LIMITS, "fp32", -1.0)
    with pytest.raises(UserError, match=r"nothing is written: .* differ from the model's by up to \d"):
        export(run, tmp_path / target)
    assert list(tmp_path.iterdir()) == []


# ---- torch.export


@pytest.mark.slow
def test_torch_export(run: str, tmp_path: Path) -> None:
    result = export(run, tmp_path / "x.pt2", dynamic_size=True)
    assert max(entry.difference for entry in result.comparisons) <= 1e-4
    extra = {"vitlab.json": ""}
    program = torch.export.load(tmp_path / "x.pt2", extra_files=extra).module()
    model = vitlab.load(run)
    for size in sizes(model)[:3]:  # torch.export takes no image of a single row
        for batch in (1, 5):
            images = torch.randn(batch, 3, *size)
            np.testing.assert_allclose(program(images).detach().numpy(), expected(model, images), atol=1e-5)
    assert json.loads(json.loads(extra["vitlab.json"])["labels"])[0] == "a"


# ---- requests


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("x.txt", {}, "should end in .onnx"),
        ("x.pt2", {"precision": "int8", "calibrate": "digits"}, "int8 is written to .onnx files only"),
        ("x.onnx", {"precision": "int8"}, "add --calibrate FOLDER"),
        ("x.onnx", {"calibrate": "digits"}, "--calibrate goes with --int8"),
        ("x.onnx", {"precision": "int8", "calibrate": "digits", "least": 1.5}, "at most 1, not 1.5"),
        ("x.onnx", {"check": "nowhere"}, "there is no data set 'nowhere'"),
    ],
)
def test_invalid_requests(run: str, target: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
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


# ---- images


def test_images_are_spread_over_a_set_and_broken_ones_left_out(photos: Path) -> None:
    images = open_images(str(photos))
    assert len(images) == 41
    assert images.pixels((16, 16), Preprocess()).shape == (40, 3, 16, 16)
    some = images.sample(5)
    assert list(some.indices) == [0, 10, 20, 30, 40]
    assert len(images.without(some)) == 36
    assert len(open_images("digits")) == 1797
    assert len(open_images(str(photos / "0*.png"))) == 10


def test_generated_images_differ_and_have_detail() -> None:
    pixels = open_images(None).pixels((32, 32), Preprocess()).float()
    assert pixels.shape == (64, 3, 32, 32)
    assert (pixels.flatten(1).std(1) > 20).all()
    assert len({tuple(x.flatten().tolist()) for x in pixels}) == 64


# ---- Ctrl-C


INTERRUPTED = """
import signal, sys
import vitlab.cli
import vitlab.export.run
from vitlab.files import unfinished

def interrupted(*args, **options):
    for path in unfinished:
        path.touch()
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        raise ImportError("an error of the library's own")

vitlab.export.run.export_module = interrupted
sys.argv = ["vitlab", "export", *sys.argv[1:]]
vitlab.cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["new.pt2", "new.onnx"], "new.onnx"))
def test_ctrl_c_is_one_line(name: str, model: Path, tmp_path: Path) -> None:
    """Also inside a library that would catch an exception and raise an error of its own; no file is left."""
    target = tmp_path / name
    process = subprocess.run([sys.executable, "-c", INTERRUPTED, model, target], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == f"stopped; {target} is not written\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".pt2", pytest.param(".onnx", marks=pytest.mark.long)])
def test_ctrl_c_at_any_moment(ending: str, model: Path, tmp_path: Path) -> None:
    target, stopped, delay = tmp_path / f"new{ending}", 0, 0.2
    words = [str(program("vitlab")), "export", str(model), str(target)]
    # no message before the verb begins, and before the program does, Python's own end
    ends = [(130, f"stopped; {target} is not written\n"), (130, ""), (-signal.SIGINT, "")]
    held: dict[str, Any] = {"preexec_fn": partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGINT])}
    while not target.exists():  # later and later, until it comes too late
        with subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, **held) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        delay += 0.5
        if not target.exists():
            assert (process.returncode, err) in ends
            assert not list(tmp_path.iterdir())
            stopped += 1
    assert stopped >= 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads in /proc what a process has loaded")
def test_ctrl_c_before_the_verb_began(model: Path, tmp_path: Path) -> None:
    words = [str(Path(sys.executable).with_name("vitlab")), "export", str(model), str(tmp_path / "new.pt2")]
    heard: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # ignored under nohup
    with subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, **heard) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():  # the command line is imported
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err in ("", f"stopped; {tmp_path / 'new.pt2'} is not written\n")  # empty: while it imported
    assert not list(tmp_path.iterdir())
