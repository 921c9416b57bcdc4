"""Feature files and the search in them, compared with the model itself and with plain numpy."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command, fill
from numpy.typing import NDArray
from PIL import Image

import vitlab
from vitlab.data.open import open_data
from vitlab.errors import UserError
from vitlab.evaluation import embed as embedding
from vitlab.evaluation import feature_file
from vitlab.evaluation.feature_file import FeatureInfo, Row, new_feature_file, open_features
from vitlab.evaluation.fewshot import fit
from vitlab.evaluation.probe import logistic
from vitlab.evaluation.search import nearest_rows
from vitlab.export.images import open_images

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    Image.fromarray(coarse).resize((30, 24), Image.Resampling.BICUBIC).save(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    vitlab.save(fill(vitlab.create("Ti/8", image_size=16, classes=3, depth=1, width=24, mlp=32, heads=2)), folder)
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders in two splits, a broken file among them."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(6):
        draw(root / "train" / ("cat" if i % 2 else "dog") / f"{i}.png", i)
    draw(root / "test" / "cat" / "7.png", 7)
    draw(root / "test" / "dog" / "8.png", 8)
    (root / "train" / "cat" / "0.png").write_text("a letter")
    return root


def features_of(run: str, paths: list[str]) -> NDArray[np.float64]:
    """By the model alone, one image at a time, in float64."""
    model = vitlab.load(run).double()
    with torch.no_grad():
        return np.concatenate([model.features(model.preprocess(Image.open(path))).numpy() for path in paths])


def unit(values: Any) -> NDArray[np.float64]:
    plain = np.asarray(values, np.float64)
    return plain / np.linalg.norm(plain, axis=-1, keepdims=True)


# ---- embed


def test_class_token_and_mean_are_features_twice_as_wide(photos: Path, tmp_path: Path) -> None:
    """Embedding, searching and refusing with both, as DINOv2's linear heads see them."""
    shape: dict[str, Any] = {"image_size": 16, "classes": 2, "depth": 1, "width": 24, "mlp": 32, "heads": 2}
    vitlab.save(fill(vitlab.create("Ti/8", **shape, pool="token_mean", registers=2)), tmp_path / "both")
    run = str(tmp_path / "both")
    made = vitlab.embed(run, photos, tmp_path / "x.parquet", device="cpu", workers=0)
    assert made.width == 48
    rows = pq.read_table(made.path).to_pylist()
    model: Any = vitlab.load(run).double()
    with torch.no_grad():
        tokens = [model.tokens(model.preprocess(Image.open(row["path"])))[0] for row in rows]
    expected = np.stack([torch.cat([x[0], x[3:].mean(0)]).numpy() for x in tokens])
    np.testing.assert_allclose([row["features"] for row in rows], expected, atol=1e-5)
    photo = photos / "test" / "cat" / "7.png"
    assert vitlab.search(run, photo, made, top=1)[0].path == str(photo)
    found, labels = expected.astype(np.float32), np.array([row["label"] == "cat" for row in rows], np.int64)
    assert logistic(found, labels, 2, 1.0).scores(found).shape == (8, 2)
    assert fit(found, labels, 2).guesses(found, [1.0]).shape[-1] == 8


def test_every_image_that_can_be_read_has_its_row(
    run: str, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vitlab"):
        made = vitlab.embed(run, photos, tmp_path / "x.parquet", device="cpu", workers=0)
    assert (made.images, made.width, made.broken) == (8, 24, (str(photos / "train" / "cat" / "0.png"),))
    assert "0.png" in caplog.text
    rows = pq.read_table(made.path).to_pylist()
    assert list(rows[0]) == ["path", "split", "row", "label", "features"]
    found = {(row["split"], row["label"], Path(row["path"]).name) for row in rows}
    train = {("train", "cat" if i % 2 else "dog", f"{i}.png") for i in range(6)}
    assert found == train | {("test", "cat", "7.png"), ("test", "dog", "8.png")}
    assert [row["row"] for row in rows if row["split"] == "train"] == [1, 2, 3, 4, 5, 6]  # 0 is broken
    expected = features_of(run, [row["path"] for row in rows])
    np.testing.assert_allclose([row["features"] for row in rows], expected, atol=1e-5)
    assert pq.read_schema(made.path).field("features").type == pa.list_(pa.float32())
    about = json.loads(pq.read_schema(made.path).metadata[b"vitlab"])
    assert (about["name"], about["data"], about["width"]) == (run, str(photos), 24)
    assert len(about["model"]) == 64
    assert list(tmp_path.iterdir()) == [made.path]  # nothing is left beside it


def test_photos_without_classes_have_no_labels(run: str, photos: Path, tmp_path: Path) -> None:
    for i in range(3):
        draw(tmp_path / "loose" / f"{i}.png", i)
    made = vitlab.embed(run, tmp_path / "loose", tmp_path / "x.parquet", workers=0)
    rows = pq.read_table(made).to_pylist()
    assert [(Path(row["path"]).name, row["split"], row["label"]) for row in rows] == [
        (f"{i}.png", None, None) for i in range(3)
    ]
    draw(tmp_path / "loose" / "cat" / "9.png", 9)  # now also a class folder
    rows = pq.read_table(vitlab.embed(run, tmp_path / "loose", tmp_path / "x.parquet", workers=0)).to_pylist()
    assert [row["label"] for row in rows] == ["cat", None, None, None]


def test_a_file_among_the_photos_changes_nothing(run: str, tmp_path: Path) -> None:
    """Class folders with features beside them are read as before, also by the same command again."""
    root = tmp_path / "pets"
    for i in range(6):
        draw(root / ("cat" if i % 2 else "dog") / f"{i}.png", i)
    before = open_data(str(root))
    for name in ("photos.parquet", "photos.parquet", "again.parquet"):
        assert vitlab.embed(run, str(root), root / name).images == 6
    after = open_data(str(root))
    assert (after.classes, len(after.train), len(after.test)) == (before.classes, len(before.train), len(before.test))
    assert len(open_images(str(root)).indices) == 6
    pq.write_table(pa.table({"path": ["a"], "size": [1]}), root / "notes.parquet")  # somebody else's
    with pytest.raises(UserError, match=r"notes\.parquet' has the columns path, size and none .* move it out"):
        open_data(str(root))


def test_several_labels_are_a_list(run: str, photos: Path, tmp_path: Path) -> None:
    lines = ["path,labels", *(f"{photos}/train/dog/{i}.png,{'a;b' if i else 'b'}" for i in (0, 2, 4))]
    (tmp_path / "set.csv").write_text("\n".join(lines) + "\n")
    made = vitlab.embed(run, tmp_path / "set.csv", tmp_path / "x.parquet", workers=0)
    assert [row["labels"] for row in pq.read_table(made).to_pylist()] == [["b"], ["a", "b"], ["a", "b"]]
    assert vitlab.search(run, photos / "train/dog/2.png", made, top=1)[0].label == "a; b"


def test_only_its_own_files_are_replaced(run: str, photos: Path, tmp_path: Path) -> None:
    letter, table = tmp_path / "letter.parquet", tmp_path / "table.parquet"
    letter.write_text("dear reader")
    pq.write_table(pa.table({"path": ["a"]}), table)
    for path in (letter, table):
        before = path.read_bytes()
        with pytest.raises(UserError, match="exists and is no feature file"):
            vitlab.embed(run, photos, path)
        assert path.read_bytes() == before
    with pytest.raises(UserError, match=r"does not end in \.parquet"):
        vitlab.embed(run, photos, tmp_path / "x.csv")
    with pytest.raises(UserError, match="there is no data set"):
        vitlab.embed(run, "nowhere", tmp_path / "x.parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"letter.parquet", "table.parquet"}


def test_an_interrupted_file_continues(
    run: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, other = tmp_path / "x.parquet", tmp_path / "other.parquet"
    monkeypatch.setattr(embedding, "PART", 3)
    vitlab.embed(run, photos, other, workers=0)
    write = feature_file.FeatureWriter.write

    def interrupted(self: feature_file.FeatureWriter, *arguments: Any) -> None:
        if self.images:
            raise KeyboardInterrupt
        write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(feature_file.FeatureWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vitlab.embed(run, photos, out, workers=0)
    assert not out.exists()
    with caplog.at_level(logging.DEBUG, "vitlab"):
        vitlab.embed(run, photos, out, workers=0)
    assert caplog.text.count("are in") == 2  # the first part, and the one that was computed and not written
    assert pq.read_table(out).equals(pq.read_table(other))
    assert {path.name for path in tmp_path.iterdir()} == {"x.parquet", "other.parquet"}


# ---- search


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, NDArray[np.float32]]:
    """A file of many blocks; some rows are equal, some point the same way, one is zero."""
    monkeypatch.setattr(feature_file, "GROUP", 64)
    values = np.random.default_rng(0).normal(size=(1000, 12)).astype(np.float32)
    values[[100, 500, 900]] = values[7]
    values[[3, 640]] = 2 * values[7]
    values[50] = 0
    path = tmp_path / "big.parquet"
    with new_feature_file(path, FeatureInfo("0" * 64, "m", "d", 12)) as file:
        for start in (0, 333, 600):
            stop = {0: 333, 333: 600, 600: 1000}[start]
            file.write([Row(f"{i}.jpg", None, i, ()) for i in range(start, stop)], values[start:stop])
    return path, values


@pytest.mark.parametrize("top", [1, 3, 10, 64, 999, 5000])
def test_a_search_is_what_numpy_finds(big: tuple[Path, NDArray[np.float32]], top: int) -> None:
    path, values = big
    rows = values.astype(np.float64)
    for seed in range(3):
        query = np.random.default_rng(seed).normal(size=12).astype(np.float32)
        lengths = np.sqrt((rows**2).sum(1)) * np.sqrt((query.astype(np.float64) ** 2).sum())
        cosines = np.divide((rows * query.astype(np.float64)).sum(1), lengths, out=np.zeros(1000), where=lengths > 0)
        hits = nearest_rows(open_features(path), query, top)
        order = np.lexsort((np.arange(1000), -np.round(cosines, 12)))[:top]  # equal rows differ by rounding alone
        got = np.array([hit.similarity for hit in hits])
        np.testing.assert_allclose(got, cosines[order], atol=1e-12)
        assert (np.diff(got) <= 0).all()
        distinct = [i for i in order.tolist() if i not in (3, 7, 100, 500, 640, 900)]
        assert [hit.row for hit in hits if hit.row not in (3, 7, 100, 500, 640, 900)] == distinct


def test_equal_images_are_in_the_order_of_the_file(big: tuple[Path, NDArray[np.float32]]) -> None:
    path, values = big
    hits = nearest_rows(open_features(path), values[7], 4)
    assert {hit.row for hit in hits} <= {3, 7, 100, 500, 640, 900}
    same = [hit.row for hit in nearest_rows(open_features(path), values[7], 6) if hit.row in (7, 100, 500, 900)]
    assert same == [7, 100, 500, 900]


def test_blocks_are_small(big: tuple[Path, NDArray[np.float32]]) -> None:
    path, values = big
    blocks = [block for _, block in open_features(path).blocks()]
    assert max(map(len, blocks)) <= 64
    np.testing.assert_array_equal(np.concatenate(blocks), values)


def test_photos_are_found_by_their_features(run: str, photos: Path, tmp_path: Path) -> None:
    made = vitlab.embed(run, photos, tmp_path / "x.parquet", workers=0)
    table = pq.read_table(made).to_pylist()
    draw(tmp_path / "new.png", 42)
    for query in (tmp_path / "new.png", Image.open(tmp_path / "new.png"), photos / "test" / "cat" / "7.png"):
        name = query if isinstance(query, Path) else tmp_path / "new.png"
        cosines = unit([row["features"] for row in table]) @ unit(features_of(run, [str(name)])[0])
        order = np.argsort(-cosines)[:4]
        hits = vitlab.search(vitlab.Run(run, "cpu"), query, made, top=4)
        assert [hit.path for hit in hits] == [table[i]["path"] for i in order]
        assert [hit.labels for hit in hits] == [(table[i]["label"],) for i in order]
        np.testing.assert_allclose([hit.similarity for hit in hits], cosines[order], atol=1e-5)
    assert hits[0].path == str(photos / "test" / "cat" / "7.png")
    assert hits[0].similarity == pytest.approx(1)


def test_features_of_another_model_are_refused(run: str, photos: Path, tmp_path: Path) -> None:
    made = vitlab.embed(run, photos, tmp_path / "x.parquet", workers=0)
    photo = photos / "test" / "cat" / "7.png"
    other = vitlab.load(run)
    with torch.no_grad():
        other.head.weight.mul_(2)  # type: ignore[union-attr]
    vitlab.search(other, photo, made)  # another head on the same features
    vitlab.search(vitlab.load(run, classes=0), photo, made)
    with torch.no_grad():
        other.get_parameter("norm.bias")[0] += 1e-3
    with pytest.raises(UserError, match=rf"features of another model, '{run}'.*vitlab embed"):
        vitlab.search(other, photo, made)
    smaller = vitlab.load(run, image_size=8)
    with pytest.raises(UserError, match="another model"):
        vitlab.search(smaller, photo, made)
    with pytest.raises(UserError, match="type int is not a model"):
        vitlab.search(7, photo, made)  # type: ignore[arg-type]


def test_files_that_are_no_feature_files(run: str, photos: Path, tmp_path: Path) -> None:
    photo, path = photos / "test" / "cat" / "7.png", tmp_path / "x.parquet"
    with pytest.raises(UserError, match="there is no file"):
        vitlab.search(run, photo, path)
    path.write_text("dear reader")
    with pytest.raises(UserError, match="is not a parquet file"):
        vitlab.search(run, photo, path)
    pq.write_table(pa.table({"path": ["a"]}), path)
    with pytest.raises(UserError, match="holds no features of vitlab"):
        vitlab.search(run, photo, path)
    path.unlink()
    vitlab.embed(run, photos, path, workers=0)
    table = pq.read_table(path)
    short = table.set_column(4, "features", pa.array([[1.0]] * len(table), pa.list_(pa.float32())))
    pq.write_table(short.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(UserError, match="is damaged: not every row has 24 features"):
        vitlab.search(run, photo, path)
    with pytest.raises(UserError, match="top must be at least 1"):
        vitlab.search(run, photo, path, top=0)


# ---- the command line


def test_the_commands(run: str, photos: Path, tmp_path: Path, command: Command) -> None:
    index, photo = str(tmp_path / "x.parquet"), str(photos / "test" / "cat" / "7.png")
    code, out, _ = command("embed", run, str(photos), index, "--workers", "0", "--device", "cpu")
    assert code == 0
    assert out.startswith("8 images, 24 features each:")
    assert "1 could not be read" in out
    code, out, _ = command("search", run, photo, "--in", index, "--top", "3")
    assert (code, len(out.strip().splitlines())) == (0, 4)
    assert "1.0000" in out
    hits = vitlab.search(run, photo, index, top=3)
    for name in ("hits.jsonl", "hits.csv"):
        sheet = tmp_path / f"{name}.png"
        words = ("--in", index, "--top", "3", "--out", str(tmp_path / name), "--sheet", str(sheet))
        assert command("search", run, photo, *words)[0] == 0
        assert Image.open(sheet).size == (8 + 5 * 168, 8 + 198)
        text = (tmp_path / name).read_text()
        rows = [*map(json.loads, text.splitlines())] if name.endswith("l") else [*csv.DictReader(text.splitlines())]
        assert [row["path"] for row in rows] == [hit.path for hit in hits]
        np.testing.assert_allclose([float(row["similarity"]) for row in rows], [h.similarity for h in hits], atol=1e-6)
        code, _, complaint = command("search", run, photo, *words)
        assert (code, "exists; remove it" in complaint) == (1, True)
    for option, name in (("--out", "x.xlsx"), ("--sheet", "x.pdf")):
        code, _, complaint = command("search", run, photo, "--in", index, option, str(tmp_path / name))
        assert (code, "its name must end in" in complaint) == (1, True)
    code, _, complaint = command("search", run, "nowhere.jpg", "--in", index)
    assert (code, complaint.strip()) == (1, "error: nowhere.jpg cannot be read: No such file or directory")


def test_a_sheet_shows_the_photos(tmp_path: Path) -> None:
    from vitlab.evaluation.hits_sheet import CELL, GAP, hits_sheet
    from vitlab.evaluation.search import Hit

    colors = {"red": (255, 0, 0), "lime": (0, 255, 0)}
    for name in colors:
        Image.new("RGB", (400, 400), name).save(tmp_path / f"{name}.png")
    hits = [Hit(str(tmp_path / f"{name}.png"), None, 0, ("[/red]\x1b",), 0.5) for name in colors]
    sheet = np.asarray(hits_sheet(Image.new("RGB", (300, 300), "blue"), [*hits, Hit("row 3", None, 3, (), 0.1)]))
    centers = [sheet[GAP + CELL // 2, GAP + CELL // 2 + i * (CELL + GAP)] for i in range(4)]
    np.testing.assert_array_equal(centers, [(0, 0, 255), *colors.values(), (211, 211, 211)])
