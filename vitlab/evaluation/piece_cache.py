"""A cache of extracted values in pieces: files of some hundred consecutive images each.

A piece's file appears complete or not at all. Its name is a hash of the model and of its images, so the pieces of many
models and data sets share a folder and are never mixed up. They may be deleted at any time.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vitlab.data.images import BrokenImage
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.evaluation.corrupted import Corrupting
from vitlab.files import atomic_file
from vitlab.inference.int8 import EightBits
from vitlab.models.guest import Measured
from vitlab.settings import to_json
from vitlab.text import brief
from vitlab.weights.digest import digest_model

What = Literal["features", "logits"]
Values = NDArray[np.float32]

log = logging.getLogger("vitlab")

SUFFIX = ".safetensors"


def model_key(
    model: Measured,
    what: What,
    half: bool,
    resize: int | None = None,
    corruption: Corrupting | None = None,
    scales: EightBits | None = None,
) -> str:
    """Hash everything about a model that its values depend on: weights, settings, preprocessing and precision.

    Features do not depend on the head, so a model with another one has the same.
    """
    precision = "bf16" if half else "full"
    about: list[object] = [what, precision if scales is None else scales.digest]
    about += [] if resize is None else [resize]
    about += [] if corruption is None else [to_json(corruption), corruption.fingerprint()]
    if what == "features":
        return hashlib.sha256(json.dumps([feature_key(model), *about]).encode()).hexdigest()[:12]
    about += [to_json(model.config), to_json(model.card.preprocess)]
    return digest_model(about, model.state_dict())[:12]


def feature_key(model: Measured) -> str:
    """Hash what a model's features depend on: neither its head nor the precision, which changes them by little."""
    config = {key: value for key, value in to_json(model.config).items() if key != "classes"}
    body = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    return digest_model([config, to_json(model.card.preprocess)], body)


class PieceCache:
    """The finished pieces of one model and one source in a folder."""

    def __init__(self, folder: Path, model: str, source: ImageSource) -> None:
        self.folder, self.model, self.source = folder, model, source
        self.path = functools.cache(self.piece_path)  # hashed before the images are read: a later change is noticed
        try:
            folder.mkdir(parents=True, exist_ok=True)  # now, rather than after the first piece's work
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"nothing can be kept in the folder {folder}: {brief(error)}; name another") from None
        others = any(not path.name.startswith(model) for path in folder.glob(f"*{SUFFIX}"))
        if others and not any(folder.glob(f"{model}-*{SUFFIX}")):
            log.info("the files in %s are of other weights or settings; they stay, and are not used", folder)

    def piece_path(self, span: range) -> Path:
        """Hash the names and labels of a piece's images with the files' sizes and times, as their content may change.

        Where names are not files, the pixels of the first image are hashed instead.
        """
        digest = hashlib.sha256(self.source.truth[span.start : span.stop].tobytes())
        files = True
        for index in span:
            name = self.source.name(index)
            digest.update(f"{name}\0{(state := file_state(name))}\0".encode(errors="surrogatepass"))
            files = files and state != ""
        if not files and self.source.groups is None:  # reading one image of a group may mean reading them all
            try:
                digest.update(self.source.image(span.start).tobytes())
            except BrokenImage as broken:
                digest.update(broken.why.encode())
        return self.folder / f"{self.model}-{digest.hexdigest()[:24]}{SUFFIX}"

    def read(self, span: range, values: Values) -> bool:
        """Copy a piece from its file into its rows of `values`; False if the file is missing or damaged."""
        path = self.path(span)
        if not path.exists():
            return False
        target = values[span.start : span.stop]
        try:
            with safe_open(path, "np") as file:
                piece, expected = file.get_tensor("values"), (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError):
            piece, expected = np.empty(0, np.float32), None
        if piece.shape != target.shape or piece.dtype != np.float32 or checksum(piece) != expected:
            log.warning("%s is damaged; its images are computed again", path)
            return False
        target[:] = piece
        return True

    def write(self, span: range, values: Values) -> None:
        piece = values[span.start : span.stop]
        with atomic_file(self.path(span)) as file:
            file.write(save({"values": piece}, {"sha256": checksum(piece)}))


def file_state(name: str) -> str:
    """A file's size and time of change; "" where the name is not a file's."""
    try:
        stat = os.stat(name)
    except (OSError, ValueError):
        return ""
    return f"{stat.st_size} {stat.st_mtime_ns}"


def checksum(values: Values) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()
