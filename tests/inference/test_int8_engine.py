"""int8 on a CPU: the graph that is kept beside a model, what is refused of a stranger's, and the engine on it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import Command, fill
from families import FAMILIES
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import vitlab
from vitlab.errors import UserError
from vitlab.evaluation.piece_cache import model_key
from vitlab.export.int8_file import features_graph, find_int8, write_graph
from vitlab.export.quantize import calibrate
from vitlab.inference.engine import Engine
from vitlab.inference.graph_check import check_graph
from vitlab.inference.int8 import NAME, Int8, check_device, check_runtime, read_int8
from vitlab.inference.onnx_file import open_session
from vitlab.inference.scales import weights_key
from vitlab.inference.traced import traceable
from vitlab.models.config import Preprocess
from vitlab.models.vit import ViT
from vitlab.prediction import Classifier

CPU = torch.device("cpu")
SIDE, WIDTH = 16, 32
WEIGHT = np.random.default_rng(0).normal(0, 0.05, (3 * SIDE * SIDE, WIDTH)).astype(np.float32)


def graph(*more: Any, inputs: tuple[Any, ...] = (), constants: dict[str, Any] | None = None) -> Any:
    """One product of an image's pixels with WEIGHT, and further nodes beside it."""
    values = {"weight": WEIGHT, **(constants or {})}
    made = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["features"]),
            *more,
        ],
        "features",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE]), *inputs],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


@pytest.fixture
def model() -> ViT:
    made = vitlab.create("Ti/8", image_size=SIDE, classes=3, depth=1, width=WIDTH, mlp=64, heads=2)
    assert isinstance(made, ViT)
    return fill(made).eval()


def int8_of(model: ViT) -> Int8:
    """Of which the features are others than the model's, so that it shows which are used."""
    return Int8(weights_key(model), 4, ("blocks.0.mlp.down",), 0.99, 300, True, graph().SerializeToString())


# ---- what a graph may have


def test_a_plain_graph_is_accepted() -> None:
    check_graph(graph(), (SIDE, SIDE), WIDTH)
    with pytest.raises(UserError, match=r"takes \(3, 16, 16\) and gives \(32,\)"):
        check_graph(graph(), (SIDE, 32), WIDTH)


def outside(proto: Any) -> None:
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../secret")


def loop() -> Any:
    body = helper.make_graph([], "body", [], [])
    return graph(helper.make_node("Loop", ["", "", "flat"], ["forever"], body=body))


def constant_in_setting() -> Any:
    return graph(helper.make_node("Cast", ["flat"], ["x"], to=helper.make_tensor("t", TensorProto.FLOAT, [1], [1.0])))


def beyond() -> Any:
    """A sum that is a million times as large as what is added."""
    return graph(
        helper.make_node("Reshape", ["line", "tall"], ["column"]),
        helper.make_node("Add", ["column", "line"], ["square"]),
        constants={"line": np.zeros(1 << 20, np.float32), "tall": np.array([-1, 1])},
    )


def attention() -> Any:
    """Whose values are wider than its queries."""
    return graph(
        helper.make_node("Reshape", ["flat", "q"], ["queries"]),
        helper.make_node("Reshape", ["flat", "v"], ["values"]),
        helper.make_node(
            "MultiHeadAttention", ["queries", "queries", "values"], ["out"], domain="com.microsoft", num_heads=1
        ),
        constants={"q": np.array([-1, 48, 16]), "v": np.array([-1, 24, 32])},
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (loop, "it has the operation 'Loop'"),
        (lambda: graph(helper.make_node("Own", ["flat"], ["x"], domain="mine")), "it has the operation 'Own'"),
        (constant_in_setting, "an operation has the setting 'to'"),
        (beyond, "the size of 'square' is too large"),
        (
            lambda: graph(
                helper.make_node("Cast", ["flat"], ["n"], to=TensorProto.INT64),
                helper.make_node("Reshape", ["n", "one"], ["line"]),
                helper.make_node("Slice", ["line", "zero", "one"], ["first"]),
                helper.make_node("Expand", ["weight", "first"], ["any"]),
                constants={"one": np.array([-1]), "zero": np.array([0])},
            ),
            "its sizes cannot be computed|the size of 'any' is unknown",
        ),
        (attention, "are no attention's"),
        (
            lambda: graph(inputs=(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]),)),
            "not one input and one output",
        ),
        (lambda: graph(helper.make_node("MatMul", ["flat", "flat"], ["x"])), "its sizes cannot be computed"),
    ],
)
def test_what_could_do_harm_is_refused(made: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_graph(made(), (SIDE, SIDE), WIDTH)


def test_other_files_functions_and_sparse_values_are_refused() -> None:
    proto = graph()
    outside(proto)
    with pytest.raises(UserError, match="'weight' is in another file"):
        check_graph(proto, (SIDE, SIDE), WIDTH)
    proto = graph()
    proto.functions.add(name="f", domain="mine")
    with pytest.raises(UserError, match="it has functions"):
        check_graph(proto, (SIDE, SIDE), WIDTH)


# ---- its file


def test_a_file_is_read_as_it_was_written(model: ViT, tmp_path: Path) -> None:
    made = int8_of(model)
    made.write(tmp_path / NAME)
    assert read_int8(tmp_path / NAME, (SIDE, SIDE), WIDTH) == made
    assert find_int8(str(tmp_path), model, None, CPU) == made
    assert "3 of 4 dense layers in 8 bits; the best class is float32's on 99.00% of 300 images" in made.describe()
    onnx.checker.check_model(str(tmp_path / NAME))  # a file like any other
    with torch.no_grad():
        model.head.bias.add_(1)  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"int8\.onnx is of other weights; calibrate again with --calibrate IMAGES$"):
        find_int8(str(tmp_path), model, None, CPU)
    with pytest.raises(UserError, match="has no int8 model yet; add --calibrate IMAGES"):
        find_int8(str(tmp_path / "other"), model, None, CPU)


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    path.write_bytes(proto.SerializeToString())


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (to_link, "it is a link, no regular file"),
        (to_pipe, "it is a link, no regular file"),
        (lambda path: path.write_bytes(b"\xff" * 100), "is no int8 model"),
        (lambda path: path.write_bytes(path.read_bytes()[:-50]), "is no int8 model"),
        (lambda path: rewrite(path, outside), "'weight' is in another file"),
        (lambda path: rewrite(path, lambda p: p.metadata_props.pop()), "it does not say what was measured"),
        (
            lambda path: rewrite(path, lambda p: setattr(p.metadata_props[-1], "value", '{"agreement": "all"}')),
            "it does not say what was measured",
        ),
        (lambda path: rewrite(path, lambda p: setattr(p.metadata_props[-1], "value", "[")), "is not valid JSON"),
    ],
)
def test_a_file_from_elsewhere_is_one_line(
    harm: Callable[[Path], object], words: str, model: ViT, tmp_path: Path
) -> None:
    path = tmp_path / NAME
    int8_of(model).write(path)
    harm(path)
    with pytest.raises(UserError, match=words) as caught:
        read_int8(path, (SIDE, SIDE), WIDTH)
    assert str(caught.value).endswith("calibrate again with --calibrate IMAGES")
    assert str(caught.value).count("\n") == 0


def test_damaged_files_are_read_or_refused(model: ViT, tmp_path: Path) -> None:
    """Nothing but a UserError, whatever a byte becomes; outside of the weights, where most of them are."""
    rng, path = np.random.default_rng(0), tmp_path / NAME
    int8_of(model).write(path)
    content = path.read_bytes()
    start, end = content.find(WEIGHT.tobytes()), content.find(WEIGHT.tobytes()) + WEIGHT.nbytes
    refused = 0
    for _ in range(100):
        damaged = bytearray(content[:start] + content[end:])
        damaged[rng.integers(len(damaged))] = rng.integers(256)
        path.write_bytes(damaged[:start] + content[start:end] + damaged[start:])
        try:
            read_int8(path, (SIDE, SIDE), WIDTH)
        except UserError as error:
            refused += str(error).endswith("calibrate again with --calibrate IMAGES")
    assert refused > 30


def test_weights_that_are_not_there_are_one_line(model: ViT) -> None:
    """The check needs sizes alone; ONNX Runtime finds out."""
    proto = graph()
    proto.graph.initializer[0].raw_data = b"\0" * 8
    with pytest.raises(UserError, match="ONNX Runtime cannot run the int8 model"):
        Int8("", 1, (), 1.0, 1, True, proto.SerializeToString()).runner()


# ---- the engine


def features(images: Tensor) -> Tensor:
    return images.flatten(1) @ torch.from_numpy(WEIGHT)


def test_the_engine_runs_the_graph_until_the_model_is_changed(model: ViT) -> None:
    assert model.head is not None
    made, x = int8_of(model), torch.randn(5, 3, SIDE, SIDE)
    for what, expected in (("features", features(x)), ("logits", model.head(features(x)))):
        engine = Engine(model, what, CPU, scales=made)  # type: ignore[arg-type]
        torch.testing.assert_close(engine(x), expected)
        assert not engine.prepare(5)  # there is nothing faster
        engine.warm_up([1, 2])
        assert engine.warming is None
    torch.testing.assert_close(engine.start(list(x))(), expected)
    with torch.no_grad():
        model.head.bias.add_(1)
        torch.testing.assert_close(engine(x), model(x))


def test_predictions_come_from_the_graph(model: ViT) -> None:
    assert model.head is not None
    pixels = torch.randint(0, 256, (4, 3, SIDE, SIDE), dtype=torch.uint8)
    x = pixels / 127.5 - 1
    assert model.card.preprocess == Preprocess()
    found = Classifier(model, "cpu", scales=int8_of(model)).logits(pixels)
    with torch.no_grad():
        torch.testing.assert_close(found, model.head(features(x)), rtol=1e-4, atol=1e-4)


def test_kept_features_are_apart(model: ViT) -> None:
    keys = {model_key(model, "features", False, scales=scales) for scales in (None, int8_of(model))}
    assert len(keys) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "relative"},
        {"attention": "axial"},
        {"pool": "attention"},
        FAMILIES["DINOv3, SwiGLU"],
        FAMILIES["EVA-02"],
    ],
)
def test_every_kind_of_graph_is_exact_and_accepted(settings: dict[str, Any]) -> None:
    """In float32 the model's features; in int8 nearer to them than to nothing, and a graph that would be read again."""
    made = vitlab.create("Ti/8", image_size=SIDE, classes=3, depth=2, width=WIDTH, mlp=64, heads=2, **settings)
    assert isinstance(made, ViT)
    model, x = fill(made).eval(), torch.rand(5, 3, SIDE, SIDE) * 2 - 1
    graph = traceable(model)
    assert isinstance(graph, ViT)
    scales, _ = calibrate(graph, torch.randint(0, 256, (64, 3, SIDE, SIDE), dtype=torch.uint8), Preprocess())
    proto = features_graph(graph, model)
    with torch.no_grad():
        expected = model.features(x)
    torch.testing.assert_close(open_session(proto.SerializeToString())(x), expected, rtol=1e-4, atol=1e-4)
    got = open_session(write_graph(proto, scales, model))(x)
    assert 1e-5 < float((got - expected).norm() / expected.norm()) < 0.2


# ---- what is refused


def test_other_devices_are_refused() -> None:
    with pytest.raises(UserError, match="int8 is for CPUs, and the device is cuda; use fp8 there, or add --device cpu"):
        check_device(torch.device("cuda"))
    with pytest.raises(UserError, match="the device is mps, or add --device cpu"):
        check_device(torch.device("mps"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"^int8 needs onnxruntime: pip install 'vitlab\[export\]'$"):
        check_runtime()


@pytest.mark.parametrize(("classes", "words"), [(0, "fewer than two"), (1, "fewer than two")])
def test_models_without_classes_are_refused(classes: int, words: str) -> None:
    small = vitlab.create("Ti/8", image_size=SIDE, classes=classes, depth=1, width=WIDTH, mlp=64, heads=2)
    with pytest.raises(UserError, match=f"{words}; leave --precision out"):
        find_int8("run", small, "photos", CPU)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision", "int8", "--device", "cpu"], "has no int8 model yet; add --calibrate IMAGES"),
        (["--precision", "int8", "--device", "cpu", "--calibrate", "nowhere"], "nowhere"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str, model: ViT, tmp_path: Path, command: Command) -> None:
    vitlab.save(model, tmp_path / "run")
    (tmp_path / "a.png").touch()
    code, out, err = command("predict", str(tmp_path / "run"), str(tmp_path / "a.png"), *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
