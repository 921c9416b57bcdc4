"""The weights that fine-tuning starts from by default: a function of the device, its memory and the network."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

import vitlab
from vitlab.cost import cost
from vitlab.errors import UserError
from vitlab.training.first_weights import DINOV2, DINOV2_SIZE, HUB, choose_default, find_weights, load_start
from vitlab.weights import hub

SHAPES = {"small": (12, 384, 6), "base": (12, 768, 12), "large": (24, 1024, 16)}  # as the authors publish them


@pytest.mark.parametrize(
    ("device", "memory", "online", "name"),
    [
        ("cpu", 0, True, "WinKawaks/vit-tiny-patch16-224"),
        ("cpu", 0, False, "WinKawaks/vit-tiny-patch16-224"),
        ("mps", 0, True, "WinKawaks/vit-small-patch16-224"),
        ("cuda", 4e9, True, "facebook/dinov2-small"),
        ("cuda", 8.2e9, True, "facebook/dinov2-base"),
        ("cuda", 15.8e9, True, "facebook/dinov2-base"),
        ("cuda", 25e9, True, "facebook/dinov2-large"),
        ("cuda", 150e9, True, "facebook/dinov2-large"),
        ("cuda", 150e9, False, "google/vit-base-patch16-224-in21k"),
    ],
)
def test_the_choice(device: str, memory: float, online: bool, name: str) -> None:
    chosen, why = choose_default(device, memory, online=online)
    assert chosen == name
    assert "--weights" in why
    assert ("DINOv2 (Apache-2.0)" in why) == name.startswith("facebook/dinov2")
    assert ("cannot be downloaded" in why) == (device == "cuda" and not online)


@pytest.mark.parametrize("name", DINOV2)
def test_each_size_fits_the_memory_it_asks_for(name: str) -> None:
    """With a batch of 32 at the size in use, and two thirds of it, so that others may use the GPU as well."""
    depth, width, heads = SHAPES[name.rpartition("-")[2]]
    settings = {"depth": depth, "width": width, "heads": heads, "mlp": 4 * width, "layer_scale": True}
    found = cost(lambda: vitlab.create("B/14", image_size=DINOV2_SIZE, classes=100, **settings))
    assert found.gpu_bytes(32, 1, sharded=False) < 2 / 3 * max(DINOV2[name], 4e9)


class Gate(BaseHTTPRequestHandler):
    """A hub whose models need an account, or whose answers are of another kind."""

    code, error = 403, "GatedRepo"
    asked: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.code)
        for name, value in (("X-Error-Code", self.error), ("X-Repo-Commit", "a" * 40), ("ETag", '"x"')):
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Gate]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(Gate, "asked", [])
        yield Gate
        server.shutdown()


@pytest.mark.parametrize("code", [401, 403])
def test_gated_weights_are_one_line_with_the_way_in(
    code: int, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "code", code)
    with pytest.raises(UserError) as caught:
        vitlab.load("facebook/dinov3-vits16-pretrain-lvd1689m")
    message = str(caught.value)
    assert "\n" not in message
    page = f"{huggingface_hub.constants.ENDPOINT}/facebook/dinov3-vits16-pretrain-lvd1689m"
    for part in ("accept", page, "HF_TOKEN", "'facebook/dinov3-vits16-pretrain-lvd1689m'"):
        assert part in message
    assert gate.asked


def test_a_hub_that_answers_has_the_weights(gate: type[Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "code", 200)
    monkeypatch.setattr(gate, "error", "")
    assert hub.is_available("facebook/dinov2-base")
    assert gate.asked == ["/facebook/dinov2-base/resolve/main/config.json"]


@pytest.mark.parametrize("how", ["refused", "offline", "no server"])
def test_a_hub_that_does_not_has_none(how: str, gate: type[Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if how == "no server":
        dead = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", dead)
    assert not hub.is_available("facebook/dinov2-base")


def test_files_in_the_cache_need_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--facebook--dinov2-base"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("b" * 40)
    folder = repo / "snapshots" / ("b" * 40)
    vitlab.save(vitlab.create("Ti/14", image_size=56, depth=1, classes=0), folder)
    assert hub.is_available("facebook/dinov2-base")
    assert load_start("facebook/dinov2-base").config.image_size == (DINOV2_SIZE, DINOV2_SIZE)


def test_named_weights_are_not_chosen(tmp_path: Path) -> None:
    vitlab.save(vitlab.create("Ti/16", image_size=32, depth=1, classes=3), tmp_path / "mine")
    found = find_weights(str(tmp_path / "mine"), torch.device("cpu"))
    assert (found.line, found.warnings) == (str(tmp_path / "mine"), ())
    assert found.model is not None
    assert found.model.config.image_size == (32, 32)
    assert find_weights("none", torch.device("cpu")).line == "none: from scratch"
    assert set(HUB) == {"cpu", "mps", "cuda"}
