"""Muon (Jordan 2024): the matrices of a model's blocks move by orthogonal matrices; AdamW moves the rest.

The momentum of a matrix, Nesterov's, becomes almost the orthogonal matrix nearest to it: its singular vectors stay,
its singular values become about 1. So directions that the gradient hardly has are learned as fast as those it is full
of. Times 0.2 sqrt(max(rows, columns)), an update has the size that AdamW's has, and AdamW's rates and decay apply (Liu
et al. 2025).

Matrices of one shape are orthogonalized together, in batched products, and all state stays in place, so that a step
can be recorded as a CUDA graph. torch.optim.Muon (torch 2.9 on) is not used: it takes one matrix after the other, has
queries, keys and values as one matrix and no convolutions, computes in bfloat16 always, and reads the learning rate
on the host, so that no graph can hold it.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitlab.models.resnet import AxialAttention
from vitlab.models.vit import MLP, Attention, SwiGLU
from vitlab.training.owners import Owners

MOMENTUM = 0.95
SIZE = 0.2  # root mean square of an update, about what AdamW's have
SMALLEST = 1e-12  # norm of a gradient below which an update is smaller than that
BLOCKS = {"blocks", "stages", "pool"}  # where a model has its matrices; before them is its stem, after them its head

# Newton-Schulz steps x -> a x + b x^3 + c x^5 on the singular values, as their Frobenius norm leaves them. Each is the
# polynomial nearest to 1 on the range that the steps before it leave of [0.001, 1] (Amsel et al. 2025); ranges are 3 %
# wider than that, for the rounding of bfloat16. Values from 0.001 on end between 0.84 and 1.15, from 0.00065 on above
# 0.6; smaller ones grow 977 times, less than to 0.6.
POLYNOMIALS = (
    (8.2249, -22.9821, 16.0732),
    (4.0656, -2.8486, 0.5014),
    (3.8708, -2.7222, 0.4884),
    (3.2731, -2.3221, 0.4476),
    (2.3079, -1.6069, 0.3778),
)

Shape = tuple[int, int]


def hidden_matrices(module: nn.Module) -> dict[str, Shape]:
    """The kernels of a model's blocks, by name, and the rows and columns of the one matrix or more that each is.

    Queries, keys and values are three, SwiGLU's gates and values two. A convolution is a matrix of its outputs.
    """
    parts: dict[str, int] = {}
    for name, part in module.named_modules():
        if isinstance(part, Attention | AxialAttention):
            parts |= {f"{name}.qkv": 3, f"{name}.qkv.lora_b": 3}
        elif isinstance(part, MLP) and isinstance(part.gelu, SwiGLU):
            parts |= {f"{name}.up": 2, f"{name}.up.lora_b": 2}
    found: dict[str, Shape] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and BLOCKS & set(name.split(".")):
            rows, *columns = layer.weight.shape
            found[f"{name}.weight"] = rows // parts.get(name, 1), math.prod(columns)
    return found


def orthogonalize(x: Tensor) -> Tensor:
    """Matrices (n, rows, columns) with the same singular vectors and singular values near 1."""
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    is_tall = x.shape[1] > x.shape[2]
    for a, b, c in POLYNOMIALS:
        gram = x.mT @ x if is_tall else x @ x.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, inner, beta=a) if is_tall else torch.baddbmm(x, inner, x, beta=a)
    return x


def orthogonalize_all(kernels: list[Tensor], shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Kernels, each made of matrices of one shape, orthogonalized together in `dtype`."""
    if not kernels:
        return []
    matrices = torch.cat([x.reshape(-1, *shape) for x in kernels])  # (n, rows, columns)
    found = orthogonalize(matrices.to(dtype)).to(matrices.dtype)
    counts = [x.numel() // math.prod(shape) for x in kernels]
    return [part.reshape(x.shape) for part, x in zip(found.split(counts), kernels, strict=True)]


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: a shard of it, where it is sharded; nothing is copied."""
    if not dist.is_initialized():  # without a group there are no shards
        return tensor
    from torch.distributed.tensor import DTensor  # takes a second, which runs in one process do not need

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Muon(torch.optim.Optimizer):
    """Muon for groups of kernels that consist of matrices of the group's "shape", and AdamW for its own groups.

    Matrices are orthogonalized in `dtype`, whatever the weights have.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], adamw: torch.optim.AdamW, dtype: torch.dtype) -> None:
        own = list(groups)
        shared = {key: adamw.defaults[key] for key in ("lr", "weight_decay", "fused")}
        super().__init__([*own, *adamw.param_groups], shared)
        self.adamw, self.shapes, self.dtype = adamw, len(own), dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups[: self.shapes]:
            self.move(group)
        self.adamw.state, self.adamw.param_groups = self.state, self.param_groups[self.shapes :]
        self.adamw.step()

    def move(self, group: dict[str, Any]) -> None:
        """Change the kernels of one shape of matrices."""
        kernels = [p for p in group["params"] if p.grad is not None]
        if not kernels:
            return
        rate, shape = group["lr"], group["shape"]
        weights, gradients = [own_part(p) for p in kernels], [own_part(p.grad) for p in kernels]
        momenta = [own_part(self.momentum(p)) for p in kernels]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = list(torch._foreach_lerp(gradients, momenta, MOMENTUM))  # Nesterov: as if the gradient came once more
        size = rate * (SIZE * math.sqrt(max(shape)))  # a tensor where the rate is one on the device
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        updates = torch._foreach_mul(self.orthogonalized(ahead, kernels, shape), size)
        torch._foreach_sub_(weights, list(updates))

    def orthogonalized(self, parts: list[Tensor], kernels: list[Tensor], shape: Shape) -> list[Tensor]:
        """This process's part of the update of each kernel, without its size.

        The processes of a sharded run compute a share of the matrices each. Where every process has all gradients
        anyway, each computes all updates, without a message.
        """
        if all(own_part(p) is p for p in kernels):  # or none of them
            return orthogonalize_all(parts, shape, self.dtype)
        owners = Owners(kernels, self.dtype)
        complete = orthogonalize_all(owners.collect(parts), shape, self.dtype)
        return [x.to(part.dtype) for x, part in zip(owners.spread(complete), parts, strict=True)]

    def momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        return state["momentum_buffer"]
