"""Scales for 8 bits from images like those that a model will see: the layers' ranges, and how far the classes agree.

Shapes: n images, h and w the model's height and width.
"""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.errors import UserError
from vitlab.inference.engine import Engine
from vitlab.inference.fp8 import float8_layers
from vitlab.inference.scales import Scales, weights_key
from vitlab.kernels.fp8 import SMALLEST, has_float8
from vitlab.models.guest import Measured
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.text import listed

LEAST = 0.99  # agreement
BATCH = 64


def check_model(model: Measured) -> Model:
    """The model, or a UserError where nothing can be in 8 bits or it could not be checked."""
    if not isinstance(model, ViT):
        raise UserError("fp8 is for the dense layers of transformers, and this model has none; leave --precision out")
    if model.card.thresholds is not None:
        raise UserError("fp8 is checked by the best class, and this model is multi-label; leave --precision out")
    if model.config.classes < 2:
        raise UserError("fp8 is checked by the best class, and this model has fewer than two; leave --precision out")
    if not float8_layers(model):
        raise UserError("fp8 takes layers whose sides are multiples of 16, and this model has none; leave it out")
    return model


def check_hardware(device: torch.device) -> None:
    if not has_float8(device):
        where = f"{torch.cuda.get_device_name(device)} has" if device.type == "cuda" else f"the device {device} has"
        raise UserError(f"fp8, and {where} no products in 8 bits; leave --precision out")


def calibrate(model: Model, ranges: Tensor, measured: Tensor, device: torch.device, *, separate: bool) -> Scales:
    """Scales from the bytes `ranges`, compared on the bytes `measured`, (n, 3, h, w) each.

    All layers, or those of the MLPs if the best class of too many images changes; a UserError if it still does. The
    model is in eval mode and on the device.
    """
    maxima = largest_inputs(model, ranges, device)
    best, key, tried = best_classes(model, measured, device), weights_key(model), list[str]()
    for words, part in (("all layers", ""), ("the MLPs alone", ".mlp.")):
        chosen = {name: value for name, value in maxima.items() if part in name}
        scales = Scales(key, chosen, 0.0, len(measured), separate)
        share = float((best_classes(model, measured, device, scales) == best).double().mean())
        if share >= LEAST:
            return Scales(key, chosen, share, len(measured), separate)
        tried.append(f"{share:.2%} with {words}")
    shares = " and ".join(tried)
    raise UserError(
        f"fp8 is refused: the best class is float32's on {shares} of {len(measured)} images, below {LEAST:.0%}"
    )


@torch.inference_mode()
def largest_inputs(model: Model, pixels: Tensor, device: torch.device) -> dict[str, float]:
    """The largest magnitude of each layer's input over all images, in the weights' own precision."""
    layers = float8_layers(model)
    found: dict[nn.Module, Tensor] = {}

    def look(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        largest = inputs[0].abs().amax()
        found[layer] = torch.maximum(found[layer], largest) if layer in found else largest

    with ExitStack() as hooks:
        for layer in layers.values():
            hooks.enter_context(layer.register_forward_hook(look))
        for part in pixels.split(BATCH):
            model(normalize(part.to(device), model.card.preprocess))
    maxima = {name: max(float(found[layer]), SMALLEST) for name, layer in layers.items()}
    if bad := [name for name, value in maxima.items() if not value < float("inf")]:
        raise UserError(f"the inputs of {listed(bad[:3])} are not finite; the model's weights may be damaged")
    return maxima


def best_classes(model: Model, pixels: Tensor, device: torch.device, scales: Scales | None = None) -> Tensor:
    """The best class of each image, (n,): the model's own, or with its layers in 8 bits."""
    engine = Engine(model, "logits", device, preprocess=model.card.preprocess, scales=scales)
    engine.half = scales is not None
    return torch.cat([engine(part.to(device)).float().argmax(1).cpu() for part in pixels.split(BATCH)])
