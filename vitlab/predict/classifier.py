"""A model with its preprocessing and class names, ready to answer.

Shapes: b pictures, h and w the model's height and width, K classes.
"""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vitlab.data.transforms import eval_pixels, normalize
from vitlab.device import has_bf16, pick_device
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.models.variants import Model
from vitlab.weights import load


class Classifier:
    """A model with its preprocessing and class names, ready to answer.

    >>> classifier = Classifier("runs/mine")
    >>> pixels = classifier.pixels(image)[None]
    >>> classifier.labels[classifier.probabilities(pixels)[0].argmax()]
    """

    model: Model
    preprocess: Preprocess
    device: torch.device
    labels: tuple[str, ...]

    def __init__(self, run: str | Path, device: str = "auto") -> None:
        model = load(run)
        classes = model.config.classes
        if classes == 0:
            raise UserError(
                f"{run} has no head, so it knows no classes; teach it some: vitlab finetune PHOTOS --weights {run}"
            )
        self.device = pick_device(device)
        self.model = model.float().to(self.device)
        self.preprocess = model.card.preprocess
        self.labels = model.card.labels or tuple(f"class {i}" for i in range(classes))

    def pixels(self, image: Image.Image) -> Tensor:
        """An upright RGB picture as the model's bytes, (3, h, w), framed as in evaluation."""
        return eval_pixels(image, self.model.config.image_size, self.preprocess)

    @torch.inference_mode()
    def logits(self, pixels: Tensor) -> Tensor:
        """(b, 3, h, w) bytes to (b, K) float32 on the CPU."""
        images = normalize(pixels.to(self.device, non_blocking=True), self.preprocess)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=has_bf16(self.device)):
            return self.model(images).float().cpu()

    def probabilities(self, pixels: Tensor) -> Tensor:
        """(b, 3, h, w) bytes to (b, K) probabilities; each row sums to one."""
        return self.logits(pixels).softmax(-1)
