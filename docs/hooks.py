"""Hooks of the site's build: the README as its home page, and tables of settings from the code."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the package beside these pages, not one that is installed elsewhere

from vitlab.data.transforms import Augment  # noqa: E402
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig  # noqa: E402
from vitlab.settings import describe  # noqa: E402
from vitlab.training.recipe import NESTED, Recipe  # noqa: E402
from vitlab.training.search import Repeats  # noqa: E402

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Recipe, Repeats, Augment, Preprocess, ViTConfig, ResNetConfig, StemConfig)
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
    for setting in describe(kind, skip=NESTED if kind is Recipe else ()):
        default = f"`{setting.default}`" if setting.default else "-"
        cells = (f"`{setting.name}`", f"`{setting.type}`", default, setting.help)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
