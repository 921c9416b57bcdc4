"""What the page draws of one picture, as JSON: the picture the model saw, its attention, and the five steps.

Attention maps are numbers that sum to 1 over the grid, colors are bytes from 0 to 255. So Ti/16 fits in 300 kB.

Shapes: L attention layers, H heads, h and w patches down and across.
"""

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlab.analysis.steps import five_steps
from vitlab.data.transforms import normalize
from vitlab.models.config import ViTConfig
from vitlab.models.resnet import ResNet
from vitlab.plots.steps import Steps
from vitlab.predict import Classifier

DECIMALS = 6
NO_STEPS = (
    "This model is a ResNet: it slides small filters over the picture and has no patches, tokens or attention to show."
)


def look(classifier: Classifier, pixels: Tensor) -> tuple[Tensor, Steps | None]:
    """Probabilities (K,) and, of a transformer, the steps; for the thread that owns the model."""
    probabilities = classifier.probabilities(pixels[None])[0]
    if isinstance(classifier.model, ResNet):
        return probabilities, None
    image = normalize(pixels[None].to(classifier.device), classifier.preprocess)[0]
    return probabilities, five_steps(classifier.model, image)


def describe(pixels: Tensor, steps: Steps | None) -> dict[str, Any]:
    """The picture as a PNG in base64 and the arrays as nested lists."""
    told: dict[str, Any] = {"picture": png(pixels)}
    if steps is None:
        return {**told, "rollout": None, "attention": None, "steps": None, "reason": NO_STEPS}
    return {
        **told,
        "rollout": shares(steps.rollout),  # (h, w)
        "attention": shares(steps.attention),  # (L, H, h, w)
        "steps": {
            "tokens": colors(steps.tokens),  # (h, w, 3)
            "positions": colors(steps.positions) if steps.positions.any() else None,
            "depths": colors(steps.depths),  # (blocks, h, w, 3)
        },
        "reason": None,
    }


def png(pixels: Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG", compress_level=3)
    return base64.b64encode(file.getvalue()).decode()


def shares(values: NDArray[np.float32]) -> list[Any]:
    return values.astype(np.float64).round(DECIMALS).tolist()


def colors(values: NDArray[np.float32]) -> list[Any]:
    return (values * 255).round().astype(np.uint8).tolist()


def facts(classifier: Classifier, name: str) -> dict[str, Any]:
    """The model in a few numbers."""
    config = classifier.model.config
    told: dict[str, Any] = {
        "name": name,
        "kind": "resnet",
        "classes": config.classes,
        "image_size": list(config.image_size),
        "parameters": sum(p.numel() for p in classifier.model.parameters()),
        "layers": 0,
        "heads": 0,
    }
    if not isinstance(config, ViTConfig):
        return told
    return told | {
        "kind": "vit",
        "layers": config.depth * (2 if config.attention == "axial" else 1),
        "heads": config.heads,
        "width": config.width,
        "grid": list(config.grid),
        "patch": config.stride,
        "stem": config.stem is not None,
        "pool": config.pool,
        "positions": config.positions,
        "axial": config.attention == "axial",
    }
