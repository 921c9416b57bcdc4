"""The cost of a model, counted on the model itself.

The model is built and run on fake tensors, which have shapes but no storage. Every convolution, matrix product and
attention is counted as two operations per multiply-add, and the bytes of every tensor that autograd saves for the
backward pass are summed. The count thus covers any model, and takes a second even where the weights exceed the memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.models.variants import Model

BATCH = 65_537  # images; a prime that divides the bytes of those tensors, and only those, that grow with the batch
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # missing in torch's table of formulas


def count(make: Callable[[], Model]) -> tuple[int, int, int, int]:
    """Of the model that `make` builds: parameters, tokens, operations and saved bytes of an image."""
    with FakeTensorMode():
        model = make()
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):  # a GPU's autocast computes these in float32, a CPU's does not
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        with FlopCounter() as counter:
            saved = saved_bytes(model)
    # the others are weights and their casts
    activations = sum(size for size in saved if size % BATCH == 0)
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, model.config.length, counter.flops // BATCH, activations // BATCH


class FlopCounter(TorchDispatchMode):
    """Sum the operations; torch's FlopCounterMode also attributes them to modules, which takes twice as long."""

    flops = 0

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton, if there is one

        super().__init__()  # type: ignore[no-untyped-call]
        self.formulas = flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), func._overloadpacket
        if name is FLASH:
            self.flops += attention_flops(*(x.shape for x in args[:3]))
        elif name in self.formulas:
            self.flops += self.formulas[name](*args, **(kwargs or {}), out_val=out)
        return out


def attention_flops(q: torch.Size, k: torch.Size, v: torch.Size) -> int:
    b, h, n, width = q
    return 2 * b * h * n * k[2] * (width + v[3])  # q k^T, then weights times v


def saved_bytes(model: Model) -> list[int]:
    """Run `BATCH` images and return the bytes of each tensor that autograd saves for the backward pass."""
    saved: dict[int, Tensor] = {}  # by storage; the tensors are held, so that no address is reused

    def save(x: Tensor) -> Tensor:
        return saved.setdefault(x.untyped_storage()._cdata, x)

    images = torch.empty(BATCH, 3, *model.config.image_size)
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(save, lambda x: x):
        model(images)
    return [x.untyped_storage().nbytes() for x in saved.values()]
