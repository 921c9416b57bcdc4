"""Promises about time, checked on machines whose speed varies from one second to the next.

A measurement may be repeated; what it has to show stays the same. Whatever is not a time (an error, a wrong answer) is
asserted inside the measurement and fails at once.
"""

import time
from collections.abc import Callable
from typing import TypeVar

ATTEMPTS = 3
Measured = TypeVar("Measured")


def measure_until(
    is_met: Callable[[Measured], bool], measure: Callable[[], Measured], describe: Callable[[Measured], str] = str
) -> Measured:
    """Return the first of up to three measurements that meets the promise; if none does, raise and list them all."""
    missed = []
    for _ in range(ATTEMPTS):
        measured = measure()
        if is_met(measured):
            return measured
        missed.append(describe(measured))
    raise AssertionError(f"none of {ATTEMPTS} measurements meets the promise:\n" + "\n".join(missed))


def assert_below(limit: float, measure: Callable[[], float]) -> None:
    """Check that one of up to three measurements, of seconds or of a ratio, is below `limit`."""
    measure_until(lambda value: value < limit, measure, lambda value: f"{value:.3f}, and the limit is {limit:g}")


def seconds(work: Callable[[], object]) -> float:
    """Run something once and return its wall-clock time."""
    start = time.monotonic()
    work()
    return time.monotonic() - start
