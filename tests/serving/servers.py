"""For the tests of serving: small models, pictures as files, and the real server in a process of its own."""

import io
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitlab

VITLAB = Path(sys.executable).with_name("vitlab")
NAMES = [f"kind {i}" for i in range(7)]
TIMEOUT = 2.0  # seconds for a request to arrive, on servers with the options below
SHORT = ("--timeout", str(TIMEOUT), "--host-name", "lab.example")


def small(name: str = "Ti/8", **settings: Any) -> Any:
    """A model that answers in a millisecond, with a head whose outputs differ."""
    size = {"depth": 3, "width": 48, "mlp": 96, "heads": 3} if "x" not in name else {}
    torch.manual_seed(1)
    model = vitlab.create(name, **{"image_size": 32, "classes": len(NAMES), **size, **settings})
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.4)
    return model.eval()


def save(folder: Path, name: str = "Ti/8", **settings: Any) -> Path:
    vitlab.save(small(name, **settings), folder, labels=NAMES)
    return folder


def photo(seed: int = 0, width: int = 60, height: int = 44) -> Image.Image:
    """Smooth random colors."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@dataclass
class Running:
    url: str
    port: int
    process: "subprocess.Popen[str]"
    lines: list[str]  # that it printed


@contextmanager
def server(run: Path, *options: str, command: tuple[str, ...] = ()) -> Iterator[Running]:
    """`vitlab serve` on a free port (or another command that prints its address); stopped at the end."""
    words = command or (str(VITLAB), "serve", str(run), "--port", "0")
    process = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if "Ctrl-C stops it" in line or "ready" in line:
                ready.set()
        ready.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        assert ready.wait(60), "the server did not start"
        found = re.search(r"http://[\d.]+:(\d+)", "".join(lines))
        assert found, "".join(lines)
        yield Running(found[0], int(found[1]), process, lines)
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def small_server(*options: str) -> Iterator[Running]:
    """A server with a small model."""
    with tempfile.TemporaryDirectory() as folder, server(save(Path(folder) / "small"), *options) as live:
        yield live


SHARED = ExitStack()  # closed at the end of the session


@cache
def shared_server(*options: str) -> Running:
    """One server for all tests of this process that need these options; starting it takes seconds."""
    return SHARED.enter_context(small_server(*options))


def answer(wire: socket.socket) -> tuple[int, dict[str, object]]:
    """The status and the JSON of the next answer on a connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = wire.recv(65536)
        assert more, f"the connection ended after {data!r}"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1])
    while len(body) < length:
        body += wire.recv(65536)
    return int(head.split()[1]), json.loads(body)
