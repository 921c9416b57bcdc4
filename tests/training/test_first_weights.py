"""The weights that fine-tuning starts from by default: a function of the device, its memory and the network."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from families import mostly_slow

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


@pytest.mark.parametrize("name", mostly_slow(DINOV2, "facebook/dinov2-small"))
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


def cached(cache: Path, name: str) -> Path:
    """The folder of a model's files in a hub's cache."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c" * 40)
    return repo / "snapshots" / ("c" * 40)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of 24 GB, as far as the choice of weights sees one."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24e9))
    return torch.device("cuda")


def test_a_damaged_download_falls_back(gpu: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk or a lost connection leaves part of a file."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = vitlab.create("Ti/16", image_size=32, depth=1, classes=0)
    for name in ("facebook/dinov2-large", HUB["cuda"]):
        vitlab.save(model, cached(tmp_path, name))
    assert find_weights(None, gpu).name == "facebook/dinov2-large"
    weights = next(tmp_path.glob("models--facebook*/snapshots/*/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    found = find_weights(None, gpu)
    assert found.name == HUB["cuda"]
    assert found.model is not None
    assert "DINOv2 cannot be downloaded" in found.line
    (line,) = found.warnings
    assert "facebook/dinov2-large cannot be loaded" in line
    assert "\n" not in line


class Gone(Gate):
    """A hub that answers for a file, and then has no such model."""

    code, error = 200, ""

    def do_GET(self) -> None:
        type(self).code, type(self).error = 404, "RepoNotFound"
        self.do_HEAD()


def test_a_hub_that_loses_the_model_is_one_line(
    gpu: torch.device, gate: type[Gate], monkeypatch: pytest.MonkeyPatch, no_box: None
) -> None:
    for name in ("code", "error"):
        monkeypatch.setattr(gate, name, getattr(Gone, name))
    monkeypatch.setattr(gate, "do_GET", Gone.do_GET)
    with pytest.raises(UserError) as caught:
        find_weights(None, gpu)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("no weights to start from", HUB["cuda"], "--weights none"):
        assert part in message
    assert any("facebook/dinov2-large" in path for path in gate.asked)


@pytest.mark.parametrize("how", ["offline", "no server"])
def test_without_a_network_the_message_has_the_way_out(
    how: str, gpu: torch.device, gate: type[Gate], monkeypatch: pytest.MonkeyPatch, no_box: None
) -> None:
    dead = "http://127.0.0.1:1"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", how == "offline")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", dead)
    url = dead + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    with pytest.raises(UserError) as caught:
        find_weights(None, gpu)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("is not in the hub's cache", "cannot be reached", f"hf download {HUB['cuda']}", "--weights FILE"):
        assert part in message
    assert not gate.asked


def test_named_weights_are_not_chosen(tmp_path: Path) -> None:
    vitlab.save(vitlab.create("Ti/16", image_size=32, depth=1, classes=3), tmp_path / "mine")
    found = find_weights(str(tmp_path / "mine"), torch.device("cpu"))
    assert (found.line, found.warnings) == (str(tmp_path / "mine"), ())
    assert found.model is not None
    assert found.model.config.image_size == (32, 32)
    assert find_weights("none", torch.device("cpu")).line == "none: from scratch"
    assert set(HUB) == {"cpu", "mps", "cuda"}
