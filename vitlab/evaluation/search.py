"""`vitlab search`: the images of a feature file that are most like another image, by the cosine of their features.

Every row is compared, in float64, block after block; of each block only the best stay in memory.

Shapes: n rows of a block, D width of the features.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlab.data.python_images import to_image
from vitlab.data.rng import Floats
from vitlab.data.source import ArraySource
from vitlab.data.thumbnails import file_thumbnail
from vitlab.errors import UserError
from vitlab.evaluation.embed import AnyModel, open_model
from vitlab.evaluation.extract import extract_values
from vitlab.evaluation.feature_file import FeatureFile, Row, open_features
from vitlab.evaluation.piece_cache import Values, feature_key
from vitlab.html import data_url, picture_card, value_table
from vitlab.models.guest import Measured

TOP = 10


@dataclass(frozen=True)
class Hit(Row):
    """An image that was found, and its similarity, from -1 to 1."""

    similarity: float

    @property
    def label(self) -> str:
        """Its class or classes; "" where they are not known."""
        return "; ".join(self.labels)

    def _repr_html_(self) -> str:
        """The image beside its name, for notebooks."""
        small = file_thumbnail(self.path)
        rows = [("similarity", f"{self.similarity:.3f}"), *([("label", self.label)] if self.label else [])]
        image = None if small is None else data_url(small, "jpeg")
        return picture_card(image, self.path, value_table(self.path, rows))


class Hits(list[Hit]):
    """The images that were found, the most similar first: a list, which a notebook shows with its images."""

    def _repr_html_(self) -> str:
        return "".join(hit._repr_html_() for hit in self)


def search(
    model: AnyModel,
    image: object,
    index: str | os.PathLike[str],
    *,
    top: int = TOP,
    device: str = "auto",
) -> Hits:
    """Find the images of a feature file that are most like another image.

    Args:
        model: the model that computed the features: a model, a run, or what `vitlab.load` takes.
        image: a path, a PIL image, an array (height, width, 3) or a tensor (3, height, width).
        index: a file that `vitlab.embed` wrote.
        top: how many images.
        device: "auto" (the best there is), "cpu", "cuda" or "mps"; for the features of the one image.

    Returns:
        The images, the most similar first, of equal ones the first in the file. Similarity is the cosine of the
        features. Every image of the file is compared, in bounded memory.

    Raises:
        UserError: the file is missing or damaged or of another model, or the image cannot be read.

    >>> features = vitlab.embed("runs/pets", "photos/", "photos.parquet")
    >>> [hit.label for hit in vitlab.search("runs/pets", "cat.jpg", features, top=3)]
    """
    if top < 1:
        raise UserError(f"top must be at least 1, not {top}")
    file = open_features(Path(index).expanduser())
    loaded, name = open_model(model)
    check_model(file, loaded, name)
    return nearest_rows(file, image_features(loaded, image, device), top)


def check_model(file: FeatureFile, model: Measured, name: str) -> None:
    """Raise UserError unless the features are of this model: those of another cannot be compared."""
    if feature_key(model) != file.info.model:
        made = f"{file.path} has features of another model, '{file.info.name}'"
        raise UserError(f"{made}; make one with {name}: vitlab embed {name} {file.info.data} FILE.parquet")


def image_features(model: Measured, image: object, device: str) -> Values:
    """The features (D,) of one image, computed as those of a set."""
    pixels = np.asarray(to_image(image))
    source = ArraySource("image", pixels[None], np.zeros(1, np.int64), ("",))
    return extract_values(model, source, device=device, workers=0).values[0]


def nearest_rows(file: FeatureFile, query: Values, top: int) -> Hits:
    """The `top` rows with the highest cosines to the query (D,), of equal ones the first."""
    best: list[Hit] = []
    for batch, values in file.blocks():
        scores = cosines(values, query)
        order = np.argsort(-scores, kind="stable")[:top]
        worst = best[-1].similarity if len(best) == top else -np.inf
        found = [(float(scores[i]), int(i)) for i in order if scores[i] > worst or len(best) < top]
        hits = [Hit(**vars(file.row(batch, i)), similarity=score) for score, i in found]
        best = sorted([*best, *hits], key=lambda hit: -hit.similarity)[:top]  # stable: earlier rows stay first
    return Hits(best)


def cosines(values: Values, query: Values) -> Floats:
    """The cosine of each row (n, D) with the query (D,), in float64; 0 where one of them is 0."""
    rows, one = values.astype(np.float64), query.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(one)
    products: Floats = rows @ one
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
