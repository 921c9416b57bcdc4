"""Class mappings and restricted classes, against loops over the model's own logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitlab
from vitlab.data import imagenet
from vitlab.data.corruptions import CORRUPTIONS, corrupt
from vitlab.data.decoder import frame_image
from vitlab.data.source import ArraySource
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.evaluation.corrupted import Corrupting, parse_corruptions
from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.mapping import ClassMapping, match_mapping, read_mapping
from vitlab.evaluation.robustness import evaluate_corrupted
from vitlab.models.variants import Model

NAMES = tuple(f"class {letter}" for letter in "abcdefgh")
SET = ("pet", "thing", "nothing", "both")
WORDS = {"pet": ("class a", "class b", "class c"), "thing": ("class h",), "both": ("class h", "class d")}
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    made = vitlab.create("Ti/4", classes=8, image_size=8, depth=1, width=16, mlp=16, heads=2)
    assert made.head is not None
    torch.nn.init.normal_(made.head.weight)
    return made.eval()


@pytest.fixture(scope="module")
def pictures() -> ArraySource:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    return ArraySource("picture", pixels, rng.integers(0, 4, 60), SET)


def logits_of(model: Model, source: ArraySource) -> np.ndarray:
    images = [eval_image(source.image(i), (8, 8), model.card.preprocess) for i in range(len(source))]
    with torch.no_grad():
        return model(torch.stack(images)).double().numpy()


def test_any_of_several_classes_is_right(model: Model, pictures: ArraySource) -> None:
    mapping = ClassMapping("map.json", WORDS)
    found = evaluate(model, pictures, labels=NAMES, mapping=mapping, device="cpu", workers=0)
    logits, right, near, images = logits_of(model, pictures), 0, 0, 0
    for row, label in zip(logits, pictures.labels, strict=True):
        accepted = {NAMES.index(word) for word in WORDS.get(SET[label], ())}
        if accepted:
            order = np.argsort(-row)
            right, near, images = right + (order[0] in accepted), near + bool(accepted & {*order[:5]}), images + 1
    assert 0 < right < images < 60
    assert (len(found.labels), found.top1.value) == (images, right / images)
    assert found.top5 is not None
    assert found.top5.value == near / images
    assert found.index is not None
    assert [SET[i] for i in np.unique(pictures.labels[found.index])] == ["pet", "thing", "both"]
    assert "3 of the set's 4 are 5 of the model's 8; images of others are left out" in found.note


def test_restricted_guesses_are_among_the_sets_classes(model: Model, pictures: ArraySource) -> None:
    mapping = ClassMapping("map.json", {"pet": ("class a",), "thing": ("class h",), "both": ("class d",)})
    found = evaluate(model, pictures, labels=NAMES, mapping=mapping, restricted=True, device="cpu", workers=0)
    columns, place = [0, 3, 7], {0: 0, 1: 2, 3: 1}
    kept = [i for i, label in enumerate(pictures.labels.tolist()) if label in place]
    logits = logits_of(model, pictures)[kept][:, columns]
    truth = np.array([place[label] for label in pictures.labels[kept].tolist()])
    assert found.names == ("class a", "class d", "class h")
    assert found.top1.value == (logits.argmax(1) == truth).mean()
    odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert found.confidence == pytest.approx(odds.max(1), abs=1e-5)  # the others have no share in it


def test_imagenets_variants_need_no_mapping(model: Model) -> None:
    """ImageNet-A and -R have folders of some synsets: restricted to these, a guess is one of them."""
    synsets = tuple(sorted(imagenet.synsets()[i] for i in (6, 11, 999)))
    rng = np.random.default_rng(1)
    source = ArraySource("r", rng.integers(0, 256, (9, 8, 8, 3), dtype=np.uint8), np.arange(9) % 3, synsets)
    torch.manual_seed(0)
    large = vitlab.create("Ti/4", classes=1000, image_size=8, depth=1, width=16, mlp=16, heads=2).eval()
    assert large.head is not None
    torch.nn.init.normal_(large.head.weight)
    found = evaluate(large, source, restricted=True, device="cpu", workers=0)
    expected = logits_of(large, source)[:, [6, 11, 999]].argmax(1)
    assert (found.guesses == expected).all()
    assert len(found.names) == 3


# ---- the file


def test_a_mapping_is_read_by_name_synset_and_number(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"clock": "analog clock; digital clock", "fish": ["n01440764", 1], "tin": "tench"}))
    match = match_mapping(read_mapping(path), None, 1000, ("tin", "fish", "clock", "other"))
    assert match.place.tolist() == [0, 0, 409, -1]
    assert {key: value.tolist() for key, value in match.several.items()} == {1: [0, 1], 2: [409, 530]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "maps no class; write the set's classes"),
        ('{"cat": []}', r"maps 'cat' to \[\]; write a class"),
        ('{"cat": {"a": 1}}', "maps 'cat' to {'a': 1}"),
        ('{"cat": "tabby;"}', "maps 'cat' to a class without a name"),
        ("[1]", "must hold a JSON object"),
        ('{"cat": "a", "cat": "b"}', "a key occurs twice"),
    ],
)
def test_files_that_are_no_mapping(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_mapping(tmp_path / "map.json")


def test_mappings_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="maps no class of the set: its classes are 'dog', and the set's 'cat'"):
        match_mapping(ClassMapping("m", {"dog": ("class a",)}), NAMES, 8, ("cat",))
    with pytest.raises(UserError, match="m names 'zebra', which is not one class of the model, whose classes are"):
        match_mapping(ClassMapping("m", {"cat": ("class a", "zebra")}), NAMES, 8, ("cat",))


def test_real_and_mappings_exclude_each_other(model: Model, pictures: ArraySource) -> None:
    with pytest.raises(UserError, match="leave the mapping or ReaL"):
        evaluate(model, pictures, labels=NAMES, restricted=True, real=[[0]])


# ---- corruptions in an evaluation


def test_corruptions_are_parsed() -> None:
    assert parse_corruptions("fog:3, jpeg:1") == [Corrupting("fog", 3), Corrupting("jpeg", 1)]
    assert [str(how) for how in parse_corruptions("snow")] == [f"snow {i}" for i in range(1, 6)]
    assert len(parse_corruptions("all", 2)) == len(set(parse_corruptions("all,fog:2", 2))) == 75
    assert {how.seed for how in parse_corruptions("all:5", 2)} == {2}
    for text, message in {
        "rain": "there is no corruption 'rain'",
        "fog:6": "from 1 to 5, as in fog:3, not '6'",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_corruptions(text)


def test_images_are_framed_then_corrupted(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores equal those of images that were framed and corrupted by hand; what is kept is not that of other images."""
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (40, 13, 11, 3), dtype=np.uint8)
    source = ArraySource("picture", pixels, rng.integers(0, 8, 40), NAMES)
    options: dict[str, Any] = {"labels": NAMES, "device": "cpu", "workers": 0, "keep": tmp_path, "batch": 16}
    found = evaluate_corrupted(model, source, parse_corruptions("contrast:5,impulse_noise:5", 4), **options)
    for how, top1 in zip(found.corruptions, found.top1, strict=True):
        framed = [frame_image(source.image(i), (8, 8), model.card.preprocess) for i in range(40)]
        by_hand = np.stack([np.asarray(corrupt(f, how.name, how.severity, i, 4)) for i, f in enumerate(framed)])
        images = torch.from_numpy(by_hand).permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.5)
        with torch.no_grad():
            logits = model(images).numpy()
        assert top1.value == (logits.argmax(1) == source.labels).mean()
    assert found.mean == pytest.approx(np.mean([rate.value for rate in found.top1]))
    again = evaluate_corrupted(model, source, found.corruptions, **options)
    assert again == found
    for name in ("contrast", "impulse_noise"):  # of another definition nothing is kept
        monkeypatch.setitem(CORRUPTIONS, name, CORRUPTIONS["brightness"])
    other = evaluate_corrupted(model, source, found.corruptions, **options)
    assert other == evaluate_corrupted(model, source, found.corruptions, **options | {"keep": None})
    assert other.top1[0] == other.top1[1] != found.top1[0]


@pytest.mark.slow
def test_workers_corrupt_alike(model: Model, pictures: ArraySource) -> None:
    scores = [
        evaluate(
            model,
            pictures,
            labels=NAMES,
            mapping=ClassMapping("m", WORDS),
            corruption=Corrupting("snow", 4),
            device="cpu",
            workers=workers,
            batch=batch,
        )
        for workers, batch in ((0, 64), (2, 7))
    ]
    assert (scores[0].guesses == scores[1].guesses).all()
    assert scores[0].confidence == pytest.approx(scores[1].confidence, abs=1e-6)


@pytest.mark.slow
def test_evaluate_prints_and_writes_them(model: Model, tmp_path: Path, command: Command) -> None:
    vitlab.save(model, tmp_path / "run", labels=tuple("0123456789")[:8])
    pets = tmp_path / "map.json"
    pets.write_text(json.dumps({str(i): str(i) for i in range(8)}))
    words = ["evaluate", str(tmp_path / "run"), "digits", "--mapping", str(pets), "--restrict"]
    words += ["--corrupt", "fog:2,fog:3,jpeg:3", "--out", str(tmp_path / "out"), "--device", "cpu", "--workers", "0"]
    code, out, err = command(*words)
    assert code == 0, err
    assert "8 of the set's 10 are 8 of the model's 8" in out
    assert "top-1 accuracy under corruptions" in out
    stored = json.loads((tmp_path / "out" / "scores.json").read_text())["corruptions"]
    assert [(row["name"], row["severity"]) for row in stored["scores"]] == [("fog", 2), ("fog", 3), ("jpeg", 3)]
    values = [row["top1"]["value"] for row in stored["scores"]]
    assert stored["mean"] == pytest.approx(((values[0] + values[1]) / 2 + values[2]) / 2)
    assert len((tmp_path / "out" / "corruptions.csv").read_text().splitlines()) == 4
    assert (tmp_path / "out" / "corruptions.png").stat().st_size > 1000
