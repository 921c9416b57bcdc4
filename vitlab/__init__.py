"""vitlab: Vision Transformers in PyTorch: models, weights, training, evaluation and serving.

>>> import vitlab
>>> run = vitlab.finetune("photos/")  # doctest: +SKIP
>>> run.predict("cat.jpg")  # doctest: +SKIP

- `finetune`, `Run`: a classifier of your own photos, and the folder it is in
- `predict`, `Classifier`, `Prediction`: the classes of files, PIL images, arrays and tensors
- `embed`, `search`: the features of every image of a set as a file, and the images in it that are most like another
- `create`, `build`: a model by its name in the paper, or from a config
- `load`, `save`, `convert`: weights of vitlab, transformers, timm, torchvision and the authors
- `attention`: the attention weights of every layer and head
- `UserError`: the exception for a wrong argument, setting or file; its message names the fix

Names are imported when first used, so that `vitlab --help` does not wait for torch.
"""

import logging as _logging
import sys as _sys
import typing as _typing
from importlib import import_module as _import_module

from vitlab.errors import UserError

if _typing.TYPE_CHECKING:
    from vitlab.analysis.attention import attention
    from vitlab.data.python_images import model_input as model_input
    from vitlab.evaluation.embed import embed
    from vitlab.evaluation.search import search
    from vitlab.finetuning.finetune import finetune
    from vitlab.finetuning.run_folder import Run
    from vitlab.models.variants import build, create
    from vitlab.prediction.classifier import Classifier, Prediction
    from vitlab.prediction.predict import predict
    from vitlab.weights.convert import convert
    from vitlab.weights.load import load
    from vitlab.weights.save import save

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "Prediction",
    "Run",
    "UserError",
    "attention",
    "build",
    "convert",
    "create",
    "embed",
    "finetune",
    "load",
    "predict",
    "save",
    "search",
]

_MODULES = {
    "Classifier": "vitlab.prediction.classifier",
    "Prediction": "vitlab.prediction.classifier",
    "Run": "vitlab.finetuning.run_folder",
    "attention": "vitlab.analysis.attention",
    "build": "vitlab.models.variants",
    "convert": "vitlab.weights.convert",
    "create": "vitlab.models.variants",
    "embed": "vitlab.evaluation.embed",
    "finetune": "vitlab.finetuning.finetune",
    "load": "vitlab.weights.load",
    "model_input": "vitlab.data.python_images",  # behind `model.preprocess`, and not public
    "predict": "vitlab.prediction.predict",
    "save": "vitlab.weights.save",
    "search": "vitlab.evaluation.search",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitlab' has no attribute '{name}'")
    return getattr(_import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names alone, for `dir` and for completion."""
    return sorted([*__all__, "__version__"])


class _StderrHandler(_logging.Handler):
    """Prints messages for the user on stderr, such as a default used for what a file does not define.

    A program that configures logging itself gets the records there instead.
    """

    last = ""

    def emit(self, record: _logging.LogRecord) -> None:
        before, self.last = self.last, record.getMessage()
        if self.last != before and not _logging.getLogger().handlers:  # a file that is read twice gives one message
            from vitlab.terminal import printable  # imports rich

            print(printable(self.last), file=_sys.stderr)


_logging.getLogger("vitlab").setLevel(_logging.INFO)
_logging.getLogger("vitlab").addHandler(_StderrHandler())
