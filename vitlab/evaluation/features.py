"""A model and a data set, and the model's features of the data set's splits."""

import os
from pathlib import Path
from typing import Any, Unpack

from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.evaluation.extract import ExtractOptions, Features, extract
from vitlab.weights import load


class FeatureSet:
    """Features of a data set's splits, kept in `keep`, or by default in RUN/features where RUN is a folder."""

    def __init__(self, run: str, data: str, *, keep: Path | None = None, **options: Unpack[ExtractOptions]) -> None:
        self.options = options
        self.run, self.name, self.model, self.data = run, data, load(run), open_data(data)
        folder = Path(run).expanduser()
        own = folder / "features" if folder.is_dir() and os.access(folder, os.W_OK) else None
        self.keep = own if keep is None else keep  # None: nothing is kept

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
        return about if self.options.get("resize") is None else about | {"resize": self.options["resize"]}
