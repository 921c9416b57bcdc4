"""Small pieces of text for messages: lists of choices, durations, the first line of another library's error."""

from collections.abc import Iterable

UNITS = {"exaFLOPs": 1e18, "petaFLOPs": 1e15, "teraFLOPs": 1e12, "gigaFLOPs": 1e9}


def valid_text(text: str) -> str:
    """Text that can be encoded: lone surrogates, from undecodable file names, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def listed(values: Iterable[object]) -> str:
    *head, last = [str(v) for v in values]
    return f"{', '.join(head)} or {last}" if head else last


def counted(number: float, noun: str) -> str:
    """A number with its noun, which has an s unless the number is 1: 1 epoch, 2.5 epochs, 1,000 images."""
    return f"{number:,.6g} {noun}{'' if number == 1 else 's'}" if number < 1e6 else f"{number:,.0f} {noun}s"


def brief(error: BaseException) -> str:
    """The first line of another library's error message."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]


def duration(seconds: float) -> str:
    """Seconds in a readable unit: 42 s, 3 min, 2.5 h, 4 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def flops_unit(flops: float) -> tuple[str, float]:
    """The unit in which a number of operations is short to read, and its size: exaFLOPs, 1e18."""
    fits = ((name, size) for name, size in UNITS.items() if flops >= 0.9995 * size)  # which is 1.00 of it
    return next(fits, ("gigaFLOPs", UNITS["gigaFLOPs"]))
