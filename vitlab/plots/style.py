"""One look for every figure: sizes, fonts, colors that the color-blind can tell apart, and how figures are written.

Figures are built without pyplot, so no window opens and none is kept alive.
"""

import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vitlab.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("vitlab")

# Okabe and Ito's palette, without yellow, which vanishes on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MAP = "viridis"  # quantities from low to high
DIVERGING = "RdBu_r"  # around zero
INK, FAINT = "#222222", "#8A8A8A"
DPI = 160

FONT = "DejaVu Sans"
# Fonts that systems bring for names in Chinese, Japanese and Korean, of which FONT has no letters.
EASTERN = (
    *("Noto Sans CJK KR", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans KR", "Noto Sans JP", "Noto Sans SC"),
    *("Apple SD Gothic Neo", "Hiragino Sans", "PingFang SC", "Malgun Gothic", "Yu Gothic", "Microsoft YaHei"),
    *("NanumGothic", "IPAexGothic", "WenQuanYi Zen Hei", "Arial Unicode MS"),
)

LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "vitlab",  # the same figure is the same file
    "image.cmap": MAP,
}


@contextmanager
def drawing() -> Iterator[None]:
    """The look, for the time of a `with`: build the figure inside it."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib: pip install 'vitlab[plots]'") from None
    from cycler import cycler

    with matplotlib.rc_context({**LOOK, "font.family": fonts(), "axes.prop_cycle": cycler(color=COLORS)}):
        yield


@functools.cache
def fonts() -> list[str]:
    """The font, then those that stand in for the letters it lacks, as far as this machine has them."""
    from matplotlib.font_manager import fontManager

    here = {font.name for font in fontManager.ttflist}
    return [FONT, *(name for name in EASTERN if name in here)]


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sides in inches, whose parts make room for each other's words."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def bare(axes: Any) -> None:
    """Axes that show a picture: no ticks, no frame, no grid."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def write(figure: "Figure", path: Path, kinds: tuple[str, ...] = ("png",)) -> list[Path]:
    """The figure as path.png (and path.svg ...), each whole or not at all."""
    written = []
    for kind in kinds:
        target, new = path.with_suffix(f".{kind}"), path.with_suffix(f".new.{kind}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with drawing():  # fonts and salts of SVG files are chosen as they are written
                save(figure, new, format=kind, metadata={"Date": None} if kind == "svg" else None)
            os.replace(new, target)
        except OSError as error:
            raise UserError(f"the figure cannot be written to '{target}': {error.strerror or error}") from None
        written.append(target)
    return written


def save(figure: "Figure", file: Path | IO[bytes], **settings: Any) -> None:
    """As `savefig`, with one sentence for all the letters that no font here has."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        figure.savefig(file, **settings)
    missing = [said for said in heard if re.search(r"Glyph .* missing", str(said.message))]
    if missing:
        tell_of_letters()
    for said in (said for said in heard if said not in missing):
        warnings.warn_explicit(said.message, said.category, said.filename, said.lineno)


@functools.cache
def tell_of_letters() -> None:
    """Once is enough."""
    log.warning("figures show boxes for letters that no font here has; install one that does, such as Noto Sans CJK")
