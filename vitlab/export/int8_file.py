"""The int8 model of a run for CPUs: from its file, or from images, after which it is in its file."""

import logging
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.export.compare import compute_logits
from vitlab.export.images import open_images
from vitlab.export.int8 import check_model, prepare, split_images
from vitlab.export.qdq import quantize_layers
from vitlab.export.quantize import Scale
from vitlab.export.scales_file import scales_path
from vitlab.inference.fused import fuse
from vitlab.inference.graph_check import check_graph
from vitlab.inference.int8 import AGAIN, NAME, Int8, check_device, check_runtime, read_int8
from vitlab.inference.onnx_file import Runner, check_packages, open_session, to_proto
from vitlab.inference.scales import weights_key
from vitlab.models.guest import Measured
from vitlab.models.vit import ViT

log = logging.getLogger("vitlab")

LEAST = 0.96  # agreement


def find_int8(run: str, model: Measured, images: str | None, device: torch.device) -> Int8:
    """The int8 model of a run on a CPU; from images, if these are named.

    Raises UserError where there is none, or where it gives other classes than float32 does.
    """
    vit = check_model(model, "leave --precision out")
    check_device(device)
    check_runtime()
    place = scales_path(run, NAME)
    if images is not None:
        made = from_images(vit, images)
        if place is not None:
            made.write(place)
        log.info("%s", made.describe())
        return made
    if place is None or not place.exists():
        raise UserError(f"{run} has no int8 model yet; add --calibrate IMAGES, some like those it will see")
    found = read_int8(place, vit.config.image_size, vit.config.features)
    if found.weights != weights_key(vit):
        raise UserError(f"{place} is of other weights; {AGAIN}")
    return found


def from_images(model: ViT, name: str) -> Int8:
    """Calibrate on the images of a folder, a pattern or a data set, and measure."""
    check_packages()
    calibration, measured, separate = split_images(open_images(name))
    size, preprocess, mode = model.config.image_size, model.card.preprocess, model.training
    ranges, pixels = (part.pixels(size, preprocess) for part in (calibration, measured))
    logits = compute_logits(model.eval(), pixels, preprocess, "running float")
    model.train(mode)
    graph = prepare(model, ranges)
    proto, written = features_graph(graph.model, model), b""

    def run(scales: dict[str, Scale]) -> Runner:
        nonlocal written
        written = write_graph(proto, scales, model)
        return with_head(model, open_session(written))

    floats, share, _ = graph.choose(run, logits, pixels, LEAST)
    if share < LEAST:
        raise UserError(
            f"int8 is refused: the best class is float32's on {share:.2%} of {len(pixels)} images of {measured.title}, "
            f"below {LEAST:.0%}"
        )
    return Int8(weights_key(model), len(graph.scales), floats, share, len(pixels), separate, written)


def features_graph(graph: ViT, model: ViT) -> Any:
    """The features of a traceable model, which is changed, as a graph for ONNX Runtime."""
    graph.head = None
    return to_proto(fuse(graph), model, False)


def write_graph(proto: Any, scales: dict[str, Scale], model: ViT) -> bytes:
    """The graph with int8 layers, if it is one that would be read again."""
    made = quantize_layers(proto, scales, fused=True)
    check_graph(made, model.config.image_size, model.config.features)
    return bytes(made.SerializeToString())


def with_head(model: ViT, features: Runner) -> Runner:
    def logits(images: Tensor) -> Tensor:
        assert model.head is not None  # checked at the start
        return model.head(features(images))

    return logits
