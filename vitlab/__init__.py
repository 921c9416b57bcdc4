"""vitlab: the Vision Transformer, whole.

>>> import vitlab
>>> model = vitlab.create("B/16", classes=10, image_size=384)
>>> maps = vitlab.attention(model, images)

Names are imported when first used, so that `vitlab --help` does not wait for torch.
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitlab.errors import UserError

if TYPE_CHECKING:
    from vitlab.analysis.attention import attention
    from vitlab.models.variants import build, create
    from vitlab.weights.convert import convert
    from vitlab.weights.load import load
    from vitlab.weights.save import save

__version__ = "0.1.0"
__all__ = ["UserError", "attention", "build", "convert", "create", "load", "save"]

_HOMES = {
    "attention": "vitlab.analysis.attention",
    "build": "vitlab.models.variants",
    "convert": "vitlab.weights.convert",
    "create": "vitlab.models.variants",
    "load": "vitlab.weights.load",
    "save": "vitlab.weights.save",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlab' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _Say(logging.Handler):
    """Says on stderr what a user should know, such as a default that stood in for what a file does not tell.

    A program that sets up logging of its own gets the records there instead.
    """

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        said, self.last = self.last, record.getMessage()
        if self.last != said and not logging.getLogger().handlers:  # a file that is read twice is told of once
            from vitlab.terminal import printable  # which imports rich

            print(printable(self.last), file=sys.stderr)


logging.getLogger("vitlab").setLevel(logging.INFO)
logging.getLogger("vitlab").addHandler(_Say())
