"""How often a model in 8 bits gives float32's best class, by the way of rounding:

    python benchmarks/eight_bits.py MODEL DATA [--images 512]
    python benchmarks/eight_bits.py MODEL DATA --layers [--images 256]
    python benchmarks/eight_bits.py MODEL DATA --again [--images 1024]

Products are emulated in float32 on numbers rounded as each way rounds them, so this runs on any machine and is about
agreement, not about speed. Ranges that are fixed come from training images, agreement from test images.

With `--layers`: how many layers can be in fp8 and how many images are then computed again in 16 bits, by the way of
rounding. To first order, each layer changes the margin of the two best classes by the product of its error and the
margin's gradient, as in vitlab/inference/effects.py; shares are of the work of the dense layers.

With `--again`: what that choice does to images it was not made by, with all else in float32.

Shapes: B batch, N tokens, I inputs, O outputs of a layer.
"""

import argparse
import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import vitlab
from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.inference.calibration import LEAST, SLACK, STRICTER, TRIES, largest_inputs, rounding_variance
from vitlab.inference.effects import Plan, fastest_plan, harmless_first, margin_changes
from vitlab.inference.fp8 import float8_layers, in_8_bits
from vitlab.inference.scales import RESTS, Scales
from vitlab.inference.values import margins
from vitlab.kernels.fp8 import E4M3, LARGEST, SMALLEST
from vitlab.models.variants import Model

CALIBRATED, BATCH = 128, 32
SLOW = 16  # images in float16, which few CPUs have products in
KINDS = {"fp8": LARGEST[E4M3], "int8": 127.0}  # and the largest number of each
# one scale a layer, which is fixed; or one for each output and each token, which has to be computed anew for each image
SCALES = ("layer", "layer, smoothed", "row", "row, smoothed")
PARTS = {"all": "", "MLPs": ".mlp."}


class Rounded(nn.Module):
    """A dense layer on rounded numbers, once its input's ranges (I,) are known."""

    def __init__(self, layer: nn.Linear, kind: str, scales: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind
        self.by_row, self.smoothed = scales.startswith("row"), scales.endswith("smoothed")
        self.ranges = torch.zeros(layer.in_features)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ranges = torch.maximum(self.ranges, x.abs().flatten(0, -2).amax(0))
            return self.layer(x)
        weight, ranges = self.layer.weight, self.ranges.clamp(min=SMALLEST)
        # channels of large inputs and small weights are brought nearer to the others: SmoothQuant, halfway
        factor = (ranges / weight.abs().amax(0).clamp(min=SMALLEST)).sqrt() if self.smoothed else torch.ones(())
        x, weight = x / factor, weight * factor
        if self.by_row:
            scales = largest(x), largest(weight)
        else:
            scales = (ranges / factor).max(), weight.abs().max()
        values, weights = (self.round(number, scale) for number, scale in zip((x, weight), scales, strict=True))
        return linear(values, weights, self.layer.bias)

    def round(self, x: Tensor, maximum: Tensor) -> Tensor:
        most = KINDS[self.kind]
        scale = maximum.clamp(min=SMALLEST) / most
        numbers = (x / scale).clamp(-most, most)
        return scale * (numbers.to(E4M3).to(x.dtype) if self.kind == "fp8" else numbers.round())


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def rounded(model: Model, kind: str, scales: str, part: str, calibration: Tensor) -> Model:
    """A copy of a model with the layers of a part rounded."""
    copied = copy.deepcopy(model)
    layers = {name: Rounded(layer, kind, scales) for name, layer in float8_layers(copied).items() if part in name}
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, layer)
    logits(copied, calibration)
    for layer in layers.values():
        layer.ready = True
    return copied


@torch.no_grad()
def logits(model: Model, images: Tensor) -> Tensor:
    return torch.cat([model(batch) for batch in images.split(BATCH)])


def read(source: ImageSource, model: Model, count: int) -> Tensor:
    """Evenly spaced images of a set, as bytes of the model's size."""
    size, preprocess = model.config.image_size, model.card.preprocess
    places = np.linspace(0, len(source) - 1, count).astype(int)
    return torch.stack([eval_pixels(source.image(int(i)), size, preprocess) for i in places])


# ---- by layer


@dataclass(frozen=True)
class Inputs:
    """What training images show of a layer's inputs."""

    low: Tensor  # (I,)
    high: Tensor  # (I,)
    mean: Tensor  # (I,)
    products: Tensor  # (I, I), the mean of x x^T over tokens


@dataclass(frozen=True)
class Way:
    """A layer's rounded weight (O, I), and what is subtracted from its inputs before they are rounded, (I,)."""

    weight: Tensor
    center: Tensor
    scale: Tensor  # of inputs, ()

    def error(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of the outputs (B, N, O) of x (B, N, I); the center's own product is exact, as part of the bias."""
        x = x - self.center
        return linear(to_e4m3(x, self.scale), self.weight) - linear(x, weight)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    most = LARGEST[E4M3]
    return (x / scale).clamp(-most, most).to(E4M3).to(x.dtype) * scale


def way(rounded: Tensor, seen: Inputs, center: Tensor) -> Way:
    largest = torch.maximum((seen.low - center).abs(), (seen.high - center).abs()).max()
    return Way(rounded, center, largest.clamp(min=SMALLEST) / LARGEST[E4M3])


def ways(weight: Tensor, seen: Inputs) -> dict[str, Way]:
    scale = weight.abs().max() / LARGEST[E4M3]
    by_output = largest(weight) / LARGEST[E4M3]
    nearest, zero = to_e4m3(weight, scale), torch.zeros_like(seen.mean)
    return {
        "a scale a layer": way(nearest, seen, zero),
        "scale of the least error": way(best_scale(weight, scale, seen.products), seen, zero),
        "scale a power of two": way(to_e4m3(weight, scale.log2().ceil().exp2()), seen, zero),
        "a scale for each output": way(to_e4m3(weight, by_output), seen, zero),
        "inputs without their mean": way(nearest, seen, seen.mean),
        "compensated": way(compensated(weight, scale, seen.products), seen, zero),
        "exact weights": way(weight, seen, zero),
    }


def best_scale(weight: Tensor, scale: Tensor, products: Tensor) -> Tensor:
    """Rounded with the scale of two octaves whose outputs are the nearest to the exact ones."""
    tried = [to_e4m3(weight, scale * 2 ** (k / 16 - 1)) for k in range(33)]
    return min(tried, key=lambda rounded: float((((rounded - weight) @ products) * (rounded - weight)).sum()))


def compensated(weight: Tensor, scale: Tensor, products: Tensor) -> Tensor:
    """Rounded column by column, the error of each made up for by those that follow (GPTQ)."""
    left, h = weight.double().clone(), products.double()
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h))
    order = h.diagonal().argsort(descending=True)
    left, h = left[:, order], h[order][:, order]
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    for i in range(len(h)):
        rounded = to_e4m3(left[:, i].float(), scale).double()
        error = (left[:, i] - rounded) / upper[i, i]
        left[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
        left[:, i] = rounded
    return left[:, order.argsort()].float()


Look = Callable[[str, nn.Linear, tuple[Tensor, ...], Tensor], None]


def watch(model: Model, look: Look) -> ExitStack:
    """Until it is closed, every call of a layer calls `look` with its name."""
    hooks = ExitStack()
    for name, layer in float8_layers(model).items():
        hooks.enter_context(layer.register_forward_hook(partial(look, name)))
    return hooks


def inputs_of(model: Model, images: Tensor) -> dict[str, Inputs]:
    found: dict[str, list[Tensor]] = {}

    def look(name: str, _: nn.Linear, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        x = inputs[0].flatten(0, -2)
        new = [*x.aminmax(dim=0), x.sum(0), x.t() @ x, torch.tensor(len(x))]
        how: list[Callable[[Tensor, Tensor], Tensor]] = [torch.minimum, torch.maximum, *[torch.add] * 3]
        found[name] = [f(a, b) for f, a, b in zip(how, found[name], new, strict=True)] if name in found else new

    with watch(model, look):
        logits(model, images)
    return {name: Inputs(low, high, x / n, xx / n) for name, (low, high, x, xx, n) in found.items()}


def changes_by_way(model: Model, seen: dict[str, Inputs], images: Tensor) -> dict[str, dict[str, Tensor]]:
    """How each layer changes the margin of each image, (n, 2) by way and layer: by its class token, by the others."""
    known = {name: ways(layer.weight, seen[name]) for name, layer in float8_layers(model).items()}
    found: dict[str, dict[str, list[Tensor]]] = {}

    def look(name: str, layer: nn.Linear, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        def note(gradient: Tensor) -> None:
            for title, way in known[name].items():
                change = (gradient * way.error(inputs[0].detach(), layer.weight)).sum(-1)  # (B, N)
                halves = torch.stack([change[:, 0], change[:, 1:].sum(1)], 1)
                found.setdefault(title, {}).setdefault(name, []).append(halves)

        out.register_hook(note)

    with watch(model, look):
        for batch in images.split(BATCH):
            margins(model(batch.clone().requires_grad_())).sum().backward()
    return {title: {name: torch.cat(parts) for name, parts in by.items()} for title, by in found.items()}


def show_layers(model: Model, calibration: Tensor, pixels: Tensor) -> None:
    """A table of the share of work that each way allows; with the class token among the others, and in 16 bits."""
    preprocess = model.card.preprocess
    images = normalize(pixels, preprocess)
    apart, rests = margins(logits(model, images)), {rest: variance_of(model, calibration, rest) for rest in RESTS}
    print(f"{len(images)} images; the two best classes are {float(apart.median()):.2f} apart (median)")
    for rest, variance in rests.items():
        print(f"{rest} alone: variance {variance:.5f}, {kept(apart, variance):.2%} expected to agree")
    work = {name: layer.weight.numel() for name, layer in float8_layers(model).items()}
    found = changes_by_way(model, inputs_of(model, normalize(calibration, preprocess)), images)
    titles = " | ".join(f"{LEAST:.0%} beside {rest}: layers, work, images again, time" for rest in rests)
    print(f"| way | class token | variance | all layers agree, % | {titles} |\n|---|---|---|---|---|---|")
    places = (False, True) if getattr(model.config, "token", False) else (False,)
    for (title, by), spare in itertools.product(found.items(), places):
        variances = harmless_first({name: x[:, 1] if spare else x.sum(1) for name, x in by.items()}, work)
        total = sum(variances.values())
        cells = [title, "16 bits" if spare else "8 bits", f"{total:.4f}", f"{100 * kept(apart, total):.1f}"]
        plans = [fastest_plan(variances, work, variance, apart, LEAST) for variance in rests.values()]
        cells.extend(describe(plan, work) for plan in plans)
        print(f"| {' | '.join(cells)} |", flush=True)


def describe(plan: Plan | None, work: dict[str, int]) -> str:
    if plan is None:
        return "none"
    share = sum(work[name] for name in plan.layers) / sum(work.values())
    return f"{len(plan.layers)}, {share:.0%}, {plan.again:.1%}, {plan.time:.2f}"


def variance_of(model: Model, pixels: Tensor, rest: str) -> float:
    """Of a model with nothing in 8 bits; few images where a CPU takes long."""
    count = SLOW if rest == "float16" else len(pixels)
    nothing = Scales("", {}, 0.0, 0, separate=False, layers=0, work=0.0, closer=0.0, again=0.0, rest=rest)
    return rounding_variance(model, pixels[:: len(pixels) // count], torch.device("cpu"), nothing)


def kept(margins: Tensor, variance: float) -> float:
    """The share of images that is expected to keep its class."""
    return float(torch.special.ndtr(margins.double() / variance**0.5).mean())


# ---- once more in 16 bits


def show_again(model: Model, calibration: Tensor, pixels: Tensor) -> None:
    """What calibration tries, by training images and half of the others, and what that does to both halves."""
    cpu, images = torch.device("cpu"), normalize(pixels, model.card.preprocess)
    exact = logits(model, images)
    maxima = largest_inputs(model, calibration, cpu)
    work = {name: layer.weight.numel() for name, layer in float8_layers(model).items()}
    variances = harmless_first(margin_changes(model, maxima, torch.float32, calibration, cpu), work)
    before, allowed = variance_of(model, calibration, "float16"), 1 - LEAST
    print("| layers, work, images again, time: planned | images | 8 bits alone, % | of them again, % | with that, % |")
    print("|---|---|---|---|---|")
    for _ in range(TRIES):
        plan = fastest_plan(variances, work, before, margins(exact[::2]), 1 - SLACK * allowed)
        if plan is None:
            break
        found = logits(with_layers(model, {name: maxima[name] for name in plan.layers}), images)
        shares = []
        for title, first in (("that it was made by", 0), ("others", 1)):
            truth, quick = exact[first::2], found[first::2]
            close = margins(quick) < plan.closer
            again = torch.where(close[:, None], truth, quick)
            alone, same = (float((values.argmax(1) == truth.argmax(1)).double().mean()) for values in (quick, again))
            shares.append(same)
            cells = f"{100 * alone:.2f} | {100 * float(close.double().mean()):.1f} | {100 * same:.2f}"
            print(f"| {describe(plan, work)} | {title} | {cells} |", flush=True)
        if shares[0] >= LEAST:
            break
        allowed *= STRICTER


def with_layers(model: Model, maxima: dict[str, float]) -> Model:
    """A copy with these layers in 8 bits, by their largest inputs."""
    copied = copy.deepcopy(model)
    for name, layer in in_8_bits(model, maxima, torch.float32).items():
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, layer)
    return copied


def show_ways(model: Model, calibration: Tensor, images: Tensor) -> None:
    """A table of the agreement with all layers, or those of the MLPs, in 8 bits."""
    expected = logits(model, images)
    print(f"{len(images)} images; the two best classes are {float(margins(expected).median()):.2f} apart (median)")
    print("| numbers | scales by | layers | best class is float32's, % | error of logits, % |\n|---|---|---|---|---|")
    for kind, scales, (title, part) in itertools.product(KINDS, SCALES, PARTS.items()):
        found = logits(rounded(model, kind, scales, part, calibration), images)
        same = float((found.argmax(1) == expected.argmax(1)).double().mean())
        error = float((found - expected).norm() / expected.norm())
        print(f"| {kind} | {scales} | {title} | {100 * same:.1f} | {100 * error:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--layers", action="store_true", help="how many layers can be in fp8")
    parser.add_argument("--again", action="store_true", help="what that choice does to other images")
    given = parser.parse_args()
    model, data = vitlab.load(given.model).eval().requires_grad_(False), open_data(given.data)
    calibration, pixels = read(data.train, model, CALIBRATED), read(data.test, model, given.images)
    if given.again:
        show_again(model, calibration, pixels)
    elif given.layers:
        show_layers(model, calibration, pixels)
    else:
        show_ways(model, *(normalize(part, model.card.preprocess) for part in (calibration, pixels)))


if __name__ == "__main__":
    main()
