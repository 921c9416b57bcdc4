"""Models without the cost of fresh weights: an empty one for its shapes, and one filled with given tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.positions import Relative
from vitlab.models.rotary import Rotary
from vitlab.models.variants import Model, build
from vitlab.text import brief


class Uninitialized(TorchFunctionMode):
    """Leaves random initialization out: on the meta device it does nothing, but imports PyTorch's compiler first."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (Tensor.uniform_, Tensor.normal_) or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def meta_model(config: ModelConfig) -> Model:
    """A model of shapes alone, on the meta device."""
    try:
        with torch.device("meta"), Uninitialized():
            return build(config)
    except (RuntimeError, OverflowError) as error:  # sizes whose product no machine can count
        raise UserError(f"the config describes a model larger than any machine can hold: {brief(error)}") from None


def fill_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """A model that holds the given tensors, without copies, in eval mode."""
    model = meta_model(config)
    model.load_state_dict(dict(tensors), assign=True)
    for module in model.modules():  # tables that no file holds
        if isinstance(module, Relative):
            module.number()
        elif isinstance(module, Rotary) and isinstance(config, ViTConfig):  # in the weights' precision
            module.to(next(iter(tensors.values())).dtype).place(config)
    return model.eval()
