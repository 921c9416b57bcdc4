"""What the site is given while it is built: the README as its home page, and tables of settings from the code."""

import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the package beside these pages, not one that is installed elsewhere

from vitlab.data.transforms import Augment  # noqa: E402
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig  # noqa: E402
from vitlab.training.recipe import Recipe  # noqa: E402

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Recipe, Augment, Preprocess, ViTConfig, ResNetConfig, StemConfig)
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text, with its markers `<!-- readme -->` and `<!-- settings: CLASS -->` filled in."""
    if "<!-- readme -->" in markdown:
        return home((ROOT / "README.md").read_text(encoding="utf-8"))
    return re.sub(r"<!-- settings: (\w+) -->", lambda match: settings_table(KINDS[match[1]]), markdown)


def home(readme: str) -> str:
    """The README with its links as seen from docs/; a link to a file outside docs/ becomes plain text."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        return match[0] if re.match(r"https?:|#", target) else label

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, readme)


def settings_table(kind: type[Any]) -> str:
    """A Markdown table of the fields of a settings class."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, type_, default, help_ in setting_rows(kind):
        cells = (f"`{name}`", f"`{type_}`", f"`{default}`" if default else "required", help_)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def setting_rows(kind: type[Any]) -> list[tuple[str, str, str, str]]:
    """(name, type, default, help) of every field; help is the comment behind it."""
    hints = typing.get_type_hints(kind)
    comments = dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(kind), re.MULTILINE))
    rows = []
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else default_text(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = f"{typing.cast(Any, field.default_factory).__name__}()"
        rows.append((field.name, type_text(hints[field.name]), default, comments.get(field.name, "")))
    return rows


def default_text(value: object) -> str:
    """A value as it is written in `key=value`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def type_text(hint: Any) -> str:
    """A type in few characters: `int`, `int, int`, `adamw | sgd`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (UnionType, typing.Union):
        return " | ".join("none" if arg is type(None) else type_text(arg) for arg in args)
    if origin is tuple:
        return ", ".join("..." if arg is Ellipsis else type_text(arg) for arg in args)
    return str(getattr(hint, "__name__", hint))
