"""What the runs of one process share: images that one has read and decoded are there for the next."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from vitlab.data.source import ImageSource


class Decoded(Protocol):
    """Decoded images in a device's memory."""

    @property
    def bytes(self) -> int: ...


Kept = TypeVar("Kept", bound=Decoded)
_kept: dict[Hashable, Decoded] | None = None  # the last used at the end; None: nothing is shared


@contextmanager
def shared_sets() -> Iterator[None]:
    """Within this, runs of this process that use the same images, one after another, decode them once."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def is_shared() -> bool:
    return _kept is not None


def share(source: ImageSource, how: Hashable, needed: int, budget: int, make: Callable[[], Kept]) -> Kept:
    """The images of a source, decoded as `how` says: those that are there already, or new ones of `needed` bytes.

    Those that were not used for longest are forgotten until all fit in `budget` bytes.
    """
    identity = None if _kept is None else source.identity()
    if _kept is None or identity is None:
        return make()
    key = identity, how
    found = _kept.pop(key, None)
    if found is None:
        while _kept and needed + sum(images.bytes for images in _kept.values()) > budget:
            del _kept[next(iter(_kept))]
        found = make()
    _kept[key] = found
    return found  # type: ignore[return-value]  # what the same `make` has made
