"""What a finished run leaves behind, read again: report.html as a path that shows its page, and scores.json."""

import os
import shlex
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.evaluation.describe import describe_scores
from vitlab.files import read_json, read_text
from vitlab.html import escape
from vitlab.report.make import NAME, SCORES, SCORES_LIMIT


class ReportFile(os.PathLike[str]):
    """The file of a report; a notebook shows the page itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"ReportFile({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which has no access to the notebook."""
        style = "width:100%;height:45em;border:1px solid #8884"
        page = escape(read_text(self.path))
        return f'<iframe title="report" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def find_report(folder: Path) -> ReportFile:
    """The report in a run's folder; UserError where there is none."""
    if not (folder / NAME).is_file():
        raise UserError(f"{folder} has no {NAME}; `vitlab report {shlex.quote(str(folder))}` writes it")
    return ReportFile(folder / NAME)


def read_scores(folder: Path) -> dict[str, Any]:
    """The scores in the report of a run's folder; UserError where there are none, or they are damaged."""
    path = folder / SCORES
    if not path.is_file():
        raise UserError(f"{folder} has no {SCORES}; `vitlab report {shlex.quote(str(folder))}` writes it")
    scores = read_json(path, SCORES_LIMIT)
    try:
        describe_scores(scores)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise UserError(f"{path} does not hold the scores of a run; `vitlab report` writes it again") from None
    return scores
