"""The cost of a model: multiply-adds of one image, and the memory that training keeps of it, measured on the model.

The model is built and run on fake tensors, which have shapes but no storage. Every convolution, matrix product and
attention is counted as two operations per multiply-add, and the bytes of every tensor that autograd saves for the
backward pass are summed. The count thus covers any model, and takes a second even where the weights exceed the memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, Size, StemConfig
from vitlab.models.resnet import stages
from vitlab.models.variants import Model, build

BACKWARD = 2  # a backward pass costs two forward ones: gradients of the inputs and of the weights
STATE = 16  # bytes a parameter takes: itself, its gradient and Adam's two moments, in float32
BATCH = 65_537  # images; a prime that divides the bytes of those tensors, and only those, that grow with the batch
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # missing in torch's table of formulas


@dataclass(frozen=True)
class Cost:
    """Per image, as training has it: forward operations, bytes a GPU keeps for the backward pass in mixed bf16; and the
    model's size."""

    parameters: int
    length: int
    forward_flops: int
    activation_bytes: int

    @property
    def train_flops(self) -> int:
        return (1 + BACKWARD) * self.forward_flops

    def run_flops(self, images: float, epochs: float) -> float:
        """Operations of a complete training run."""
        return self.train_flops * images * epochs

    def gpu_bytes(self, images: float, gpus: int, sharded: bool) -> float:
        """Memory of each GPU for the model's state and the activations of `images` at a time."""
        return STATE * self.parameters / (gpus if sharded else 1) + self.activation_bytes * images


def days(flops: float, tflops: float) -> float:
    """Days that a machine takes for `flops` operations at a sustained speed in TFLOP/s."""
    if tflops <= 0:
        raise UserError(f"the speed must be positive TFLOP/s, not {tflops:g}")
    return flops / (tflops * 1e12) / 86_400


def cost(make: Callable[[], Model]) -> Cost:
    """Measure the model that `make` builds; neither building nor running it takes storage."""
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
    return Cost(parameters, model.config.length, counter.flops // BATCH, activations // BATCH)


# ---- the same in closed form, for tables of many models


def forward_flops(config: ModelConfig) -> int:
    """Operations of one image, at once, by the formulas of the layers; rarer kinds of models are counted as above."""
    if isinstance(config, ResNetConfig):
        return convolution_flops(config, config.image_size) + 2 * config.channels * config.classes
    c, rows = config, config.grid[0] * config.grid[1]
    if c.attention == "axial" or c.positions == "relative" or c.pool == "attention":
        return cost(lambda: build(c)).forward_flops
    stem = 0 if c.stem is None else convolution_flops(c.stem, c.image_size)
    embed = 2 * rows * (3 if c.stem is None else c.stem.channels) * c.patch**2 * c.width
    mlp = (3 if c.mlp_kind == "swiglu" else 2) * c.width * c.mlp
    tokens = c.training_length
    block = 2 * tokens * (4 * c.width**2 + mlp) + 4 * tokens**2 * c.width  # dense layers, attention
    head = 2 * c.width * c.prelogits + 2 * c.features * c.classes
    return stem + embed + c.depth * block + head


def convolution_flops(config: ResNetConfig | StemConfig, size: Size) -> int:
    """Operations of a ResNet's root and stages; every stride of 2 rounds up."""
    h, w = halve(size)
    flops = 2 * h * w * 3 * 49 * config.width  # the root: 7x7
    h, w = halve((h, w))
    for stage in stages(config):
        for cin, mid, stride in stage:
            flops += 2 * h * w * cin * mid
            h, w = halve((h, w)) if stride == 2 else (h, w)
            flops += 2 * h * w * (9 * mid * mid + mid * 4 * mid)
            flops += 2 * h * w * cin * 4 * mid if stride == 2 or cin != 4 * mid else 0  # the projected shortcut
    return flops


def halve(size: Size) -> Size:
    return -(-size[0] // 2), -(-size[1] // 2)


# ---- counting


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
