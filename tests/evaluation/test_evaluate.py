"""`evaluate` on real models and images, against scikit-learn on the model's own logits."""

import csv
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, top_k_accuracy_score

import vitlab
from vitlab.cli import main
from vitlab.data import imagenet
from vitlab.data.folder import subfolders
from vitlab.data.open import open_data
from vitlab.data.source import ArraySource, Subset
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.evaluation.classes import match_classes, read_names
from vitlab.evaluation.evaluate import check_real, evaluate, open_split, score
from vitlab.evaluation.result import Evaluation
from vitlab.weights import load

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")


@pytest.fixture(scope="module")
def pictures() -> ArraySource:
    """37 pictures of 7 classes, a number that no batch divides."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (37, 8, 8, 3), dtype=np.uint8)
    return ArraySource("picture", pixels, rng.integers(0, 7, 37), NAMES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("runs") / "small", "Ti/4", NAMES)


def save_random(folder: Path, name: str, labels: tuple[str, ...]) -> Path:
    """A model whose head is random too, so that its predictions vary."""
    torch.manual_seed(0)
    model = vitlab.create(name, classes=len(labels), image_size=8, depth=1, width=16, mlp=16, heads=2)
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    vitlab.save(model, folder, labels=labels)
    return folder


def own_logits(run: Path, source: Any) -> np.ndarray:
    model = load(run)
    with torch.no_grad():
        images = [
            eval_image(source.image(i), model.config.image_size, model.card.preprocess) for i in range(len(source))
        ]
        return model(torch.stack(images)).double().numpy()


def same_scores(found: Evaluation, logits: np.ndarray, labels: np.ndarray, k: int) -> None:
    guesses = logits.argmax(1)
    assert found.top1.value == pytest.approx((guesses == labels).mean())
    assert found.top5 is not None
    assert found.top5.value == pytest.approx(top_k_accuracy_score(labels, logits, k=5, labels=range(k)))
    assert (found.matrix == confusion_matrix(labels, guesses, labels=range(k))).all()
    precision, recall, _, images = precision_recall_fscore_support(
        labels, guesses, labels=range(k), zero_division=np.nan
    )
    for row in found.class_table():
        assert row["images"] == images[row["number"]]
        for name, expected in (("recall", recall), ("precision", precision)):
            value = np.nan if row[name] is None else row[name]
            assert value == pytest.approx(expected[row["number"]], nan_ok=True)
    odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert found.confidence == pytest.approx(odds.max(1), abs=1e-5)


@pytest.mark.parametrize("batch", [5, 64, None])
def test_scores_are_scikit_learns_whatever_the_batch(run: Path, pictures: ArraySource, batch: int | None) -> None:
    found = evaluate(load(run), pictures, batch=batch, device="cpu")
    assert len(found.labels) == 37
    same_scores(found, own_logits(run, pictures), pictures.labels, 7)


def test_classes_in_another_order_are_matched_by_name(run: Path, pictures: ArraySource) -> None:
    order = np.array([3, 0, 6, 1, 5, 2, 4])  # where the set has class i of the model
    turned = ArraySource("picture", pictures.pixels, np.argsort(order)[pictures.labels], tuple(NAMES[i] for i in order))
    found = evaluate(load(run), turned, device="cpu")
    assert found.names == NAMES
    same_scores(found, own_logits(run, pictures), pictures.labels, 7)


def test_a_set_with_fewer_classes_counts_all_its_images(run: Path, pictures: ArraySource) -> None:
    """Predictions of classes that the set lacks are wrong, and every image is counted."""
    known = np.flatnonzero(np.isin(pictures.labels, [1, 4]))
    two = ArraySource("picture", pictures.pixels[known], (pictures.labels[known] == 1).astype(np.int64), ("elk", "bee"))
    found = evaluate(load(run), two, device="cpu")
    guesses = own_logits(run, pictures)[known].argmax(1)
    assert found.top1.value == pytest.approx((guesses == pictures.labels[known]).mean())
    assert found.matrix.sum() == len(known)
    assert found.matrix.sum(1).tolist() == [0, (two.labels == 1).sum(), 0, 0, (two.labels == 0).sum(), 0, 0]
    assert {row["class"] for row in found.class_table() if row["recall"] is not None} == {"bee", "elk"}
    assert "2 of the model's 7" in found.note


def test_a_class_without_images_in_the_split(run: Path, pictures: ArraySource) -> None:
    part = Subset(pictures, np.flatnonzero(pictures.labels != 2))
    found = evaluate(load(run), part, device="cpu")
    same_scores(found, own_logits(run, part), part.labels, 7)
    last = found.to_json()["per_class"][-1]
    assert (last["class"], last["images"], last["recall"], last["recall_low"]) == ("cat", 0, None, None)


def test_classes_that_the_model_lacks(run: Path, pictures: ArraySource) -> None:
    other = ArraySource("picture", pictures.pixels, pictures.labels, ("ant", "bee", "cat", "dog", "elk", "owl", "pig"))
    with pytest.raises(UserError, match=r"2 of the set's 7 classes: 'owl', 'pig'"):
        evaluate(load(run), other, device="cpu")
    renamed = evaluate(load(run), other, device="cpu", labels=other.classes)
    assert renamed.names == other.classes
    same_scores(renamed, own_logits(run, pictures), pictures.labels, 7)


def test_matching() -> None:
    assert match_classes(("a", "b", "c"), 3, ("c", "a")).place.tolist() == [2, 0]
    assert match_classes(("a", "a"), 2, ("a", "a")).place.tolist() == [0, 1]  # the same names in the same order
    with pytest.raises(UserError, match="3 classes without names and the set has 2"):
        match_classes(None, 3, ("x", "y"), by_position=True)
    with pytest.raises(UserError, match="several classes called 'a'"):
        match_classes(("a", "a", "b"), 3, ("b", "a"))


@pytest.mark.parametrize("labels", [None, ("a", "b"), ("0", "1")])
def test_positions_are_compared_only_if_asked(labels: tuple[str, ...] | None) -> None:
    with pytest.raises(UserError, match="--by-position"):
        match_classes(labels, 2, ("x", "y"))
    found = match_classes(labels, 2, ("x", "y"), by_position=True)
    assert (found.names, found.place.tolist()) == (labels or ("x", "y"), [0, 1])
    assert "by position" in found.note
    swapped = match_classes(("x", "y"), 2, ("y", "x"), by_position=True)
    assert swapped.place.tolist() == [1, 0]  # names that match go first


def test_numbers_match_a_model_without_names_only() -> None:
    tens = tuple(map(str, range(0, 100, 10)))
    assert match_classes(None, 100, tens).place.tolist() == list(range(0, 100, 10))
    assert match_classes(None, 12, ("007", "11")).place.tolist() == [7, 11]
    for labels, classes in ((None, ("1", "10")), (None, ("7", "07")), (tuple("abcdefghij"), ("1", "2"))):
        with pytest.raises(UserError):
            match_classes(labels, 10, classes)


# ---- ImageNet's classes


def timm_imagenet() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Synsets and names of the 1,000 classes, as timm has them; importing it would take seconds."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    assert spec.origin is not None
    info = Path(spec.origin).parent / "data" / "_info"
    named = dict(line.split("\t") for line in (info / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    synsets = tuple((info / "imagenet_synsets.txt").read_text().split())
    return synsets, tuple(named[synset] for synset in synsets)


def test_imagenets_classes_are_timms() -> None:
    assert (imagenet.synsets(), imagenet.class_names()) == timm_imagenet()


def test_imagenet_by_synset_by_name_and_by_number() -> None:
    synsets, names = timm_imagenet()
    numbers = tuple(map(str, range(1000)))
    some = np.random.default_rng(0).permutation(np.delete(np.arange(1000), [134, 517, 638]))[:50]  # without the cranes
    first = tuple(name.split(",")[0] for name in names)
    for model in (None, numbers, synsets, names, first):
        for theirs in (numbers, synsets, names, first):
            found = match_classes(model, 1000, tuple(theirs[i] for i in some))
            assert found.place.tolist() == some.tolist(), found.note
    mixed = np.random.default_rng(1).permutation(1000)[:200]  # a model of 200 of them, in another order
    model = tuple(names[i] for i in mixed)
    found = match_classes(model, 200, tuple(synsets[i] for i in mixed[::-1]))
    assert found.place.tolist() == list(range(199, -1, -1))
    with pytest.raises(UserError, match="lacks 1 of"):
        match_classes(model, 200, (synsets[next(i for i in range(1000) if i not in mixed)], model[0]))


SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))
TI16, TINY = SHARED / "weights" / "vit_tiny_patch16_224.safetensors", SHARED / "data" / "tiny-imagenet" / "test.parquet"


@pytest.mark.slow
@pytest.mark.skipif(not (TI16.exists() and TINY.exists()), reason="needs the real weights and pictures")
def test_real_weights_on_folders_of_numbers_and_of_synsets(tmp_path: Path) -> None:
    """ViT-Ti/16 on Tiny-ImageNet's pictures, five of each of 20 classes, in folders of both kinds."""
    synsets, names = timm_imagenet()
    source, _ = open_split(str(TINY), "all")
    number = {name: i for i, name in enumerate(names) if names.count(name) == 1}
    known = [label for label, name in enumerate(source.classes) if name in number][:20]
    for label in known:
        here = number[source.classes[label]]
        for i in np.flatnonzero(source.labels == label)[:5].tolist():
            for folder in (tmp_path / "numbers" / str(here), tmp_path / "synsets" / "val" / synsets[here]):
                folder.mkdir(parents=True, exist_ok=True)
                source.image(i).save(folder / f"{i}.png")
    model = load(TI16)
    by_number = evaluate(model, open_split(str(tmp_path / "numbers"), "all")[0], device="cpu")
    by_synset = evaluate(model, open_split(f"imagenet:{tmp_path / 'synsets'}", "test")[0], device="cpu")
    assert len(by_number.labels) == len(by_synset.labels) == 100
    assert by_number.top1 == by_synset.top1
    assert by_number.top1.value > 0.15  # 64 pixels enlarged to 224; 0.001 is chance


def test_the_two_cranes_need_their_synsets() -> None:
    synsets, names = timm_imagenet()
    assert names[134] == names[517] == "crane"
    with pytest.raises(UserError, match=r"1 of the set's 3 classes .*: 'crane'; .*synsets"):
        match_classes(None, 1000, (names[0], "crane", names[2]))
    assert match_classes(names, 1000, (names[0], synsets[517])).place.tolist() == [0, 517]


def test_real_needs_imagenets_order() -> None:
    check_real(None, 1000)
    check_real(timm_imagenet()[1], 1000)
    with pytest.raises(UserError, match="another order"):
        check_real(timm_imagenet()[0][::-1], 1000)


def test_names_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("one\n\n two words \n")
    assert read_names(path, 2) == ("one", "two words")
    with pytest.raises(UserError, match="2 names, one a line, and the model has 3 classes"):
        read_names(path, 3)
    with pytest.raises(UserError, match="cannot be read"):
        read_names(tmp_path / "none.txt", 3)


def test_a_model_without_a_head(pictures: ArraySource) -> None:
    bare = vitlab.create("Ti/4", classes=0, image_size=8, depth=1, width=16, mlp=16, heads=2)
    with pytest.raises(UserError, match="no head"):
        evaluate(bare, pictures, device="cpu")


def test_intervals_hold_their_values(run: Path, pictures: ArraySource) -> None:
    found = evaluate(load(run), pictures, device="cpu")
    for rate in (found.top1, found.top5, found.calibration_error):
        assert rate is not None
        assert 0 <= rate.low <= rate.value <= rate.high <= 1


def test_two_classes_have_no_top_five() -> None:
    logits = np.array([[1, 0], [0, 1], [3, 0]], np.float32)
    found = score(logits, np.array([0, 1, 1]), ("no", "yes"), "", ("a", "b", "c"))
    assert found.top5 is None
    assert found.confused == [("yes", "no", 1)]


def test_real_in_an_evaluation() -> None:
    logits = np.zeros((4, 1000), np.float32)
    logits[np.arange(4), [5, 6, 7, 8]] = 9
    lists = [[5], [9, 6], [], [1]]
    files = tuple(f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 5))
    names = tuple(map(str, range(1000)))
    found = score(logits, np.array([5, 9, 3, 8]), names, "", files, (lists, np.arange(4)))
    assert found.real is not None
    assert (found.real.images, found.real.correct, found.real.skipped) == (3, 2, 1)
    assert found.real.accuracy.value == pytest.approx(2 / 3)
    assert found.real.own == 2  # 5 and 9 are in their lists, 8 is not
    assert found.to_json()["real"]["skipped"] == 1


def test_real_needs_imagenets_classes(run: Path, pictures: ArraySource) -> None:
    with pytest.raises(UserError, match="1000 classes, and this model has 7"):
        evaluate(load(run), pictures, device="cpu", real=[[1]])


# ---- files


def test_files_hold_what_the_arrays_hold(run: Path, pictures: ArraySource, tmp_path: Path) -> None:
    found = evaluate(load(run), pictures, device="cpu")
    found.write_results(tmp_path / "new" / "scores", {"data": "pictures"})
    folder = tmp_path / "new" / "scores"
    assert (folder / "confusion.png").exists()
    assert not subfolders(tmp_path / "new")  # its figures are no class of a data set
    scores = json.loads((folder / "scores.json").read_text())
    assert scores == {"data": "pictures", **json.loads(json.dumps(found.to_json(), allow_nan=False))}
    matrix = np.zeros((7, 7), int)
    for truth, guess, images in scores["confusion"]:
        matrix[truth, guess] = images
    assert (matrix == found.matrix).all()
    assert scores["images"] == sum(b["images"] for b in scores["calibration"]) == 37
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    assert [row["image"] for row in rows] == [f"picture {i}" for i in range(37)]
    assert [row["truth"] for row in rows] == [NAMES[i] for i in pictures.labels]
    assert np.mean([row["truth"] == row["guess"] for row in rows]) == pytest.approx(found.top1.value)
    table = list(csv.DictReader((folder / "per_class.csv").open()))
    assert {row["class"] for row in table} == set(NAMES)
    recalls = [float(row["recall"]) for row in table if row["recall"]]
    assert recalls == sorted(recalls)
    for name in ("confusion.png", "calibration.png"):
        assert min(Image.open(folder / name).size) > 300
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [".vitlab-pictures", "scores.json", "per_class.csv", "predictions.csv", "confusion.png", "calibration.png"]
    )


# ---- the command


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["vitlab", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def photos(root: Path, per_class: int = 10) -> Path:
    rng = np.random.default_rng(1)
    for name in NAMES:
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def test_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_random(tmp_path / "run", "Ti/2", tuple(str(i) for i in range(10)))
    code = run_command(monkeypatch, "evaluate", str(tmp_path / "run"), "digits", "--json", str(tmp_path / "s.json"))
    printed = capsys.readouterr().out
    assert code == 0
    assert "599 images of digits, test" in printed
    scores = json.loads((tmp_path / "s.json").read_text())
    source, _ = open_split("digits", "test")
    right = (own_logits(tmp_path / "run", source).argmax(1) == source.labels).mean()
    assert scores["top1"]["value"] == pytest.approx(right)
    assert f"{right:.2%}" in printed


def test_a_split_of_ones_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos(tmp_path / "photos")
    assert run_command(monkeypatch, "evaluate", str(run), str(root)) == 0
    printed = capsys.readouterr().out
    assert "14 images" in printed  # two of ten of each class are held out
    assert "--split all" in printed  # there are others, which a model of other photos can be tested on
    assert "--split all" not in open_split(str(root), "test", trained=True)[1]
    some = open_split(str(root), "test", unseen=lambda data: replace(data, test=Subset(data.test, np.arange(9))))
    assert "--split all" not in some[1]  # the model has learned from others of this set
    own = tmp_path / "splits"  # a set with a test split of its own has no others for a test
    own.mkdir()
    for name in ("train", "test"):
        (own / name).symlink_to(root)
    assert "--split all" not in open_split(str(own), "test")[1]
    assert run_command(monkeypatch, "evaluate", str(run), str(root), "--split", "all") == 0
    assert "70 images" in capsys.readouterr().out
    assert run_command(monkeypatch, "evaluate", str(run), str(root), "--split", "validation") == 1
    assert "has no validation split" in capsys.readouterr().err
    assert run_command(monkeypatch, "evaluate", str(run), str(root), "--split", "tset") == 1
    assert "there is no split 'tset'" in capsys.readouterr().err


def test_a_model_without_names_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos(tmp_path / "photos", 2)
    vitlab.save(vitlab.create("Ti/4", classes=7, image_size=8, depth=1, width=16, mlp=16, heads=2), tmp_path / "model")
    words = ("evaluate", str(tmp_path / "model"), str(root), "--split", "all")
    assert run_command(monkeypatch, *words) == 1
    assert "--by-position" in capsys.readouterr().err
    assert run_command(monkeypatch, *words, "--by-position") == 0
    assert "matched by position, as asked: the model's first is taken for 'ant'" in capsys.readouterr().out


def test_the_share_that_a_run_held_out(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command reads the run's recipe, so that it tests on no image that the run was trained on."""
    from vitlab.cli.evaluate import find_holdout, full_name
    from vitlab.models.config import Preprocess
    from vitlab.models.names import configure
    from vitlab.settings import to_json as as_json
    from vitlab.training.recipe import Recipe

    folder = tmp_path / "run"
    folder.mkdir()
    recipe = as_json(Recipe("Ti/4", "photos", steps=1, holdout=0.1))
    model = {"kind": "vit", **as_json(configure("Ti/4", {"image_size": 8, "classes": 2}))}
    about = {"model": model, "preprocess": as_json(Preprocess()), "labels": ["a", "b"], "images": 9}
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, **about}))
    assert find_holdout(str(folder), "photos/") == (0.1, True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to("photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelled in ("photos", "./photos", "~/photos", f"{tmp_path}/run/../photos/", "link"):
        assert find_holdout(str(folder), spelled) == (0.1, True)
    for other in ("others", "imagenet:photos", "run", "run/photos"):
        assert find_holdout(str(folder), other) == (0.2, False)
    assert find_holdout(str(run), "photos") == (0.2, False)
    (tmp_path / "digits").mkdir()
    assert full_name("digits") != full_name("./digits") == full_name(f"{tmp_path}/digits")  # a folder of that name


@pytest.mark.parametrize("split", ["all", "test"])
def test_a_finished_model_is_tested_on_one_class_alone(split: str, run: Path, tmp_path: Path, command: Command) -> None:
    """As many photos are right as the model alone has right; training on such a folder is refused."""
    for i in range(10):
        coarse = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
        (tmp_path / "set" / NAMES[1]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).save(tmp_path / "set" / NAMES[1] / f"{i}.png")
    with pytest.raises(UserError, match="a classifier needs two or more"):
        open_data(str(tmp_path / "set"))
    source, _ = open_split(str(tmp_path / "set"), split)
    files = [source.name(i) for i in range(len(source))]
    right = sum(vitlab.predict(run, file).label == NAMES[1] for file in files)
    code, _, err = command(
        "evaluate", str(run), str(tmp_path / "set"), "--split", split, "--out", str(tmp_path / "out")
    )
    assert code == 0, err
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (scores["images"], len(files)) == (len(files), 10 if split == "all" else 2)
    assert scores["top1"]["value"] == pytest.approx(right / len(files))


def test_a_corrupt_image_is_left_out_and_many_are_an_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = photos(tmp_path / "photos", 3), tmp_path / "out"
    bad = [root / "dog" / f"{i}.png" for i in range(3)]
    bad[1].write_bytes(bad[1].read_bytes()[:60])
    words = ("evaluate", str(run), str(root), "--split", "all")
    assert run_command(monkeypatch, *words, "--json", str(tmp_path / "scores.json")) == 0
    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["broken"] == [str(bad[1])]
    assert found["images"] == sum(row["images"] for row in found["per_class"]) == 20
    for path in (bad[0], bad[2]):
        path.write_bytes(b"")
    capsys.readouterr()
    code = run_command(monkeypatch, *words, "--out", str(out))
    printed = capsys.readouterr()
    assert code == 1
    assert "3 of 21 images cannot be read" in printed.err
    assert str(bad[1]) in printed.err.replace("\n", "")
    assert "top-1" not in printed.out
    assert not out.exists()
