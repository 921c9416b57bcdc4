"""What travels with a model's weights besides its config: preprocessing, class names, and how it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitlab.models.config import Preprocess
from vitlab.models.unknown import Unknown

LARGEST_TEMPERATURE = 100.0  # a temperature is between 1 / 100 and 100


@dataclass(frozen=True)
class Card:
    """Preprocessing, class names and provenance of a model: `model.card`, saved and loaded with the weights.

    A multi-label model has `thresholds`: a class is in the image where its probability, the sigmoid of its logit, is
    at least that of the class. Without them, the probabilities are the softmax of the logits divided by `temperature`,
    and one class is right.
    """

    preprocess: Preprocess = field(default_factory=Preprocess)
    labels: tuple[str, ...] | None = None
    # source, format and sha256 of the file the weights came from; of a trained model, of the file it started from
    provenance: Mapping[str, str] | None = None
    thresholds: tuple[float, ...] | None = None
    temperature: float = 1.0  # chosen on held-out images; 1 leaves the logits as they are
    # what refuses images that are none of the classes; arrays, so cards are compared without it
    unknown: Unknown | None = field(default=None, compare=False, repr=False)
