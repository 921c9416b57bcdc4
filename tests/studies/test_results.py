"""`vitlab results`: the published numbers, and those read from folders of runs."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vitlab.cost import cost, forward_flops
from vitlab.errors import UserError
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.studies.published import COMPUTE, PUBLISHED
from vitlab.studies.results import data_names, published_columns, read_column, title_of
from vitlab.training.setup import read_run

Command = Callable[..., tuple[int, str, str]]


def small_run(tmp_path: Path, command: Command) -> Path:
    words = ["depth=1", "width=16", "mlp=16", "heads=2", "steps=3", "batch=16", "warmup=0", "workers=0", "device=cpu"]
    assert command("train", "digits", *words, "--out", str(tmp_path / "run"))[0] == 0
    return tmp_path / "run"


def test_published_rows_are_marked(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command("results", "--compute", "--json", str(tmp_path / "r.json"), "--out", str(tmp_path / "out"))
    assert code == 0
    assert out.count("(published)") == len(PUBLISHED) == 6
    assert "(yours)" not in out
    for text in ("88.55 ± 0.04", "12,300", "R50+ViT-L/16", "by a linear probe", "ObjectNet"):
        assert text in out
    stored = json.loads((tmp_path / "r.json").read_text())
    assert {model["source"] for model in stored["models"]} == {"published"}
    assert stored["models"][0]["scores"]["Oxford-IIIT Pets"] == [97.56, 0.03]
    assert len(stored["compute"]) == 18
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert [row["TPUv3-core-days"] for row in rows] == ["2,500", "680", "230", "9,900", "12,300", "-"]


def test_it_fits_a_terminal_of_eighty_columns(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command("results")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_costs_agree_with_our_count() -> None:
    """The paper's exaFLOPs within 5 %: 303 million images, three forward passes each."""
    for row in COMPUTE:
        name = row.model.replace("ViT-", "").replace("ResNet", "R")
        counted = 3 * forward_flops(configure(name, {"classes": 1000})) * 303e6 * row.epochs / 1e18
        assert row.exaflops == pytest.approx(counted, rel=0.05), row


def test_data_sets_have_the_papers_names() -> None:
    for data, title in {
        "oxford-pets": "Oxford-IIIT Pets",
        "/data/flowers102": "Oxford Flowers-102",
        "sets/cifar10": "CIFAR-10",
        "sets/cifar-100-python.tar.gz": "CIFAR-100",
        "imagenet:/data/in": "ImageNet",
        "photos/": "photos",
        "pets.parquet": "Oxford-IIIT Pets",
    }.items():
        assert title_of(data) == title


def test_results_of_a_transfer_a_search_and_an_evaluation(tmp_path: Path) -> None:
    def write(name: str, content: object) -> str:
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(json.dumps(content))
        return str(path.parent)

    target = {"title": "CIFAR-10", "mean": 0.981, "std": 0.002}
    moved = read_column(write("transfer/results.json", {"weights": "w.npz", "targets": {"cifar10": target}}))
    assert list(moved.scores) == ["CIFAR-10"]
    assert moved.scores["CIFAR-10"] == pytest.approx((98.1, 0.2))
    assert (moved.source, moved.note) == ("yours", "transfer of w.npz")
    vtab = read_column(write("vtab/results.json", {"means": {"all": {"mean": 0.7, "done": 3, "of": 19}}}))
    assert vtab.scores["VTAB (19 tasks)"][0] == pytest.approx(70)
    assert vtab.note == "VTAB: 3 of 19 tasks"
    summary = {"accuracy": {"mean": 0.9, "std": 0.01}}
    seeds = {"recipe": {"data": "x/pets"}, "summary": summary, "runs": {"0": {}, "1": {}}}
    assert read_column(write("seeds/search.json", seeds)).scores["Oxford-IIIT Pets"] == pytest.approx((90, 1))
    scores = {"model": "m", "data": "imagenet:/d", "top1": {"value": 0.755}, "real": {"value": 0.822}}
    tested = read_column(write("tested/scores.json", scores))
    assert tested.scores == {"ImageNet": (75.5, None), "ImageNet ReaL": (100 * 0.822, None)}
    assert data_names([moved, tested])[:3] == ["ImageNet", "ImageNet ReaL", "CIFAR-10"]
    with pytest.raises(UserError, match="holds no results; name the folder of a run"):
        read_column(str(tmp_path))
    for i, odd in enumerate(({"a": 1}, moved_by("x", 10**400), moved_by("x", 1e308), moved_by("x", "much"))):
        with pytest.raises(UserError, match=r"cannot be read \((Key|Overflow|Value)Error"):
            read_column(write(f"odd-{i}/results.json", odd))


def test_scores_of_very_many_classes_are_read(tmp_path: Path) -> None:
    rows = [{"number": i, "class": f"a class of plants, {i}", "recall": 0.25} for i in range(150_000)]
    scores = {"model": "m", "data": "plants", "top1": {"value": 0.5}, "per_class": rows}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    assert (tmp_path / "scores.json").stat().st_size > 10_000_000
    assert read_column(str(tmp_path)).scores == {"plants": (50, None)}


def moved_by(title: object, mean: object) -> dict[str, object]:
    return {"weights": "a\nb|c", "targets": {"x": {"title": title, "mean": mean, "std": None}}}


@pytest.mark.parametrize("title", ["one|two\nthree", 5])
def test_words_from_a_file_do_not_break_a_table(title: object, tmp_path: Path, command: Command) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps(moved_by(title, 0.5)))
    code, _, err = command("results", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert code == 0, err
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(PUBLISHED) + 1
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1  # columns


def test_what_is_no_accuracy_of_a_test_set_does_not_stand_in_its_column(tmp_path: Path) -> None:
    def write(name: str, content: object) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        return str(path.parent)

    def scores(data: str, split: str) -> dict[str, object]:
        return {"model": "m", "data": data, "split": split, "top1": {"value": 0.5}}

    summary = {"accuracy": {"mean": 0.9, "std": 0.01}}
    masked = {"recipe": {"data": "pets", "objective": "masked"}, "summary": summary, "runs": {"0": {}, "1": {}}}
    assert read_column(write("masked/search.json", masked)).scores == {}  # of colors
    labels = {"recipe": {"data": "photos"}, "summary": {"map": {"mean": 0.5, "std": None}}, "runs": {"0": {}}}
    assert read_column(write("labels/search.json", labels)).scores == {"photos, mAP": (50, None)}
    begun = read_column(write("begun/search.json", {"recipe": {"data": "pets"}, "summary": {}, "runs": {}}))
    assert (begun.scores, begun.note) == ({}, "no seed is done yet")
    none = read_column(write("vtab/results.json", {"means": {}, "tasks": {}}))
    assert (none.scores, none.note) == ({}, "VTAB: no task is done yet")
    few = scores("sets/pets", "test") | {"mapping": "map.json"}
    assert list(read_column(write("mapped/scores.json", few)).scores) == ["Oxford-IIIT Pets, mapped"]
    few |= {"restricted": True, "classes": ["tabby", "beagle", "boxer"]}
    assert list(read_column(write("mapped/scores.json", few)).scores) == ["Oxford-IIIT Pets, among 3 classes"]
    objects = scores("sets/objectnet", "test") | {"mapping": "map.json"}
    assert list(read_column(write("mapped/scores.json", objects)).scores) == ["ObjectNet"]
    vtab = {"title": "VTAB (19 tasks)", "mean": 0.5, "std": None, "images": 2}
    found = read_column(write("two/results.json", {"weights": "w", "targets": {"vtab": vtab}}))
    assert found.note == "transfer of w; VTAB: 2 of 19 tasks"
    titles = {"test": "ObjectNet", "all": "ObjectNet", "train": "ObjectNet, train"}
    for split, title in titles.items():
        assert list(read_column(write("tested/scores.json", scores("sets/objectnet/", split))).scores) == [title]


def test_a_run_that_was_tested_on_another_set_keeps_its_own_score(tmp_path: Path, command: Command) -> None:
    folder = small_run(tmp_path, command)
    before = read_column(str(folder)).scores
    assert list(before) == ["digits"]
    photos = tmp_path / "objectnet"
    for name in ("0", "1"):
        (photos / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (40 * number, 9, 9)).save(photos / name / f"{number}.png")
    code, _, err = command("evaluate", str(folder), str(photos), "--split", "all", "--out", str(folder))
    assert code == 0, err
    found = read_column(str(folder)).scores
    assert list(found) == ["digits", "ObjectNet"]
    assert found["digits"] == pytest.approx(before["digits"])
    assert command("evaluate", str(folder), "digits", "--split", "train", "--out", str(folder))[0] == 0
    assert list(read_column(str(folder)).scores) == ["digits", "digits, train"]


@pytest.mark.slow
def test_a_run_beside_the_published(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    folder = small_run(tmp_path, command)
    code, out, err = command("results", str(folder))
    assert code == 0, err
    assert (out.count("(published)"), out.count("(yours)")) == (6, 1)
    found, stored = read_column(str(folder)), read_run(folder)
    accuracy = json.loads((folder / "scores.json").read_text())["top1"]["value"]
    assert found.scores == {"digits": (100 * accuracy, None)}
    assert stored is not None
    each = cost(lambda: build(stored.model)).train_flops
    assert found.exaflops == pytest.approx(each * 3 * 16 / 1e18)
    assert found.hours is not None
    assert found.hours > 0
    assert found.core_days is None
    assert all(column.published for column in published_columns())
