"""Small pieces of HTML for notebooks and pages; every text is escaped."""

import base64
import html
from collections.abc import Iterable

from vitlab.text import valid_text


def escape(text: str) -> str:
    """Text in place of markup, that can be encoded whatever file name it came from."""
    return html.escape(valid_text(text))


def bar_table(caption: str, rows: Iterable[tuple[str, float]]) -> str:
    """A table of names and shares from 0 to 1, each with a bar."""
    bar = '<div style="width:{:.1f}px;height:0.8em;background:#0072b2"></div>'
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{share:.1%}</td><td>{bar.format(100 * share)}</td></tr>"
        for name, share in rows
    )
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"


def value_table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"


def picture_card(image: str | None, name: str, content: str) -> str:
    """A small picture, if there is one, with other HTML beside it; `image` is its data: URL."""
    style = "display:inline-flex;align-items:center;gap:1em;margin:0 2em 1em 0"
    picture = "" if image is None else f'<img src="{escape(image)}" alt="{escape(name)}">'
    return f'<div style="{style}">{picture}{content}</div>'


def data_url(data: bytes, kind: str) -> str:
    """An image of the given kind, such as "png", as a data: URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
