"""Batches are functions of (seed, step); evaluation reads every image once; failures are reported."""

import itertools
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import arrays, picture, write_folder
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vitlab.data.decoder import DecodeHint
from vitlab.data.images import BrokenImage
from vitlab.data.loader import Batch, EvalLoader, TrainLoader
from vitlab.data.open import open_data
from vitlab.data.resident import ResidentSet, fits_on_device, resize_weights
from vitlab.data.source import ArraySource, Subset
from vitlab.data.transforms import Augment, eval_image
from vitlab.errors import UserError
from vitlab.models.config import Preprocess

PLAIN = Preprocess()
FULL = Augment(randaugment=(1, 10), mixup=0.4, cutmix=1.0, label_smoothing=0.1)
WAYS = [False, True]  # resident or not


def loader(
    source: ArraySource, augment: Augment = FULL, *, size: int = 16, batch: int = 8, **settings: object
) -> TrainLoader:
    return TrainLoader(source, (size, size), augment, PLAIN, batch=batch, seed=5, **settings)  # type: ignore[arg-type]


def take(source: TrainLoader, count: int, step: int = 0) -> list[Batch]:
    return list(itertools.islice(source.batches(step), count))


def same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "labels", "targets", "index")
    )


# ---- the order


@pytest.mark.parametrize("resident", WAYS)
def test_every_epoch_shows_every_image_once(resident: bool) -> None:
    source = arrays(23)
    found = torch.cat([batch.index for batch in take(loader(source, resident=resident), 23)]).reshape(8, 23)
    assert (found.sort(1).values == torch.arange(23)).all()  # 23 batches of 8 are 8 epochs of 23
    assert len({tuple(epoch.tolist()) for epoch in found}) == 8
    labels = torch.cat([batch.labels for batch in take(loader(source, resident=resident), 3)])
    assert (labels == found.flatten()[:24] % 4).all()


@pytest.mark.parametrize("resident", WAYS)
def test_workers_and_restarts_change_nothing(resident: bool) -> None:
    source = arrays()
    expected = take(loader(source, resident=resident), 7)
    for workers, step in ((0, 5), (1, 0), (2, 3)):
        for batch, again in zip(
            expected[step:], take(loader(source, resident=resident, workers=workers), 7 - step, step), strict=True
        ):
            assert same(batch, again)


@pytest.mark.parametrize("resident", WAYS)
@pytest.mark.parametrize(("world", "batch"), [(2, 8), (2, 6), (4, 12), (3, 9)])
def test_ranks_share_the_batch(resident: bool, world: int, batch: int) -> None:
    """Slices of 3 split a pair of Mixup partners between two ranks."""
    source = arrays()
    expected = take(loader(source, batch=batch, resident=resident), 4)
    ranks = [take(loader(source, batch=batch, resident=resident, rank=r, world=world), 4) for r in range(world)]
    for step, batch_ in enumerate(expected):
        parts = [rank[step] for rank in ranks]
        joined = Batch(*(torch.cat([getattr(p, n) for p in parts]) for n in ("images", "labels", "targets", "index")))
        assert same(joined, batch_)


@pytest.mark.parametrize(("rank", "world", "batch"), [(0, 1, 8), (0, 1, 7), (1, 2, 6), (1, 3, 9), (2, 3, 9)])
@pytest.mark.parametrize("augment", [FULL, Augment()])
def test_many_batches_at_a_time_are_the_same(rank: int, world: int, batch: int, augment: Augment) -> None:
    """As on an accelerator; 23 images, so that the batches made at once span epochs."""
    one, many = (loader(arrays(23), augment, batch=batch, rank=rank, world=world, resident=True) for _ in range(2))
    many.images_at_once = 40
    for step in (0, 2):
        for alone, among in zip(take(one, 12, step), take(many, 12, step), strict=True):
            assert same(alone, among)


@pytest.mark.parametrize("resident", WAYS)
def test_seeds_and_epochs_differ(resident: bool) -> None:
    source = arrays(8)
    augment = Augment()
    one = take(loader(source, augment, resident=resident), 2)
    other = TrainLoader(source, (16, 16), augment, PLAIN, batch=8, seed=6, resident=resident)
    assert one[0].index.tolist() != next(other.batches()).index.tolist()
    first, second = (batch.images[batch.index.argsort()] for batch in one)  # the same images, another epoch
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def shares(batches: list[Batch]) -> list[set[float]]:
    """The shares that a batch's images keep of themselves, to a rounding."""
    return [{round(float(value), 5) for value in batch.targets.max(1).values if value < 1} for batch in batches]


def test_one_share_for_the_batch() -> None:
    source, augment = arrays(60), Augment(mixup=0.5, mix_by="batch")  # partners of one class keep all of it
    batches = take(loader(source, augment, batch=24), 6)
    each = shares(batches)
    assert all(len(found) <= 1 for found in each)
    assert len(set.union(*each)) > 3  # of the batches
    assert any(len(found) > 1 for found in shares(take(loader(source, Augment(mixup=0.5), batch=24), 6)))
    micro = take(loader(source, augment, batch=8, step=24), 18)  # micro-batches and ranks do not matter
    ranks = [take(loader(source, augment, batch=24, rank=rank, world=2), 6) for rank in range(2)]
    for step, batch in enumerate(batches):
        assert torch.equal(torch.cat([part.targets for part in micro[3 * step : 3 * step + 3]]), batch.targets)
        assert torch.equal(torch.cat([part[step].targets for part in ranks]), batch.targets)
    resumed = next(loader(source, augment, batch=24).batches(4))
    assert torch.equal(resumed.targets, batches[4].targets)


def test_targets_match_the_mixture() -> None:
    source = arrays(40, 40)  # a class of its own for each, so that targets show the partner
    for batch in take(loader(source, Augment(mixup=0.5), batch=10), 4):
        assert torch.allclose(batch.targets.sum(1), torch.ones(10))
        for i in range(10):
            own, partner = batch.targets[i, batch.labels[i]], batch.targets[i, batch.labels[i ^ 1]]
            assert own >= 0.5 - 1e-6
            assert torch.isclose(own + partner, torch.tensor(1.0))
    unmixed = next(loader(source, Augment(), batch=10).batches()).images
    batch = next(loader(source, Augment(mixup=0.5), batch=10).batches())
    for i in range(10):
        own = batch.targets[i, batch.labels[i]]
        assert torch.allclose(batch.images[i], own * unmixed[i] + (1 - own) * unmixed[i ^ 1], atol=1e-5)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(UserError, match="batch of 10 does not divide among 4 ranks"):
        loader(arrays(), batch=10, world=4)


# ---- the resident set


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("low", "high", "size"), [(0.0, 24.0, 8), (3.3, 17.9, 8), (5.0, 9.5, 16), (0.0, 24.0, 24)])
def test_weights_are_pillows_resize(kind: str, low: float, high: float, size: int) -> None:
    line = np.random.default_rng(0).integers(0, 256, 24, dtype=np.uint8)
    image = Image.fromarray(np.repeat(line[None], 8, 0))
    filters = {k: getattr(Image.Resampling, k.upper()) for k in ("nearest", "bilinear", "bicubic", "lanczos")}
    expected = np.asarray(image.resize((size, 8), filters[kind], box=(low, 0, high, 8)))[0].astype(float)
    matrix = resize_weights(torch.tensor([low]), torch.tensor([high]), size, 24, kind)[0]  # type: ignore[arg-type]
    found = (matrix.double() @ torch.from_numpy(line).double()).round().clamp(0, 255)
    assert np.abs(found.numpy() - expected).max() <= 1


def test_resident_images_are_those_of_the_workers() -> None:
    """Pictures no larger than twice the input are stored as they are, so only roundings differ."""
    source = arrays(height=20, width=30)
    for augment in (Augment(), Augment(crop="resize"), Augment(mixup=0.3)):
        for one, other in zip(
            take(loader(source, augment, resident=False), 4),
            take(loader(source, augment, resident=True), 4),
            strict=True,
        ):
            assert torch.equal(one.index, other.index)
            assert torch.equal(one.targets, other.targets)
            assert (one.images - other.images).abs().max() <= 2.01 * 2 / 255


def test_large_pictures_of_many_shapes_are_cut_alike(tmp_path: Path) -> None:
    """Stored stretched, at twice the input: crops keep place and shape; only fine detail is lost."""
    for i, shape in enumerate([(90, 60), (60, 90), (64, 64), (40, 120)] * 3):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        picture(i, *shape).save(tmp_path / str(i % 2) / f"{i}.png")
    source = open_data(str(tmp_path)).train
    held = TrainLoader(source, (16, 16), Augment(), PLAIN, batch=8, resident=True)
    files = TrainLoader(source, (16, 16), Augment(), PLAIN, batch=8, resident=False)
    assert held.held is not None
    assert held.held.stored == (32, 32)
    for one, other in zip(take(held, 3), take(files, 3), strict=True):
        assert torch.equal(one.index, other.index)
        assert (one.images - other.images).abs().mean() < 0.05
        assert ((one.images - other.images).flatten(1).abs().mean(1) < 0.15).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_cuts_what_the_cpu_cuts() -> None:
    source = arrays(40, height=30, width=40)
    for augment in (Augment(), FULL):
        cpu, gpu = (take(loader(source, augment, resident=True, device=device), 5) for device in ("cpu", "cuda"))
        for one, other in zip(cpu, gpu, strict=True):
            assert torch.equal(one.index, other.index.cpu())
            assert torch.allclose(one.targets, other.targets.cpu())
            assert (one.images - other.images.cpu()).abs().mean() < 0.01
        again = take(loader(source, augment, resident=True, device="cuda"), 2, 3)
        assert all(same(a, b) for a, b in zip(again, gpu[3:], strict=True))


def test_which_sets_are_resident() -> None:
    source, cpu = open_data("digits").train, torch.device("cpu")
    assert fits_on_device(source, (8, 8), cpu)
    assert not fits_on_device(source, (224, 224), cpu)
    assert loader(arrays(), size=16).resident
    assert ResidentSet(source, (8, 8), PLAIN, 0, cpu).stored == (8, 8)


# ---- evaluation


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (3, 0), (5, 0), (1, 2), (2, 1)])
def test_every_image_exactly_once(world: int, workers: int) -> None:
    source = arrays(23)
    parts = []
    for rank in range(world):
        batches = list(EvalLoader(source, (16, 16), PLAIN, batch=4, workers=workers, rank=rank, world=world).batches())
        assert all(len(batch.labels) == 4 for batch in batches[:-1])
        parts += batches
    assert torch.cat([batch.index for batch in parts]).tolist() == list(range(23))
    for batch in parts:
        for image, index, label, goal in zip(batch.images, batch.index, batch.labels, batch.targets, strict=True):
            assert torch.equal(image, eval_image(source.image(int(index)), (16, 16), PLAIN))
            assert label == source.labels[index]
            assert goal.tolist() == [float(k == label) for k in range(4)]


def test_kept_evaluation_images_are_the_same() -> None:
    source = arrays(11)
    loader_ = EvalLoader(source, (16, 16), PLAIN, batch=4, resident=True)
    first, second = list(loader_.batches()), list(loader_.batches())
    assert len(loader_) == len(first) == 3
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_more_ranks_than_images() -> None:
    found = [list(EvalLoader(arrays(2), (8, 8), PLAIN, batch=4, rank=r, world=3).batches()) for r in range(3)]
    assert sum(len(batch.labels) for rank in found for batch in rank) == 2


# ---- broken images and lost workers


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    write_folder(tmp_path, {"a": 15, "b": 15})
    (tmp_path / "a" / "003.png").write_bytes(b"broken")
    (tmp_path / "b" / "014.png").write_bytes(b"")  # the last: the next good one is the first
    return tmp_path


@pytest.mark.parametrize("resident", WAYS)
@pytest.mark.parametrize("workers", [0, 1])
def test_broken_images_are_named_and_replaced(
    damaged: Path, resident: bool, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_data(str(damaged), holdout=0.01).train
    bad = [i for i in range(len(source)) if source.name(i).endswith(("a/003.png", "b/014.png"))]
    assert len(bad) == 2
    with caplog.at_level(logging.WARNING, "vitlab"):
        one = loader(source, resident=resident, workers=workers, batch=7)  # type: ignore[arg-type]
        batches = take(one, 8)  # two epochs
    assert sorted(one.broken) == bad
    assert sum("a broken image was skipped" in record.message for record in caplog.records) == 2
    index = torch.cat([batch.index for batch in batches])[: 2 * len(source)]
    counts = torch.bincount(index, minlength=len(source))
    for b in bad:
        assert counts[b] == 0
        assert counts[(b + 1) % len(source)] == 4
    again = take(loader(source, resident=resident, batch=7), 2, 6)  # type: ignore[arg-type]
    assert same(again[1], batches[7])


@pytest.mark.parametrize("resident", WAYS)
def test_too_many_broken_images(damaged: Path, resident: bool) -> None:
    source = open_data(str(damaged), holdout=0.01).train
    with pytest.raises(UserError, match=r"\d of 28 training images cannot be read.*broken_limit \(0.02\)"):
        take(loader(source, resident=resident, broken_limit=0.02), 8)  # type: ignore[arg-type]


class AllBroken(ArraySource):
    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        raise BrokenImage(self.name(index), "always broken")


@pytest.mark.parametrize("resident", WAYS)
def test_nothing_but_broken_images(resident: bool) -> None:
    good = arrays()
    source = AllBroken("broken", good.pixels, good.labels, good.classes)
    with pytest.raises(UserError, match=r"always broken|can be read"):
        take(loader(source, resident=resident), 1)


@pytest.mark.parametrize(("workers", "resident"), [(0, False), (0, True), (1, False)])
def test_broken_images_are_left_out_of_evaluation(damaged: Path, workers: int, resident: bool) -> None:
    """Over two ranks every other image comes once, on the first pass and on the next, with its own pixels and label."""
    (damaged / "a" / "004.png").write_bytes(b"broken")
    source = open_data(str(damaged), holdout=0.01).train
    bad = [i for i in range(len(source)) if source.name(i).endswith(("a/003.png", "a/004.png", "b/014.png"))]
    good = Subset(source, np.setdiff1d(np.arange(len(source)), bad))
    [expected] = EvalLoader(good, (8, 8), PLAIN, batch=len(good)).batches()
    options = {"batch": 2, "workers": workers, "resident": resident, "world": 2}
    loaders = [EvalLoader(source, (8, 8), PLAIN, rank=rank, **options) for rank in (0, 1)]  # type: ignore[arg-type]
    for _ in range(2 - workers):
        batches = [batch for loader_ in loaders for batch in loader_.batches()]
        assert all(len(batch.index) for batch in batches)
        assert torch.cat([batch.index for batch in batches]).tolist() == good.indices.tolist()
        assert torch.equal(torch.cat([batch.images for batch in batches]), expected.images)
        assert torch.equal(torch.cat([batch.labels for batch in batches]), expected.labels)
        assert sorted({**loaders[0].broken, **loaders[1].broken}) == bad
    if not workers:
        sizes = [len(batch.index) for loader_ in loaders for batch in loader_.batches(empty=True)]
        assert len(sizes) == 14
        assert sum(sizes) == len(good)


class Fatal(ArraySource):
    """Its worker is killed, as by the system when memory runs out, at image 11."""

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().image(index, shrink)


def test_a_killed_worker_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))  # s until torch looks
    good = arrays()
    source = Fatal("fatal", good.pixels, good.labels, good.classes)
    with pytest.raises(
        UserError, match=r"^a loader worker \(process \d+\) was killed by signal 9; .*workers=1"
    ) as caught:
        take(loader(source, Augment(), resident=False, workers=2), 10)
    assert "\n" not in str(caught.value)
    assert signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None)


STOPPED_AT_START = """
import os, signal
import numpy as np
from vitlab.data.loader import EvalLoader
from vitlab.data.source import ArraySource
from vitlab.errors import Stopped
from vitlab.models.config import Preprocess
from vitlab.signals import stoppable

left = [signal.SIGTERM]
os.register_at_fork(after_in_parent=lambda: left and signal.raise_signal(left.pop()))
source = ArraySource("x", np.zeros((8, 8, 8, 3), np.uint8), np.zeros(8, np.int64), ("a",))
try:
    with stoppable("stopped"):
        list(EvalLoader(source, (8, 8), Preprocess(), batch=4, workers=2).batches())
except Stopped as stop:
    print(stop.code, stop)
"""


def test_a_signal_while_workers_start_is_told_in_one_sentence() -> None:
    """It comes after the first fork of two."""
    found = subprocess.run([sys.executable, "-c", STOPPED_AT_START], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("143 stopped\n", "")
