"""vitlab: Vision Transformers in PyTorch: models, weights, training, evaluation and serving.

>>> import vitlab
>>> model = vitlab.create("B/16", classes=10, image_size=384)  # doctest: +SKIP
>>> classifier = vitlab.Classifier("runs/mine")  # doctest: +SKIP

- `create`, `build`: a model by its name in the paper, or from a config
- `load`, `save`, `convert`: weights of vitlab, transformers, timm, torchvision and the authors
- `Classifier`, `Prediction`: a model with its preprocessing and class names, and what it returns for an image
- `attention`: the attention weights of every layer and head
- `UserError`: the exception for a wrong argument, setting or file; its message names the fix

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
    from vitlab.prediction.classifier import Classifier, Prediction
    from vitlab.weights.convert import convert
    from vitlab.weights.load import load
    from vitlab.weights.save import save

__version__ = "0.1.0"
__all__ = ["Classifier", "Prediction", "UserError", "attention", "build", "convert", "create", "load", "save"]

_MODULES = {
    "Classifier": "vitlab.prediction.classifier",
    "Prediction": "vitlab.prediction.classifier",
    "attention": "vitlab.analysis.attention",
    "build": "vitlab.models.variants",
    "convert": "vitlab.weights.convert",
    "create": "vitlab.models.variants",
    "load": "vitlab.weights.load",
    "save": "vitlab.weights.save",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitlab' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])


class _StderrHandler(logging.Handler):
    """Prints messages for the user on stderr, such as a default used for what a file does not define.

    A program that configures logging itself gets the records there instead.
    """

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        before, self.last = self.last, record.getMessage()
        if self.last != before and not logging.getLogger().handlers:  # a file that is read twice gives one message
            from vitlab.terminal import printable  # imports rich

            print(printable(self.last), file=sys.stderr)


logging.getLogger("vitlab").setLevel(logging.INFO)
logging.getLogger("vitlab").addHandler(_StderrHandler())
