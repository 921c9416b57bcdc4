"""vitlab: the Vision Transformer, whole.

>>> import vitlab
>>> model = vitlab.create("B/16", classes=10, image_size=384)
>>> maps = vitlab.attention(model, images)

Names are imported when first used, so that `vitlab --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitlab.config import UserError

if TYPE_CHECKING:
    from vitlab.analysis.attention import attention
    from vitlab.models.variants import build, create

__version__ = "0.1.0"
__all__ = ["UserError", "attention", "build", "create"]

_HOMES = {
    "attention": "vitlab.analysis.attention",
    "build": "vitlab.models.variants",
    "create": "vitlab.models.variants",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlab' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
