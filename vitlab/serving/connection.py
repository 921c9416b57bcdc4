"""One client's connection: HTTP/1.1 in which nothing is read before it is asked for.

The headers are read, then the application runs; the body is parsed when the application asks for it, and the next
request when the client has read the answer. So a client can make the server hold a few buffers, and make it work at the
pace of its own reading: what it sends beyond that stays in the kernel.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import Message, Scope
from uvicorn.server import ServerState

from vitlab.serving.limits import CLOSE, MIN_PIECE, MIN_RATE, SMALL_PIECES, Limits, RequestError
from vitlab.serving.pool import ConnectionPool

log = logging.getLogger("vitlab")

KEEP_ALIVE = 5.0  # seconds between two requests of a connection
LINGER = 2.0  # seconds for a client to read the error for a body that it is still sending
LINGER_PAUSE = 0.005  # seconds between two reads of such a body: at most 13 MB/s are discarded for each client
READ_SIZE = 65_536  # bytes
EVENTS = 16  # pieces of a body that are parsed before other connections run
OVERLOADED = "too many connections; try again in a moment"


class Connection(asyncio.BufferedProtocol):
    """The protocol that uvicorn creates for every socket; a subclass sets `limits` and `pool`.

    A client that closes its side gets no more: asyncio closes the connection, unless `eof_received` is overridden.
    """

    limits: Limits
    pool: ConnectionPool
    read_buffer = memoryview(bytearray(READ_SIZE))  # copied right after each read, so all connections share it

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: object = None
    ) -> None:
        self.app, self.server, self.app_state = config.loaded_app, server_state, app_state
        self.loop = asyncio.get_running_loop()
        self.http = h11.Connection(h11.SERVER)
        self.unparsed = b""
        self.reader: asyncio.Future[None] | None = None  # done when `wanted` bytes have arrived
        self.wanted = 1
        self.closed, self.drained = asyncio.Event(), asyncio.Event()
        self.drained.set()
        self.idle_since: float | None = time.monotonic()
        self.has_served = self.is_busy = self.is_stopping = False
        self.start_request()

    def start_request(self) -> None:
        self.method = b""
        self.pieces = self.length = self.received = self.progress = 0  # all but `pieces` in bytes of the body
        self.is_complete = self.is_delivered = False  # parsed to its end; and the application has seen that end
        self.is_answered = self.must_yield = False
        self.response: h11.Response | None = None

    # ---- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # `drained` means that the kernel has it all
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self.server.connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes there
        if self.pool.waiting >= self.pool.size:  # as many wait as may be admitted
            self.send_error(RequestError(503, OVERLOADED))
            transport.close()
            return
        task = self.loop.create_task(self.run())
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.unparsed += bytes(self.read_buffer[:nbytes])
        if self.reader is None or self.reader.done():
            self.transport.pause_reading()  # nothing asked for it; the rest stays in the kernel
        elif len(self.unparsed) >= self.wanted:
            self.reader.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self.closed.set()
        self.drained.set()
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def pause_writing(self) -> None:
        self.drained.clear()

    def resume_writing(self) -> None:
        self.drained.set()

    # ---- called by uvicorn's server and the pool

    def shutdown(self) -> None:
        """The server stops: the current request is finished, and no other is begun."""
        self.is_stopping = True
        if not self.is_busy:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    # ---- requests, one after the other

    async def run(self) -> None:
        try:
            try:
                if not await self.pool.admit(self):
                    raise RequestError(503, OVERLOADED)
                while await self.handle_request():
                    self.start_request()
            except RequestError as error:
                self.send_error(error)
            if await self.flush():
                await self.linger()
        except Exception:
            log.exception("a connection failed")
        finally:
            self.pool.remove(self)
            if self.transport.get_write_buffer_size():  # what the client has not read by now is discarded
                self.transport.abort()
            self.transport.close()

    async def handle_request(self) -> bool:
        """Read one request and answer it; returns whether another may follow."""
        if (request := await self.read_headers()) is None:
            return False
        self.is_busy, self.idle_since = True, None
        try:
            await self.app(self.build_scope(request), self.receive, self.send)
        except Exception:  # the middleware has logged it, after its answer had begun
            self.abort()
        if not self.is_answered or not await self.flush():
            self.abort()
            return False
        self.is_busy, self.has_served, self.idle_since = False, True, time.monotonic()
        if self.is_stopping or self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True

    async def read_headers(self) -> h11.Request | None:
        """Read the next request's line and headers; None where the client has left or sent nothing."""
        has_begun = is_pipelined = bool(self.http.trailing_data[0])  # sent before the last answer
        seconds = self.limits.header_seconds
        try:
            async with asyncio.timeout(seconds if has_begun or not self.has_served else KEEP_ALIVE) as limit:
                while (event := self.next_event()) is h11.NEED_DATA:
                    if not await self.feed_parser():
                        return None
                    if not has_begun:
                        has_begun, self.idle_since = True, time.monotonic()
                        limit.reschedule(self.loop.time() + seconds)
        except TimeoutError:
            if has_begun:
                raise RequestError(408, "the request's headers did not arrive in time") from None
            return None
        if not isinstance(event, h11.Request):
            return None
        check_framing(event)
        self.method, self.pieces = event.method, 0
        fields = dict(event.headers)
        self.length = int(fields.get(b"content-length", b"0"))
        if not self.length and b"transfer-encoding" not in fields:
            self.next_event()  # the end of a message without a body, which is here already
            self.is_complete = True
            is_pipelined = is_pipelined or bool(self.http.trailing_data[0])
        if is_pipelined and not await self.pool.wait_to_pipeline(self.limits.answer_seconds):
            return None
        return event

    def next_event(self) -> Any:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError:
            raise RequestError(400, "this is not valid HTTP", CLOSE) from None

    async def feed_parser(self, wanted: int = 1) -> bool:
        """Give the parser more bytes; False when there are no more."""
        if not (data := await self.read(wanted)):
            return False
        self.count_piece()
        self.http.receive_data(data)
        return True

    async def read(self, wanted: int = 1) -> bytes:
        """Return what has arrived; where nothing has, wait for `wanted` bytes; empty when the client has left."""
        if not self.unparsed and not self.closed.is_set():
            self.reader, self.wanted = self.loop.create_future(), wanted
            self.transport.resume_reading()
            try:
                await self.reader
            finally:
                self.reader = None
        data, self.unparsed = self.unparsed, b""
        return data

    def count_piece(self) -> None:
        """Each read and each chunk costs the same whatever its size, so their average size has a lower limit."""
        self.pieces += 1
        if self.pieces > SMALL_PIECES + self.received // MIN_PIECE:
            message = f"the request comes in too many tiny pieces; send at least {MIN_PIECE} bytes at a time"
            raise RequestError(400, message, CLOSE)

    # ---- the ASGI interface

    def build_scope(self, request: h11.Request) -> Scope:
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "server": (self.transport.get_extra_info("sockname") or ("", 0))[:2],
            "client": (self.transport.get_extra_info("peername") or ("", 0))[:2],
            "scheme": "http",
            "method": request.method.decode(),
            "root_path": "",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
            "state": self.app_state.copy(),
        }

    async def receive(self) -> Message:
        if self.is_delivered and not self.is_answered:
            if not self.unparsed:
                self.transport.resume_reading()  # or a disconnect would not be noticed
            await self.closed.wait()
        if self.is_answered or self.closed.is_set():
            return {"type": "http.disconnect"}
        if self.http.they_are_waiting_for_100_continue:
            self.transport.write(self.http.send(h11.InformationalResponse(status_code=100, headers=[])))
        if self.must_yield:
            await asyncio.sleep(0)
        self.idle_since = self.idle_since or time.monotonic()
        data = b"" if self.is_complete else await self.read_body()
        if data is None:
            return {"type": "http.disconnect"}
        self.received += len(data)
        if self.is_complete:
            self.is_delivered, self.idle_since = True, None
        elif self.received - self.progress >= MIN_RATE:  # less than that does not count as progress
            self.progress, self.idle_since = self.received, time.monotonic()
        return {"type": "http.request", "body": data, "more_body": not self.is_complete}

    async def read_body(self) -> bytes | None:
        """As much of the body as is here, at most EVENTS pieces of it; None where the client has left."""
        data = bytearray()
        for _ in range(EVENTS):
            event = self.next_event()
            if event is h11.NEED_DATA:
                if data:
                    break
                # a body that comes byte by byte does not run this code for each of them
                if not await self.feed_parser(min(MIN_RATE, self.length - self.received)):
                    return None
            elif isinstance(event, h11.Data):
                data += event.data
                self.count_piece()
            else:
                self.is_complete = True
                break
        else:
            self.must_yield = True
        return bytes(data)

    async def send(self, message: Message) -> None:
        if self.closed.is_set():
            return
        if message["type"] == "http.response.start":
            headers = [*self.server.default_headers, *message.get("headers", ())]
            if (self.is_stopping or not self.is_complete) and (b"connection", b"close") not in headers:
                headers.append((b"connection", b"close"))
            self.response = h11.Response(status_code=message["status"], headers=headers)
            return  # it is sent together with the body
        events: list[h11.Event] = [self.response] if self.response else []
        self.response = None
        if self.method != b"HEAD":
            events.append(h11.Data(message.get("body", b"")))
        if not message.get("more_body", False):
            events.append(h11.EndOfMessage())
            self.is_answered = True
        self.write(*events)
        if not self.is_answered:  # the next piece of a long answer is sent when the client has read this one
            if not await self.flush():
                self.abort()
            self.idle_since = None

    def write(self, *events: h11.Event) -> None:
        self.transport.write(b"".join(self.http.send(event) or b"" for event in events))

    # ---- the end of an answer

    async def flush(self) -> bool:
        """Wait until the kernel has the answer; False if the client does not read it."""
        self.idle_since = time.monotonic()
        left = self.transport.get_write_buffer_size()
        while left:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.answer_seconds):
                    await self.drained.wait()
            before, left = left, self.transport.get_write_buffer_size()
            if left and before - left < MIN_RATE * self.limits.answer_seconds:
                return False
        return not self.closed.is_set()

    async def linger(self) -> None:
        """Give a client that is still sending a moment to read its answer: closing now would discard it."""
        if self.http.their_state not in (h11.SEND_BODY, h11.ERROR):
            return
        self.idle_since = time.monotonic()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER):
                self.transport.write_eof()
                while await self.read():  # discarded unparsed
                    await asyncio.sleep(LINGER_PAUSE)

    def send_error(self, error: RequestError) -> None:
        """Answer something that never became a request."""
        if self.transport.is_closing():
            return
        body = error.body
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun already
            self.write(h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage())


def check_framing(request: h11.Request) -> None:
    """Refuse a message whose end is ambiguous: a proxy in front might see other requests than this server does."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise RequestError(400, "a request with both Content-Length and Transfer-Encoding is ambiguous; send only one")
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise RequestError(400, "Transfer-Encoding needs HTTP/1.1; send a Content-Length")
