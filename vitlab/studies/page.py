"""study.html: one file with the figure, the table beside the paper's numbers, and the commands of every row."""

import functools
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from vitlab import __version__
from vitlab.html import data_url
from vitlab.studies.place import describe
from vitlab.studies.table import Table, cells


def render_page(table: Table, picture: Path | None) -> str:
    """The page as HTML; characters that UTF-8 cannot encode, which paths may have, become question marks."""
    heads, rows = cells(table)
    about = {key: value for key, value in describe(table.study, table.request).items() if value and key != "format"}
    text = (
        templates()
        .get_template("page.html")
        .render(
            study=table.study,
            heads=heads,
            rows=rows,
            lines=table.lines,
            notes=table.notes,
            numbers=1 + len(table.abouts),  # cells before the first number
            about={key: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for key, v in about.items()},
            left=sum(line.over < table.request.seeds for line in table.lines),
            picture=None if picture is None else data_url(picture.read_bytes(), "png"),
            version=__version__,
        )
    )
    return text.encode("utf-8", "replace").decode()


@functools.cache
def templates() -> Environment:
    loader = PackageLoader("vitlab.studies", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
