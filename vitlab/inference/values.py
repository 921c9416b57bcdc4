"""What an engine computes of images, as one module that can be compiled, recorded or exported."""

from typing import Literal

from torch import Tensor, nn

from vitlab.models.variants import Model

What = Literal["features", "logits"]


class ValuesOf(nn.Module):
    """A model's features or logits of normalized images."""

    def __init__(self, model: Model, what: What) -> None:
        super().__init__()
        self.model, self.what = model, what

    def forward(self, images: Tensor) -> Tensor:
        return self.model.features(images) if self.what == "features" else self.model(images)
