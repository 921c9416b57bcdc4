"""Pictures that ask a decoder for minutes: their senders get an answer in time, and nobody else notices."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos import bombs
from servers import Running, answer, encoded, photo, save, server
from test_crowd import MODEL, Load, press

SHORT = bombs.scans(64, 600)  # more scans than any photo has
LONG = bombs.scans(5000, 490)  # as many as are allowed, over 25 megapixels: some ten seconds of work
SECONDS = 12.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server(save(tmp_path_factory.mktemp("bombs") / "small")) as live:
        yield live
        assert live.process.poll() is None, "".join(live.said)


def connect(live: Running, data: bytes) -> socket.socket:
    """A connection on which a picture was sent."""
    wire = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}"
    wire.sendall(f"{head}\r\n\r\n".encode() + data)
    return wire


def busy(live: Running, seconds: float) -> float:
    """Seconds of a core that the decoding processes use in a while."""

    def used() -> float:
        children = psutil.Process(live.process.pid).children(recursive=True)
        return sum(child.cpu_times().user + child.cpu_times().system for child in children)

    before = used()
    time.sleep(seconds)
    return used() - before


def test_absurd_files_are_refused_at_once(live: Running) -> None:
    for data, words in ((SHORT, "scans"), (bombs.chunks(), "tiny chunks")):
        began = time.monotonic()
        with connect(live, data) as wire:
            status, body = answer(wire)
        assert status == 422
        assert words in str(body["error"])
        assert time.monotonic() - began < 5


def test_the_frame_inside_an_avif_counts(live: Running) -> None:
    with connect(live, bombs.inner_frame()) as wire:
        status, body = answer(wire)
    assert status == 413
    assert "16000 x 16000 pixels" in str(body["error"])


def test_work_ends_when_its_client_leaves(live: Running) -> None:
    wire = connect(live, LONG)
    time.sleep(1.5)
    wire.close()
    time.sleep(1.0)
    assert busy(live, 1.0) < 0.3


@pytest.mark.slow
def test_a_picture_over_its_budget_is_a_broken_one(live: Running) -> None:
    began = time.monotonic()
    wires = [connect(live, LONG) for _ in range(2)]
    with connect(live, encoded(photo(), "JPEG")) as good:
        assert answer(good)[0] == 200
        assert time.monotonic() - began < 3
    for wire in wires:
        status, body = answer(wire)
        assert status == 422
        assert "to decode" in str(body["error"])
        wire.close()
    assert time.monotonic() - began < 35


@pytest.mark.slow
def test_stopping_does_not_wait_for_bombs(tmp_path: Path) -> None:
    with server(save(tmp_path / "small")) as live:
        wires = [connect(live, LONG) for _ in range(6)]
        time.sleep(1.0)
        began = time.monotonic()
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(40) == 0
        assert time.monotonic() - began < 28
        for wire in wires:
            wire.close()


# ---- eight senders that never tire, beside sixty-four good clients


def send_forever(port: int, seconds: float) -> None:
    """Eight connections with bombs, again and again; prints the statuses they got."""
    end, statuses = time.monotonic() + seconds, []

    def sender(data: bytes) -> None:
        live = Running("", port, None, [])  # type: ignore[arg-type]
        while time.monotonic() < end:
            with contextlib.suppress(OSError, AssertionError), connect(live, data) as wire:
                statuses.append(answer(wire)[0])

    threads = [threading.Thread(target=sender, args=(data,), daemon=True) for data in (SHORT, LONG) * 4]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(0.1)
    print(*statuses, flush=True)


@pytest.mark.slow
def test_eight_scan_bomb_senders_and_sixty_four_clients(tmp_path: Path) -> None:
    with server(save(tmp_path / "run", "Ti/16", **MODEL)) as live:
        asyncio.run(press(live.port, 1.0, Load()))
        quiet, siege = Load(), Load()
        asyncio.run(press(live.port, SECONDS, quiet))
        words = [sys.executable, __file__, str(live.port), str(SECONDS + 2)]
        tests = str(Path(__file__).parents[1])
        senders = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": tests})
        time.sleep(1.0)
        asyncio.run(press(live.port, SECONDS, siege))
        statuses = [int(word) for word in senders.communicate(timeout=60)[0].split()]
    late = [load.percentile(0.99) for load in (quiet, siege)]
    print(f"p99 {late[0]:.3f} s quiet, {late[1]:.3f} s beside bombs; {quiet.rate:.0f} and {siege.rate:.0f} requests/s")
    assert quiet.errors == siege.errors == []
    assert late[1] <= 3 * late[0]
    assert statuses
    assert all(400 <= status < 500 for status in statuses)


if __name__ == "__main__":
    send_forever(int(sys.argv[1]), float(sys.argv[2]))
