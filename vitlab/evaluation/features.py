"""A model and a data set, and the model's features of the data set's splits."""

import hashlib
from pathlib import Path
from typing import Any, Unpack

from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.evaluation.extract import ExtractOptions, Features, extract
from vitlab.files import cache_folder, check_folder
from vitlab.models.guest import Guest
from vitlab.weights.guests import open_measured


class FeatureSet:
    """Features of a data set's splits, kept in `keep`, or by default in the user's cache."""

    def __init__(self, run: str, data: str, *, keep: Path | None = None, **options: Unpack[ExtractOptions]) -> None:
        self.options = options
        self.run, self.name, self.model, self.data = run, data, open_measured(run), open_data(data)
        self.keep = features_folder(run) if keep is None else keep  # None: nothing is kept

    def describe(self) -> str:
        """One line on the data set and on where its features are kept."""
        d, where = self.data, "not kept (--keep FOLDER keeps them)" if self.keep is None else f"kept in {self.keep}"
        return f"{d.name}: {len(d.train):,} training and {len(d.test):,} test images, {d.note}; features are {where}"

    def extract(self, source: ImageSource, split: str) -> Features:
        """Extract the features of one of the data set's splits, which is named in the progress bar."""
        return extract(self.model, source, keep=self.keep, title=f"{split} features", **self.options)

    def to_json(self, train: Features, test: Features) -> dict[str, Any]:
        """What the numbers computed from these features are about."""
        images = {"train": len(train.labels), "test": len(test.labels)}
        about = {"run": self.run, "data": self.name, "images": images, "width": train.values.shape[1]}
        about |= {"guest": self.model.title} if isinstance(self.model, Guest) else {}
        return about if self.options.get("resize") is None else about | {"resize": self.options["resize"]}


def features_folder(run: str) -> Path | None:
    """A folder of the user's cache for the features of a model; None where nothing can be written.

    It has the model's name, and a hash of its place for those of the same name.
    """
    path = Path(run).expanduser()
    place = str(path.resolve()) if path.exists() else run
    name = f"{path.resolve().name or 'model'}-{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:8]}"
    folder = cache_folder() / "features" / name
    try:
        check_folder(folder)
    except UserError:
        return None
    return folder
