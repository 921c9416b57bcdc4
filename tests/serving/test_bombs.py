"""Pictures that would take minutes to decode: their senders get an error in time, and other clients no delay."""

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
from functools import partial
from pathlib import Path

import psutil
import pytest
from chaos import bombs
from servers import Running, answer, encoded, photo, save, server, shared_server
from test_crowd import MODEL, Load, press
from timing import assert_below, measure_until, seconds

SHORT = bombs.scans(64, 600)  # more scans than any photo has
LONG = bombs.scans(5000, 490)  # as many as are allowed, over 25 megapixels: some ten seconds of work
SECONDS = 12.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    live = shared_server()
    yield live
    assert live.process.poll() is None, "".join(live.lines)


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


def check_broken(live: Running, data: bytes, words: str) -> None:
    with connect(live, data) as wire:
        status, body = answer(wire)
    assert status == 422
    assert words in str(body["error"])


def test_absurd_files_are_refused_at_once(live: Running) -> None:
    for data, words in ((SHORT, "scans"), (bombs.chunks(), "tiny chunks")):
        assert_below(5, partial(seconds, partial(check_broken, live, data, words)))


def test_the_frame_inside_an_avif_counts(live: Running) -> None:
    with connect(live, bombs.inner_frame()) as wire:
        status, body = answer(wire)
    assert status == 413
    assert "16000 x 16000 pixels" in str(body["error"])


def test_work_ends_when_its_client_leaves(live: Running) -> None:
    def attempt() -> float:
        wire = connect(live, LONG)
        time.sleep(1.5)
        wire.close()
        time.sleep(1.0)
        return busy(live, 1.0)

    assert_below(0.3, attempt)


def test_a_picture_over_its_time_limit_is_refused(live: Running) -> None:
    def attempt() -> tuple[float, float]:
        """Seconds until the good client is answered, and until the last bad one is."""
        began = time.monotonic()
        wires = [connect(live, LONG) for _ in range(2)]
        with connect(live, encoded(photo(), "JPEG")) as good:
            assert answer(good)[0] == 200
        first = time.monotonic() - began
        for wire in wires:
            status, body = answer(wire)
            assert status == 422
            assert "to decode" in str(body["error"])
            wire.close()
        return first, time.monotonic() - began

    measure_until(lambda took: took[0] < 3 and took[1] < 35, attempt)


def test_stopping_does_not_wait_for_bombs(tmp_path: Path) -> None:
    run = save(tmp_path / "small")

    def attempt() -> float:
        with server(run) as live:
            wires = [connect(live, LONG) for _ in range(6)]
            time.sleep(1.0)
            live.process.send_signal(signal.SIGTERM)
            took = seconds(lambda: live.process.wait(120))
            assert live.process.returncode == 0
            for wire in wires:
                wire.close()
        return took

    assert_below(28, attempt)


# ---- eight hostile senders beside sixty-four good clients


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


def test_eight_scan_bomb_senders_and_sixty_four_clients(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

    def attempt(live: Running) -> tuple[Load, Load]:
        """What the clients measure without the senders and with them."""
        quiet, siege = Load(), Load()
        asyncio.run(press(live.port, SECONDS, quiet))
        words = [sys.executable, __file__, str(live.port), str(SECONDS + 2)]
        senders = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
        time.sleep(1.0)
        asyncio.run(press(live.port, SECONDS, siege))
        statuses = [int(word) for word in senders.communicate(timeout=60)[0].split()]
        assert quiet.errors == siege.errors == []
        assert statuses
        assert all(400 <= status < 500 for status in statuses)
        return quiet, siege

    def describe(loads: tuple[Load, Load]) -> str:
        return "; ".join(f"p99 {load.percentile(0.99):.3f} s at {load.rate:.0f} requests/s" for load in loads)

    with server(save(tmp_path / "run", "Ti/16", **MODEL)) as live:
        asyncio.run(press(live.port, 1.0, Load()))
        measured = measure_until(
            lambda loads: loads[1].percentile(0.99) <= 3 * loads[0].percentile(0.99), partial(attempt, live), describe
        )
    print(describe(measured))


if __name__ == "__main__":
    send_forever(int(sys.argv[1]), float(sys.argv[2]))
