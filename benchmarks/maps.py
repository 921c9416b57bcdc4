"""Maps of where a model looks, measured: python -m benchmarks.maps RUN DATA --photos 200

For the class that the model predicts for each of some photos of the test split:

deletion     patches are replaced by the blurred photo, those highest in the map first; the area under the curve of the
             class's probability, which a good map brings down soon: lower is better
insertion    the same from the blurred photo to the photo; higher is better
center       how often the map's maximum is in the middle half of each side, where photographers put the object
corners      the share of the map in the four corner patches, where there is hardly ever anything
mosaic       halves of two photos with different predictions side by side: how often the map's maximum is in the half of
             the class that is asked for, and the share of the map that is; 50 % of both is what a map that does not
             depend on the class can have

Values with 95 % intervals, and differences to rollout on the same photos, by bootstrap over photos. Gradients are of
the log-odds unless the name has the logit, which `class_map` uses. Without a class token only rollout and maps of held
tokens are compared.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from vitlab.analysis.attention import each_attention
from vitlab.analysis.class_map import class_map
from vitlab.analysis.held import add_positions, encode_until, held_logits
from vitlab.analysis.rollout import rollout, to_grid
from vitlab.data.open import open_data
from vitlab.data.rng import Floats
from vitlab.data.transforms import eval_image
from vitlab.device import pick_device
from vitlab.errors import UserError
from vitlab.models.vit import Block, ViT, attention_weights
from vitlab.weights import load

SIGMA = 0.05  # of the blur, relative to the image's side
DRAWS = 2000  # of the bootstrap
PASS = 16  # images of a pass that keeps the gradients of all layers
PATH = 5  # steps of the integrated gradient


# ---- what the maps are made of


@dataclass(frozen=True)
class Layer:
    """A layer's attention (B, H, N, N) and values (B, H, N, K), and its block's input (B, N, D), with gradients."""

    attention: Tensor
    attention_gradient: Tensor
    values: Tensor
    tokens: Tensor
    tokens_gradient: Tensor


Score = Callable[[Tensor, Tensor], Tensor]


def logit(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels[:, None])[:, 0]


def odds(logits: Tensor, labels: Tensor) -> Tensor:
    """log p / (1 - p) of the labels (B,): the logit, less the others'."""
    return logit(logits, labels) - logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)


def trace(model: ViT, images: Tensor, labels: Tensor, score: Score) -> list[Layer]:
    """One pass of a model with a class token, all weights explicit, and the gradients of the score."""
    assert model.token is not None
    assert model.head is not None
    with torch.no_grad():
        x = encode_until(model, model.patches(images), 0)
    x.requires_grad_()
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x = x if layer == 0 else add_positions(model, x, layer)
        q, k, v, bias = block.attention.project(block.norm1(x))
        weights = attention_weights(q, k, bias)
        kept.append((weights, v, x))
        x = x + block.attention.out((weights @ v).transpose(1, 2).reshape(x.shape))
        x = x + block.mlp(block.norm2(x))
    logits = model.head(model.pool_tokens(model.norm(x)))
    inputs = [one for weights, _, x in kept for one in (weights, x)]
    found = torch.autograd.grad(score(logits, labels).sum(), inputs)
    pairs = zip(kept, found[::2], found[1::2], strict=True)
    return [Layer(a.detach(), da, v.detach(), x.detach(), dx) for (a, v, x), da, dx in pairs]


# ---- the maps: (B, N - 1) of the patches, class token left out


def last_attention(layers: list[Layer]) -> Tensor:
    return layers[-1].attention.mean(1)[:, 0, 1:]


def attention_values(layers: list[Layer]) -> Tensor:
    """The last layer's attention times the length of the value that it brings."""
    last = layers[-1]
    return (last.attention[:, :, 0] * last.values.norm(dim=-1)).sum(1)[:, 1:]


def through_layers(layers: list[Layer]) -> Tensor:
    """The positive part of attention times gradient, averaged over heads, multiplied through layers with residuals."""
    length = layers[0].attention.shape[-1]
    through = torch.eye(length, device=layers[0].attention.device)
    for layer in layers:
        step = (layer.attention * layer.attention_gradient).clamp(min=0).mean(1)
        through = through + step @ through
    return through[:, 0, 1:]


def attention_gradient(layers: list[Layer]) -> Tensor:
    """The class token's attention times gradient, summed over heads and these layers."""
    return torch.stack([(x.attention * x.attention_gradient).sum(1)[:, 0, 1:] for x in layers]).sum(0)


def tokens_gradient(layer: Layer) -> Tensor:
    return (layer.tokens * layer.tokens_gradient).sum(-1)[:, 1:]


def grad_cam(layer: Layer) -> Tensor:
    """The tokens weighted by the mean gradient of each channel."""
    return (layer.tokens * layer.tokens_gradient[:, 1:].mean(1, keepdim=True)).sum(-1)[:, 1:]


Method = Callable[[ViT, Tensor, Tensor], Tensor]  # images (B, 3, height, width) and labels (B,) to (B, h, w)


def traced(read: Callable[[list[Layer]], Tensor], score: Score = odds) -> Method:
    def method(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
        return read(trace(model, images, labels, score)).clamp(min=0).unflatten(-1, model.config.grid)

    return method


Baseline = Callable[[Tensor], Tensor]  # images (B, 3, height, width) to others without what is in them


def gray(images: Tensor) -> Tensor:
    return torch.zeros_like(images[:1])


def held_at(*shares: float, score: Score = odds, baseline: Baseline | None = None, center: bool = False) -> Method:
    """Tokens times gradient that far through the blocks, all that depends on the tokens held constant after it.

    Of several depths the sum. `baseline`: less the tokens of another image. `center`: less the mean of all patches.
    """

    def method(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
        parts = []
        for share in shares:
            start = min(round(share * len(model.blocks)), len(model.blocks) - 1)
            with torch.no_grad():
                x = encode_until(model, model.patches(images), start)
                base = 0 if baseline is None else encode_until(model, model.patches(baseline(images)), start)
            (gradient,) = torch.autograd.grad(score(held_logits(model, x.requires_grad_(), start), labels).sum(), x)
            parts.append(((x.detach() - base) * gradient).sum(-1)[:, int(model.config.token) :])
        total = torch.stack(parts).sum(0)
        total = total - total.mean(1, keepdim=True) if center else total
        return total.clamp(min=0).unflatten(-1, model.config.grid)

    return method


def integrated(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    """Attention times gradient, the latter averaged over a path from the blurred image to the image."""
    blurred = blur(images)
    shares = torch.linspace(0, 1, PATH + 1).tolist()[1:]
    parts = [trace(model, blurred + share * (images - blurred), labels, odds) for share in shares]
    layers = []
    for along in zip(*parts, strict=True):
        mean = torch.stack([layer.attention_gradient for layer in along]).mean(0)
        layers.append(replace(along[-1], attention_gradient=mean))
    return attention_gradient(layers).clamp(min=0).unflatten(-1, model.config.grid)


def plain_rollout(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    return to_grid(model, rollout(each_attention(model, images)))


def random_map(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int(labels.sum()))
    return torch.rand(len(images), *model.config.grid, generator=generator).to(images.device)


def center_map(model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    """A blob in the middle of every image, which knows nothing of it."""
    y, x = (torch.linspace(-1, 1, side) for side in model.config.grid)
    return torch.exp(-2 * (y[:, None] ** 2 + x**2)).expand(len(images), -1, -1).to(images.device)


DEPTHS = {"first block": 0, "a sixth": 1 / 6, "a third": 1 / 3, "half": 1 / 2, "two thirds": 2 / 3, "last block": 1}
GENERAL: dict[str, Method] = {
    "rollout": plain_rollout,
    "class map (vitlab)": class_map,
    "center": center_map,
    "random": random_map,
}
OF_TOKEN: dict[str, Method] = {
    "attention, last layer": traced(last_attention),
    "attention x value norm, last layer": traced(attention_values),
    "gradient-weighted rollout": traced(through_layers),
    "attention x gradient, last layer": traced(lambda x: attention_gradient(x[-1:])),
    "attention x gradient, last 4": traced(lambda x: attention_gradient(x[-4:])),
    "attention x gradient, all": traced(attention_gradient),
    "attention x gradient of the logit, all": traced(attention_gradient, logit),
    "attention x integrated gradient, all": integrated,
    "Grad-CAM, input of the last block": traced(lambda x: grad_cam(x[-1])),
    "tokens x gradient, middle block": traced(lambda x: tokens_gradient(x[len(x) // 2])),
}
HELD: dict[str, Method] = {
    **{f"held, {name}": held_at(share) for name, share in DEPTHS.items()},
    **{f"held, {name}, less gray": held_at(share, baseline=gray) for name, share in DEPTHS.items()},
    "held, a third, less the blurred image": held_at(1 / 3, baseline=lambda images: blur(images)),
    "held, a third, of the logit": held_at(1 / 3, score=logit),
    "held, a third, of the logit, less gray": held_at(1 / 3, score=logit, baseline=gray),
    "held, a third, centered": held_at(1 / 3, center=True),
    "held, a third, less gray, centered": held_at(1 / 3, baseline=gray, center=True),
    "held, a sixth to half": held_at(1 / 6, 1 / 3, 1 / 2),
    "held, a sixth to half, less gray": held_at(1 / 6, 1 / 3, 1 / 2, baseline=gray),
    "held, a sixth to half, less gray, centered": held_at(1 / 6, 1 / 3, 1 / 2, baseline=gray, center=True),
}


# ---- the tests


def blur(images: Tensor) -> Tensor:
    sigma = SIGMA * max(images.shape[2:])
    return gaussian_blur(images, 2 * math.ceil(2 * sigma) + 1, sigma)


def probability(model: ViT, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """The probability (B,) of a class in each image."""
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(batch)]).float()
    logits = logits / model.card.temperature
    multi = model.card.thresholds is not None
    return (logits.sigmoid() if multi else logits.softmax(-1)).gather(1, labels[:, None])[:, 0]


@dataclass(frozen=True)
class Photos:
    """The photos, what patches are replaced by, predicted labels and their probabilities (n,) in both; mosaics."""

    images: Tensor
    filled: Tensor
    labels: Tensor
    before: Tensor
    after: Tensor
    pairs: Tensor
    pair_labels: Tensor  # (n, 2): of the left and of the right half


def prepare(model: ViT, images: Tensor, filled: Tensor, batch: int) -> Photos:
    labels = torch.cat([model(part).argmax(1) for part in images.split(batch)])
    before, after = (probability(model, one, labels, batch) for one in (images, filled))
    return Photos(images, filled, labels, before, after, *mosaics(images, labels, model.config.grid))


def areas(model: ViT, photos: Photos, maps: Tensor, steps: int, batch: int) -> tuple[Floats, Floats]:
    """Areas under the curves of deletion and of insertion, (n,), by the trapezoidal rule over `steps` equal steps."""
    rank = ranks(maps)
    stride = photos.images.shape[-1] // maps.shape[-1]
    rank = rank.repeat_interleave(stride, 1).repeat_interleave(stride, 2)[:, None]
    deletion, insertion = [photos.before], [photos.after]
    for step in range(1, steps):
        chosen = rank < round(maps[0].numel() * step / steps)
        without = torch.where(chosen, photos.filled, photos.images)
        alone = torch.where(chosen, photos.images, photos.filled)
        deletion.append(probability(model, without, photos.labels, batch))
        insertion.append(probability(model, alone, photos.labels, batch))
    curves = torch.stack([*deletion, photos.after]), torch.stack([*insertion, photos.before])
    first, second = (torch.trapezoid(curve.double(), dx=1 / steps, dim=0).cpu().numpy() for curve in curves)
    return first, second


def ranks(maps: Tensor) -> Tensor:
    """The place of each cell in the order of a map, (n, h, w), 0 the highest; equal ones in an order by chance."""
    flat = maps.flatten(1)
    shuffled = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0)).to(maps.device)
    order = shuffled[flat[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    return order.argsort(1).unflatten(1, maps.shape[1:])


def in_center(maps: Tensor) -> Floats:
    """Whether the maximum of each map is in the middle half of each side, (B,); of equal ones, the share that is."""
    h, w = maps.shape[1:]
    inside = torch.zeros(h, w, dtype=torch.bool, device=maps.device)
    inside[round(h / 4) : h - round(h / 4), round(w / 4) : w - round(w / 4)] = True
    return share_of_maximum(maps, inside)


def in_corners(maps: Tensor) -> Floats:
    """The share of each map in the four corner patches, (B,)."""
    inside = torch.zeros_like(maps[0], dtype=torch.bool)
    inside[[0, 0, -1, -1], [0, -1, 0, -1]] = True
    return share_inside(maps, inside, 0.0)


def share_inside(maps: Tensor, inside: Tensor, empty: float) -> Floats:
    total = maps.sum((1, 2)).double()
    return torch.where(total > 0, (maps * inside).sum((1, 2)).double() / total, empty).cpu().numpy()


def share_of_maximum(maps: Tensor, inside: Tensor) -> Floats:
    top = (maps == maps.amax((1, 2), keepdim=True)).double()
    return ((top * inside).sum((1, 2)) / top.sum((1, 2))).cpu().numpy()


def mosaics(images: Tensor, labels: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The middles of each photo and of the next one with another label, side by side, and both labels (B, 2)."""
    width, columns = images.shape[-1], grid[1]
    cut = columns // 2 * (width // columns)  # between two patches
    left = images[..., (width - cut) // 2 :][..., :cut]
    right = images[..., cut // 2 :][..., : width - cut]
    other = [next(j for j in following(i, len(labels)) if labels[j] != labels[i]) for i in range(len(labels))]
    return torch.cat([left, right[other]], -1), torch.stack([labels, labels[other]], 1)


def following(i: int, count: int) -> Iterator[int]:
    return ((i + step) % count for step in range(1, count))


def in_own_half(maps: Tensor, side: int) -> tuple[Floats, Floats]:
    """Whether the maximum is in the left half (side 0) or the right one (side 1), and the share of the map, (B,)."""
    inside = torch.zeros_like(maps[0], dtype=torch.bool)
    inside[:, : maps.shape[2] // 2] = True
    inside = inside if side == 0 else ~inside
    return share_of_maximum(maps, inside), share_inside(maps, inside, 0.5)


def measure(model: ViT, photos: Photos, method: Method, steps: int, batch: int) -> dict[str, Floats]:
    """The values (n,) of each test for each photo."""
    start = time.perf_counter()
    maps = apply(method, model, photos.images, photos.labels)
    seconds = (time.perf_counter() - start) / len(maps)
    deletion, insertion = areas(model, photos, maps, steps, batch)
    labels = photos.pair_labels
    own = [in_own_half(apply(method, model, photos.pairs, labels[:, side]), side) for side in (0, 1)]
    halves = {name: (own[0][i] + own[1][i]) / 2 for i, name in enumerate(("mosaic maximum", "mosaic share"))}
    seconds_each = np.full(len(maps), seconds)
    values = {"deletion": deletion, "insertion": insertion, "center": in_center(maps), "corners": in_corners(maps)}
    values |= halves
    return {name: np.asarray(value, np.float64) for name, value in (values | {"seconds": seconds_each}).items()}


def apply(method: Method, model: ViT, images: Tensor, labels: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.cat([method(model, *part).detach().float() for part in split(PASS, images, labels)])


def split(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(max(1, size)) for tensor in tensors), strict=True)


# ---- results


def interval(values: Floats) -> tuple[float, float, float]:
    """The mean with its 95 % interval by bootstrap."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def summarize(found: Mapping[str, Mapping[str, Floats]]) -> dict[str, Any]:
    """Means with intervals, and differences to rollout, of each method and test."""
    base = found["rollout"]
    return {
        name: {
            test: {"mean": interval(value), "minus rollout": interval(value - base[test])}
            for test, value in tests.items()
        }
        for name, tests in found.items()
    }


def markdown(summary: Mapping[str, Any], key: str) -> str:
    tests = ["deletion", "insertion", "center", "corners", "mosaic maximum", "mosaic share"]
    lines = [f"| map | {' | '.join(tests)} | ms |", "|---|" + "---|" * (len(tests) + 1)]
    for name, row in summary.items():
        cells = []
        for test in tests:
            mean, low, high = row[test][key]
            sign = "+" if key != "mean" else ""
            cells.append(f"{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} | {1000 * row['seconds']['mean'][0]:.0f} |")
    return "\n".join(lines)


def read_photos(model: ViT, data: str, count: int, seed: int) -> Tensor:
    source = open_data(data).test
    chosen = np.sort(np.random.default_rng(seed).permutation(len(source))[:count]).tolist()
    size, preprocess = model.config.image_size, model.card.preprocess
    return torch.stack([eval_image(source.image(i), size, preprocess) for i in chosen])


def main(
    run: Annotated[str, typer.Argument(help="A run folder or a file of weights.")],
    data: Annotated[str, typer.Argument(help="A data set; photos of its test split are used.")],
    photos: Annotated[int, typer.Option(help="Photos.")] = 200,
    methods: Annotated[str, typer.Option(help="Words of the names of methods, as in: class,gradient.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of deletion and insertion.")] = 5,
    fill: Annotated[str, typer.Option(help="What replaces a patch: blur or gray.")] = "blur",
    batch: Annotated[int, typer.Option(help="Images of a pass.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the choice of photos.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="A JSON file for all results.")] = None,
) -> None:
    place = pick_device(device)
    model = load(run)
    if not isinstance(model, ViT):
        raise UserError(f"{run} is a ResNet: it has no rollout to compare with")
    model = model.to(place).eval().requires_grad_(False)
    images = read_photos(model, data, photos, seed).to(place)
    ready = prepare(model, images, blur(images) if fill == "blur" else torch.zeros_like(images), batch)
    known = GENERAL | HELD | (OF_TOKEN if model.config.token else {})
    words = methods.split(",")
    found = {}
    for name, method in known.items():
        if name == "rollout" or any(word in name for word in words):
            found[name] = measure(model, ready, method, steps, batch)
            print(name, {test: round(float(value.mean()), 3) for test, value in found[name].items()}, flush=True)
    summary = summarize(found)
    print(f"\n{len(images)} photos, {steps} steps, {fill}\n\n{markdown(summary, 'mean')}\n")
    print(f"Differences to rollout\n\n{markdown(summary, 'minus rollout')}")
    if out is not None:
        out.write_text(json.dumps({"photos": len(images), "steps": steps, "fill": fill, "methods": summary}, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        typer.run(main)
