"""What the page draws for one image, as JSON: the image the model saw, class maps, attention, and the five steps.

Maps are numbers that sum to 1 over the grid, colors are bytes from 0 to 255. So the answer of Ti/16 is below
300 kB. Shapes: L attention layers, H heads, h and w patches down and across.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlab.analysis.class_map import class_map
from vitlab.analysis.steps import five_steps
from vitlab.data.transforms import normalize
from vitlab.models.config import ViTConfig
from vitlab.models.resnet import ResNet
from vitlab.plots.steps import Steps
from vitlab.prediction import Classifier
from vitlab.prediction.classifier import Scores

NO_STEPS = "This model is a ResNet: it applies convolutions to images, so it has no attention and no tokens to show."


@dataclass(frozen=True)
class ClassMap:
    """What speaks for a class, on the grid of patches: values (h, w) that sum to 1, or are all 0."""

    label: int
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Explanation:
    """What is computed of one image; a ResNet has no steps."""

    scores: Scores
    map: ClassMap  # of the most probable class
    steps: Steps | None


def explain(classifier: Classifier, pixels: Tensor) -> Explanation:
    """Explain one image of bytes (3, height, width); for the thread that owns the model, as all that runs it."""
    scores = classifier.scores(pixels[None])
    best = compute_map(classifier, pixels, int(scores.probabilities[0].argmax()))
    if isinstance(classifier.model, ResNet):
        return Explanation(scores, best, None)
    image = normalize(pixels[None].to(classifier.device), classifier.preprocess)[0]
    return Explanation(scores, best, five_steps(classifier.model, image))


def compute_map(classifier: Classifier, pixels: Tensor, label: int) -> ClassMap:
    """The map of one class. Gradients are kept for one image at a time: the model's thread is the only one."""
    image = normalize(pixels[None].to(classifier.device), classifier.preprocess)
    values = class_map(classifier.model, image, label)[0].double().cpu().numpy()
    total = float(values.sum())
    return ClassMap(label, values / total if total > 0 else values)


def map_to_json(classifier: Classifier, one: ClassMap) -> dict[str, Any]:
    return {"index": one.label, "name": classifier.labels[one.label], "values": round_list(one.values)}


def steps_to_json(pixels: Tensor, steps: Steps | None) -> dict[str, Any]:
    """The image as a PNG in base64 and the arrays as nested lists."""
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG", compress_level=3)
    picture = base64.b64encode(file.getvalue()).decode()
    if steps is None:
        return {"picture": picture, "rollout": None, "attention": None, "steps": None, "reason": NO_STEPS}
    colors = {
        "tokens": color_list(steps.tokens),  # (h, w, 3)
        "positions": color_list(steps.positions) if steps.positions.any() else None,
        "depths": color_list(steps.depths),  # (blocks, h, w, 3)
        "prefix": color_list(steps.prefix),  # (blocks, P, 3)
        "prefix_attention": round_list(steps.prefix_attention.mean(1)),  # (L, P)
    }
    rollout, attention = round_list(steps.rollout), round_list(steps.attention)  # (h, w) and (L, H, h, w)
    return {"picture": picture, "rollout": rollout, "attention": attention, "steps": colors, "reason": None}


def round_list(values: NDArray[np.floating]) -> list[Any]:
    return values.astype(np.float64).round(6).tolist()


def color_list(values: NDArray[np.float32]) -> list[Any]:
    return (values * 255).round().astype(np.uint8).tolist()


def model_info(classifier: Classifier, name: str) -> dict[str, Any]:
    """What /v1/model answers about the model."""
    config, model = classifier.model.config, classifier.model
    fields: dict[str, Any] = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
    fields |= {"classes": config.classes, "image_size": config.image_size}
    unknown = classifier.unknown
    fields |= {"multi_label": classifier.thresholds is not None, "refuse": None if unknown is None else unknown.rate}
    if isinstance(config, ViTConfig):
        axial = config.attention == "axial"
        fields |= {"kind": "vit", "layers": config.depth * (2 if axial else 1), "heads": config.heads, "axial": axial}
        fields |= {"grid": config.grid, "patch": config.stride, "stem": config.stem is not None}
        fields |= {"width": config.width, "features": config.features, "pool": config.pool}
        fields |= {"positions": config.positions, "rotary": config.rotary != "none"}
        fields |= {"class_token": config.token, "registers": config.registers}
    else:
        fields |= {"kind": "resnet", "layers": 0, "heads": 0}
    return fields
