"""The process: a socket, room for its connections, and an orderly end."""

import contextlib
import errno
import gc
import logging
import socket
import warnings
from collections.abc import Callable
from types import FrameType

import uvicorn
from PIL import Image
from starlette.types import ASGIApp

from vitlab.errors import UserError
from vitlab.serving.connection import Connection
from vitlab.serving.limits import Limits
from vitlab.serving.pool import ConnectionPool

DRAIN = 25  # seconds to finish what has begun, when asked to stop; orchestrators kill after 30
FILES = 256  # open files beside the connections'
SEND_BUFFER = 65_536  # bytes; the kernel would take megabytes of answers for a client that reads none


class Server(uvicorn.Server):
    """Says when it listens and when it is asked to stop; exits with 0, where uvicorn would die of the signal."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start, self.on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is here stays: looking through all of torch again would stop everybody for 0.2 s at a time
        if self.started:
            self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # asked twice: at once
        self.should_exit = True
        self.on_stop()


def listen(host: str, port: int) -> socket.socket:
    """The socket, taken before the model is loaded, so that a port in use is reported at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, proto)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # its connections inherit it
        taken.bind(address)
    except OSError as error:
        taken_already = error.errno == errno.EADDRINUSE
        reason = "it is in use" if taken_already else str(error.strerror or error)
        option = "--port" if taken_already or error.errno == errno.EACCES else "--host"
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another with {option}") from None
    return taken


def room(connections: int) -> int:
    """As many connections as wanted, or as this process may have files open."""
    try:
        import resource
    except ImportError:  # not a Unix
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + FILES  # as many again may wait for a place
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # some systems have another limit, which they do not name
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(connections, max(1, (soft - FILES) // 2, soft // 4))


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
    table = ConnectionPool(room(limits.connections))
    config = uvicorn.Config(
        app,
        http=type("Limited", (Connection,), {"limits": limits, "table": table}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN,
        server_header=False,
        proxy_headers=False,
    )
    Server(config, on_start, on_stop).run(sockets=[sock])


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
