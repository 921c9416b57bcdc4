"""`vitlab study shape`: the paper's figure 8."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Number, Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shape = tuple[int, int, int, int]  # depth, width, MLP, patch
BASE, QUICK_BASE = (8, 192, 384, 16), (2, 24, 48, 8)
AXES = ("depth", "width", "mlp", "patch")
#        each dimension alone, then all in proportion
SCALED: dict[str, tuple[int, ...]] = {
    "depth": (2, 4, 16, 32),
    "width": (96, 384, 768),
    "mlp": (192, 768, 1536),
    "patch": (32, 8, 4),
}
ALL = ((4, 96, 192, 32), (12, 288, 576, 8), (16, 384, 768, 8))
QUICK_SCALED = {"depth": (1, 4), "width": (12, 48), "mlp": (24, 96), "patch": (16, 4)}
QUICK_ALL = ((4, 48, 96, 4),)


def shapes(quick: bool) -> Iterator[tuple[str, str, Shape]]:
    """Every row's name, what is scaled in it, and its shape."""
    base, scaled = (QUICK_BASE, QUICK_SCALED) if quick else (BASE, SCALED)
    yield "base", "base", base
    for axis, values in scaled.items():
        for value in values:
            depth, width, mlp, patch = (value if axis == name else own for name, own in zip(AXES, base, strict=True))
            yield f"{axis}-{value}", axis, (depth, width, mlp, patch)
    for number, shape in enumerate(QUICK_ALL if quick else ALL, 1):
        yield f"all-{number}", "all", shape


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for name, axis, (depth, width, mlp, patch) in shapes(ask.quick):
        run = ask.pretrain(name, seed, f"Ti/{patch}", depth=depth, width=width, mlp=mlp, heads=3)
        numbers = ask.few_shots(run) | {"accuracy": Number(run, "accuracy")}
        about = {"scaled": axis, "depth": f"{depth}", "width": f"{width}", "MLP": f"{mlp}", "patch": f"{patch}"}
        yield Row(name, about, numbers, run)


def figure(table: Table) -> "Figure":
    """5-shot accuracy by compute relative to the base, a line through the base for each dimension."""
    key = table.request.mean_heading("5-shot")
    base = table.lines[0].flops or 1.0
    series = []
    for axis in (*AXES, "all"):
        lines = [line for line in table.done if line.about["scaled"] in (axis, "base")]
        lines.sort(key=lambda line: line.flops or 0)
        labels = ["" if line.name == "base" else line.name.partition("-")[2] for line in lines] if axis != "all" else []
        x = [(line.flops or 0) / base for line in lines]
        series.append(Series("MLP" if axis == "mlp" else axis, x, [line.values[key] for line in lines], labels))
    return lines_figure([Lines(f"{key}, by shape", "compute relative to the base", "accuracy, %", series)])


STUDY = Study(
    "shape",
    "Which dimension of a ViT is worth scaling?",
    "figure 8",
    rows,
    figure,
    paper="Depth helps most, with diminishing returns after 16 layers; width least; smaller patches help without more "
    "parameters; all in proportion is robust.",
    seeds=1,
    note="The paper's base has 8 layers of width 1024, an MLP of 2048 and patches of 32; this one 8 layers of width "
    "192, an MLP of 384 and patches of 16.",
)
