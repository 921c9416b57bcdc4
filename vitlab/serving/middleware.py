"""Runs before every route: Host, token, headers that keep browsers safe, errors in one format, metrics."""

import hmac
import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.serving.hosts import AllowedHosts
from vitlab.serving.limits import RequestError
from vitlab.serving.metrics import Metrics
from vitlab.serving.uploads import ClientDisconnected

log = logging.getLogger("vitlab")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
PUBLIC = ("/", "/docs", "/openapi.json", "/healthz")  # without a token
DISCONNECTED = 499  # never sent: the status that is counted for a client that disconnected


class SecurityMiddleware:
    """An ASGI app around the app, which decides before a byte of the body is read.

    With a token, every path but the public ones requires it; without one, `hosts` decides which names are this server.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        token: str | None,
        hosts: AllowedHosts | None = None,
        public: Sequence[str] = PUBLIC,
    ) -> None:
        self.app, self.metrics, self.token, self.hosts, self.public = app, metrics, token, hosts, public

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

        if scope["method"] == "HEAD":  # the connection leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            self.check_host(scope)
            self.check_token(scope)
            await self.app(scope, receive, safe_send)
        except RequestError as error:
            await error_response(error)(scope, receive, safe_send)
        except ClientDisconnected:
            status = DISCONNECTED
        except Exception:
            log.exception("a request to %s failed", scope["path"])
            if status:  # too late for another answer: the connection is closed
                raise
            failure = RequestError(500, "the server failed on this request; see its log")
            await error_response(failure)(scope, receive, safe_send)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.count_request(route, status or DISCONNECTED, time.perf_counter() - start)

    def check_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host")  # browsers always send one
        if self.token is None and self.hosts is not None and host is not None and not self.hosts.allows(host):
            message = f"this server does not have the name '{host[:80]}'; start it with --host-name to allow it"
            raise RequestError(421, message)

    def check_token(self, scope: Scope) -> None:
        if self.token is None or scope["path"] in self.public or scope["path"].startswith("/page/"):
            return
        kind, _, token = Headers(scope=scope).get("authorization", "").encode("latin-1").partition(b" ")
        same = hmac.compare_digest(token.strip(), self.token.encode())  # takes as long whatever is wrong
        if kind.lower() != b"bearer" or not same:
            message = "this server requires a token: send the header 'Authorization: Bearer TOKEN'"
            raise RequestError(401, message, {"WWW-Authenticate": "Bearer"})


def error_response(error: RequestError) -> Response:
    return Response(error.body, error.status, error.headers, "application/json")
