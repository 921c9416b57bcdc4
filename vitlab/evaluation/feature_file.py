"""A parquet file of features: one row for each image, and in its metadata the model that computed them.

path       string           the file, or the row of a packed set
split      string           train, validation or test; null where the set has one split
row        int64            the number of the image in its split
label      string           its class; null where it is unknown. Of a multi-label set: labels, a list of strings
features   list of float32  the input of the model's head, (D,)
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.parquet import FEATURES
from vitlab.errors import UserError
from vitlab.evaluation.piece_cache import Values
from vitlab.files import atomic_file, parse_json
from vitlab.settings import check_types, from_json, to_json
from vitlab.text import brief, valid_text

KEY, FORMAT = b"vitlab", f"{FEATURES}1"
GROUP = 4096  # rows of a row group, and of a block that is read


@dataclass(frozen=True)
class FeatureInfo:
    """What the metadata of a feature file has."""

    model: str  # sha256 of what its features depend on, see `feature_key`
    name: str  # of the run or the weights, as they were given
    data: str  # the set, as it was given
    width: int  # D
    multi_label: bool = False
    format: str = FORMAT

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class Row:
    """One image of a feature file."""

    path: str
    split: str | None
    row: int
    labels: tuple[str, ...]


def parquet() -> Any:
    """pyarrow's module for parquet files, or a UserError that names the package."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("feature files need the package pyarrow: pip install 'vitlab[data]'") from None
    return pyarrow.parquet


def schema(info: FeatureInfo) -> Any:
    import pyarrow as pa

    label = ("labels", pa.list_(pa.string())) if info.multi_label else ("label", pa.string())
    columns = [("path", pa.string()), ("split", pa.string()), ("row", pa.int64()), label]
    columns.append(("features", pa.list_(pa.float32())))
    return pa.schema(columns, {KEY: json.dumps(to_json(info)).encode()})


# ---- writing


class FeatureWriter:
    """Writes rows into a file that is open."""

    def __init__(self, file: Any, info: FeatureInfo) -> None:
        self.info, self.schema, self.images = info, schema(info), 0
        self.writer = parquet().ParquetWriter(file, self.schema)

    def write(self, rows: Sequence[Row], values: Values) -> None:
        """Add rows with their features (n, D)."""
        import pyarrow as pa

        offsets = np.arange(len(rows) + 1, dtype=np.int32) * self.info.width
        labels = [tuple(map(valid_text, row.labels)) for row in rows]
        columns: list[list[Any]] = [
            [valid_text(row.path) for row in rows],
            [row.split for row in rows],
            [row.row for row in rows],
            [*map(list, labels)] if self.info.multi_label else [each[0] if each else None for each in labels],
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self.schema, strict=False)]
        features = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))
        self.writer.write_table(pa.Table.from_arrays([*arrays, features], schema=self.schema), row_group_size=GROUP)
        self.images += len(rows)


@contextmanager
def new_feature_file(path: Path, info: FeatureInfo) -> Iterator[FeatureWriter]:
    """A file that appears, complete, at the end of the block; it may replace an older one of its kind."""
    check_replaceable(path)
    with atomic_file(path) as file:
        writer = FeatureWriter(file, info)
        with writer.writer:
            yield writer


def check_replaceable(path: Path) -> None:
    """Raise UserError for a file that is no feature file, and for a name that does not end in .parquet."""
    if path.suffix != ".parquet":
        raise UserError(f"features are written to a parquet file, and '{path}' does not end in .parquet")
    parquet()
    if not path.exists():
        return
    try:
        open_features(path)
    except UserError:
        raise UserError(f"{path} exists and is no feature file; remove it or name another") from None


# ---- reading


class FeatureFile:
    """A feature file that is open."""

    def __init__(self, path: Path, info: FeatureInfo, file: Any) -> None:
        self.path, self.info, self.file = path, info, file
        self.images: int = file.metadata.num_rows

    def blocks(self) -> Iterator[tuple[Any, Values]]:
        """Yield blocks of rows, as a pyarrow batch, with their features (n, D): no more than a few MB at a time."""
        width = self.info.width
        try:
            for batch in self.file.iter_batches(GROUP):
                column = batch.column("features")
                values = column.flatten().to_numpy()
                ends = np.diff(column.offsets.to_numpy())
                if column.null_count or (ends != width).any() or not np.isfinite(values).all():
                    raise UserError(f"{self.path} is damaged: not every row has {width} features; make it again")
                yield batch, values.reshape(-1, width)
        except OSError as error:  # pyarrow's own errors are of this kind, too
            raise UserError(f"{self.path} cannot be read: {brief(error)}; make it again") from None

    def row(self, batch: Any, index: int) -> Row:
        """One row of a block."""
        one = {name: batch.column(name)[index].as_py() for name in batch.schema.names if name != "features"}
        labels = one["labels"] if self.info.multi_label else [one["label"]]
        return Row(one["path"], one["split"], one["row"], tuple(label for label in labels or () if label is not None))


def open_features(path: Path) -> FeatureFile:
    """Open a feature file; UserError where there is none, or it is of another kind."""
    if not path.is_file():
        raise UserError(f"there is no file '{path}'; `vitlab embed RUN DATA {path}` makes it")
    module = parquet()
    try:
        file = module.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a parquet file: {brief(error)}") from None
    about = (file.schema_arrow.metadata or {}).get(KEY)
    if about is None:
        raise UserError(f"{path} holds no features of vitlab; `vitlab embed RUN DATA FILE.parquet` makes such a file")
    info = from_json(FeatureInfo, parse_json(about, f"the metadata of {path}"))
    if info.format != FORMAT or not file.schema_arrow.equals(schema(info), check_metadata=False):
        raise UserError(f"{path} has other columns than this version of vitlab writes; make it again")
    return FeatureFile(path, info, file)
