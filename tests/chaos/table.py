"""The rows as JSON, and as the table in docs/reliability.md with what is needed to repeat it."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from chaos.rows import Row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
START, END = "<!-- chaos: start -->", "<!-- chaos: end -->"
SHOWN = 5  # failures of a part that the page lists; chaos.json has all


def about(scale: float, seed: int, only: str) -> dict[str, str]:
    """The command, the commit, the machine, the seed and the date."""
    import torch

    words = [f"--scale {scale:g}" if scale != 1 else "", f"--only {only}" if only else ""]
    return {
        "command": " ".join(["cd tests && python -m chaos", *filter(None, words)]),
        "commit": commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seed": str(seed),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """Short, and marked where the tree had changes: other than the page, which is being written."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!docs/reliability.md")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def write_json(path: Path, facts: Mapping[str, str], rows: list[Row]) -> None:
    path.write_text(json.dumps({**facts, "rows": [vars(row) for row in rows]}, indent=1) + "\n")


def markdown(facts: Mapping[str, str], rows: list[Row]) -> str:
    lines = [
        f"`{facts['command']}`, commit {facts['commit']}, {facts['machine']}, seed {facts['seed']}, {facts['date']}:",
        "",
    ]
    lines += ["| part | tried | failures | seconds | notes |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (
            row.name,
            f"{row.count:,} {row.unit}".strip(),
            str(len(row.failures)),
            f"{row.seconds:,.0f}",
            row.notes,
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    for row in rows:
        if row.failures:
            more = len(row.failures) - SHOWN
            lines += [
                "",
                f"Failures of {row.name}{f', the first {SHOWN} of {len(row.failures)}' if more > 0 else ''}:",
                "",
            ]
            lines += [f"- {line(failure)}" for failure in row.failures[:SHOWN]]
    return "\n".join(lines)


def line(failure: str) -> str:
    """One line of text, without the folders of this machine."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", " ".join(failure.split()))[:300]


def write_page(facts: Mapping[str, str], rows: list[Row], page: Path = PAGE) -> None:
    text = page.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n\n{markdown(facts, rows)}\n\n{END}{after}")
