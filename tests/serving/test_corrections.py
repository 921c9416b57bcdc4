"""Corrections become class folders that are a data set; no request writes anywhere else, or more than is allowed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from PIL import Image
from servers import NAMES, encoded, photo, save, small
from starlette.testclient import TestClient

from vitlab.data.open import open_data
from vitlab.errors import UserError
from vitlab.prediction import Classifier
from vitlab.serving.app import create_app
from vitlab.serving.corrections import Corrections
from vitlab.serving.limits import RequestError
from vitlab.serving.service import Service, ServiceSettings

PNG = encoded(photo())
ALLOWED = {"X-Requested-With": "vitlab"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrections") / "new" / "folder"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[TestClient]:
    run = save(tmp_path_factory.mktemp("runs") / "small")
    service = Service(Classifier(run, "cpu"), ServiceSettings(corrections=folder, processes=1))
    with TestClient(create_app(service)) as http:
        yield http


def correct(http: TestClient, data: bytes, label: object, headers: dict[str, str] | None = None) -> Any:
    files = {"image": ("../../evil.sh", data)}
    return http.post(f"/v1/corrections?label={label}", files=files, headers=ALLOWED if headers is None else headers)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_is_a_data_set_of_the_corrected_photos(http: TestClient, folder: Path) -> None:
    assert http.get("/v1/model").json()["corrections"] is True
    sent = {
        ("kind 2", ".png"): encoded(photo(1)),
        ("kind 2", ".jpg"): encoded(photo(2), "JPEG"),
        ("kind 5", ".webp"): encoded(photo(3), "WEBP"),
        ("kind 5", ".gif"): encoded(photo(4), "GIF"),
        ("kind 0", ".avif"): encoded(photo(5), "AVIF"),
    }
    for (name, _), data in sent.items():
        answer = correct(http, data, NAMES.index(name))
        assert answer.status_code == 200, answer.text
        assert files(folder)[answer.json()["stored"]] == data
    found = files(folder)
    assert {(Path(path).parent.name, Path(path).suffix): data for path, data in found.items()} == sent
    assert len(found) == len(sent)
    opened = open_data(str(folder))
    assert opened.classes == ("kind 0", "kind 2", "kind 5")
    assert sum(len(split) for split in opened.splits.values()) == len(sent)


def test_a_photo_has_one_class_the_last_one(http: TestClient, folder: Path) -> None:
    before = files(folder)
    data = encoded(photo(9))
    for label in (1, 4, 4, 3):
        stored = correct(http, data, label).json()["stored"]
        added = {path: content for path, content in files(folder).items() if path not in before}
        assert added == {stored: data}
        assert Path(stored).parent == Path(NAMES[label])


@pytest.mark.parametrize(
    ("data", "label", "status", "words"),
    [
        (b"nonsense", 0, 422, "is not an image"),
        (PNG[: len(PNG) // 2], 0, 422, "is broken"),
        (b"", 0, 422, "is empty"),
        (PNG, 7, 422, "label: input should be less than 7"),
        (PNG, -1, 422, "label: input should be greater"),
        (PNG, "../../etc", 422, "label: input should be a valid integer"),
    ],
)
def test_wrong_corrections_write_nothing(
    http: TestClient, folder: Path, data: bytes, label: object, status: int, words: str
) -> None:
    before = files(folder.parent.parent)
    answer = correct(http, data, label)
    assert answer.status_code == status
    assert words in answer.json()["error"]
    assert files(folder.parent.parent) == before


@pytest.mark.parametrize("headers", [{}, {"X-Requested-With": "XMLHttpRequest"}, {"Origin": "http://evil.example"}])
def test_a_form_of_another_site_writes_nothing(http: TestClient, folder: Path, headers: dict[str, str]) -> None:
    """What a browser sends for another site without asking: a form, without headers of its own."""
    before = files(folder)
    answer = correct(http, encoded(photo(20)), 0, headers)
    assert answer.status_code == 403
    assert "X-Requested-With: vitlab" in answer.json()["error"]
    assert files(folder) == before


def test_another_site_may_not_send_the_header(http: TestClient) -> None:
    """A browser asks first, and sends nothing without these headers in the answer."""
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "x-requested-with"
    answer = http.options("/v1/corrections?label=0", headers=asked)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_token_guards_corrections(tmp_path: Path) -> None:
    run = save(tmp_path / "run")
    settings = ServiceSettings(token="secret", corrections=tmp_path / "new", processes=1)
    with TestClient(create_app(Service(Classifier(run, "cpu"), settings))) as http:
        assert correct(http, PNG, 0).status_code == 401
        assert files(tmp_path / "new") == {}
        assert correct(http, PNG, 0, {**ALLOWED, "Authorization": "Bearer secret"}).status_code == 200


# ---- the folder alone


def test_a_full_folder_takes_no_more_until_photos_leave_it(tmp_path: Path) -> None:
    first, second = encoded(photo(1)), encoded(photo(2))
    by_number = Corrections(tmp_path / "number", NAMES, max_files=1)
    by_size = Corrections(tmp_path / "size", NAMES, max_bytes=len(first) + len(second) - 1)
    for one in (by_number, by_size):
        path = one.folder / one.add(first, 0)
        with pytest.raises(RequestError, match="is full") as full:
            one.add(second, 0)
        assert full.value.status == 507
        one.add(first, 1)  # a photo that moves needs no more room
        assert not path.exists()
        (one.folder / "kind 1" / path.name).unlink()
        one.add(second, 0)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../up", "a/b", "a\\b", ".hidden", "__pycache__", "train", "Val", "a\0b", "a\nb", " a", "é" * 128],
)
def test_a_class_whose_name_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    corrections = Corrections(tmp_path / "here", [name, "fine"])
    with pytest.raises(RequestError, match="has a name that no class folder can have"):
        corrections.add(PNG, 0)
    corrections.add(PNG, 1)
    assert [path.parent.name for path in tmp_path.rglob("*.png")] == ["fine"]


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    corrections = Corrections(tmp_path / "here", NAMES)
    (tmp_path / "here" / "kind 0").write_text("a file where the class folder would be")
    with pytest.raises(RequestError, match="cannot be written"):
        corrections.add(PNG, 0)
    assert list(files(tmp_path / "here")) == ["kind 0"]


def test_a_file_is_no_folder_for_corrections(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--corrections '.*file' cannot be used as a folder"):
        Corrections(tmp_path / "file", NAMES)


def test_a_multi_label_model_has_no_corrections(tmp_path: Path) -> None:
    model = small()
    model.card = replace(model.card, thresholds=(0.5,) * len(NAMES))
    with pytest.raises(UserError, match="this model is multi-label"):
        Service(Classifier(model, "cpu"), ServiceSettings(corrections=tmp_path / "here"))
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
def test_finetune_learns_the_corrections(tmp_path: Path, command: Command) -> None:
    """Reddish and bluish photos, corrected to two classes: the new model knows those, and gets new photos right."""
    save(tmp_path / "run")
    corrections = Corrections(tmp_path / "corrections", NAMES)

    def tinted(seed: int) -> Image.Image:
        return Image.blend(photo(seed, 40, 40), Image.new("RGB", (40, 40), "red" if seed % 2 else "blue"), 0.6)

    for seed in range(60):
        corrections.add(encoded(tinted(seed)), 1 if seed % 2 else 4)
    words = ("--weights", str(tmp_path / "run"), "--minutes", "0.01", "--out", str(tmp_path / "new"))
    code, _, error = command("finetune", str(tmp_path / "corrections"), *words)
    assert code == 0, error
    new = Classifier(tmp_path / "new", "cpu", refuse=0)
    assert [new.predict(tinted(seed)).label for seed in range(60, 70)] == ["kind 4", "kind 1"] * 5
