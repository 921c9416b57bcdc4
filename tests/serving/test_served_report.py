"""The run's report and samples on the server: a stranger's run can show itself there, and do nothing else."""

import base64
import hashlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from servers import answer, photo, save, server
from starlette.testclient import TestClient

import vitlab
from vitlab.data.samples import NAME, Sample, encode, read_samples, write_samples
from vitlab.data.source import ArraySource
from vitlab.prediction import Classifier
from vitlab.serving.app import create_app
from vitlab.serving.report import read_report
from vitlab.serving.service import Service, ServiceSettings

HTML = "<!doctype html><title>A report</title><p>ä" + "x" * 200_000
SAMPLES = [Sample("kind 3", *encode(photo(3))), Sample("kind 1", *encode(photo(1)))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = save(tmp_path_factory.mktemp("runs") / "small")
    (run / "report.html").write_text(HTML)
    return run


@contextmanager
def client(run: Path, token: str | None = None, **settings: Any) -> Iterator[TestClient]:
    report = read_report(run, has_token=token is not None)
    service = Service(Classifier(run, "cpu"), ServiceSettings(token=token, report=report, processes=1, **settings))
    with TestClient(create_app(service)) as http:
        yield http


def test_the_report_may_do_nothing_but_be_seen(run: Path) -> None:
    with client(run) as http:
        assert http.get("/v1/model").json()["report"] == "/report"
        got = http.get("/report")
    assert got.text == HTML
    assert got.headers["content-type"].startswith("text/html")
    policy = {words.split()[0]: words.split()[1:] for words in got.headers["content-security-policy"].split(";")}
    assert policy["default-src"] == ["'none'"]
    assert "allow-same-origin" not in policy["sandbox"]  # it has no origin that the API would answer to
    own = sorted((Path(vitlab.__file__).parent / "report").glob("*.js"))
    digests = [base64.b64encode(hashlib.sha256(script.read_bytes()).digest()).decode() for script in own]
    assert sorted(policy["script-src"]) == (sorted(f"'sha256-{digest}'" for digest in digests) or ["'none'"])
    assert policy["img-src"] == ["data:"]
    assert got.headers["x-content-type-options"] == "nosniff"


def test_a_link_to_the_report_of_a_server_with_a_token(run: Path) -> None:
    """A browser sends no token with a link; the path has a secret that only those with the token get."""
    with client(run, token="secret") as http:
        assert http.get("/report").status_code == 401
        path = http.get("/v1/model", headers={"Authorization": "Bearer secret"}).json()["report"]
        assert path.startswith("/report/")
        assert len(path) > 25
        assert http.get(path).text == HTML
        assert http.get(path[:-1]).status_code == 401
        assert path not in http.get("/openapi.json").text


def test_files_that_are_no_report(run: Path, tmp_path: Path) -> None:
    assert read_report(tmp_path, has_token=False) is None
    assert read_report(tmp_path / "nowhere", has_token=False) is None
    (tmp_path / "report.html").symlink_to(run / "report.html")  # a run shows only what is in its folder
    assert read_report(tmp_path, has_token=False) is None
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    assert read_report(tmp_path, has_token=False) is None


def test_the_samples_of_a_run(run: Path) -> None:
    with client(run, samples=SAMPLES) as http:
        assert http.get("/v1/model").json()["samples"] == 2
        assert http.get("/v1/samples").json() == {"samples": [vars(sample) for sample in SAMPLES]}
    with client(run) as http:
        assert http.get("/v1/samples").json() == {"samples": []}


# ---- with the real server


def ask(wire: socket.socket, path: str) -> None:
    wire.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


@pytest.mark.slow
def test_serve_finds_them_in_the_run_folder_unless_asked_not_to(run: Path) -> None:
    write_samples(run, ArraySource("x", np.zeros((9, 32, 32, 3), np.uint8), np.arange(9) % 3, ("a", "b", "c")))
    for options, number in (((), 8), (("--no-samples",), 0)):
        with server(run, *options) as live, socket.create_connection(("127.0.0.1", live.port), timeout=20) as wire:
            ask(wire, "/v1/samples")
            samples = answer(wire)[1]["samples"]
            assert samples == [vars(sample) for sample in read_samples(run)][:number]
    (run / NAME).unlink()


@pytest.mark.slow
def test_a_long_report_is_not_buffered_for_clients_that_do_not_read(tmp_path: Path) -> None:
    """Thirty clients ask for 20 MB each and read nothing; then one that reads slowly gets all of it."""
    run = save(tmp_path / "run")
    (run / "report.html").write_bytes(b"x" * 20_000_000)
    with server(run) as live:
        process = psutil.Process(live.process.pid)
        before = process.memory_info().rss
        wires = [socket.create_connection(("127.0.0.1", live.port), timeout=20) for _ in range(30)]
        for wire in wires:
            ask(wire, "/report")
        time.sleep(2)
        assert process.memory_info().rss - before < 60_000_000
        for wire in wires:
            wire.close()
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as wire:
            ask(wire, "/report")
            ask(wire, "/healthz")
            data = b""
            while not data.endswith(b'"token":false}'):
                more = wire.recv(1 << 20)
                assert more
                data += more
        assert data.count(b"x") >= 20_000_000
