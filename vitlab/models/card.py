"""What travels with a model's weights besides its config: preprocessing, class names and provenance."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitlab.models.config import Preprocess


@dataclass(frozen=True)
class Card:
    """Preprocessing, class names and provenance of a model: `model.card`, saved and loaded with the weights."""

    preprocess: Preprocess = field(default_factory=Preprocess)
    labels: tuple[str, ...] | None = None
    # source, format and sha256 of the file the weights came from; of a trained model, of the file it started from
    provenance: Mapping[str, str] | None = None
