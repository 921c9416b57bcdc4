"""How often a model in 8 bits gives float32's best class, by the way of rounding:

    python benchmarks/eight_bits.py MODEL DATA [--images 512]

Products are emulated in float32 on numbers rounded as each way rounds them, so this runs on any machine and is about
agreement, not about speed. Ranges that are fixed come from 64 training images, agreement from test images.
"""

import argparse
import copy
import itertools

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import vitlab
from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.inference.fp8 import float8_layers
from vitlab.kernels.fp8 import E4M3, LARGEST, SMALLEST
from vitlab.models.variants import Model

CALIBRATED, BATCH = 64, 32
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
    """Evenly spaced images of a set, as the model has them."""
    size, preprocess = model.config.image_size, model.card.preprocess
    places = np.linspace(0, len(source) - 1, count).astype(int)
    pixels = [eval_pixels(source.image(int(i)), size, preprocess) for i in places]
    return normalize(torch.stack(pixels), preprocess)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=512)
    given = parser.parse_args()
    model, data = vitlab.load(given.model).eval(), open_data(given.data)
    calibration, images = read(data.train, model, CALIBRATED), read(data.test, model, given.images)
    expected = logits(model, images)
    first, second = expected.topk(2).values.unbind(1)
    print(f"{len(images)} images; the two best classes are {float((first - second).median()):.2f} apart (median)")
    print("| numbers | scales by | layers | best class is float32's, % | error of logits, % |\n|---|---|---|---|---|")
    for kind, scales, (title, part) in itertools.product(KINDS, SCALES, PARTS.items()):
        found = logits(rounded(model, kind, scales, part, calibration), images)
        same = float((found.argmax(1) == expected.argmax(1)).double().mean())
        error = float((found - expected).norm() / expected.norm())
        print(f"| {kind} | {scales} | {title} | {100 * same:.1f} | {100 * error:.1f} |", flush=True)


if __name__ == "__main__":
    main()
