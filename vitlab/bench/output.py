"""Speeds side by side as tables, numbers and figures."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from vitlab.bench.cases import Axis, Case, axis_value
from vitlab.bench.clock import Row
from vitlab.bench.compare import Outcome
from vitlab.plots.speed import Bars, Lines

AXIS_TITLES = {"batch": "images per batch", "size": "side of the image in pixels", "depth": "layers"}


def case_table(outcome: Outcome) -> Table:
    """The contestants of one case, a row each."""
    best, latency = outcome.best_peer, outcome.case.what == "latency"
    # narrow, and names may wrap, so that 80 columns show all numbers
    headings = ["ms per\nimage" if latency else "images/s", "low to high", "of\nmatmul"]
    headings += ["GB"] if any(row.memory for row in outcome.rows) else []
    headings += [] if best is None else ["of best\npeer"]
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    caption = f"matmul: {outcome.matmul_flops / 1e12:,.3g} TFLOP/s"
    table = Table(
        Column("", overflow="fold"), *columns, title=outcome.case.title, title_justify="left", caption=caption
    )
    for row in outcome.rows:
        values = sorted(amount(rate, latency) for rate in row.rates)
        cells = [
            number(amount(row.median, latency)),
            f"{number(values[0])} to {number(values[-1])}",
            f"{row.share:.1%}",
        ]
        cells += [f"{row.memory / 1e9:.1f}" if row.memory else ""] if "GB" in headings else []
        cells += [] if best is None else [f"{row.ratio(best):.2f}"]
        name = f"{row.name} {row.version}" if " " not in row.name else row.name
        table.add_row(f"{name} ({row.how})" if row.how else name, *cells)
    return table


def growth_table(outcomes: Sequence[Outcome], axis: Axis) -> Table:
    """Medians of images per second, a row for each contestant and a column for each value along the axis."""
    values = [f"{axis_value(outcome.case, axis):,}" for outcome in outcomes]
    title = f"{growth_title(outcomes[0].case, axis)}: images/s by {AXIS_TITLES[axis]}"
    table = Table("", *(Column(value, justify="right") for value in values), title=title, title_justify="left")
    for name, medians in by_name(outcomes).items():
        table.add_row(name, *("" if math.isnan(median) else number(median) for median in medians))
    return table


def growth_title(case: Case, axis: Axis) -> str:
    """A case without what the axis varies."""
    words = {"batch": f", batch {case.batch}", "size": f", {case.image_size} px", "depth": f", depth {case.depth}"}
    return case.title.replace(words[axis], "")


def by_name(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Each contestant's median in every outcome; NaN where it was left out."""
    names = dict.fromkeys(row.name for outcome in outcomes for row in outcome.rows)
    found = [{row.name: row.median for row in outcome.rows} for outcome in outcomes]
    return {name: [medians.get(name, math.nan) for medians in found] for name in names}


def amount(rate: float, latency: bool) -> float:
    return 1000 / rate if latency else rate


def number(value: float) -> str:
    """Three digits at least: 0.254, 12.3, 4,085."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def panel(outcomes: Sequence[Outcome], axis: Axis | None) -> Bars | Lines:
    """What a figure shows of a group."""
    first = outcomes[0]
    if axis is None:
        latency = first.case.what == "latency"
        rounds = {row.name: [amount(rate, latency) for rate in row.rates] for row in first.rows}
        return Bars(first.case.title, "ms per image" if latency else "images per second", rounds)
    values = [axis_value(outcome.case, axis) for outcome in outcomes]
    return Lines(growth_title(first.case, axis), AXIS_TITLES[axis], "images per second", values, by_name(outcomes))


def outcome_json(outcome: Outcome, axis: Axis | None) -> dict[str, Any]:
    best = outcome.best_peer
    rows = [row_json(row, best) for row in outcome.rows]
    depth = getattr(outcome.case.config, "depth", None)
    about = {**vars(outcome.case), "depth": depth, "axis": axis, "matmul_flops": outcome.matmul_flops}
    return {**about, "rows": rows, "left_out": list(outcome.left_out)}


def row_json(row: Row, best: Row | None) -> dict[str, Any]:
    return {
        "name": row.name,
        "version": row.version,
        **({"how": row.how} if row.how else {}),
        "images_per_second": row.median,
        "rounds": list(row.rates),
        "matmul_share": row.share,
        "memory_bytes": row.memory,
        "to_best_peer": None if best is None else row.ratio(best),
    }
