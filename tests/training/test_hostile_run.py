"""Every JSON file of a run's folder replaced by nonsense: resuming, reporting and loading give one error line each,
or use the older checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run, few_digits, plain_run, records, train_small
from test_resume import killed_at

from vitlab.errors import UserError
from vitlab.report import write_report
from vitlab.report.history import read_history
from vitlab.training import checkpoint
from vitlab.training.checkpoint import find_checkpoint
from vitlab.training.loop import train
from vitlab.training.setup import read_recipe, recipe_to_resume

NONSENSE = {
    **{text: text for text in ("null", "[]", "{}", "1", '"x"', "NaN", "1e999", "", "{", "true", '{"recipe": null}')},
    "deep": "[" * 10_000 + "]" * 10_000,
    "deep objects": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "huge": "1" + "0" * 400,
    "endless": "1" + "0" * 5000,
    "bytes": "\udcff\udcfe",
    "twice": '{"format": 1, "format": 2}',
}
ANY = pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE.keys())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    train_small(out, steps=6, checkpoint_every=3, evaluate_every=3, warmup=1)
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def put(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


def resume(run: Path) -> None:
    recipe = recipe_to_resume(run, [])
    assert recipe is not None
    train(recipe, run, resume=True, data=few_digits())


def assert_one_error_line(act: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as error:
        act()
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 800


def change_value(path: Path, keys: tuple[str, ...], text: str, *, sealed: bool = False) -> None:
    """One value of a JSON file replaced; `sealed`: with a matching digest."""
    content = json.loads(path.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = "@"
    text = json.dumps(content).replace('"@"', text)
    if sealed:
        content = json.loads(text)
        del content["digest"]
        text = json.dumps(content | {"digest": checkpoint.meta_digest(content)})
    path.write_text(text)


# ---- recipe.json


@ANY
def test_recipe(run: Path, text: str) -> None:
    put(run / "recipe.json", text)
    assert_one_error_line(lambda: write_report(run))
    assert_one_error_line(lambda: resume(run))
    assert_one_error_line(lambda: read_recipe(run))


def test_every_field_of_a_recipe(made: Path, run: Path) -> None:
    """Wrong types and huge numbers are rejected or, where they are possible, accepted; never a traceback."""
    content = json.loads((made / "recipe.json").read_text())
    parts = ("recipe", "model", "preprocess")
    fields = [*((key,) for key in content), *((part, key) for part in parts for key in content[part])]
    texts = ("null", "[]", '{"a": 1}', '"x"', "-1", "1e400", "1" + "0" * 30, "1" + "0" * 400, "[[1]]")
    rejected = 0
    for i, keys in enumerate(fields):
        for text in texts[i % 3 :: 3]:  # three of them each, in turn
            shutil.copy(made / "recipe.json", run / "recipe.json")
            change_value(run / "recipe.json", keys, text)
            try:
                read_recipe(run)
            except UserError as error:
                rejected += len(str(error).splitlines()) == 1
    assert rejected > 1.5 * len(fields)


def test_a_model_larger_than_its_checkpoint_is_not_built(run: Path) -> None:
    change_value(run / "recipe.json", ("model", "width"), "1000000")
    assert_one_error_line(lambda: resume(run))
    change_value(run / "recipe.json", ("model", "depth"), "1000000000")
    assert_one_error_line(lambda: resume(run))


# ---- checkpoints


@ANY
def test_state_falls_back_to_the_older_one(
    made: Path, run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run / "checkpoints" / "last" / "state.json", text)
    found = find_checkpoint(run / "checkpoints" / "last")
    assert found is not None
    assert (found.folder.name, found.meta.step) == ("last.old", 3)
    if text in ("[]", "null"):
        resume(run)
        assert "skipped the checkpoint last" in capsys.readouterr().err.replace("\n", " ")
        assert_same_run(made, run)
    else:
        shutil.rmtree(run / "checkpoints" / "last.old")
        assert_one_error_line(lambda: resume(run))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("step", text) for text in ("1000000000", "7", "-1", "true", "2.0", "null", '"3"', "1" + "0" * 400)),
        *(("micro", text) for text in ("0", "5", "64", "null", "[]")),
        *(("world", text) for text in ("0", "3", "-2", "null")),
        *(("log_bytes", text) for text in ("-1", "1" + "0" * 30, "null", "1.5")),
        *(("best", text) for text in ('"x"', "[]", "true")),
        *(("tested", text) for text in ("null", "2")),
        *(("sha256", text) for text in ("null", "{}", "[]", '{"state.safetensors": 1}', '{"..": "x"}', '{"": "x"}')),
    ],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_an_impossible_state_is_skipped(run: Path, key: str, text: str, sealed: bool) -> None:
    change_value(run / "checkpoints" / "last" / "state.json", (key,), text, sealed=sealed)
    recipe = read_recipe(run)
    assert recipe is not None
    from vitlab.training.setup import check_meta

    found = find_checkpoint(run / "checkpoints" / "last", lambda meta: check_meta(meta, recipe))
    assert found is not None
    assert found.meta.step == 3


def test_a_step_beyond_the_last_is_skipped(made: Path, run: Path) -> None:
    change_value(run / "checkpoints" / "last" / "state.json", ("step",), "1000000000", sealed=True)
    resume(run)
    assert_same_run(made, run)
    assert records(run)[-1]["step"] == 6


def test_tensors_of_another_model_are_an_error(run: Path) -> None:
    from safetensors.torch import load_file, save_file

    last = run / "checkpoints" / "last"
    meta = checkpoint.read_meta(last)
    state = load_file(last / "state.safetensors")
    key = next(key for key in state if key.startswith("optimizer/") and key.endswith("exp_avg"))
    other = state[key].clone()
    for change in ({key: None}, {key: other[:1]}, {"model/other": other}, {"x": other}, {key: other.int()}):
        new = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        (last / "state.json").unlink()
        save_file({name: tensor.contiguous() for name, tensor in new.items()}, last / "state.safetensors")
        checkpoint.write_meta(last, meta)
        assert_one_error_line(lambda: resume(run))


# ---- log.jsonl


@ANY
def test_log(run: Path, text: str) -> None:
    if text in ("", "{}", '{"recipe": null}', NONSENSE["twice"]):
        pytest.skip("records that nothing reads are harmless")
    put(run / "log.jsonl", text)
    assert_one_error_line(lambda: read_history(run))
    log = run / "log.jsonl"
    log.write_bytes(b'{"step": 1, "loss": 2.0, "lr": 0.1}\n' + log.read_bytes())
    assert_one_error_line(lambda: read_history(run))


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "x", "loss": 1, "lr": 1}',
        '{"step": 1, "loss": null, "lr": 1}',
        '{"loss": 1, "lr": 1}',
        '{"step": 1, "loss": NaN, "lr": 1}',
        '{"step": 1e999, "loss": 1, "lr": 1}',
        '{"step": 1' + "0" * 40 + ', "loss": 1, "lr": 1}',
        '{"step": 1, "validation": 5}',
        '{"step": 1, "validation": {"accuracy": []}}',
        '{"step": 1, "validation": {"accuracy": 1.0}, "ema": null}',
        '{"speed": []}',
        '{"speed": {"step": 1}}',
        '{"speed": {"step": true, "images_per_second": 5}}',
    ],
)
def test_records_of_other_shapes(run: Path, line: str) -> None:
    with (run / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    assert_one_error_line(lambda: read_history(run))


def test_junk_after_the_checkpoint_is_cut_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with killed_at(13, monkeypatch):
        train_small(tmp_path / "run")
    with (tmp_path / "run" / "log.jsonl").open("ab") as file:
        file.write(b"\xff\xfe junk")
    train_small(tmp_path / "run", resume=True)
    assert_same_run(plain_run(), tmp_path / "run")
