"""The process: a socket, connections that are not waited for forever, and an orderly end.

Uvicorn reads HTTP. What it leaves open is closed here: a connection that does not finish its headers, that keeps on
sending after its answer, or that does not read its answer.
"""

import asyncio
import contextlib
import errno
import json
import logging
import socket
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Literal

import h11
import uvicorn
from PIL import Image
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitlab.config import UserError
from vitlab.serving.limits import Limits

KEEP_ALIVE = 5  # seconds between two requests of a connection
DRAIN = 25  # seconds to finish what has begun, when asked to stop; orchestrators kill after 30
Phase = Literal["headers", "leftover"] | None


class Protocol(H11Protocol):
    """Uvicorn's HTTP/1.1, impatient."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.phase: Phase = None
        self.timer: asyncio.TimerHandle | None = None
        self.begun = False
        if len(self.connections) > self.limits.connections:
            self.refuse(503, "too many connections; try again in a moment")
        self.watch()

    def data_received(self, data: bytes) -> None:
        self.begun = True
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        self.begun = False
        super().on_response_complete()
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.stop_timer()

    def watch(self) -> None:
        """Arm the timer of the phase the connection is in, once per phase."""
        theirs, ours = self.conn.their_state, self.conn.our_state
        phase: Phase = None
        if theirs is h11.IDLE:
            phase = "headers"
        elif theirs is h11.SEND_BODY and ours in (h11.DONE, h11.MUST_CLOSE):
            phase = "leftover"  # answered already; the rest of the body is read to nowhere, but not forever
        if phase == self.phase:
            return
        self.stop_timer()
        self.phase = phase
        if phase == "headers":
            self.timer = self.loop.call_later(self.limits.header_seconds, self.headers_late)
        elif phase == "leftover":
            self.timer = self.loop.call_later(self.limits.body_seconds, self.transport.abort)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.phase = None

    def headers_late(self) -> None:
        if self.begun:
            self.refuse(408, "the request's headers did not arrive in time")
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.limits.body_seconds, self.transport.abort)  # if the answer is still not read by then

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "this is not HTTP that can be understood")

    def refuse(self, status: int, sentence: str) -> None:
        """An answer to something that never became a request."""
        if self.transport.is_closing():
            return
        body = json.dumps({"error": sentence}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun already
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Says when it listens and when it is asked to stop; exits with 0, where uvicorn would die of the signal."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start, self.on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # asked twice: at once
        self.should_exit = True
        self.on_stop()


def listen(host: str, port: int) -> socket.socket:
    """The socket, taken before the model is loaded, so that a port in use is told at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, proto)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken_already = error.errno == errno.EADDRINUSE
        reason = "it is in use" if taken_already else str(error.strerror or error)
        option = "--port" if taken_already or error.errno == errno.EACCES else "--host"
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another with {option}") from None
    return taken


def serve(
    app: ASGIApp,
    sock: socket.socket,
    limits: Limits,
    on_start: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """Until SIGTERM or Ctrl-C; then what has begun is finished, for at most DRAIN seconds."""
    Image.MAX_IMAGE_PIXELS = limits.max_pixels  # Pillow's own guard stands at twice this
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # and ours, at this, refuses
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        app,
        http=type("Timed", (Protocol,), {"limits": limits}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=DRAIN,
        server_header=False,
        proxy_headers=False,
    )
    Server(config, on_start, on_stop).run(sockets=[sock])


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
