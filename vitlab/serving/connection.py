"""One client's connection: HTTP/1.1 that reads only what somebody asks for.

The headers are read, then the application runs; the body is parsed when the application asks for it, and the next
request when the answer has been taken. So a client can make the server hold a few buffers, and make it work at the
pace of its own reading: what it sends beyond that stays in the kernel.
"""

import asyncio
import contextlib
import json
import logging
import time
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import Message, Scope
from uvicorn.server import ServerState

from vitlab.serving.limits import LEAST_PIECE, LEAST_RATE, SPARE_PIECES, Limits, Refused
from vitlab.serving.pool import ConnectionPool

log = logging.getLogger("vitlab")

KEEP_ALIVE = 5.0  # seconds between two requests of a connection
LINGER = 2.0  # seconds for a client to read the refusal of a body that it is still sending
LINGER_PAUSE = 0.005  # between two reads of such a body: at most 13 MB/s are thrown away for anyone
BLOCK = 65_536  # bytes of one read
EVENTS = 16  # pieces of a body that are parsed before others have their turn
FULL = "too many connections; try again in a moment"
NOT_HTTP = "this is not HTTP that can be understood"


class Connection(asyncio.BufferedProtocol):
    """What uvicorn makes of every socket; `limits` and `table` are set by a subclass."""

    limits: Limits
    table: ConnectionPool
    block = memoryview(bytearray(BLOCK))  # emptied right after each read, so one is enough for all

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.app, self.server, self.app_state = config.loaded_app, server_state, app_state
        self.loop = _loop or asyncio.get_running_loop()
        self.http = h11.Connection(h11.SERVER)
        self.inbox = b""  # read and not yet parsed
        self.waiter: asyncio.Future[None] | None = None
        self.enough = 1  # bytes to wake the waiter for
        self.closed, self.drained = asyncio.Event(), asyncio.Event()
        self.drained.set()
        self.address = ""
        self.waits: float | None = time.monotonic()
        self.served = self.busy = self.last = False
        self.start_request()

    def start_request(self) -> None:
        self.pieces = self.length = self.taken = self.marked = 0
        self.complete = self.handed = self.answered = self.crowded = False  # handed: the app has seen the end
        self.response: h11.Response | None = None
        self.method = b""

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # `drained` means that the kernel has it all
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self.server.connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes there
        if self.table.crowded:
            self.refuse(Refused(503, FULL))
            transport.close()
            return
        task = self.loop.create_task(self.talk())
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.block

    def buffer_updated(self, nbytes: int) -> None:
        self.inbox += bytes(self.block[:nbytes])
        if self.waiter is None or self.waiter.done():
            self.transport.pause_reading()  # nobody asked; until then the rest stays in the kernel
        elif len(self.inbox) >= self.enough:
            self.waiter.set_result(None)

    def eof_received(self) -> None:
        return None  # closes: who sends no more is not waited for

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self.closed.set()
        self.drained.set()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def pause_writing(self) -> None:
        self.drained.clear()

    def resume_writing(self) -> None:
        self.drained.set()

    # ---- what uvicorn's server and the table call

    def shutdown(self) -> None:
        """The server stops: what has begun is finished, and nothing else is begun."""
        self.last = True
        if not self.busy:
            self.transport.close()

    def drop(self) -> None:
        self.transport.abort()

    # ---- the conversation

    async def talk(self) -> None:
        try:
            try:
                if not await self.table.enter(self):
                    raise Refused(503, FULL)
                while await self.exchange():
                    self.start_request()
            except Refused as refused:
                self.refuse(refused)
            if await self.flush():
                await self.linger()
        except Exception:
            log.exception("a connection failed")
        finally:
            self.table.leave(self)
            self.finish()

    async def exchange(self) -> bool:
        """One request and its answer; whether another may follow."""
        request = await self.head()
        if request is None:
            return False
        self.busy, self.waits = True, None
        try:
            await self.app(self.scope(request), self.receive, self.send)
        except Exception:  # the guard has logged it, after its answer had begun
            self.drop()
        if not self.answered or not await self.flush():
            self.drop()
            return False
        self.busy, self.served, self.waits = False, True, time.monotonic()
        if self.last or self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True

    async def head(self) -> h11.Request | None:
        """The next request's line and headers; None where the client has left or never began."""
        begun = early = bool(self.http.trailing_data[0])  # sent before the last answer
        seconds = self.limits.header_seconds
        try:
            async with asyncio.timeout(seconds if begun or not self.served else KEEP_ALIVE) as limit:
                while (event := self.next_event()) is h11.NEED_DATA:
                    if not await self.feed():
                        return None
                    if not begun:
                        begun, self.waits = True, time.monotonic()
                        limit.reschedule(self.loop.time() + seconds)
        except TimeoutError:
            if begun:
                raise Refused(408, "the request's headers did not arrive in time") from None
            return None
        if not isinstance(event, h11.Request):
            return None
        check_framing(event)
        self.method, self.pieces = event.method, 0
        fields = dict(event.headers)
        self.length = int(fields.get(b"content-length", b"0"))
        if not self.length and b"transfer-encoding" not in fields:
            self.next_event()  # the end of a message without a body, which is here already
            self.complete = True
            early = early or bool(self.http.trailing_data[0])
        if early and not await self.table.turn(self.limits.answer_seconds):
            return None
        return event

    def next_event(self) -> Any:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError:
            raise Refused(400, NOT_HTTP, {"Connection": "close"}) from None

    async def feed(self, enough: int = 1) -> bool:
        """More bytes for the parser; False when there are no more."""
        data = await self.read(enough)
        if not data:
            return False
        self.count_piece()
        self.http.receive_data(data)
        return True

    async def read(self, enough: int = 1) -> bytes:
        """What has arrived; where nothing has, what comes, as soon as that is enough."""
        if not self.inbox and not self.closed.is_set():
            self.waiter, self.enough = self.loop.create_future(), enough
            self.transport.resume_reading()
            try:
                await self.waiter
            finally:
                self.waiter = None
        data, self.inbox = self.inbox, b""
        return data

    def count_piece(self) -> None:
        """Each read and each chunk costs the same whatever it holds, so there is a limit to how little that may be."""
        self.pieces += 1
        if self.pieces > SPARE_PIECES + self.taken // LEAST_PIECE:
            sentence = f"the request comes in too many tiny pieces; send at least {LEAST_PIECE} bytes at a time"
            raise Refused(400, sentence, {"Connection": "close"})

    # ---- the application's side

    def scope(self, request: h11.Request) -> Scope:
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
        if self.handed and not self.answered:
            if not self.inbox:
                self.transport.resume_reading()  # or nobody would notice that the client leaves
            await self.closed.wait()
        if self.answered or self.closed.is_set():
            return {"type": "http.disconnect"}
        if self.complete:  # there is no body
            self.handed = True
            return {"type": "http.request", "body": b"", "more_body": False}
        if self.http.they_are_waiting_for_100_continue:
            self.transport.write(self.http.send(h11.InformationalResponse(status_code=100, headers=[])))
        if self.crowded:
            await asyncio.sleep(0)
        self.waits = self.waits or time.monotonic()
        data = await self.some_body()
        if data is None:
            return {"type": "http.disconnect"}
        self.taken += len(data)
        if self.complete:
            self.handed, self.waits = True, None
        elif self.taken - self.marked >= LEAST_RATE:  # less than that is no progress
            self.marked, self.waits = self.taken, time.monotonic()
        return {"type": "http.request", "body": data, "more_body": not self.complete}

    async def some_body(self) -> bytes | None:
        """As much of the body as is here, but no more pieces of it than are quickly parsed; None: the client left."""
        data = bytearray()
        for _ in range(EVENTS):
            event = self.next_event()
            if event is h11.NEED_DATA:
                if data:
                    break
                if not await self.feed(min(LEAST_RATE, self.length - self.taken)):  # a byte at a time wakes nobody
                    return None
            elif isinstance(event, h11.Data):
                data += event.data
                self.count_piece()
            else:
                self.complete = True
                break
        else:
            self.crowded = True
        return bytes(data)

    async def send(self, message: Message) -> None:
        if self.closed.is_set():
            return
        if message["type"] == "http.response.start":
            headers = [*self.server.default_headers, *message.get("headers", ())]
            if (self.last or not self.complete) and (b"connection", b"close") not in headers:
                headers.append((b"connection", b"close"))
            self.response = h11.Response(status_code=message["status"], headers=headers)
            return  # and leaves together with the body
        out = []
        if self.response is not None:
            out.append(self.http.send(self.response))
            self.response = None
        if self.method != b"HEAD":
            out.append(self.http.send(h11.Data(message.get("body", b""))))
        if not message.get("more_body", False):
            out.append(self.http.send(h11.EndOfMessage()))
            self.answered = True
        self.transport.write(b"".join(part or b"" for part in out))

    # ---- the end of an answer

    async def flush(self) -> bool:
        """Until the kernel has the answer; False if the client does not read it."""
        self.waits = time.monotonic()
        left = self.transport.get_write_buffer_size()
        while left:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.answer_seconds):
                    await self.drained.wait()
            before, left = left, self.transport.get_write_buffer_size()
            if left and before - left < LEAST_RATE * self.limits.answer_seconds:
                return False
        return not self.closed.is_set()

    async def linger(self) -> None:
        """A client that is still sending gets a moment to read its answer: closing now would take it away again."""
        if self.http.their_state not in (h11.SEND_BODY, h11.ERROR):
            return
        self.waits = time.monotonic()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER):
                self.transport.write_eof()
                while await self.read():  # thrown away unparsed
                    await asyncio.sleep(LINGER_PAUSE)

    def finish(self) -> None:
        """Closed in peace where all is written, cut where not: nothing waits for who does not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self.transport.close()

    def refuse(self, refused: Refused) -> None:
        """An answer to something that never became a request."""
        if self.transport.is_closing():
            return
        body = json.dumps({"error": refused.sentence}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun already
            for event in (
                h11.Response(status_code=refused.status, headers=headers),
                h11.Data(body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.http.send(event) or b"")


def check_framing(request: h11.Request) -> None:
    """Where a message ends must not be a matter of opinion, or a proxy may see other requests than we do."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refused(400, "a request with both Content-Length and Transfer-Encoding is ambiguous; send one of them")
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise Refused(400, "Transfer-Encoding needs HTTP/1.1; send a Content-Length")
