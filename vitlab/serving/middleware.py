"""What stands before every route: Host, token, headers that keep browsers safe, errors in one shape, the counting."""

import hmac
import json
import logging
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.serving.hosts import Hosts
from vitlab.serving.limits import Refused
from vitlab.serving.metrics import Metrics
from vitlab.serving.uploads import Gone

log = logging.getLogger("vitlab")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OPEN = ("/", "/docs", "/openapi.json", "/healthz")
OPEN_FOLDER = "/page/"
GONE = 499  # never sent: what is counted for a client that went away


class SecurityMiddleware:
    """An ASGI app around the app, which decides before a byte of the body is read.

    Where there is a token, everything wants it but what OPEN names; where there is none, `hosts` says which names mean
    this server.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, token: str | None, hosts: Hosts | None = None) -> None:
        self.app, self.metrics, self.token, self.hosts = app, metrics, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def safe_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["method"] == "HEAD":  # the server leaves the body out; the app need not know
            scope = {**scope, "method": "GET"}
        try:
            self.check_host(scope)
            self.check_token(scope)
            await self.app(scope, receive, safe_send)
        except Refused as refused:
            await answer(safe_send, refused)
        except Gone:
            status = GONE
        except Exception:
            log.exception("a request to %s failed", scope["path"])
            if status:  # too late for another answer: let the server cut the connection
                raise
            await answer(safe_send, Refused(500, "the server failed on this request; its log says why"))
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.answered(route, status or GONE, time.perf_counter() - start)

    def check_host(self, scope: Scope) -> None:
        if self.token is not None or self.hosts is None:
            return
        sent = next((value for name, value in scope["headers"] if name == b"host"), None)
        if sent is not None and not self.hosts.allows(text := sent.decode("latin-1")):  # browsers always send one
            raise Refused(
                421, f"this server does not go by the name '{text[:80]}'; start it with --host-name to allow it"
            )

    def check_token(self, scope: Scope) -> None:
        if self.token is None or scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDER):
            return
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = sent.partition(b" ")
        same = hmac.compare_digest(token.strip(), self.token.encode())  # takes as long whatever is wrong
        if kind.lower() != b"bearer" or not same:
            sentence = "this server wants a token: send the header 'Authorization: Bearer TOKEN'"
            raise Refused(401, sentence, {"WWW-Authenticate": "Bearer"})


async def answer(send: Send, refused: Refused) -> None:
    body = json.dumps({"error": refused.sentence}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **refused.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
