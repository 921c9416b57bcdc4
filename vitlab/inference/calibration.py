"""Scales for 8 bits from images like those that a model will see: ranges, harmless layers, and how far classes agree.

Shapes: n images, h and w the model's height and width.
"""

from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.errors import UserError
from vitlab.inference.effects import fastest_plan, harmless_first, margin_changes
from vitlab.inference.engine import Engine
from vitlab.inference.fp8 import float8_layers
from vitlab.inference.scales import Scales, weights_key
from vitlab.inference.values import margins
from vitlab.kernels.fp8 import SMALLEST, has_float8
from vitlab.models.guest import Measured
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.text import listed

LEAST = 0.99  # agreement
SLACK = 0.9  # of the disagreement allowed, how much is aimed at first,
STRICTER = 0.7  # and how much of that each time it is not reached
TRIES = 8
ROOM = 16.0  # how many times the largest value seen float16 must hold
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

    The fastest choice of layers, and of images that are computed again in 16 bits, that should keep the best class by
    what each layer does to `ranges`; a more careful one where too many classes of `measured` change, and a UserError
    where none keeps them. The model is in eval mode and on the device.
    """
    maxima = largest_inputs(model, ranges, device)
    work = {name: layer.weight.numel() for name, layer in float8_layers(model).items()}
    rest = pick_rest(model, ranges, device)
    nothing = Scales(weights_key(model), {}, 0.0, len(measured), separate, len(work), 0.0, 0.0, 0.0, rest)
    exact = logits_of(model, measured, device)
    variances = harmless_first(margin_changes(model, maxima, nothing.dtype, ranges, device), work)
    before, apart = rounding_variance(model, ranges, device, nothing), margins(exact)
    allowed, found = 1 - LEAST, "no choice of layers is expected to keep it"
    for _ in range(TRIES):
        plan = fastest_plan(variances, work, before, apart, 1 - SLACK * allowed)
        if plan is None:
            break
        chosen = {name: maxima[name] for name in maxima if name in plan.layers}
        share = sum(work[name] for name in chosen) / sum(work.values())
        scales = replace(nothing, maxima=chosen, work=share, closer=plan.closer, again=plan.again)
        same = agreement(exact, logits_of(model, measured, device, scales))
        if same >= LEAST:
            return replace(scales, agreement=same)
        found = f"it is on {same:.2%} with {len(chosen)} of {len(work)} layers in 8 bits"
        allowed *= STRICTER
    alone = agreement(exact, logits_of(model, measured, device, nothing))
    raise UserError(
        f"fp8 is refused: the best class must be float32's on {LEAST:.0%} of {len(measured)} images, and {found}; "
        f"{rest} alone has {alone:.2%}"
    )


def agreement(exact: Tensor, found: Tensor) -> float:
    """The share of images with the same best class, by logits (n, classes)."""
    return float((found.argmax(1) == exact.argmax(1)).double().mean())


def pick_rest(model: Model, pixels: Tensor, device: torch.device) -> str:
    """What all else is computed in: float16, which rounds to three bits more than bf16, if its range has room."""
    return "float16" if largest_value(model, pixels, device) * ROOM < torch.finfo(torch.float16).max else "bfloat16"


def rounding_variance(model: Model, pixels: Tensor, device: torch.device, nothing: Scales) -> float:
    """The mean square by which 16 bits, with nothing in 8, change the margin of the two best classes."""
    exact, found = (logits_of(model, pixels, device, scales) for scales in (None, nothing))
    pairs = exact.topk(2).indices
    change = (found - exact).gather(1, pairs).diff(dim=1)
    return float(change.double().square().mean())


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


@torch.inference_mode()
def largest_value(model: Model, pixels: Tensor, device: torch.device) -> float:
    """The largest magnitude that any part of the model returns, in the weights' own precision."""
    found = [torch.zeros((), device=device)]

    def look(_: nn.Module, inputs: tuple[Tensor, ...], out: object) -> None:
        if isinstance(out, Tensor):
            found[0] = torch.maximum(found[0], out.abs().amax())

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(look))
        for part in pixels.split(BATCH):
            model(normalize(part.to(device), model.card.preprocess))
    return float(found[0])


def logits_of(model: Model, pixels: Tensor, device: torch.device, scales: Scales | None = None) -> Tensor:
    """Logits (n, classes) in float32: the model's own, or those of 16 bits with the layers that have scales in 8."""
    engine = Engine(model, "logits", device, preprocess=model.card.preprocess, scales=scales)
    engine.half = scales is not None
    return torch.cat([engine(part.to(device)).float().cpu() for part in pixels.split(BATCH)])
