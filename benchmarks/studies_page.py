"""Tables and figures of the studies for the documentation: python benchmarks/studies_page.py RESULTS.tgz PAGE.md

RESULTS.tgz is what benchmarks/studies.py packs. For each complete study, the lines of PAGE.md between

    <!-- table: NAME -->
    <!-- end -->

become its table, and its figure is written to studies/NAME.png beside the page. A study is complete with as many seeds
as all its rows have.
"""

import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from studies import SETTINGS, Plan

from vitlab.files import read_json, write_text
from vitlab.studies.place import ABOUT
from vitlab.studies.run import Worker
from vitlab.studies.table import Table, cells, table_line
from vitlab.text import counted


def complete_tables(out: Path) -> Iterator[Table]:
    """The tables of complete studies, their figures drawn."""
    plan = Plan((), out, 14, quick=False)
    for name in SETTINGS:
        begun = read_json(about)["seeds"] if (about := out / name / ABOUT).is_file() else 0
        for seeds in range(begun, 0, -1):
            worker, jobs = plan.stage(f"{name}:{seeds}")
            if all(worker.place.result(job) is not None for job in jobs):
                yield Worker.render(worker, draw=True)  # more than a worker of the plan does
                break
        else:
            print(f"{name}: not complete")


def lines_of(table: Table) -> str:
    """The table for a page's width: rows by their names, means first, what all rows have in common in a line below."""
    heads, rows = cells(table)
    columns = dict(zip(heads, zip(*rows, strict=True), strict=True))
    common = {head: columns[head][0] for head in table.counts if len(set(columns[head])) == 1}
    shown = [head for head in heads if head not in table.abouts and head not in common]
    shown.sort(key=lambda head: (head != "row", "mean" not in head))
    lines = [shown, ["---"] * len(shown), *zip(*(columns[head] for head in shown), strict=True)]
    words = [f"{head} {value}" for head, value in common.items() if value]
    return "\n".join([*map(table_line, lines), "", f"All rows: {', '.join(words)}."])


def main() -> None:
    results, page = map(Path, sys.argv[1:])
    text = page.read_text()
    figures = page.parent / "studies"
    figures.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, tarfile.open(results) as archive:
        archive.extractall(folder, filter="data")
        for table in complete_tables(Path(folder)):
            name = table.study.name
            print(f"{name}: {len(table.lines)} rows, {counted(table.request.seeds, 'seed')}")
            mark = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            if not (place := mark.search(text)):
                print(f"{page} has no place for the table of {name}")
                continue
            text = f"{text[: place.end(1)]}\n{lines_of(table)}\n\n{text[place.start(2) :]}"
            copyfile(table.out / "figure.png", figures / f"{name}.png")
    write_text(page, text)


if __name__ == "__main__":
    main()
