"""A guest: a model of another library, which is measured beside this package's own and never trained or saved here."""

from dataclasses import dataclass

from torch import Tensor, nn

from vitlab.models.card import Card
from vitlab.models.config import Size
from vitlab.models.variants import Model


@dataclass(frozen=True)
class GuestConfig:
    """What measuring needs to know of a guest."""

    name: str  # the library's, such as resnet50
    image_size: Size
    features: int  # their width, D
    classes: int


class Guest(nn.Module):
    """A body that gives features (B, D), and the linear layer that takes them to logits (B, classes)."""

    def __init__(self, body: nn.Module, head: nn.Linear, config: GuestConfig, card: Card) -> None:
        super().__init__()
        self.body, self.head, self.config, self.card = body, head, config, card

    @property
    def title(self) -> str:
        """What it is, for the reader."""
        return f"torchvision's {self.config.name}, not a model of vitlab"

    def features(self, images: Tensor) -> Tensor:
        return self.body(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


Measured = Model | Guest
