"""The process: a socket, the limit on open files, and a clean shutdown."""

import contextlib
import errno
import logging
import resource  # on POSIX systems only, as are the processes that decode
import socket
import warnings
from collections.abc import Callable
from types import FrameType

import uvicorn
from PIL import Image
from starlette.types import ASGIApp

from vitlab.errors import UserError
from vitlab.serving.connection import Connection
from vitlab.serving.garbage import keep_all
from vitlab.serving.limits import Limits
from vitlab.serving.pool import ConnectionPool

DRAIN = 25  # seconds for requests in progress after a signal to stop; orchestrators kill after 30
OTHER_FILES = 256  # open files that are not connections
SEND_BUFFER = 65_536  # bytes; the kernel would buffer megabytes of answers for a client that reads none


class Server(uvicorn.Server):
    """Calls back when it listens and when a signal stops it; exits with 0, where uvicorn raises the signal again."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start, self.on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        keep_all()
        if self.started:
            self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # the second signal ends it at once
        self.should_exit = True
        self.on_stop()


def listen(host: str, port: int) -> socket.socket:
    """Bind the socket; before the model is loaded, so that a port in use is reported at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # its connections inherit it
        sock.bind(address)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "it is in use" if in_use else str(error.strerror or error)
        option = "--port" if in_use or error.errno == errno.EACCES else "--host"
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another with {option}") from None
    return sock


def available_connections(connections: int) -> int:
    """Raise the limit on open files for so many connections; return how many of them it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + OTHER_FILES  # as many again may wait to be admitted
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # some systems have another limit, which they do not report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(connections, max(1, (soft - OTHER_FILES) // 2, soft // 4))


def serve(
    app: ASGIApp, sock: socket.socket, limits: Limits, on_start: Callable[[], None], on_stop: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C; then requests in progress are finished, for at most DRAIN seconds."""
    Image.MAX_IMAGE_PIXELS = limits.max_pixels  # Pillow's own limit is twice this
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower and raises
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    pool = ConnectionPool(available_connections(limits.connections))
    config = uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": limits, "pool": pool}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        timeout_graceful_shutdown=DRAIN,
        server_header=False,
        proxy_headers=False,
    )
    Server(config, on_start, on_stop).run(sockets=[sock])


def server_url(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
