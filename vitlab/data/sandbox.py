"""A decoder in a process of its own, with a budget of time and memory for each image.

A small file can make a decoder work for minutes or fill gigabytes, and only limits enforced by the system stop it. The
process imports Pillow and little else, answers one request after another over a socket, and is killed and replaced
when a request exceeds the budget.

A request is a JSON header and the file's bytes; an answer is a JSON header and, on success, the pixels in bands of
some rows, so that neither side holds a large image twice.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from vitlab.data.decoder import Buffer, DecodeError, DecodeHint, decode_bytes, frame_image
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.settings import check_types, from_json, to_json

LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 1 << 20
BAND_PIXELS = 1 << 20  # sent at a time
PACKAGE_FOLDER = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Budget:
    """What one image may cost."""

    cpu: int = 10  # seconds of a core
    wall: float = 18.0  # seconds, waiting for a core included
    memory: int = 900_000_000  # bytes, beyond what the process uses when it starts


@dataclass(frozen=True)
class DecodeRequest:
    """How a file is decoded: the formats allowed, the most pixels, and the frame of the result."""

    formats: tuple[str, ...] | None = None
    most_pixels: int | None = None
    size: Size | None = None  # None: not framed
    preprocess: Preprocess = field(default_factory=Preprocess)

    def __post_init__(self) -> None:
        check_types(self)


class Sandbox:
    """The caller's side. One request at a time; `kill` may be called from any thread."""

    def __init__(self, budget: Budget | None = None, *, nice: int = 0) -> None:
        self.budget, self.nice = budget or Budget(), nice
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started it, which may be forked
        self.wire: socket.socket | None = None
        self.lock = threading.Lock()  # held while starting or killing the process
        self.closed = False

    def decode(self, data: Buffer, request: DecodeRequest, shrink: DecodeHint | None = None) -> Image.Image:
        """The upright RGB image; raises DecodeError where it cannot be decoded within the budget."""
        deadline = time.monotonic() + self.budget.wall
        for last in (False, True):
            try:
                return self._request(data, request, shrink, deadline)
            except TimeoutError:
                self.kill()
                raise DecodeError("broken", f"it took longer than {self.budget.wall:g} s to decode") from None
            except (OSError, EOFError):
                code = self._exit_code()
                if last or code not in (-signal.SIGKILL, -signal.SIGTERM):  # signals from outside, not due to the image
                    raise DecodeError("broken", self._reason(code)) from None
            except DecodeError:  # its answer
                raise
            except BaseException:  # such as Ctrl-C: the answer would be taken for that to the next request
                self.kill()
                raise
        raise AssertionError("unreachable")

    def _request(self, data: Buffer, request: DecodeRequest, shrink: DecodeHint | None, deadline: float) -> Image.Image:
        wire = self.start()
        send(wire, {**to_json(request), "bytes": len(data), "shrink": shrink is not None}, data, deadline)
        answer = receive_header(wire, deadline)
        if "ask" in answer and shrink is not None:  # for the factor, which depends on the image's size
            send(wire, {"factor": float(shrink(tuple(answer["ask"])))}, deadline=deadline)
            answer = receive_header(wire, deadline)
        if "fault" in answer:
            raise DecodeError(answer["fault"], answer["why"])
        return receive_image(wire, (answer["width"], answer["height"]), deadline)

    def start(self) -> socket.socket:
        """The connection to the process, which is started if there is none."""
        with self.lock:
            if self.closed:
                raise EOFError
            if self.wire is None or self.process is None or self.process.poll() is not None:
                self._drop()
                self.wire, theirs = socket.socketpair()
                with theirs:
                    self.process, self.owner = launch(theirs, self.budget, self.nice), os.getpid()
            return self.wire

    def kill(self, *, close: bool = False) -> None:
        """End the process and the request it is working on; with `close` no other process replaces it."""
        with self.lock:
            self.closed = self.closed or close
            self._drop()

    def _drop(self) -> None:
        """Forget the process, and end it if it is this one's own: a forked process has a copy of its parent's."""
        own = self.owner == os.getpid()
        if self.process is not None and own:
            self.process.kill()
            self.process.wait()
        if self.wire is not None:
            with contextlib.suppress(OSError):
                if own:
                    self.wire.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits for the answer
            self.wire.close()
        self.process = self.wire = None

    def _exit_code(self) -> int | None:
        """The exit code of the process that ended; None where `kill` ended it."""
        with self.lock:
            code = None
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self.process.wait(1)
            self._drop()
        return code

    def _reason(self, code: int | None) -> str:
        if code is None:
            return "decoding it was stopped"
        if code == -signal.SIGXCPU:
            return f"it took more than {self.budget.cpu} s of a core to decode"
        if code == 1:  # a MemoryError
            return f"it needs more than {self.budget.memory / 1e9:.1f} GB to decode"
        return f"its decoder crashed ({code})"

    def __del__(self) -> None:
        if getattr(self, "process", None) is not None:
            self.kill()


def launch(theirs: socket.socket, budget: Budget, nice: int) -> "subprocess.Popen[bytes]":
    """Start the process, with its end of the connection."""
    file, null = theirs.fileno(), subprocess.DEVNULL
    serving = f"from vitlab.data.sandbox import serve; serve({file}, {budget.cpu}, {budget.memory}, {nice})"
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread reserves address space
    try:
        return subprocess.Popen(  # a session of its own, since Ctrl-C in the terminal is handled by the caller
            python_command(serving),
            stdin=null,
            stdout=null,
            stderr=null,
            env=env,
            pass_fds=[file],
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"no process to decode images in could be started: {error.strerror or error}") from None


def python_command(code: str) -> list[str]:
    """Runs code in an interpreter that finds its modules where this one does, and none in the current folder (-P).

    Unless this package itself is there, as in a clone that is not installed: then it must be the same one.
    """
    paths = [path for path in sys.path if path]
    if PACKAGE_FOLDER not in paths and "" in sys.path:
        paths.insert(0, PACKAGE_FOLDER)
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {paths!r}; {code}"]


# ---- messages


def send(wire: socket.socket, header: dict[str, Any], data: Buffer = b"", deadline: float | None = None) -> None:
    wire.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
    text = json.dumps(header).encode()
    wire.sendall(LENGTH.pack(len(text)) + text)
    wire.sendall(data)


def receive_header(wire: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    (length,) = LENGTH.unpack(receive(wire, LENGTH.size, deadline))
    if length > MAX_HEADER_BYTES:
        raise EOFError
    return dict(json.loads(receive(wire, length, deadline)))


def receive(wire: socket.socket, length: int, deadline: float | None = None) -> bytearray:
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        wire.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        count = wire.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return data


def bands(size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The rows of an image of (width, height), as (top, bottom) of each band."""
    step = max(1, BAND_PIXELS // size[0])
    return ((top, min(top + step, size[1])) for top in range(0, size[1], step))


def receive_image(wire: socket.socket, size: tuple[int, int], deadline: float) -> Image.Image:
    image = Image.new("RGB", size)
    for top, bottom in bands(size):
        pixels = receive(wire, 3 * size[0] * (bottom - top), deadline)
        image.paste(Image.frombytes("RGB", (size[0], bottom - top), bytes(pixels)), (0, top))
    return image


# ---- inside the process


def serve(file: int, cpu: int, memory: int, nice: int) -> None:
    """Answer requests until the caller closes the connection, each within `cpu` seconds of a core; write no files.

    The address space is limited to `memory` bytes more than now, where its current size can be read.
    """
    import resource  # on POSIX systems only, as is this process

    wire = socket.socket(fileno=file)
    Image.MAX_IMAGE_PIXELS = None  # the limits here are stricter
    Image.init()
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as about:
        own = int(about.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (own + memory, own + memory))
    with contextlib.suppress(EOFError, OSError):
        while True:
            header = receive_header(wire)
            data = receive(wire, header["bytes"])
            used = int(time.process_time()) + 1  # the system counts from the start of the process
            resource.setrlimit(resource.RLIMIT_CPU, (used + cpu, resource.RLIM_INFINITY))
            answer_request(wire, header, data)


def answer_request(wire: socket.socket, header: dict[str, Any], data: bytearray) -> None:
    """Answer one request; a MemoryError ends the process, which the caller replaces."""
    request = from_json(DecodeRequest, {key: header[key] for key in ("formats", "most_pixels", "size", "preprocess")})

    def ask(size: Size) -> float:
        send(wire, {"ask": size})
        return float(receive_header(wire)["factor"])

    try:
        image = decode_bytes(data, ask if header["shrink"] else None, request.formats, request.most_pixels)
        if request.size is not None:
            image = frame_image(image, request.size, request.preprocess)
    except DecodeError as error:
        send(wire, {"fault": error.fault, "why": error.why})
    else:
        send(wire, {"width": image.width, "height": image.height})
        for top, bottom in bands(image.size):
            wire.sendall(image.crop((0, top, image.width, bottom)).tobytes())
