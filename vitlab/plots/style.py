"""The common style of all figures (sizes, fonts, colors safe for the color-blind) and how figures are written.

Figures are built without pyplot, so no window opens and no figure stays in memory.
"""

import functools
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from vitlab.errors import UserError
from vitlab.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("vitlab")

# Okabe and Ito's palette, without yellow, which is hardly visible on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MAP = "viridis"  # quantities from low to high
INK, FAINT = "#222222", "#8A8A8A"
DPI = 160
LONGEST = 24  # characters of a class name in a figure

FONT = "DejaVu Sans"
# Fonts of common systems for names in Chinese, Japanese and Korean, which FONT has no glyphs for.
CJK_FONTS = (
    *("Noto Sans CJK KR", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans KR", "Noto Sans JP", "Noto Sans SC"),
    *("Apple SD Gothic Neo", "Hiragino Sans", "PingFang SC", "Malgun Gothic", "Yu Gothic", "Microsoft YaHei"),
    *("NanumGothic", "IPAexGothic", "WenQuanYi Zen Hei", "Arial Unicode MS"),
)

RC_PARAMS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "svg.fonttype": "none",
    "svg.hashsalt": "vitlab",  # the same figure is the same file
    "image.cmap": MAP,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Apply the style inside a `with` block, in which the figure is built; without matplotlib, a UserError."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib: pip install 'vitlab[plots]'") from None
    from cycler import cycler

    with matplotlib.rc_context({**RC_PARAMS, "font.family": fonts(), "axes.prop_cycle": cycler(color=COLORS)}):
        yield


@functools.cache
def fonts() -> list[str]:
    """The font, then the installed fallbacks for glyphs that it lacks."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [FONT, *(name for name in CJK_FONTS if name in installed)]


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> "Figure":
    """Create an empty figure, sides in inches, whose layout keeps texts apart or leaves them where they are put."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout=layout)


def bare(axes: Any) -> None:
    """Remove ticks, frame and grid from axes that show an image."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def write(figure: "Figure", path: Path, kinds: tuple[str, ...] = ("png",)) -> list[Path]:
    """Write the figure as path.png (and path.svg ...), each complete or not at all; return the paths."""
    targets = [path.with_suffix(f".{kind}") for kind in kinds]
    for kind, target in zip(kinds, targets, strict=True):
        with atomic_file(target) as file, drawing():  # fonts and salts of SVG files are chosen as they are written
            save(figure, file, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return targets


def save(figure: "Figure", file: Path | IO[bytes], **settings: Any) -> None:
    """Call `savefig`, with one warning for all glyphs that no installed font has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(file, **settings)
    for one in caught:
        if re.search(r"Glyph .* missing", str(one.message)):
            warn_missing_glyphs()
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@functools.cache
def warn_missing_glyphs() -> None:
    """Warn at the first call only."""
    log.warning("figures show boxes for letters that no font here has; install one that does, such as Noto Sans CJK")


def shorten(name: str) -> str:
    """Shorten a class name to `LONGEST` characters on one line."""
    line = " ".join(name.split()) or name
    return line if len(line) <= LONGEST else line[: LONGEST - 1].rstrip(" ,") + "…"
