"""`vitlab serve` as a user sees it: how it starts, what it prints, how it ends."""

import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from servers import answer, encoded, photo, save, server

from vitlab.cli import main

PNG = encoded(photo())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("serve") / "small")


def error_line(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is printed for wrong options."""
    monkeypatch.setattr(sys, "argv", ["vitlab", "serve", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    return printed


def test_a_port_in_use(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        printed = error_line([str(run), "--port", str(port)], monkeypatch, capsys)
    assert f"cannot listen on 127.0.0.1 port {port}: it is in use; choose another with --port" in printed


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--max-bytes", "lots"], "--max-bytes must be a positive number"),
        (["RUN", "--queue", "4"], "can never fit a queue of 4"),
        (["RUN", "--token", " "], "the token is empty"),
        (["RUN", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["RUN", "--host-name", "http://my.host"], "--host-name 'http://my.host' is not a host name"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, words: list[str], printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--port", "0", *[str(run) if word == "RUN" else word for word in words]]
    assert printed in error_line(words, monkeypatch, capsys)


def test_an_empty_token_in_the_environment_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VITLAB_TOKEN", "")
    assert "unset VITLAB_TOKEN" in error_line([str(run), "--port", "0"], monkeypatch, capsys)


def metrics(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        wire.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n")
        wire.sendall(b"Connection: close\r\n\r\n")
        return b"".join(iter(lambda: wire.recv(65536), b"")).decode()


@pytest.mark.slow
def test_sigterm_finishes_requests_in_progress(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_TOKEN", "secret")
    head = (
        "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
        f"Authorization: Bearer secret\r\nContent-Length: {len(PNG)}\r\n\r\n"
    )
    with server(run) as live, socket.create_connection(("127.0.0.1", live.port), timeout=20) as wire:
        wire.sendall(b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(wire)[0] == 401
        wire.sendall(head.encode() + PNG[:50])
        while "vitlab_upload_bytes 50" not in metrics(live.port):  # the request has begun
            time.sleep(0.05)
        live.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert live.process.poll() is None  # it waits for our request
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", live.port), timeout=5)
        wire.sendall(PNG[50:])
        assert answer(wire)[0] == 200
        assert live.process.wait(60) == 0
        printed = "".join(live.lines)
        assert "stopped" in printed
        assert "Traceback" not in printed
        assert "secret" not in printed


@pytest.mark.slow
def test_ctrl_c_stops_it_too_and_a_public_address_is_warned_of(run: Path) -> None:
    with server(run, "--host", "0.0.0.0") as live:
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(60) == 0
        printed = "".join(live.lines)
        assert "VITLAB_TOKEN=... requires a token" in printed
        assert "Traceback" not in printed


@pytest.mark.parametrize(("soft", "hard", "expected"), [(256, 20_000, 1024), (256, 1280, 512), (64, 64, 16)])
def test_the_limit_on_open_files_is_raised_or_there_are_fewer_connections(soft: int, hard: int, expected: int) -> None:
    code = (
        "import resource; from vitlab.serving.server import available_connections\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "print(available_connections(1024), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"this process may not have {hard} files open")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, files = map(int, out.split())
    assert found == expected
    assert found < files <= hard


@pytest.mark.slow
def test_without_a_model_the_one_in_the_box_answers(boxed: Path) -> None:
    program = f"from pathlib import Path; from vitlab.weights import box; box.FOLDER = Path({str(boxed)!r})"
    words = (sys.executable, "-c", f"{program}; from vitlab.cli import main; main()", "serve", "--port", "0")
    with server(boxed, "--device", "cpu", command=words) as running:
        assert any(line.startswith("note: no model is named") for line in running.lines)
        assert any(line.startswith("box on cpu: http") for line in running.lines)
        files = {"image": ("photo.png", PNG)}
        (image,) = httpx.post(f"{running.url}/v1/predict", files=files).json()["images"]
        assert httpx.get(f"{running.url}/v1/model").json()["name"] == "box"
    assert sorted(each["name"] for each in image["classes"]) == ["acorn", "goose", "umbrella"]
