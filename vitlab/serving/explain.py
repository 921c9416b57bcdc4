"""What the page draws for one image, as JSON: the image the model saw, its attention, and the five steps.

Attention maps are numbers that sum to 1 over the grid, colors are bytes from 0 to 255. So the answer of Ti/16 is below
300 kB. Shapes: L attention layers, H heads, h and w patches down and across.
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
    "This model is a ResNet: it applies convolutions to the picture and has no patches, tokens or attention to show."
)


def compute_steps(classifier: Classifier, pixels: Tensor) -> tuple[Tensor, Steps | None]:
    """Probabilities (K,) and, for a transformer, the steps; for the thread that owns the model."""
    probabilities = classifier.probabilities(pixels[None])[0]
    if isinstance(classifier.model, ResNet):
        return probabilities, None
    image = normalize(pixels[None].to(classifier.device), classifier.preprocess)[0]
    return probabilities, five_steps(classifier.model, image)


def steps_to_json(pixels: Tensor, steps: Steps | None) -> dict[str, Any]:
    """The image as a PNG in base64 and the arrays as nested lists."""
    fields: dict[str, Any] = {"picture": encode_png(pixels)}
    if steps is None:
        return {**fields, "rollout": None, "attention": None, "steps": None, "reason": NO_STEPS}
    return {
        **fields,
        "rollout": round_list(steps.rollout),  # (h, w)
        "attention": round_list(steps.attention),  # (L, H, h, w)
        "steps": {
            "tokens": color_list(steps.tokens),  # (h, w, 3)
            "positions": color_list(steps.positions) if steps.positions.any() else None,
            "depths": color_list(steps.depths),  # (blocks, h, w, 3)
        },
        "reason": None,
    }


def encode_png(pixels: Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG", compress_level=3)
    return base64.b64encode(file.getvalue()).decode()


def round_list(values: NDArray[np.float32]) -> list[Any]:
    return values.astype(np.float64).round(DECIMALS).tolist()


def color_list(values: NDArray[np.float32]) -> list[Any]:
    return (values * 255).round().astype(np.uint8).tolist()


def model_info(classifier: Classifier, name: str) -> dict[str, Any]:
    """The fields of /v1/model, without the server's limits."""
    config = classifier.model.config
    fields: dict[str, Any] = {
        "name": name,
        "kind": "resnet",
        "classes": config.classes,
        "image_size": list(config.image_size),
        "parameters": sum(p.numel() for p in classifier.model.parameters()),
        "layers": 0,
        "heads": 0,
    }
    if not isinstance(config, ViTConfig):
        return fields
    axial = config.attention == "axial"
    return fields | {
        "kind": "vit",
        "layers": config.depth * (2 if axial else 1),
        "heads": config.heads,
        "width": config.width,
        "grid": list(config.grid),
        "patch": config.stride,
        "stem": config.stem is not None,
        "pool": config.pool,
        "positions": config.positions,
        "axial": axial,
    }
