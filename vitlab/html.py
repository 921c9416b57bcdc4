"""Small pieces of HTML for notebooks and pages; every text is escaped."""

import base64
from collections.abc import Iterable
from html import escape


def bar_table(caption: str, rows: Iterable[tuple[str, float]]) -> str:
    """A table of names and shares from 0 to 1, each with a bar."""
    bar = '<div style="width:{:.1f}px;height:0.8em;background:#0072b2"></div>'
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{share:.1%}</td><td>{bar.format(100 * share)}</td></tr>"
        for name, share in rows
    )
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"


def data_url(data: bytes, kind: str) -> str:
    """An image of the given kind, such as "png", as a data: URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
