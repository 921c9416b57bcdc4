"""What an engine computes of images, as one module that can be compiled, recorded or exported."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.models.config import Preprocess
from vitlab.models.variants import Model

What = Literal["features", "logits"]


class ValuesOf(nn.Module):
    """A model's features or logits of normalized images or, where it has a preprocessing, of bytes."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, what: What, preprocess: Preprocess | None = None) -> None:
        super().__init__()
        self.model, self.what, self.of_bytes = model, what, preprocess is not None
        device = next(model.parameters()).device
        for name in ("mean", "std") if preprocess is not None else ():
            value = torch.tensor(getattr(preprocess, name), dtype=torch.float32, device=device)
            self.register_buffer(name, value[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        if self.of_bytes:
            images = (images.float() / 255 - self.mean) / self.std
        return self.model.features(images) if self.what == "features" else self.model(images)


def margins(logits: Tensor) -> Tensor:
    """How far the best logit is above the next, (B,), of logits (B, classes)."""
    best, second = logits.topk(2).values.unbind(1)
    return best - second
