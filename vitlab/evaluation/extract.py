"""What a model makes of every image of a set: computed once, in pieces that can be kept, so that it may be interrupted.

A piece is the values of some hundred images in a row, in a file that appears whole or not at all. Its name is a hash
of the model and of those images, so the pieces of many models and sets lie side by side in one folder and none is
ever taken for another's. They may be deleted at any time.

Shapes: n images, D the width of the features, or the number of classes, b images of a batch.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from vitlab.data.images import BrokenImage
from vitlab.data.loader import EvalLoader
from vitlab.data.rng import Ints
from vitlab.data.source import ImageSource, Subset
from vitlab.device import has_bf16, pick_device, pick_workers
from vitlab.errors import UserError
from vitlab.files import fsync
from vitlab.models.config import ResNetConfig
from vitlab.models.variants import Model
from vitlab.settings import to_json
from vitlab.terminal import progress
from vitlab.text import brief

What = Literal["features", "logits"]
Values = NDArray[np.float32]

log = logging.getLogger("vitlab")

# Images of a batch and, at most, of a piece: what an interruption may lose, some seconds of work.
ON_GPU, ELSEWHERE = (256, 1024), (64, 256)
ENDING = ".safetensors"
WARM_UP = 5  # batches before the speed is known
PAYS = 120  # seconds of the model's time left, from which compiling it takes less than it saves


@dataclass(frozen=True)
class Features:
    """One row of values for each image of a source, in its order."""

    values: Values  # (n, D)
    labels: Ints  # (n,)


def extract(
    model: Model,
    source: ImageSource,
    *,
    what: What = "features",
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    keep: Path | None = None,
    title: str = "features",
) -> Features:
    """Every image exactly once, in the source's order, with a bar; a broken image is an error that names it.

    keep: a folder where finished pieces stay, so that an interrupted extraction goes on where it was; None: nothing
    is kept. The result takes n·D·4 bytes of memory (3.9 GB for ImageNet's 1.28 million images at D = 768), the work
    no more than a few batches beside it; the folder takes as much again.

    The model's own preprocessing and image size are used. A GPU that has bf16 computes in it, others and CPUs in
    the weights' own precision. The model is put in eval mode and on the device for the work, and left as it was.
    """
    place = pick_device(device)
    usual, most = ON_GPU if place.type == "cuda" else ELSEWHERE
    size = usual if batch is None else batch
    check(model, source, what, size)
    n, length = len(source), size * max(1, most // size)  # whole batches, so that every piece is cut the same way
    spans = [range(start, min(start + length, n)) for start in range(0, n, length)]
    half = has_bf16(place) and next(model.parameters()).dtype == torch.float32
    shelf = None if keep is None else PieceCache(keep, model_key(model, what, half), source)
    values = np.empty((n, width(model, what)), np.float32)
    with progress(title, n) as advance:
        missing = [span for span in spans if shelf is None or not shelf.read(span, values, advance)]
        left = sum(map(len, missing))
        if left < n:
            log.info("%s: %d of %d images are in %s already", title, n - left, n, keep)
        if missing:
            with working(model, place):
                run = Runner(model, what, place, half, left)
                number = pick_workers(place) if workers is None else workers
                rows = batches(run, model, source, missing, size, number, place)
                for span in missing:
                    fill(values[span.start : span.stop], rows, advance)
                    if shelf is not None:
                        shelf.write(span, values)
    return Features(values, source.labels)


def check(model: Model, source: ImageSource, what: What, batch: int) -> None:
    if batch < 1:
        raise UserError(f"a batch needs at least one image, not {batch}")
    if len(source) == 0:
        raise UserError("there are no images to extract from")
    if what == "logits" and model.config.classes == 0:
        raise UserError("this model has no head and so no class scores; use one with a head, or its features")


def width(model: Model, what: What) -> int:
    c = model.config
    if what == "logits":
        return c.classes
    return c.channels if isinstance(c, ResNetConfig) else c.prelogits or c.width


# ---- computing


@contextmanager
def working(model: Model, place: torch.device) -> Iterator[None]:
    """The model in eval mode on the device, and afterwards as it was."""
    modes = [(module, module.training) for module in model.modules()]
    home = next(model.parameters()).device
    model.eval().to(place)
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(f"a batch does not fit in the memory of {place}; use a smaller one, as with batch=16") from None
    finally:
        model.to(home)
        for module, mode in modes:
            module.training = mode


class Runner:
    """From normalized images (b, 3, h, w) to values (b, D); a GPU's model is compiled when the work left pays for it.

    Compiling a ViT takes 5 to 30 seconds and then saves a sixth of the model's time or more (on an H200: B/16 from
    8,800 to 10,700 images a second, L/16 from 3,050 to 3,600), so it depends on the images left and on the GPU.
    """

    def __init__(self, model: Model, what: What, place: torch.device, half: bool, images: int) -> None:
        self.plain: Callable[[Tensor], Tensor] = model.features if what == "features" else model
        self.quick: Callable[[Tensor], Tensor] | None = None
        self.dtype = next(model.parameters()).dtype
        self.place, self.half, self.left = place, half, images
        self.calls, self.fastest = 0, float("inf")

    @torch.no_grad()
    def __call__(self, images: Tensor, whole: bool) -> Values:
        """`whole`: whether they are as many as in other batches; it is not worth compiling for those of a last one."""
        began = time.monotonic()
        with torch.autocast(self.place.type, torch.bfloat16, enabled=self.half):
            values = (self.quick if self.quick and whole else self.plain)(images.to(self.dtype))
        found = values.float().cpu().numpy()  # waits for the device
        self.calls, self.left = self.calls + 1, self.left - len(found)
        self.fastest = min(self.fastest, (time.monotonic() - began) / len(found))
        if self.place.type == "cuda" and self.calls == WARM_UP and self.fastest * self.left > PAYS:
            self.quick = torch.compile(self.plain)
        return found


def batches(
    run: Runner, model: Model, source: ImageSource, spans: list[range], batch: int, workers: int, place: torch.device
) -> Iterator[Values]:
    """The values of the spans' images, batch by batch; no batch reaches from one span into the next."""
    index = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    part = Subset(source, index)
    loader = EvalLoader(
        part, model.config.image_size, model.card.preprocess, batch=batch, workers=workers, device=place, resident=False
    )
    for found in loader.batches():
        values = run(found.images, len(found.images) == batch)
        bad = ~np.isfinite(values).all(1)
        if bad.any():
            name = part.name(int(found.index[int(bad.argmax())]))
            raise UserError(f"the model gives no finite numbers for {name}; its weights may be damaged")
        yield values


def fill(target: Values, rows: Iterator[Values], advance: Callable[[int], None]) -> None:
    at = 0
    while at < len(target):
        found = next(rows)
        target[at : at + len(found)] = found
        at += len(found)
        advance(len(found))


# ---- keeping


def model_key(model: Model, what: What, half: bool) -> str:
    """A hash of everything about a model that its values hang on."""
    about = [to_json(model.config), to_json(model.card.preprocess), what, "bf16" if half else "full"]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


class PieceCache:
    """The finished pieces of one model in a folder."""

    def __init__(self, folder: Path, model: str, source: ImageSource) -> None:
        self.folder, self.model, self.source = folder, model, source
        self.paths: dict[range, Path] = {}  # as the images were before they were read
        try:
            folder.mkdir(parents=True, exist_ok=True)  # now, rather than after the first piece's work
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"nothing can be kept in the folder {folder}: {brief(error)}; name another") from None
        others = any(not path.name.startswith(model) for path in folder.glob(f"*{ENDING}"))
        if others and not any(folder.glob(f"{model}-*{ENDING}")):
            log.info("what %s holds is of other weights or settings: it stays, and is not used", folder)

    def path(self, span: range) -> Path:
        if span not in self.paths:
            self.paths[span] = self.find_path(span)
        return self.paths[span]

    def find_path(self, span: range) -> Path:
        """Of a piece: by the names and labels of its images and, as a set may change under its names, the files' sizes
        and times; where names are not files, by the first image's pixels."""
        digest = hashlib.sha256(self.source.labels[span.start : span.stop].tobytes())
        files = True
        for index in span:
            name = self.source.name(index)
            digest.update(f"{name}\0{(state := file_state(name))}\0".encode(errors="surrogatepass"))
            files = files and state != ""
        if not files and self.source.groups is None:  # else the image may be far away
            try:
                digest.update(self.source.image(span.start).tobytes())
            except BrokenImage as broken:
                digest.update(broken.why.encode())  # the loader will say so
        return self.folder / f"{self.model}-{digest.hexdigest()[:24]}{ENDING}"

    def read(self, span: range, values: Values, advance: Callable[[int], None]) -> bool:
        """Take a piece from the folder into its place, if it is there and sound."""
        path = self.path(span)
        if not path.exists():
            return False
        target = values[span.start : span.stop]
        try:
            with safe_open(path, "np") as file:
                found, said = file.get_tensor("values"), (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError):
            found, said = np.empty(0, np.float32), None
        if found.shape != target.shape or found.dtype != np.float32 or checksum(found) != said:
            log.warning("%s is damaged; its images are computed again", path)
            return False
        target[:] = found
        advance(len(span))
        return True

    def write(self, span: range, values: Values) -> None:
        path = self.path(span)
        new = path.with_suffix(f".{os.getpid()}.new")  # two extractions may share a folder
        piece = values[span.start : span.stop]
        try:
            save_file({"values": piece}, new, {"sha256": checksum(piece)})
            fsync(new)
            new.replace(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be written: {brief(error)}") from None
        finally:
            new.unlink(missing_ok=True)


def file_state(name: str) -> str:
    """A file's size and time of change; nothing where the name is not a file's."""
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def checksum(values: Values) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()
