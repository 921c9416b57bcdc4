"""HEIC photos: read where the package for them is installed; else counted, with the line that installs it."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.data import folder, images
from vitlab.data.decoder import readers
from vitlab.data.images import BrokenImage, decode
from vitlab.data.open import open_data
from vitlab.errors import UserError

Command = Callable[..., tuple[int, str, str]]
INSTALL = "pip install 'vitlab[heic]'"
START = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"  # the first bytes of a photo from an iPhone


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not installed."""
    folder.warn_skipped.cache_clear()
    plain = images.EXTENSIONS - images.HEIC
    for module in ("data.images", "data.folder", "prediction.inputs"):
        monkeypatch.setattr(f"vitlab.{module}.EXTENSIONS", plain)


def write_photos(root: Path, kinds: dict[str, list[str]]) -> Path:
    for label, names in kinds.items():
        (root / label).mkdir(parents=True)
        for i, name in enumerate(names):
            Image.new("RGB", (8, 8), (40 * i, 90, 0)).save(root / label / name, "PNG" if name[0] != "h" else "JPEG")
    return root


@pytest.mark.usefixtures("without")
def test_skipped_photos_are_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"cat": ["a.png", "b.png", "c.png", "h.HEIC", "h.heif"], "dog": ["d.png", "e.png", "h.heic", ".heic"]}
    root = write_photos(tmp_path / "photos", kinds)
    with caplog.at_level(logging.WARNING, "vitlab"):
        data = open_data(str(root))
        open_data(str(root))
    assert len(data.train) + len(data.test) == 5
    lines = [record.message for record in caplog.records]
    assert lines == [f"3 HEIC photos in '{root}' are skipped; to read HEIC, {INSTALL}"]


@pytest.mark.usefixtures("without")
def test_a_folder_of_nothing_else_is_an_error(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos", {"cat": ["h1.heic", "h2.heic"], "dog": ["h3.heic"]})
    with pytest.raises(UserError, match=rf"no images but 3 HEIC photos; to read HEIC, {INSTALL[:12]}"):
        open_data(str(root))


@pytest.mark.usefixtures("without")
def test_commands_print_the_line(tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"cat": ["a.png", "b.png", "h.heic"], "dog": ["c.png", "d.png"]}
    root = write_photos(tmp_path / "photos", kinds)
    status, _, _ = command("data", str(root), "--picture", str(tmp_path / "samples.png"))
    assert status == 0
    assert [record.message for record in caplog.records] == [
        f"1 HEIC photos in '{root}' are skipped; to read HEIC, {INSTALL}"
    ]
    status, _, err = command("predict", "none", str(root / "cat" / "*.heic"))
    assert status == 1
    assert INSTALL in err.replace("\n", " ")


@pytest.mark.skipif("HEIF" in readers(), reason="the package for HEIC is installed")
def test_a_photo_that_is_named_is_broken_for_a_reason() -> None:
    with pytest.raises(BrokenImage, match="to read HEIC, pip install"):
        decode(START + bytes(100), "photo")


# ---- with the package


@pytest.fixture
def photo() -> tuple[bytes, Image.Image]:
    """A photo as bytes of HEIC, and as it was before."""
    pillow_heif = pytest.importorskip("pillow_heif")
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    plain = Image.fromarray(
        np.stack([np.tile(ramp, (48, 1)), np.tile(ramp[:48, None], (1, 64)), np.full((48, 64), 9)], 2).astype(np.uint8)
    )
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the phone upright
    pillow_heif.from_pillow(plain).save(file, quality=95, exif=exif.tobytes())
    return file.getvalue(), plain


def test_heic_is_decoded_in_the_process_with_limits(photo: tuple[bytes, Image.Image], tmp_path: Path) -> None:
    data, plain = photo
    assert not images.is_plain(data)
    for file in (data, tmp_path / "photo.heic"):
        if isinstance(file, Path):
            file.write_bytes(data)
        found = decode(file, "photo")
        assert found.mode == "RGB"
        upright = plain.transpose(Image.Transpose.ROTATE_270)
        assert found.size == upright.size
        assert np.abs(np.asarray(found).astype(int) - np.asarray(upright)).mean() < 4
    with pytest.raises(BrokenImage):
        decode(data[: len(data) // 2], "half")
    assert ".heic" in images.EXTENSIONS


def test_a_folder_of_heic_photos(photo: tuple[bytes, Image.Image], tmp_path: Path) -> None:
    for name in ("cat/1.heic", "cat/2.HEIC", "dog/1.heif", "dog/2.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(photo[0])
    data = open_data(str(tmp_path))
    assert len(data.train) == len(data.test) == 2
    assert data.train.image(1).size == (48, 64)


def test_the_package_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, vitlab.data.folder; assert 'pillow_heif' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
