"""What a model costs: multiply-adds of one image and what training must remember of it, read off the model itself.

The model is built and run on tensors without storage, once; every convolution, matrix product and attention that
passes is counted as two operations per multiply-add, and every tensor kept for the backward pass is weighed. So
the count covers whatever the model is made of, and takes a second even for models that would not fit in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from vitlab.errors import UserError
from vitlab.models.variants import Model

BACKWARD = 2  # a backward pass costs two forward ones: gradients of the inputs and of the weights
IMAGES_OF_JFT = 303_000_000
STATE = 16  # bytes a parameter takes: itself, its gradient and Adam's two moments, in float32


@dataclass(frozen=True)
class Cost:
    """Per image: forward operations, bytes a GPU keeps for the backward pass in mixed bf16; and the model's size."""

    parameters: int
    length: int
    forward_flops: int
    activation_bytes: int

    @property
    def train_flops(self) -> int:
        return (1 + BACKWARD) * self.forward_flops

    def run_flops(self, images: float, epochs: float) -> float:
        """Operations of a whole training run."""
        return self.train_flops * images * epochs

    def gpu_bytes(self, images: float, gpus: int, sharded: bool) -> float:
        """Memory of one of so many GPUs that trains so many images at a time: the model's state, and activations."""
        return STATE * self.parameters / (gpus if sharded else 1) + self.activation_bytes * images


def days(flops: float, tflops: float) -> float:
    """How long a machine works on that many operations at a sustained speed."""
    if tflops <= 0:
        raise UserError(f"the speed must be positive TFLOP/s, not {tflops:g}")
    return flops / (tflops * 1e12) / 86_400


def cost(make: Callable[[], Model]) -> Cost:
    """The cost of the model that `make` builds; it is built without storage."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={flash: _attention_flops})
    with FakeTensorMode():
        model = make()
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):  # a GPU's autocast computes these in float32, a CPU's does not
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        with counter:
            one = _kept_bytes(model, batch=1)
        return Cost(
            parameters=sum(p.numel() for p in model.parameters()),
            length=model.config.length,
            forward_flops=int(counter.get_total_flops()),
            # the difference leaves out what does not grow with the batch: weights, and their casts
            activation_bytes=_kept_bytes(model, batch=2) - one,
        )


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    b, h, n, width = q
    return 2 * b * h * n * k[2] * (width + v[3])  # q k^T, then weights times v


def _kept_bytes(model: Model, batch: int) -> int:
    """Bytes of all tensors kept for the backward pass of a batch."""
    kept: dict[int, Tensor] = {}  # by storage; the tensors are held, so that no address is given away twice

    def keep(x: Tensor) -> Tensor:
        return kept.setdefault(x.untyped_storage()._cdata, x)

    images = torch.empty(batch, 3, *model.config.image_size)
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda x: x):
        model(images)
    return sum(x.untyped_storage().nbytes() for x in kept.values())
