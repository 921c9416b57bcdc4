"""Models side by side: who takes turns, what is measured, and how it is shown."""

import dataclasses
import io
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle
from rich.console import Console
from timing import measure_until

from vitlab.bench.cases import AXES, Case, grow, pick, plan, usual_batch
from vitlab.bench.clock import LARGE, Contestant, Row, calls_within, race
from vitlab.bench.compare import Outcome, Terms, count_parts, engine_call, make_terms, measure_case
from vitlab.bench.output import case_table, growth_table, number, outcome_json, panel
from vitlab.bench.peers import NotThere
from vitlab.errors import UserError
from vitlab.inference.engine import Engine
from vitlab.models.names import configure
from vitlab.plots.speed import Bars, Lines, speed_figure

Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
TERMS = Terms(CPU, torch.float32, ("timm",), rounds=2, seconds=0.01)
SMALL = Case("Ti/16", "infer", "eager", batch=2, image_size=32, depth=1)


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of the usual size takes half a second."""
    monkeypatch.setitem(LARGE, "cpu", 512)


# ---- cases


def test_batches_suit_the_model_and_the_device() -> None:
    """Those for which the GPU's tables are made."""
    assert [usual_batch(configure(name, {}), gpu=True) for name in ("Ti/16", "B/16", "L/16")] == [512, 256, 128]
    assert usual_batch(configure("H/14", {}), gpu=False) == 1


def test_growth_is_in_steps_that_the_model_allows() -> None:
    case = Case("B/16", "infer", "eager", batch=256, image_size=224)
    assert [c.batch for c in grow(case, "batch")] == [1, 4, 16, 64, 256]
    assert [c.image_size for c in grow(case, "size")] == [112, 224, 336, 448]
    assert [c.depth for c in grow(case, "depth")] == [3, 6, 12, 24]
    assert [c.image_size for c in grow(Case("H/14", "infer", "eager", 1, 224), "size")] == [112, 224, 336, 448]
    assert all(c.config for axis in AXES for c in grow(case, axis))
    with pytest.raises(UserError, match="leave depth out of --grow"):
        grow(Case("R50x1", "infer", "eager", 1, 224), "depth")


def test_plan() -> None:
    options = {"batch": 8, "image_size": 32, "gpu": False}
    groups = plan(["Ti/16"], ["train", "latency"], ["eager", "compiled"], ["depth"], **options)  # type: ignore[arg-type]
    kinds = [(g.cases[0].what, g.cases[0].mode, g.cases[0].batch, g.axis, len(g.cases)) for g in groups]
    assert kinds == [
        ("train", "eager", 8, None, 1),
        ("train", "compiled", 8, None, 1),
        ("train", "compiled", 8, "depth", 4),
        ("latency", "eager", 1, None, 1),
        ("latency", "compiled", 1, None, 1),
    ]
    with pytest.raises(UserError, match="the sizes are"):
        plan(["Q/16"], ["train"], ["eager"], [], **options)  # type: ignore[arg-type]


def test_words_of_options() -> None:
    assert pick("infer, train", "--what", ("train", "infer", "latency")) == ["train", "infer"]
    with pytest.raises(UserError, match=r"--what must be a list of train or infer, not 'tarin'"):
        pick("tarin", "--what", ("train", "infer"))


# ---- the clock


def test_contestants_take_turns_and_each_round_starts_with_another() -> None:
    order: list[str] = []

    def act(name: str) -> None:
        order.append(name)
        time.sleep(0.002)

    three = [Contestant(name, "1", partial(act, name), None) for name in "abc"]
    rounds = list(race(three, CPU, rounds=3, seconds=0.002, alone=True))
    assert [sorted(speeds) for speeds in rounds] == [["a", "b", "c"]] * 3
    turns = [name for i, name in enumerate(order) if i == 0 or name != order[i - 1]]
    assert "".join(turns) == "abc" + "abc" + "bca" + "cab"  # first each alone, to see how often it fits


def test_half_as_fast_is_half_the_rate() -> None:
    fast, slow = (Contestant(name, "1", partial(time.sleep, s), None) for name, s in (("a", 0.01), ("b", 0.02)))

    def measure() -> float:
        speeds = list(race([fast, slow], CPU, rounds=3, seconds=0.05, alone=False))
        return Row("a", "1", tuple(s["a"] for s in speeds), None, ()).ratio(
            Row("b", "1", tuple(s["b"] for s in speeds), None, ())
        )

    measure_until(lambda ratio: 1.8 < ratio < 2.2, measure)
    measure_until(lambda calls: 8 <= calls <= 11, lambda: calls_within(fast.call, CPU, 0.1))


def test_the_ratio_is_of_the_same_rounds() -> None:
    """A machine that halves its speed after a round changes no ratio."""
    ours, theirs = Row("a", "1", (200, 100, 50), None, ()), Row("b", "1", (100, 50, 25), None, ())
    assert ours.ratio(theirs) == 2
    assert ours.median == 100


# ---- a case


@pytest.mark.parametrize("what", ["train", "infer", pytest.param("latency", marks=pytest.mark.slow)])
def test_a_case_on_this_machine(what: str) -> None:
    case = Case("Ti/16", what, "eager", 1 if what == "latency" else 2, 32, depth=1)  # type: ignore[arg-type]
    parts: list[int] = []
    outcome = measure_case(case, TERMS, parts.append)
    names = ["vitlab", "vitlab train", "timm"] if what == "train" else ["vitlab", "timm"]
    assert [row.name for row in outcome.rows] == names
    assert not outcome.left_out
    assert len(parts) == count_parts(case, TERMS)
    n, d = 5, 192  # four patches and the class token
    forward = 2 * 4 * 768 * d + 2 * n * (4 * d * d + 2 * d * 768) + 4 * n * n * d + 2 * d * 1000
    for row in outcome.rows:
        assert len(row.rates) == 2
        flops = (3 if what == "train" else 1) * forward
        products = [rate * flops / share for rate, share in zip(row.rates, row.shares, strict=True)]
        assert outcome.matmul_flops == pytest.approx(sum(products) / 2)  # the median of two rounds
        assert 0 < row.share < 1
    assert outcome.best_peer is outcome.rows[-1]


def test_a_contestant_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.bench.peers.PEERS", {"timm": lambda config: torch.nn.Linear(2, 2)})
    outcome = measure_case(SMALL, TERMS, lambda parts: None)
    assert [row.name for row in outcome.rows] == ["vitlab"]
    assert outcome.left_out[0].startswith("timm has another model of that name, with 6 parameters instead of")
    assert outcome.best_peer is None
    assert outcome_json(outcome, None)["rows"][0]["to_best_peer"] is None


@pytest.mark.long
def test_compiled() -> None:
    """Where there is a compiler; without one, what fails is named."""
    for what, own in (("train", "vitlab train"), ("infer", "vitlab engine")):
        case = Case("Ti/16", what, "compiled", 2, 32, depth=1)  # type: ignore[arg-type]
        outcome = measure_case(case, TERMS, lambda parts: None)
        assert [row.name for row in outcome.rows] == ["vitlab", own, "timm"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("what", ["train", "infer", "latency"])
def test_a_case_on_a_gpu(what: str) -> None:
    terms = make_terms("cuda", "auto", ["timm"], rounds=2, seconds=0.05)
    for mode in ("eager", "compiled"):
        case = Case("Ti/16", what, mode, 1 if what == "latency" else 64, 128)  # type: ignore[arg-type]
        outcome = measure_case(case, terms, lambda parts: None)
        assert not outcome.left_out
        assert len(outcome.rows) == (4 if what == "train" else 3 if mode == "compiled" else 2)
        for row in outcome.rows:
            assert row.memory is not None
            # the weights in float32 with their gradients and two moments, or in bf16
            assert row.memory > 5.5e6 * (16 if what == "train" else 2)
            assert 0 < row.share < 1


def test_the_engine_is_named_by_what_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where it chooses; on a GPU a model that was not compiled is no engine."""
    compiled = dataclasses.replace(SMALL, mode="compiled")
    monkeypatch.setattr(Engine, "prepare", lambda self, batch: False)
    call = engine_call(compiled, TERMS)
    assert call().shape == (2, 1000)
    assert call.how == "eager"
    call.engine.use(2, "ONNX Runtime", call.engine.plain)
    row = Row("vitlab engine", "1", (100.0,), None, (0.1,), call.how)
    outcome = Outcome(compiled, (row,), 1e12, ())
    assert cells(case_table(outcome))[0] == ["vitlab engine (ONNX Runtime)"]
    assert outcome_json(outcome, None)["rows"][0]["how"] == "ONNX Runtime"
    monkeypatch.setattr("vitlab.bench.compare.build", lambda config: call.engine.model)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)
    monkeypatch.setattr("vitlab.inference.engine.has_bf16", lambda device: True)
    on_gpu = dataclasses.replace(TERMS, device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(NotThere, match="could not be compiled"):
        engine_call(compiled, on_gpu)


# ---- tables, figures, numbers


def outcomes() -> list[Outcome]:
    found = []
    for case, factor in zip(grow(Case("Ti/16", "infer", "eager", 4, 32), "batch"), (1, 2, 3), strict=True):
        rows = [Row("vitlab", "0.1", (30.0 * factor, 33.0 * factor), 2_500_000_000, (0.1,))]
        rows += [] if factor == 3 else [Row("timm", "1.0", (15.0 * factor, 22.0 * factor), None, (0.1,))]
        found.append(Outcome(case, tuple(rows), 1e12, ()))
    return found


def cells(table: object) -> list[list[str]]:
    return [list(column.cells) for column in table.columns]  # type: ignore[attr-defined]


def test_table_of_a_case() -> None:
    table = cells(case_table(outcomes()[0]))
    assert table[0] == ["vitlab 0.1", "timm 1.0"]
    assert table[1] == ["31.5", "18.5"]
    assert table[2] == ["30 to 33", "15 to 22"]
    assert table[4] == ["2.5", ""]
    assert table[5] == ["1.75", "1.00"]  # the median of 2 and 1.5


def test_a_table_of_80_columns_shows_all_numbers() -> None:
    """Long names wrap; no number is cut."""
    rows = [
        Row(name, "1.10.100", (10_338.4, 10_553.0), 119_000_000_000, (0.55,), how)
        for name, how in (("vitlab engine", "compiled, as a CUDA graph"), ("vitlab train cuda_graph=true", ""))
    ]
    outcome = Outcome(
        Case("B/16", "infer", "compiled", 256, 224), (*rows, dataclasses.replace(rows[0], name="timm")), 1e12, ()
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(case_table(outcome))
    shown = console.export_text()
    assert "…" not in shown
    for number_shown in ("10,446", "10,338 to 10,553", "55.0%", "119.0", "1.00"):
        assert shown.count(number_shown) == 3


def test_table_of_latency_is_in_milliseconds() -> None:
    row = Row("vitlab", "1", (100.0, 200.0, 250.0), None, (0.1,))
    outcome = Outcome(Case("Ti/16", "latency", "eager", 1, 32), (row,), 1e12, ())
    table = cells(case_table(outcome))
    assert table[1:3] == [["5"], ["4 to 10"]]
    assert isinstance(panel([outcome], None), Bars)


def test_table_and_figure_of_growth() -> None:
    found = outcomes()
    assert cells(growth_table(found, "batch")) == [["vitlab", "timm"], ["31.5", "18.5"], ["63", "37"], ["94.5", ""]]
    lines = panel(found, "batch")
    assert isinstance(lines, Lines)
    assert lines.values == [1, 2, 4]
    assert lines.title == "Ti/16 inference, eager, 32 px"
    figure = speed_figure([panel(found[:1], None), lines])
    bars, growth = figure.axes
    assert [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)] == [31.5, 18.5]
    assert [list(line.get_xdata()) for line in growth.lines] == [[1, 2, 4], [1, 2, 4]]  # type: ignore[arg-type]


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.25432, 12.34, 4085.4)] == ["0.254", "12.3", "4,085"]


# ---- the command line


@pytest.mark.slow
def test_bench_compare(tmp_path: Path, command: Command) -> None:
    words = ["--image-size", "32", "--what", "infer", "--against", "timm", "--batch", "2", "--device", "cpu"]
    words += ["--seconds", "0.01", "--rounds", "2", "--grow", "batch"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    code, out, err = command("bench", "compare", "Ti/16", *words, *files)
    assert code == 0, err
    assert "matmul: " in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(r["axis"], r["batch"]) for r in found["results"]] == [(None, 2), ("batch", 1), ("batch", 2)]
    assert found["results"][0]["depth"] == 12
    assert {row["name"] for result in found["results"] for row in result["rows"]} == {"vitlab", "timm"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Q/16"], "the sizes are Ti, S, B, L, H or g"),
        (["Ti/16", "--what", "training"], "--what must be a list of train, infer or latency, not 'training'"),
        (["Ti/16", "--against", "keras"], "--against must be a list of timm, transformers or torchvision, not 'keras'"),
        (["Ti/16", "--precision", "fp8"], "--precision must be float32, bfloat16 or auto, not 'fp8'"),
        (["Ti/16", "--seconds", "0"], "--seconds must be positive, not 0"),
        (["Ti/16", "--image-size", "100"], "use 96 or 112"),
        (["Ti/16", "--plot", "a.jpg"], "name a file that ends in .png"),
        (["Ti/16", "--device", "cuda:9"], "device=cuda:9" if not torch.cuda.is_available() else "no device 'cuda:9'"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str, command: Command) -> None:
    code, out, err = command("bench", "compare", *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
