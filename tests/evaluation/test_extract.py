"""Extraction: every image once and in order; interruptions lose no finished piece, and no piece is mixed up."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from PIL import Image
from scipy.ndimage import map_coordinates

import vitlab
from vitlab.data.decoder import DecodeHint
from vitlab.data.open import open_data
from vitlab.data.source import ArraySource, ImageSource, Subset
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.stretched import Stretched
from vitlab.inference.payback import PAYS
from vitlab.models.card import Card
from vitlab.models.config import Preprocess
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

BATCH, COUNT = 40, 250  # pieces are of 80 here, and the set divides by neither


class Counted(ArraySource):
    """Random pictures that record which were read, and that can interrupt."""

    def __init__(self, count: int = COUNT, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        pixels = rng.integers(0, 256, (count, 9, 12, 3), dtype=np.uint8)
        super().__init__("noise", pixels, rng.integers(0, 4, count), tuple("abcd"))
        self.seen: list[int] = []
        self.stop_at = -1

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        if index == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append(index)
        return super().image(index, shrink)


def tiny(seed: int = 0, **settings: object) -> ViT:
    torch.manual_seed(seed)
    model = vitlab.create("Ti/4", image_size=8, depth=1, width=12, heads=2, mlp=24, classes=4, dropout=0.2, **settings)
    assert isinstance(model, ViT)
    torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr]
    return model


def photos(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(60):
            Image.new("RGB", (10, 10), (i, 2 * i, 90)).save(folder / label / f"{i:02}.png")


def small(model: Model, source: ImageSource, **options: object) -> Features:
    return extract(model, source, batch=BATCH, device="cpu", workers=0, **options)  # type: ignore[arg-type]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[Path]]:
    """Pieces of two batches, and the files that they are."""
    monkeypatch.setattr("vitlab.evaluation.extract.CPU_SIZES", (BATCH, 2 * BATCH))
    return lambda folder: sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("what", ["features", "logits"])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_row_per_image_in_order(what: str, workers: int) -> None:
    """The same as the model on one image after another; the set does not divide by the batch."""
    model, source = tiny(), Counted(53)
    found = extract(model, source, what=what, batch=10, workers=workers, device="cpu")  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        images = [eval_image(source.image(i), (8, 8), Preprocess())[None] for i in range(53)]
        alone = torch.cat([model.features(x) if what == "features" else model(x) for x in images])
    np.testing.assert_allclose(found.values, alone.numpy(), rtol=1e-5, atol=1e-6)
    assert found.values.dtype == np.float32
    assert_array_equal(found.labels, source.labels)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny().train()
    model.norm.eval()
    small(model, Counted(5))
    assert model.training
    assert model.blocks[0].training
    assert not model.norm.training


def test_the_models_own_preprocessing_is_used() -> None:
    model, source = tiny(), Counted(5)
    model.card = Card(preprocess=Preprocess(mean=(0.2, 0.3, 0.4), std=(0.3, 0.2, 0.1), fit="stretch"))
    stretched = small(model, source).values
    model.eval()
    with torch.no_grad():
        image = eval_image(source.image(3), (8, 8), Preprocess((0.2, 0.3, 0.4), (0.3, 0.2, 0.1), fit="stretch"))
        np.testing.assert_allclose(stretched[3], model.features(image[None])[0].numpy(), rtol=1e-5, atol=1e-6)


def test_double_precision_and_no_head() -> None:
    model, source = tiny().double(), Counted(5)
    assert small(model, source).values.dtype == np.float32
    headless = vitlab.create("Ti/4", image_size=8, depth=1, width=12, heads=2, mlp=24, classes=0)
    with pytest.raises(UserError, match="has no head"):
        small(headless, source, what="logits")


def test_interrupted_and_continued(tmp_path: Path, pieces: Callable[[Path], list[Path]]) -> None:
    """The same to the bit as in one run; of a finished piece only the first image is read again."""
    model, source = tiny(), Counted()
    complete = small(model, source)
    source.stop_at = 170
    with pytest.raises(KeyboardInterrupt):
        small(model, source, keep=tmp_path)
    assert len(pieces(tmp_path)) == 2  # images 0 to 159
    assert list(tmp_path.glob("*.new")) == []
    source.stop_at = -1
    source.seen.clear()
    continued = small(model, source, keep=tmp_path)
    assert_array_equal(continued.values, complete.values)
    assert sorted(set(source.seen)) == [0, 80, *range(160, COUNT)]
    assert [source.seen.count(i) for i in range(170, 230)] == [1] * 60
    source.seen.clear()
    again = small(model, source, keep=tmp_path)
    assert source.seen == [0, 80, 160, 240]
    assert_array_equal(again.values, complete.values)


def test_a_broken_piece_is_computed_again(
    tmp_path: Path, pieces: Callable[[Path], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    model, source = tiny(), Counted()
    complete = small(model, source, keep=tmp_path)
    cut, flipped, emptied, sound = pieces(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-7])
    data = bytearray(flipped.read_bytes())
    data[-20] ^= 1
    flipped.write_bytes(data)
    emptied.write_bytes(b"")
    before = sound.stat().st_mtime_ns
    again = small(model, source, keep=tmp_path)
    assert_array_equal(again.values, complete.values)
    lines = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert {line.split(" ")[0] for line in lines} == {str(cut), str(flipped), str(emptied)}
    assert sound.stat().st_mtime_ns == before
    caplog.clear()
    small(model, source, keep=tmp_path)
    assert "damaged" not in caplog.text


def test_no_piece_of_another_is_used(
    tmp_path: Path, pieces: Callable[[Path], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """Other weights, settings, preprocessing, values, images under the same names, labels: each its own pieces."""
    caplog.set_level(logging.INFO, "vitlab")
    source = Counted()
    small(tiny(), source, keep=tmp_path)
    framed = tiny()
    framed.card = Card(preprocess=Preprocess(crop=1.0))
    relabelled = Counted()
    relabelled.truth = (relabelled.labels + 1) % 4
    cases: list[tuple[Model, ArraySource | Subset, dict[str, str]]] = [
        (tiny(1), source, {}),
        (tiny(gelu="tanh"), source, {}),
        (framed, source, {}),
        (tiny(), source, {"what": "logits"}),
        (tiny(), Counted(seed=1), {}),
        (tiny(), relabelled, {}),
        (tiny(), Subset(source, np.arange(COUNT)[::-1].copy()), {}),
    ]
    for number, (model, images, options) in enumerate(cases, 2):
        caplog.clear()
        found = small(model, images, keep=tmp_path, **options)
        assert_array_equal(found.values, small(model, images, **options).values)
        assert "already" not in caplog.text
        assert len(pieces(tmp_path)) == 4 * number
    assert "of other weights or settings" not in caplog.text  # the last case is of the first's model
    small(tiny(2), source, keep=tmp_path)
    assert "of other weights or settings" in caplog.text


def test_a_removed_image_invalidates_only_later_pieces(tmp_path: Path, pieces: Callable[[Path], list[Path]]) -> None:
    """After the broken image that stopped a long extraction is removed, the pieces before it are still used."""
    model, source = tiny(), Counted()
    small(model, source, keep=tmp_path)
    source.seen.clear()
    rest = Subset(source, np.delete(np.arange(COUNT), 100))
    found = small(model, rest, keep=tmp_path)
    assert set(range(1, 80)) & set(source.seen) == set()
    np.testing.assert_allclose(found.values, np.delete(small(model, source).values, 100, 0), rtol=1e-5, atol=1e-6)


def test_a_changed_photo_is_computed_again(tmp_path: Path, pieces: Callable[[Path], list[Path]]) -> None:
    """A change of any image of a piece, not only the first; the other pieces are kept."""
    photos(tmp_path / "photos")
    model, source = tiny(), open_data(str(tmp_path / "photos"), holdout=0.01).train
    before = small(model, source, keep=tmp_path / "kept").values
    assert len(pieces(tmp_path / "kept")) == 2
    photo = Path(source.name(17))
    Image.new("RGB", (10, 10), (200, 0, 0)).save(photo)
    after = small(model, source, keep=tmp_path / "kept").values
    assert len(pieces(tmp_path / "kept")) == 3
    changed = np.flatnonzero((before != after).any(1))
    assert changed.tolist() == [17]
    assert_array_equal(after, small(model, source).values)


def test_a_photo_that_changes_meanwhile_is_computed_again(tmp_path: Path) -> None:
    """Values read before the change are not kept under the hash of the changed file."""
    photos(tmp_path / "photos")
    model, source = tiny(), open_data(str(tmp_path / "photos"), holdout=0.01).train
    new = Image.new("RGB", (10, 10), (200, 0, 0))
    hook = model.norm.register_forward_hook(lambda *_: new.save(source.name(3)))  # its batch has been read
    small(model, source, keep=tmp_path / "kept")
    hook.remove()
    after = small(model, source, keep=tmp_path / "kept").values
    assert_array_equal(after, small(model, source).values)


def test_broken_images_are_left_out(
    tmp_path: Path, pieces: Callable[[Path], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are those of the others, from the cache too; an image that can be read later is computed then."""
    photos(tmp_path / "photos")
    model, source = tiny(), open_data(str(tmp_path / "photos"), holdout=0.01).train
    complete, bad = small(model, source).values, [5, *range(40, 80)]  # one, and a batch of which nothing is left
    contents = {i: Path(source.name(i)).read_bytes() for i in bad}
    states = {i: os.stat(source.name(i)) for i in bad}
    for i in bad:
        Path(source.name(i)).write_bytes(contents[i][:40].ljust(len(contents[i])))
        os.utime(source.name(i), ns=(states[i].st_atime_ns, states[i].st_mtime_ns))
    good = np.setdiff1d(np.arange(len(source)), bad)
    for again in range(2):
        with caplog.at_level(logging.DEBUG, "vitlab"):
            found = small(model, source, keep=tmp_path / "kept", broken_limit=0.5)
        assert_array_equal(found.index, good)
        assert_array_equal(found.labels, source.labels[good])
        np.testing.assert_allclose(found.values, complete[good], rtol=1e-5, atol=1e-6)
        assert f"41 of 118 images cannot be read: {source.name(5)}, " in caplog.text
        assert ("118 of 118 images are in" in caplog.text) == bool(again)
    with pytest.raises(UserError, match=r"41 of 118 images cannot be read: .*fix or remove them"):
        small(model, source, keep=tmp_path / "kept")
    for i in bad:  # as if it had been the disk: neither size nor time has changed
        Path(source.name(i)).write_bytes(contents[i])
        os.utime(source.name(i), ns=(states[i].st_atime_ns, states[i].st_mtime_ns))
    found = small(model, source, keep=tmp_path / "kept")
    assert_array_equal(found.values, complete)


def test_one_broken_image_of_few_is_no_error(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    source = Subset(open_data(str(tmp_path / "photos"), holdout=0.01).train, np.arange(3))
    Path(source.name(1)).write_bytes(b"")
    assert_array_equal(small(tiny(), source).index, [0, 2])
    Path(source.name(0)).write_bytes(b"")
    with pytest.raises(UserError, match="2 of 3 images cannot be read"):
        small(tiny(), source)


def test_values_that_are_no_numbers_are_an_error() -> None:
    model = tiny()
    torch.nn.init.constant_(model.get_parameter("norm.bias"), float("nan"))
    with pytest.raises(UserError, match=r"no finite numbers for noise 0; its weights may be damaged"):
        small(model, Counted(5))


def test_a_folder_that_cannot_be_written_fails_before_any_work(tmp_path: Path) -> None:
    source = Counted(5)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"nothing can be kept in the folder .*file"):
        small(tiny(), source, keep=tmp_path / "file")
    assert source.seen == []


@pytest.mark.parametrize(
    ("batch", "count", "message"), [(0, 5, "at least one image, not 0"), (4, 0, "there are no images")]
)
def test_no_batch_or_no_images(batch: int, count: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        extract(tiny(), Counted(count), batch=batch, device="cpu")


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_extract import Counted, tiny
from vitlab.evaluation.extract import extract

class Slow(Counted):
    def image(self, index, shrink=None):
        time.sleep(0.002)
        return super().image(index, shrink)

extract(tiny(), Slow(4000), batch=40, workers=0, device="cpu", keep=Path({keep!r}))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_eager_and_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 is close to the CPU's float32, the model comes back, and the last batch, smaller, need not be compiled."""
    model, source = tiny(), Counted(1000)
    plain = extract(model, source, device="cpu").values
    for seconds in (1e9, 0):
        monkeypatch.setitem(PAYS, "cuda", seconds)
        found = extract(model, source, batch=64, device="cuda", keep=tmp_path / str(seconds)).values
        assert np.abs(found - plain).max() < 0.05 * np.abs(plain).max()
        assert next(model.parameters()).device.type == "cpu"


@pytest.mark.slow
def test_killed_and_continued(tmp_path: Path) -> None:
    """kill -9 at any moment leaves complete pieces only; the rest is computed, and the result is that of one run."""
    source = Counted(4000)
    complete = extract(tiny(), source, batch=40, workers=0, device="cpu")
    code = KILLED.format(tests=str(Path(__file__).parent), keep=str(tmp_path))
    reached = [0]
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code])
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.safetensors"))) < reached[-1] + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL  # it was at work
        reached.append(len(list(tmp_path.glob("*.safetensors"))))
        assert reached[-1] > reached[-2]
    source.seen.clear()
    continued = extract(tiny(), source, batch=40, workers=0, device="cpu", keep=tmp_path)
    assert_array_equal(continued.values, complete.values)
    assert len(set(source.seen)) < 4000 - reached[-1] * 200


# ---- the authors' framing


def authors_image(pixels: np.ndarray, side: int, size: tuple[int, int]) -> np.ndarray:
    """Stretched to a square and cropped at the center, by scipy in float64; fractions are dropped."""
    h, w, _ = pixels.shape
    at = np.meshgrid(*((np.arange(side) + 0.5) * length / side - 0.5 for length in (h, w)), indexing="ij")
    planes = [map_coordinates(pixels[..., c].astype(np.float64), at, order=1, mode="nearest") for c in range(3)]
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    return np.stack(planes, -1).round(6).astype(np.uint8)[top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize("shape", [(375, 500), (40, 31), (256, 256), (1, 7)])
def test_images_are_framed_as_by_the_authors(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape, 3), dtype=np.uint8)
    source = ArraySource("noise", pixels, np.zeros(1, np.int64), ("a", "b"))
    found = np.asarray(Stretched(source, 256, (224, 200)).image(0)).astype(int)
    expected = authors_image(pixels[0], 256, (224, 200)).astype(int)
    assert abs(found - expected).max() <= 1
    assert (found == expected).mean() > 0.999  # the rest is an integer to within rounding
    flat = ArraySource("flat", np.full_like(pixels, 117), np.zeros(1, np.int64), ("a", "b"))
    assert set(np.asarray(Stretched(flat, 256, (224, 200)).image(0)).flat) == {117}


def test_features_of_resized_images(tmp_path: Path) -> None:
    """Normalized as the model is, framed as the authors do, and kept apart from those of its own preprocessing."""
    model, source = tiny().eval(), Counted(30)
    model.card = Card(Preprocess(mean=(0.1, 0.5, 0.7), std=(0.3, 0.4, 0.5), crop=0.5))
    small(model, source, keep=tmp_path)
    found = small(model, source, keep=tmp_path, resize=16)
    frames = np.stack([authors_image(picture, 16, (8, 8)) for picture in source.pixels])
    images = (frames / 255 - model.card.preprocess.mean) / model.card.preprocess.std
    with torch.no_grad():
        expected = model.features(torch.tensor(images, dtype=torch.float32).permute(0, 3, 1, 2))
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    assert_array_equal(small(model, source, keep=tmp_path, resize=16).values, found.values)
    for side in (7, 10_000):
        with pytest.raises(UserError, match="at least the model's size, 8x8, and at most 8192"):
            small(model, source, resize=side)
