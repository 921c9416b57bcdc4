"""A run on reviewed data: its manifest, its continuation, and whose review is opened."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run, skip_report, train_small
from test_received import photos
from test_resume import killed_at

from vitlab.data.review_file import Finding, write_review
from vitlab.errors import UserError
from vitlab.training.setup import open_recipe_data, read_recipe, recipe_to_resume

Command = Callable[..., tuple[int, str, str]]
SETTINGS: dict[str, Any] = {"steps": 6, "batch": 4, "micro": 4, "warmup": 0, "checkpoint_every": 2}


def test_a_reviewed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS | {"data": str(photos(tmp_path / "photos")), "review": str(tmp_path / "review.csv")}
    names = sorted((tmp_path / "photos").rglob("*.png"))
    decisions = ["class1", "remove"]
    write_review(tmp_path / "review.csv", [Finding(str(n), decision=d) for n, d in zip(names, decisions, strict=False)])
    out = tmp_path / "run"
    train_small(out, **settings)
    listed = gzip.decompress((out / "data.txt.gz").read_bytes()).decode().splitlines()
    assert len(listed) == 11
    assert [line.split("\t")[2] for line in listed if "class0/0.png" in line] == ["1"]
    recipe = read_recipe(out)
    assert recipe is not None
    assert sum(map(len, open_recipe_data(recipe).splits.values())) == 11  # as the report opens it
    with killed_at(3, monkeypatch):
        train_small(tmp_path / "cut", **settings)
    train_small(tmp_path / "cut", resume=True, **settings)
    assert_same_run(out, tmp_path / "cut")
    write_review(tmp_path / "review.csv", [Finding(str(names[2]), decision="remove")])
    with pytest.raises(UserError, match=r"the data of the run in .* has changed"):
        train_small(out, resume=True, **settings)
    (out / "recipe.json").write_text((out / "recipe.json").read_text() + " ")  # as if received from someone
    with pytest.raises(UserError, match=r"its review .* is not opened unasked"):
        recipe_to_resume(out, [f"data={settings['data']}"])
    unreviewed = recipe_to_resume(out, [f"data={settings['data']}", "review=none"])
    assert unreviewed is not None
    assert unreviewed.review is None


@pytest.mark.slow
def test_finetune_applies_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    skip_report(monkeypatch)
    names = sorted(photos(tmp_path / "photos").rglob("*.png"))
    write_review(tmp_path / "review.csv", [Finding(str(names[0]), decision="remove")])
    words = [
        "finetune",
        str(tmp_path / "photos"),
        "--apply",
        str(tmp_path / "review.csv"),
        "--weights",
        "none",
        "--out",
        str(tmp_path / "run"),
    ]
    small = ["model=Ti/4", "image_size=8", "depth=1", "width=16", "mlp=16", "heads=2", "steps=2", "batch=4", "warmup=0"]
    code, _, err = command(*words, *small, "device=cpu")
    assert code == 0, err
    assert len(gzip.decompress((tmp_path / "run" / "data.txt.gz").read_bytes()).decode().splitlines()) == 11
    write_review(tmp_path / "review.csv", [Finding(str(names[0]), decision="clas1")])
    code, _, err = command(*words[:-1], str(tmp_path / "other"), *small, "device=cpu")
    assert code == 1
    assert "decides 'clas1'; write keep, remove" in err.replace("\n", " ")
