"""A teacher: its probabilities and features against closed forms, what it sees against Pillow, and runs that resume."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fill
from numpy.typing import NDArray
from PIL import Image
from small_runs import SMALL, assert_same_run, few_digits, records, skip_report, train_small
from test_parallel import train as train_by
from test_resume import killed_at
from torch import Tensor, nn

import vitlab
from vitlab.data import imagenet
from vitlab.data.loader import Batch
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import Interpolation, Preprocess
from vitlab.models.variants import Model
from vitlab.training.objectives import Classification, MultiLabel, softmax_loss
from vitlab.training.parallel import Cluster
from vitlab.training.recipe import change, make_recipe
from vitlab.training.setup import RunSetup, choose_micro, recipe_to_resume
from vitlab.training.teacher import Distillation, Mapped, Teacher, keep_classes, open_teacher

Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
Floats = NDArray[np.float64]
DIGITS = tuple(few_digits().classes)
OTHER = Preprocess(mean=(0.4, 0.5, 0.3), std=(0.2, 0.3, 0.25))


def tiny(seed: int = 0, **settings: Any) -> Model:
    options = {"image_size": 8, "depth": 1, "width": 16, "mlp": 32, "heads": 2, "classes": 10} | settings
    return fill(vitlab.create("Ti/4", **options), seed)


def with_labels(model: Model, labels: tuple[str, ...] | None) -> Model:
    model.card = dataclasses.replace(model.card, labels=labels)
    return model


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of digits, larger than the student, at another resolution and of another order of classes."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    model = with_labels(tiny(3, image_size=12, width=24), DIGITS[::-1])
    model.card = dataclasses.replace(model.card, preprocess=OTHER)
    vitlab.save(model, folder)
    return folder


def batch_of(images: Tensor, classes: int = 10) -> Batch:
    labels = torch.arange(len(images)) % classes
    targets = nn.functional.one_hot(labels, classes).float()
    return Batch(images, labels, targets, torch.arange(len(images)))


def lesson(teacher: Model, *, share: float = 1.0, temperature: float = 1.0, **other: Any) -> Distillation:
    seen = Teacher(teacher, Preprocess(), (8, 8)).double()
    return Distillation(Classification(softmax_loss), seen, "softmax", share, temperature, other.pop("features", 0.0))


def softmax(logits: Floats) -> Floats:
    likely = np.exp(logits - logits.max(1, keepdims=True))
    return likely / likely.sum(1, keepdims=True)


def cross_entropy(truth: Floats, logits: Floats) -> float:
    return float(-(truth * np.log(softmax(logits))).sum(1).mean())


def numbers(tensor: Tensor) -> Floats:
    return tensor.detach().double().numpy()


# ---- probabilities


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_of_a_copy_is_the_teachers_entropy(temperature: float) -> None:
    student = tiny().double()
    batch = batch_of(torch.randn(6, 3, 8, 8, dtype=torch.float64))
    likely = softmax(numbers(student(batch.images)) / temperature)
    entropy = -(likely * np.log(likely)).sum(1).mean()
    loss = lesson(copy.deepcopy(student), temperature=temperature).loss(student, batch, 0)
    assert loss.item() == pytest.approx(temperature**2 * entropy, abs=1e-12)


def test_a_run_on_unaugmented_images_has_the_entropy_for_its_loss(tmp_path: Path) -> None:
    """From file to log, in float32: one batch of all 193 images."""
    model = with_labels(tiny(), DIGITS)
    model.card = dataclasses.replace(model.card, preprocess=Preprocess(crop=1.0))
    vitlab.save(model, tmp_path / "model")
    plain = change(SMALL, depth=1, dropout=0.0, drop_path=0.0, augment=Augment(crop="none", flip=False), ema=0.0)
    settings: dict[str, Any] = {"steps": 1, "batch": 193, "micro": 193, "warmup": 0, "weights": str(tmp_path / "model")}
    train_small(tmp_path / "run", recipe=plain, teacher=str(tmp_path / "model"), **settings)
    source = few_digits().train
    logits = model(model.preprocess([source.image(i) for i in range(len(source))]))
    expected = cross_entropy(softmax(numbers(logits)), numbers(logits))
    assert next(r["loss"] for r in records(tmp_path / "run") if "loss" in r) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("share", "temperature"), [(1.0, 1.0), (1.0, 4.0), (0.3, 2.0)])
def test_temperature_and_share_by_their_formula(share: float, temperature: float) -> None:
    student, teacher = tiny(1).double(), tiny(2).double()
    batch = batch_of(torch.randn(5, 3, 8, 8, dtype=torch.float64))
    own, taught = numbers(student(batch.images)), numbers(teacher(batch.images))
    soft = temperature**2 * cross_entropy(softmax(taught / temperature), own / temperature)
    expected = share * soft + (1 - share) * cross_entropy(numbers(batch.targets), own)
    loss = lesson(teacher, share=share, temperature=temperature).loss(student, batch, 0)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_gradients_reach_the_student_alone() -> None:
    student, teacher = tiny(1).double(), tiny(2).double()
    batch = batch_of(torch.randn(5, 3, 8, 8, dtype=torch.float64))
    taught, t = teacher(batch.images).detach(), 2.0
    lesson(teacher, temperature=t).loss(student, batch, 0).backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert student.head is not None
    features = student.features(batch.images).detach()
    wrong = (student(batch.images).detach() / t).softmax(1) - (taught / t).softmax(1)  # dL / dlogits, times B / T
    torch.testing.assert_close(student.head.weight.grad, t * wrong.T @ features / 5, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("separate", [False, True])
def test_a_sigmoid_student_learns_each_class(separate: bool) -> None:
    """Of a multi-label teacher its sigmoids, of any other its softmax."""
    student, teacher = tiny(1).double(), tiny(2).double()
    batch = batch_of(torch.randn(4, 3, 8, 8, dtype=torch.float64))
    own, taught = numbers(student(batch.images)), numbers(teacher(batch.images))
    truth = 1 / (1 + np.exp(-taught / 2)) if separate else softmax(taught / 2)
    yes = 1 / (1 + np.exp(-own / 2))
    expected = -4 * (truth * np.log(yes) + (1 - truth) * np.log(1 - yes)).sum(1).mean()
    seen = Teacher(teacher, Preprocess(), (8, 8)).double()
    found = Distillation(MultiLabel(), seen, "sigmoid", 1.0, 2.0, 0.0, separate).loss(student, batch, 0)
    assert found.item() == pytest.approx(expected, rel=1e-10)


# ---- classes


def test_permuted_classes_are_matched_by_name() -> None:
    names = ("cat", "dog", "owl", "fox")
    model = with_labels(tiny(classes=4), names)
    images = torch.randn(3, 3, 8, 8)
    before = model(images)
    found = keep_classes(model, ("owl", "cat"), "teacher")(images)
    torch.testing.assert_close(found, before[:, [2, 0]])
    likely = found.softmax(1)
    all_likely = before.softmax(1)[:, [2, 0]]
    torch.testing.assert_close(likely, all_likely / all_likely.sum(1, keepdim=True))  # given that it is one of them


@pytest.mark.parametrize("labels", [None, imagenet.short_names(), imagenet.synsets()])
def test_imagenets_classes_are_matched_by_synset(labels: tuple[str, ...] | None) -> None:
    model = with_labels(tiny(classes=1000), labels)
    images = torch.randn(2, 3, 8, 8)
    before = model(images)
    found = keep_classes(model, ("n02085620", "n01440764", "goldfish, Carassius auratus"), "teacher")(images)
    assert imagenet.synsets()[151] == "n02085620"  # a Chihuahua
    torch.testing.assert_close(found, before[:, [151, 0, 1]])


def test_the_place_among_others_decides_between_the_cranes() -> None:
    """The bird is number 134, the machine 517; "crane" alone could be either."""
    order = (0, 130, 600)
    some = [imagenet.synsets()[i] for i in order]
    assert imagenet.class_numbers([*some[:2], "crane", some[2]]) is None  # both are between 130 and 600
    later, earlier = (imagenet.class_numbers([*some[:1], *x]) for x in (["n02009229", "crane"], ["crane", "n02009229"]))
    assert imagenet.synsets().index("n02009229") == 131
    assert later is None  # again both are after 131
    assert earlier is None  # and none before
    machine, bird = [imagenet.synsets()[i] for i in (500, 600)], [imagenet.synsets()[i] for i in (130, 200)]
    assert imagenet.class_numbers([machine[0], "crane", machine[1]]).tolist() == [500, 517, 600]  # type: ignore[union-attr]
    assert imagenet.class_numbers([bird[0], "crane", bird[1]]).tolist() == [130, 134, 200]  # type: ignore[union-attr]
    assert imagenet.class_numbers([machine[1], "crane", machine[0]]) is None  # not in order


def test_missing_classes_are_named_with_the_alternative() -> None:
    model = with_labels(tiny(classes=4), ("cat", "dog", "owl", "fox"))
    with pytest.raises(UserError, match=r"3 of the data's 4: 'a', 'b', 'c'; .*teacher_share=0 teacher_features=1"):
        keep_classes(model, ("a", "cat", "b", "c"), "photos.safetensors")
    with pytest.raises(UserError, match="1 of the data's 2: 'my cat'"):
        keep_classes(with_labels(tiny(classes=1000), None), ("n01440764", "my cat"), "teacher")
    with pytest.raises(UserError, match="4 classes without names"):
        keep_classes(with_labels(tiny(classes=4), None), ("cat", "dog"), "teacher")
    with pytest.raises(UserError, match="no classes to learn the probabilities of; learn its features"):
        keep_classes(tiny(classes=0), ("cat", "dog"), "teacher")


# ---- what it sees


def resized(pixels: Floats, side: int, kind: Interpolation) -> Floats:
    """Pillow's resize of float images (B, 3, h, w), channel by channel."""
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in pixels.reshape(-1, *pixels.shape[2:])]
    found = np.stack([np.asarray(plane.resize((side, side), filters[kind])) for plane in planes])
    return found.reshape(*pixels.shape[:2], side, side).astype(np.float64)


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("side", "to"), [(8, 12), (20, 8), (8, 8)])
def test_its_own_resolution_and_normalization(kind: Interpolation, side: int, to: int) -> None:
    """Against Pillow: larger, smaller with antialiasing, and as large."""
    pixels = np.random.default_rng(0).random((3, 3, side, side))
    given = Preprocess(mean=(0.48, 0.45, 0.4), std=(0.27, 0.26, 0.28))
    images = (pixels - np.reshape(given.mean, (3, 1, 1))) / np.reshape(given.std, (3, 1, 1))
    model = tiny(image_size=to)
    model.card = Card(dataclasses.replace(OTHER, interpolation=kind))
    seen = resized(pixels, to, kind).clip(0, 1) if side != to else pixels
    expected = torch.from_numpy((seen - np.reshape(OTHER.mean, (3, 1, 1))) / np.reshape(OTHER.std, (3, 1, 1)))
    teacher = Teacher(model, given, (side, side)).float()
    torch.testing.assert_close(teacher.see(torch.from_numpy(images).float()), expected.float(), rtol=0, atol=1e-5)
    logits, features = teacher(torch.from_numpy(images).float())
    torch.testing.assert_close(features, model.features(expected.float()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, model(expected.float()), rtol=1e-4, atol=1e-4)


def test_the_same_input_stays_the_same_tensor() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert Teacher(tiny(), Preprocess(), (8, 8)).see(images) is images


# ---- features


def test_the_features_error_starts_at_one_and_falls() -> None:
    student, teacher = tiny(1, classes=3).double(), tiny(2, width=24, classes=0).double()
    module, batch = Mapped(student, 24).double(), batch_of(torch.randn(16, 3, 8, 8, dtype=torch.float64), 3)
    learn = lesson(teacher, share=0, features=2.0)
    labels = cross_entropy(numbers(batch.targets), numbers(student(batch.images)))
    shown = numbers(teacher.features(batch.images))
    variance = shown.var(1)
    start = learn.loss(module, batch, 0).item()
    assert start - labels == pytest.approx(2 * (variance / (variance + 1e-5)).mean(), rel=1e-9)  # the map is zero
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        learn.loss(module, batch, step).backward()
        optimizer.step()
    standard = (shown - shown.mean(1, keepdims=True)) / np.sqrt(variance + 1e-5)[:, None]
    mapped = numbers(student.features(batch.images)) @ numbers(module.map.weight).T + numbers(module.map.bias)
    error = ((mapped - standard) ** 2).mean()
    labels = cross_entropy(numbers(batch.targets), numbers(student(batch.images)))
    assert learn.loss(module, batch, 0).item() == pytest.approx(labels + 2 * error, rel=1e-9)
    assert error < 0.5
    assert all(p.grad is not None for p in module.parameters())
    assert all(p.grad is None for p in teacher.parameters())


# ---- runs


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"teacher_share": 0.7, "teacher_temperature": 2.0}, marks=pytest.mark.slow),
        {"teacher_share": 0.3, "teacher_temperature": 2.0, "teacher_features": 1.0},  # of which this has every part
        pytest.param({"teacher_share": 0.0, "teacher_features": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_to_the_bit(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, float]
) -> None:
    settings: dict[str, Any] = {"teacher": str(digits), "steps": 6, **changes}
    train_small(tmp_path / "plain", **settings)
    with killed_at(5, monkeypatch):
        train_small(tmp_path / "cut", **settings)
    train_small(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "plain", tmp_path / "cut")
    names = vitlab.load(tmp_path / "cut").state_dict().keys()
    assert not any(name.startswith(("map", "student")) for name in names)  # the model alone


def test_the_teacher_is_written_down_and_cannot_change(digits: Path, tmp_path: Path) -> None:
    out, moved, other = tmp_path / "run", tmp_path / "moved", tmp_path / "other"
    train_small(out, teacher=str(digits), steps=4)
    provenance = vitlab.load(out).card.provenance
    assert provenance is not None
    assert provenance["teacher"] == str(digits)
    assert len(provenance["teacher_sha256"]) == 64
    shutil.copytree(digits, moved)
    vitlab.save(with_labels(tiny(4), DIGITS), other)
    train_small(out, resume=True, teacher=str(moved), steps=4)  # the same file elsewhere
    with pytest.raises(UserError, match=r"has the teacher '.*model' \(sha256 .*\), not .*other \(sha256 .*; continue"):
        train_small(out, resume=True, teacher=str(other), steps=4)
    with pytest.raises(UserError, match=r"has the teacher .*, not none; continue it with its own"):
        train_small(out, resume=True, steps=4)
    with pytest.raises(UserError, match="another teacher_share"):
        train_small(out, resume=True, teacher=str(digits), teacher_share=0.5, steps=4)


def test_a_received_run_opens_no_teacher(digits: Path, tmp_path: Path) -> None:
    train_small(tmp_path / "mine", teacher=str(digits), steps=4)
    shutil.copytree(tmp_path / "mine", tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    content = json.loads(path.read_text())
    content["recipe"]["teacher"] = "/etc/hostname"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"its teacher '/etc/hostname' is not opened unasked; .*teacher=WEIGHTS"):
        recipe_to_resume(tmp_path / "run", ["data=digits"])
    recipe = recipe_to_resume(tmp_path / "run", ["data=digits", f"teacher={digits}"])
    assert recipe is not None
    assert recipe.teacher == str(digits)
    assert recipe_to_resume(tmp_path / "mine", []) is not None  # this user's own


def test_settings_that_learn_nothing_are_refused() -> None:
    for settings, reason in (
        ({"teacher_share": 0}, "learn nothing from the teacher"),
        ({"objective": "masked"}, "has no classes, .*teacher_share=0 teacher_features=1"),
        ({"freeze": "body", "teacher_features": 1}, "frozen body"),
        ({"balance": "weights"}, "of which teacher_share=1 leaves none"),
    ):
        with pytest.raises(UserError, match=reason):
            make_recipe("Ti/4", "digits", steps=1, teacher="x", **settings)


def test_masked_patches_learn_features(digits: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"objective": "masked", "teacher_share": 0.0, "ema": 0.0, "steps": 2}
    settings |= {"warmup": 0, "log_every": 1}
    train_small(tmp_path / "run", teacher=str(digits), teacher_features=1.0, **settings)
    train_small(tmp_path / "plain", **{k: v for k, v in settings.items() if k != "teacher_share"})
    taught, plain = ([r["loss"] for r in records(tmp_path / x) if "loss" in r] for x in ("run", "plain"))
    assert taught[0] - plain[0] == pytest.approx(1, abs=1e-3)  # the map is zero, and the masks are the same
    assert vitlab.load(tmp_path / "run").config.classes == 0


def test_low_rank_updates_learn_from_a_teacher(digits: Path, tmp_path: Path) -> None:
    vitlab.save(tiny(classes=3), tmp_path / "base")
    settings: dict[str, Any] = {"weights": str(tmp_path / "base"), "lora": 2, "teacher_features": 0.5, "depth": 1}
    train_small(tmp_path / "run", teacher=str(digits), steps=2, warmup=0, **settings)
    assert vitlab.load(tmp_path / "run").config.classes == 10


def test_the_teacher_counts_where_memory_is_measured() -> None:
    """A large teacher of a small student sets how many images there is memory for."""
    large = with_labels(vitlab.create("Ti/4", image_size=64, depth=1, classes=10), DIGITS)
    assert teacher_micro(large) < teacher_micro(None)


def teacher_micro(teacher: Model | None) -> int:
    """The micro-batch of a small student where memory is what limits it."""
    student = tiny()
    recipe = change(SMALL, batch=2**20, micro=None)
    run = RunSetup(Path(), recipe, few_digits(), student.config, Preprocess(), {}, None, student, None, teacher)
    return choose_micro(run, Cluster(CPU), student, bf16=False)


@pytest.mark.slow
def test_digits_from_a_digits_teacher_by_the_command_line(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The labels are not used, and the student still learns them."""
    skip_report(monkeypatch)
    small = (
        *("model=Ti/2", "image_size=8", "depth=1", "width=32", "mlp=32", "heads=2", "warmup=1", "batch=64", "lr=0.01"),
        *("crop=none", "flip=false", "validation=0", "ema=0", "threads=1", "device=cpu"),
    )
    first = command("train", "digits", "--out", str(tmp_path / "teacher"), *small, "steps=80")
    assert first[0] == 0, first[2]
    words = ("train", "digits", f"teacher={tmp_path / 'teacher'}", "--out", str(tmp_path / "student"), *small)
    code, _, errors = command(*words, "steps=80", "seed=1")
    assert code == 0, errors
    found = (tmp_path / "teacher", tmp_path / "student")
    teacher, student = (next(r["test"]["accuracy"] for r in records(run) if "test" in r) for run in found)
    assert teacher > 0.5
    assert student > 0.8 * teacher
    code, _, errors = command("train", "digits", "teacher=nowhere", "--out", str(tmp_path / "none"), *small, "steps=2")
    assert code == 1
    assert "there is no file or folder nowhere" in errors.replace("\n", " ")
    assert not (tmp_path / "none" / "recipe.json").exists()


def test_open_teacher_leaves_out_a_head_that_is_not_used(digits: Path) -> None:
    recipe = make_recipe("Ti/4", "digits", steps=1, teacher=str(digits), teacher_share=0, teacher_features=1)
    model = open_teacher(recipe, ("none", "of", "its", "classes"))
    assert model is not None
    assert model.head is None


# ---- more processes, compilers and GPUs


@pytest.mark.slow
def test_two_processes_learn_as_one(digits: Path, tmp_path: Path) -> None:
    """From labels, probabilities and features, in a complete model per process and in shards."""
    lesson = ("teacher_share=0.5", "teacher_features=1")
    settings = ("steps=12", "lr=0.003", "precision=float64", f"teacher={digits}", *lesson)
    train_by(tmp_path / "one", 1, *settings)
    alone = [r["loss"] for r in records(tmp_path / "one") if "loss" in r]
    assert len(alone) == 12
    for parallel in ("ddp", "fsdp"):
        train_by(tmp_path / parallel, 2, *settings, f"parallel={parallel}")
        shared = [r["loss"] for r in records(tmp_path / parallel) if "loss" in r]
        np.testing.assert_allclose(shared, alone, rtol=1e-9, err_msg=parallel)


@pytest.mark.long
def test_compiled_it_teaches_the_same(digits: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"teacher": str(digits), "teacher_features": 0.5, "steps": 5, "device": "cpu"}
    found = []
    for compiled in ("no", "yes"):
        train_small(tmp_path / compiled, compile=compiled, dropout=0.0, drop_path=0.0, **settings)
        found.append([r["loss"] for r in records(tmp_path / compiled) if "loss" in r])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_in_a_cuda_graph_it_teaches_the_same(digits: Path, tmp_path: Path, compiled: str) -> None:
    settings: dict[str, Any] = {"teacher": str(digits), "device": "cuda", "precision": "float32", "compile": compiled}
    found = []
    for graph in (False, True):
        train_small(tmp_path / str(graph), steps=30, micro=32, cuda_graph=graph, teacher_features=0.5, **settings)
        found.append([r["loss"] for r in records(tmp_path / str(graph)) if "loss" in r])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)
