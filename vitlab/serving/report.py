"""The report of a run, as the server shows it: anyone may have written the file, so it may do nothing but be seen."""

import base64
import functools
import hashlib
import secrets
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MAX_BYTES = 100_000_000
PIECE = 65_536  # bytes sent at a time: the next ones when the client has read these
# forms may close a dialog, and have no place to be sent to
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox allow-scripts allow-forms; script-src "
)


@dataclass(frozen=True)
class Report:
    """A report in memory, and the path it is served at."""

    path: str
    html: bytes


def read_report(run: Path, has_token: bool) -> Report | None:
    """The report of a run folder, None where there is none.

    A link in a browser cannot send a token: with one, the path has a secret in it, which the page gets with its token.
    """
    path = run / "report.html"
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:  # no link out of the folder
        return None
    return Report(f"/report/{secrets.token_urlsafe(16)}" if has_token else "/report", path.read_bytes())


@functools.cache
def policy() -> str:
    """No request of any kind, and no script but those of this package's own reports, by their digests.

    In its sandbox it is of no origin: what it might do, it could not do as the page of this server.
    """
    files = resources.files("vitlab").joinpath("report").iterdir()
    scripts = sorted(file.read_bytes() for file in files if file.name.endswith(".js"))
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    return POLICY + (" ".join(f"'sha256-{digest}'" for digest in digests) or "'none'")


class ReportResponse(Response):
    """Sends the report in pieces; the connection waits for its client between two of them, so it buffers only one."""

    media_type = "text/html"

    def __init__(self, report: Report) -> None:
        super().__init__(headers={"Content-Security-Policy": policy(), "Content-Length": str(len(report.html))})
        self.html = memoryview(report.html)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.html), PIECE):
            piece = bytes(self.html[start : start + PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
