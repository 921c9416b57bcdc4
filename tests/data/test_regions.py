"""Crops that the device scales (`resize=device`) are those of the workers, to one level of 255."""

import dataclasses
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import arrays, encoded, picture
from PIL import Image

from vitlab.data.folder import FileSource
from vitlab.data.images import decode
from vitlab.data.jpeg_tensor import decode_usual
from vitlab.data.loader import Batch, TrainLoader
from vitlab.data.regions import RegionReader, padded_size, scale_regions
from vitlab.data.rng import keys
from vitlab.data.source import ArraySource, Subset
from vitlab.data.transforms import Augment, crop_boxes, draw_flips
from vitlab.models.config import Interpolation, Preprocess
from vitlab.training.recipe import Recipe, difference, override

LEVEL = 2.001 / 255  # of pixels between -1 and 1
KEYS = keys(1, 0, np.arange(12))


def take(loader: TrainLoader, count: int, step: int = 0) -> list[Batch]:
    return list(itertools.islice(loader.batches(step), count))


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])  # a CPU's and a GPU's
@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_regions_are_scaled_as_pillow_does(kind: Interpolation, precision: torch.dtype) -> None:
    size, preprocess, height, width = (24, 32), Preprocess(interpolation=kind), 40, 60
    source = arrays(12, height=height, width=width)
    chunk = RegionReader(source, size, preprocess, Augment()).read_chunk(list(enumerate(KEYS.tolist())))
    flips = draw_flips(KEYS, Augment())
    found = scale_regions(chunk, flips, size, preprocess, precision)
    boxes = crop_boxes(KEYS, np.full(12, width / height), size, Augment(), preprocess) * [width, height, width, height]
    for i, box in enumerate(boxes.tolist()):
        image = source.image(i).resize(size[::-1], Image.Resampling[kind.upper()], box=tuple(box))
        expected = np.asarray(image)[:, ::-1] if flips[i] else np.asarray(image)
        assert np.abs(found[i].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1
    assert chunk.pixels.numel() < 12 * 3 * height * width  # only what the crops need


def test_batches_are_those_of_the_workers(tmp_path: Path) -> None:
    """Of images of many shapes, some much larger than the input, some smaller, one broken."""
    shapes = [(90, 60), (30, 45), (8, 8), (200, 150), (40, 33)] * 3
    for i, shape in enumerate(shapes):
        picture(i, *shape).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"")
    source = FileSource(tmp_path, [f"{i}.png" for i in range(15)], [i % 2 for i in range(15)], ("a", "b"))
    for augment in (Augment(), Augment(crop="resize"), Augment(crop="none", mixup=0.3)):
        one, other = (
            TrainLoader(source, (16, 24), augment, Preprocess(), batch=5, resident=False, resize=where)
            for where in ("workers", "device")
        )
        for expected, found in zip(take(one, 4), take(other, 4), strict=True):
            assert torch.equal(found.index, expected.index)
            assert torch.equal(found.targets, expected.targets)
            assert (found.images - expected.images).abs().max() <= LEVEL
        assert set(one.broken) == set(other.broken) == {3}


def test_large_crops_are_scaled_by_the_worker_and_change_no_further() -> None:
    size = (16, 16)
    pixels = np.stack([np.asarray(picture(i, 300, 300)) for i in range(4)])
    source = ArraySource("large", pixels, np.zeros(4, np.int64), ("a", "b"))
    augment = Augment(area=(0.5, 1.0), flip=False)
    chunk = RegionReader(source, size, Preprocess(), augment).read_chunk(list(enumerate(KEYS[:4].tolist())))
    height, width = padded_size(size, "bilinear")
    assert chunk.pixels.numel() == 4 * 3 * 16 * 16 < 4 * 3 * height * width
    found = scale_regions(chunk, np.zeros(4, bool), size, Preprocess())
    assert torch.equal(found.permute(0, 2, 3, 1).flatten(), chunk.pixels)


def test_restarts_and_workers_change_nothing() -> None:
    source, augment = arrays(height=30, width=40), Augment(randaugment=(1, 10))
    settings = {"batch": 8, "resident": False, "resize": "device"}
    expected = take(TrainLoader(source, (16, 16), augment, Preprocess(), **settings), 4)  # type: ignore[arg-type]
    again = take(TrainLoader(source, (16, 16), augment, Preprocess(), workers=2, **settings), 2, 2)  # type: ignore[arg-type]
    for one, other in zip(expected[2:], again, strict=True):
        assert torch.equal(one.images, other.images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_scales_as_the_workers_do() -> None:
    source = arrays(40, height=50, width=70)
    one = TrainLoader(source, (32, 32), Augment(), Preprocess(), batch=20, resident=False)
    settings = {"device": torch.device("cuda"), "resize": "device", "workers": 2, "resident": False}
    other = TrainLoader(source, (32, 32), Augment(), Preprocess(), batch=20, **settings)  # type: ignore[arg-type]
    for expected, found in zip(take(one, 3), take(other, 3), strict=True):
        assert (found.images.cpu() - expected.images).abs().max() <= LEVEL


def test_a_run_keeps_who_scales_its_crops() -> None:
    recipe = Recipe("Ti/16", "digits", steps=10)
    assert recipe.resize == "workers"
    changed = override(recipe, ["resize=device"])
    assert "resize (the run has workers, not device)" in (difference(changed, recipe) or "")
    assert difference(dataclasses.replace(changed, resize="workers"), recipe) is None


# ---- usual JPEGs, straight to tensors


def jpeg(seed: int, mode: str = "RGB", **settings: object) -> bytes:
    file = io.BytesIO()
    picture(seed, 45, 61).convert(mode).save(file, "JPEG", **settings)
    return file.getvalue()


def no_shrink(size: tuple[int, int]) -> float:
    return 1.0


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("quality", [30, 95])
def test_usual_jpegs_have_the_pixels_of_pillow(subsampling: str, progressive: bool, quality: int) -> None:
    data = jpeg(quality, quality=quality, subsampling=subsampling, progressive=progressive)
    found = decode_usual(data, no_shrink)
    assert found is not None
    assert (found.numpy() == np.asarray(Image.open(io.BytesIO(data)))).all()
    assert decode_usual(data, lambda size: 2.0) is None


def test_other_files_are_left_to_pillow() -> None:
    usual = jpeg(0)
    others = {
        "gray": jpeg(0, "L"),
        "CMYK": jpeg(0, "CMYK"),
        "rotated": jpeg(0, exif=turned()),
        "PNG": encoded(picture(0)),
        "truncated": usual[: len(usual) // 2],
        "of no length": b"",
        "huge": usual.replace(bytes([0, 45, 0, 61]), bytes([255, 255, 255, 255]), 1),
        "many scans": usual[:-2] + b"\xff\xda" * 600,
    }
    assert usual.count(bytes([0, 45, 0, 61])) == 1
    for name, data in others.items():
        assert decode_usual(data, no_shrink) is None, name


def test_damaged_jpegs_are_refused_or_equal() -> None:
    """Whatever the damage, both decoders give the same pixels or none."""
    random, decoded = np.random.default_rng(0), 0
    for i in range(300):
        data = bytearray(jpeg(i, quality=int(random.integers(40, 96)), progressive=bool(i % 2)))
        for _ in range(1 + i % 5):
            data[int(random.integers(2, len(data)))] = int(random.integers(256))
        found = decode_usual(bytes(data), no_shrink)
        if found is not None:
            assert (found.numpy() == np.asarray(decode(bytes(data), ""))).all()
            decoded += 1
    assert 50 < decoded < 300


def test_a_folder_of_many_kinds_is_read_as_by_the_workers(tmp_path: Path) -> None:
    kinds = [
        jpeg(0),
        jpeg(1, "L"),
        jpeg(2, "CMYK"),
        jpeg(3, exif=turned()),
        jpeg(4)[:-300],
        encoded(picture(5, 40, 70)),
    ]
    for i, data in enumerate(kinds):
        (tmp_path / f"{i}.jpg").write_bytes(data)
    files = FileSource(tmp_path, [f"{i}.jpg" for i in range(6)], [0, 1] * 3, ("a", "b"))
    source = Subset(files, np.array([5, 4, 3, 2, 1, 0]))
    one, other = (
        TrainLoader(source, (32, 32), Augment(), Preprocess(), batch=6, resident=False, broken_limit=1, resize=where)
        for where in ("workers", "device")
    )
    for expected, found in zip(take(one, 2), take(other, 2), strict=True):
        assert torch.equal(found.index, expected.index)
        assert (found.images - expected.images).abs().max() <= LEVEL
    assert one.broken == other.broken
    assert set(one.broken) == {1}
