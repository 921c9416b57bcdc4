"""The scales of a model for 8 bits: from its file, or from images, after which they are in its file."""

import logging
from pathlib import Path

import torch

from vitlab.errors import UserError
from vitlab.export.images import open_images
from vitlab.inference.calibration import calibrate, check_hardware, check_model
from vitlab.inference.fp8 import float8_layers
from vitlab.inference.scales import NAME, Scales, read_scales, weights_key
from vitlab.models.guest import Measured
from vitlab.models.variants import Model

log = logging.getLogger("vitlab")

RANGES = 128  # images that ranges are taken from,
MEASURED = 1024  # others that the agreement is measured on,
SEPARATE = 200  # if there are at least so many others
FEWEST = 16
NARROW = 512  # width below which 8 bits take longer than 16: at 192 and 256 they did on an H200, at 768 they did not


def find_scales(run: str, model: Measured, images: str | None, device: torch.device) -> Scales:
    """The scales of a run's model, on a device that has products in 8 bits; from images, if these are named.

    Raises UserError where there are none, or with them the model gives other classes than in float32.
    """
    vit = check_model(model)
    check_hardware(device)
    if vit.config.width < NARROW:
        log.warning("fp8 is for wide models; one of width %d is faster without --precision fp8", vit.config.width)
    place = scales_path(run)
    if images is not None:
        scales = from_images(vit, images, device)
        if place is not None:
            scales.write(place)
        log.info("%s", scales.describe())
        return scales
    if place is None or not place.exists():
        raise UserError(f"{run} has no scales for fp8 yet; add --calibrate IMAGES, some like those it will see")
    scales = read_scales(place)
    if scales.weights != weights_key(vit) or not set(scales.maxima) <= set(float8_layers(vit)):
        raise UserError(f"{place} is of other weights; calibrate again with --calibrate IMAGES")
    return scales


def scales_path(run: str, name: str = NAME) -> Path | None:
    """Where a run's scales are, or another file: in its folder, or beside its own; None for a name of the hub."""
    path = Path(run).expanduser()
    if path.is_dir():
        return path / name
    return path.with_name(f"{path.name}.{name}") if path.is_file() else None


def from_images(model: Model, name: str, device: torch.device) -> Scales:
    """Calibrate on the images of a folder, a pattern or a data set; the model comes back to where it was."""
    images = open_images(name)
    if len(images) < FEWEST:
        raise UserError(f"{images.title} has {len(images)} images; fp8 is calibrated on at least {FEWEST}")
    seen = images.sample(RANGES)
    others = images.without(seen)
    separate = len(others) >= SEPARATE
    size, preprocess = model.config.image_size, model.card.preprocess
    ranges, measured = (
        part.pixels(size, preprocess) for part in (seen, (others if separate else images).sample(MEASURED))
    )
    home, mode = next(model.parameters()).device, model.training
    try:
        return calibrate(model.eval().to(device), ranges, measured, device, separate=separate)
    finally:
        model.train(mode).to(home)
