"""`convert --push-to-hub`: huggingface_hub against a local server that speaks the few endpoints of an upload."""

import base64
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peers import agree, images, randomize
from test_adapters import adapt
from transformers import ViTForImageClassification

from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import load, save

Command = Callable[..., tuple[int, str, str]]
CONFIG = ViTConfig((32, 32), patch=8, depth=1, width=64, mlp=80, heads=4, classes=3, norm_eps=1e-12)
NAMES = ["ant", "bee | wasp", "c`w"]


class Hub(ThreadingHTTPServer):
    """A hub with one repository: what it was asked, and the files it got."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuse = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        code, data = self.reply(self.path, body)
        text = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        if self.command == "HEAD" and code == 200:  # what its client asks of a file
            for name, value in (("ETag", '"x"'), ("X-Repo-Commit", "a" * 40)):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else text)

    do_GET = do_POST = do_HEAD = handle_any

    def reply(self, path: str, body: bytes) -> tuple[int, Any]:
        hub = self.server
        if path == "/api/repos/create":
            hub.tokens.add(self.headers["Authorization"])
            hub.created.append(json.loads(body))
            return (403, {"error": "no permission"}) if hub.refuse else (200, {"url": f"{hub.url}/me/pets"})
        if path == "/api/models/me/pets/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        if path == "/api/models/me/pets/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"{hub.url}/me/pets/commit/a", "commitOid": "a" * 40, "success": True}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        return (200, {}) if path.partition("/main/")[2] in hub.files else (404, {"error": "Entry not found"})

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A model whose temperature transformers' config cannot hold, so that there is a JSON beside its weights."""
    model = randomize(build(CONFIG))
    provenance = {"source": "/home/me/secret/weights.npz", "data": "~/private/photos", "training": "5 steps"}
    model.card = dataclasses.replace(model.card, provenance=provenance, temperature=1.5)
    save(model, tmp_path / "run", preprocess=Preprocess(crop=0.9), labels=NAMES)
    return str(tmp_path / "run")


def push(command: Command, run: str, folder: Path) -> tuple[int, str, str]:
    return command("convert", run, str(folder), "--to", "huggingface", "--push-to-hub", "me/pets")


def test_the_upload_is_the_model(hub: Hub, run: str, tmp_path: Path, command: Command) -> None:
    code, out, err = push(command, run, tmp_path / "hub")
    assert code == 0, err
    assert f"uploaded: {hub.url}/me/pets" in out
    assert hub.created == [{"name": "pets", "organization": "me", "visibility": "private"}]
    assert hub.tokens == {"Bearer hf_secret"}
    assert {name: (tmp_path / "hub" / name).read_bytes() for name in hub.files} == hub.files
    (tmp_path / "downloaded").mkdir()
    for name, data in hub.files.items():
        (tmp_path / "downloaded" / name).write_bytes(data)
    theirs: Any = ViTForImageClassification.from_pretrained(tmp_path / "downloaded")
    theirs, ours = theirs.eval(), load(run)
    with torch.no_grad():
        agree(theirs(images(32)).logits, ours(images(32)))
    back = load(tmp_path / "downloaded").card
    assert (back.labels, back.preprocess, back.temperature) == (tuple(NAMES), Preprocess(crop=0.9), 1.5)


def test_low_rank_updates_go_up_merged(hub: Hub, tmp_path: Path, command: Command) -> None:
    """Whoever downloads them has no base, and reads nothing of where it was."""
    save(randomize(build(CONFIG)), tmp_path / "secret" / "base")
    unmerged = adapt(tmp_path / "secret" / "base", tmp_path / "run")
    code, _, err = push(command, str(tmp_path / "run"), tmp_path / "hub")
    assert code == 0, err
    assert not [name for name, data in hub.files.items() if b"secret" in data]
    (tmp_path / "secret").rename(tmp_path / "gone")
    theirs: Any = ViTForImageClassification.from_pretrained(tmp_path / "hub")
    with torch.no_grad():
        agree(theirs.eval()(images(32)).logits, unmerged(images(32)))


def test_the_card(hub: Hub, run: str, tmp_path: Path, command: Command) -> None:
    assert push(command, run, tmp_path / "hub")[0] == 0
    card: Any = huggingface_hub.ModelCard(hub.files["README.md"].decode())  # its own parser
    about = card.data.to_dict()
    assert (about["library_name"], about["pipeline_tag"]) == ("transformers", "image-classification")
    text = hub.files["README.md"].decode()
    for part in ("for 3 classes", "32x32 pixels", 'pipeline("image-classification", "me/pets")', "`bee \\| wasp`"):
        assert part in text
    assert "| source | weights.npz |" in text
    assert not [name for name, data in hub.files.items() if b"secret" in data or b"private" in data]


def test_a_card_that_is_there_stays(hub: Hub, run: str, tmp_path: Path, command: Command) -> None:
    hub.files["README.md"] = b"my own words"
    assert push(command, run, tmp_path / "hub")[0] == 0
    assert hub.files["README.md"] == b"my own words"
    assert {"model.safetensors", "preprocessor_config.json"} <= set(hub.files)


def test_a_refusal_is_one_line(hub: Hub, run: str, tmp_path: Path, command: Command) -> None:
    hub.refuse = True
    code, _, err = push(command, run, tmp_path / "hub")
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("error: the hub refuses me/pets: ")
    assert last.endswith(f"the folder {tmp_path / 'hub'} is complete")


def test_what_is_missing_is_noticed_before_the_work(
    hub: Hub, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    words = ["convert", run, str(tmp_path / "hub"), "--to", "huggingface", "--push-to-hub"]
    assert "takes OWNER/NAME, not 'pets'" in command(*words, "pets")[2]
    assert "use --to huggingface, not timm" in command(*words[:4], "timm", *words[5:], "me/pets")[2]
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    code, _, err = command(*words, "me/pets")
    assert (code, err.count("\n")) == (1, 1)
    assert "needs a token that may write: run `hf auth login`" in err
    assert not hub.created
    assert not (tmp_path / "hub").exists()


def test_without_a_network(
    hub: Hub, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, err = push(command, run, tmp_path / "hub")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: me/pets could not be uploaded: ")
    assert (tmp_path / "hub" / "model.safetensors").exists()
