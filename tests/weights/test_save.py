"""Our own folder: everything is restored, and an interrupted save leaves the old model or the new one."""

import copy
import dataclasses
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import head_of, images, randomize

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.beside import beside_path

VIT = ViTConfig((16, 24), patch=8, depth=2, width=32, mlp=40, heads=4, classes=3, norm_eps=1e-7, gelu="tanh")
CONFIGS: dict[str, Any] = {
    "plain": VIT,
    "relative": dataclasses.replace(VIT, positions="relative"),
    "2d, every layer": dataclasses.replace(VIT, positions="2d", placement="every"),
    "sinusoidal": dataclasses.replace(VIT, positions="sinusoidal", placement="shared"),
    "sincos2d": dataclasses.replace(VIT, positions="sincos2d", pool="mean"),
    "axial": dataclasses.replace(VIT, attention="axial", pool="mean", positions="none"),
    "attention pool": dataclasses.replace(VIT, pool="attention", prelogits=20),
    "no head, dropout": dataclasses.replace(VIT, classes=0, dropout=0.1, drop_path=0.2),
    "stem": dataclasses.replace(VIT, stem=StemConfig((1, 2), 32, "variance", 1e-8, 1e-5), patch=1),
    "ResNet": ResNetConfig((20, 30), (1, 1), 32, classes=3),
    "AxialResNet": ResNetConfig((20, 30), (1, 1), 32, classes=3, attention="axial"),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_everything_is_restored(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = randomize(build(CONFIGS[name]), dtype)
    save(model, tmp_path / "run")
    back = load(tmp_path / "run")
    assert back.config == model.config
    assert not back.training
    assert all(p.requires_grad for p in back.parameters())
    assert not any(x.is_meta for x in [*back.parameters(), *back.buffers()])
    x = images(model.config.image_size, dtype)
    assert torch.equal(back(x), model(x))
    bare = load(tmp_path / "run" / "model.safetensors")  # the header has the config too
    assert torch.equal(bare(x), model(x))
    height, width = model.config.image_size
    larger = (2 * height, 2 * width)
    assert torch.equal(
        load(tmp_path / "run", image_size=larger)(images(larger, dtype)), model.resize(larger)(images(larger, dtype))
    )


def test_the_card_is_saved_with_the_weights(tmp_path: Path) -> None:
    preprocess = Preprocess(mean=(0.1, 0.2, 0.3), interpolation="lanczos", fit="stretch")
    save(build(VIT), tmp_path / "one", preprocess=preprocess, labels=["ä", "b", "c"])
    model = load(tmp_path / "one")
    assert model.card.preprocess == preprocess
    assert model.card.labels == ("ä", "b", "c")
    twin = copy.deepcopy(model)
    compiled: Any = torch.compile(model)
    assert twin.card == model.card == compiled.card
    save(twin, tmp_path / "two")
    assert load(tmp_path / "two").card.labels == ("ä", "b", "c")
    fresh = load(tmp_path / "two", classes=7)
    assert fresh.card.labels is None
    assert fresh.card.preprocess == preprocess
    with pytest.raises(UserError, match="3 class names for 7"):
        save(fresh, tmp_path / "three", labels=["a", "b", "c"])
    assert not (tmp_path / "three").exists()


def test_provenance_names_the_first_source(tmp_path: Path) -> None:
    from hashlib import sha256

    save(build(dataclasses.replace(VIT, gelu="exact", norm_eps=1e-6)), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs.safetensors", "timm")
    beside_path(tmp_path / "theirs.safetensors").unlink()  # a file as others write it
    convert(tmp_path / "theirs.safetensors", tmp_path / "run", "vitlab", heads=4, image_size=(16, 24))
    save(load(tmp_path / "run"), tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    digest = sha256((tmp_path / "theirs.safetensors").read_bytes()).hexdigest()
    assert config["provenance"] == {"source": str(tmp_path / "theirs.safetensors"), "format": "timm", "sha256": digest}
    assert config["sha256"] == sha256((tmp_path / "copy" / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_folder_is_saved_into(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "log.jsonl").write_text("{}\n")
    for bias in (1.0, 2.0):
        save(marked(bias), run)
        assert head_of(load(run)).bias[0] == bias
    assert (run / "log.jsonl").read_text() == "{}\n"
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "config.json", "log.jsonl", "model.safetensors"]


def test_models_of_other_programs_are_not_overwritten(tmp_path: Path) -> None:
    save(build(dataclasses.replace(VIT, norm_eps=1e-6)), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hub", "timm")
    before = (tmp_path / "hub" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="another program's"):
        save(marked(1.0), tmp_path / "hub")
    (tmp_path / "hub" / "config.json").unlink()
    with pytest.raises(UserError, match="another program's"):
        save(marked(1.0), tmp_path / "hub")
    assert (tmp_path / "hub" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        save(marked(1.0), tmp_path / "file")
    with pytest.raises(UserError, match="exists"):
        convert(tmp_path / "ours", tmp_path / "hub", "vitlab")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    for bias in (1.0, 2.0):
        save(marked(bias), tmp_path / f"{bias:g}")
    shutil.copy(tmp_path / "1" / "model.safetensors", tmp_path / "2" / "model.safetensors")
    with pytest.raises(UserError, match="sha256"):
        load(tmp_path / "2")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(marked(1.0), tmp_path / "file" / "run")


# ---- interruptions


def marked(bias: float) -> Any:
    model = randomize(build(VIT))
    torch.nn.init.constant_(head_of(model).bias, bias)
    return model


@pytest.mark.parametrize(
    ("weights", "config", "waiting", "loads"),
    [
        ("old", "old", None, "old"),
        ("old", "old", "new", "old"),  # killed before the weights were replaced
        ("new", "old", "new", "new"),  # after
        ("new", None, "new", "new"),  # the same in a folder that had no model
        ("new", "new", None, "new"),
        ("new", "old", None, None),  # no save does this
        ("old", None, "new", None),
        (None, None, "new", None),  # killed before there were any weights
    ],
)
def test_every_moment_of_a_save(
    weights: str | None, config: str | None, waiting: str | None, loads: str | None, tmp_path: Path
) -> None:
    bias = {"old": 1.0, "new": 2.0}
    for name, value in bias.items():
        save(marked(value), tmp_path / name)
    run = tmp_path / "run"
    run.mkdir()
    if weights:
        shutil.copy(tmp_path / weights / "model.safetensors", run)
    for made_by, place in ((config, "config.json"), (waiting, "config.next.json")):
        if made_by:
            shutil.copy(tmp_path / made_by / "config.json", run / place)
    if loads is None:
        with pytest.raises(UserError, match=r"sha256|no model\.safetensors"):
            load(run)
    else:
        assert head_of(load(run)).bias[0] == bias[loads]
    save(marked(3.0), run)  # and the next save repairs it
    assert head_of(load(run)).bias[0] == 3
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "model.safetensors"]


def start(work: Callable[[], object]) -> int:
    """Run in a process of its own, whose number is returned."""
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the others, and would wait for them
        try:
            work()
        finally:
            os._exit(0)
    return child


def run_and_kill(work: Callable[[], object], seconds: float) -> None:
    """Run in a process of its own, and kill that with SIGKILL after so many seconds."""
    child = start(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def duration(work: Callable[[], object]) -> float:
    """The seconds that it takes in a process of its own, so that a busy machine is given as much."""
    begin = time.monotonic()
    os.waitpid(start(work), 0)
    return time.monotonic() - begin


@pytest.mark.slow
def test_kill_while_saving_into_a_run_folder(tmp_path: Path) -> None:
    models = [marked(1.0), marked(2.0)]
    models[1].blocks[0].mlp.up.weight.data += 1
    expected = [{name: x.clone() for name, x in model.state_dict().items()} for model in models]
    save(models[0], tmp_path / "run")

    def work() -> None:
        while True:
            for model in models:
                save(model, tmp_path / "run")

    rng, seen = random.Random(0), set()
    limit = 3 * duration(lambda: save(models[0], tmp_path / "run"))
    for _ in range(40):
        run_and_kill(work, rng.uniform(0, limit))
        loaded = load(tmp_path / "run").state_dict()
        which = int(loaded["head.bias"][0] == 2)
        assert all(torch.equal(x, expected[which][name]) for name, x in loaded.items())
        seen.add(which)
    assert seen == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["vitlab", "huggingface", "timm"])
def test_kill_while_converting(to: str, tmp_path: Path) -> None:
    source = dataclasses.replace(VIT, image_size=(16, 16), norm_eps=1e-6, width=128, heads=2, mlp=512)
    model = randomize(build(source))
    save(model, tmp_path / "ours")
    rng, done = random.Random(0), 0
    once = [duration(partial(convert, tmp_path / "ours", tmp_path / f"{to}-{name}", to)) for name in "ab"]
    limit = 1.5 * min(once)  # the first is slower
    for i in range(25):
        target = tmp_path / f"{to}-{i}"
        delay = limit * rng.random() ** (1 if i % 2 else 4)  # many early ones: the machine may be faster by now
        run_and_kill(partial(convert, tmp_path / "ours", target, to), delay)
        if target.exists():  # then it is complete
            done += 1
            assert all(torch.equal(x, model.state_dict()[name]) for name, x in load(target).state_dict().items())
    assert 0 < done < 25


def test_save_needs_a_vitlab_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Linear"):
        save(torch.nn.Linear(2, 2), tmp_path / "run")  # type: ignore[arg-type]
    compiled = torch.compile(vitlab.build(VIT))
    save(compiled, tmp_path / "compiled")  # type: ignore[arg-type]
    assert load(tmp_path / "compiled").config == VIT


def test_names_that_could_not_be_read_again_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """And of those that may be written, the longest are read."""
    few = vitlab.create("Ti/8", image_size=8, depth=1, width=8, mlp=8, heads=1, classes=70_000)
    with pytest.raises(UserError, match=r"the names of 70,000 classes take 11\.\d MB, .* use shorter names$"):
        vitlab.save(few, tmp_path / "long", labels=[f"{i:0156d}" for i in range(70_000)])
    assert not (tmp_path / "long").exists()
    names = [f"{i:0120d}" for i in range(70_000)]
    vitlab.save(few, tmp_path / "model", labels=names)
    assert list(vitlab.load(tmp_path / "model").labels or ()) == names
