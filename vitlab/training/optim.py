"""Optimization: learning-rate schedules, weight decay, the two optimizers, gradient clipping, Polyak averaging."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

Decay = Literal["linear", "cosine", "constant"]
OptimizerName = Literal["adamw", "sgd"]


def learning_rate(step: int, *, base: float, steps: int, warmup: int, decay: Decay, end: float = 0.0) -> float:
    """The rate of step 0, 1, ... steps-1: up from zero over `warmup` steps, then down over the rest.

    The decay runs over the steps after the warm-up, as in the authors' code: with t from 0 to 1, linear goes from
    base to `end`, cosine is base * (1 + cos(pi t)) / 2, constant is base.
    """
    if step < warmup:
        return base * step / warmup
    t = (step - warmup) / (steps - warmup)
    if decay == "linear":
        return end + (base - end) * (1 - t)
    return base * (1 + math.cos(math.pi * t)) / 2 if decay == "cosine" else base


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter: to kernels only.

    Kernels of dense layers and convolutions are called "weight" and have two axes or more; biases, norms, tokens,
    positions, probes and mask embeddings lack the name or the axes.
    """
    return name.rpartition(".")[2] == "weight" and parameter.ndim >= 2


def make_optimizer(
    module: nn.Module,
    kind: OptimizerName,
    *,
    weight_decay: float,
    betas: tuple[float, float],
    momentum: float,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """AdamW (decay decoupled, times the learning rate) or SGD with momentum, with decay on kernels alone.

    With `capturable` AdamW's step can be recorded as a CUDA graph: its learning rate is a tensor on the GPU.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if is_decayed(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if not is_decayed(name, p)], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        fused = all(p.is_cuda for _, p in trained)
        lr: float | Tensor = torch.zeros((), device=trained[0][1].device) if capturable else 0.0
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=fused, capturable=capturable)
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale gradients so that their global norm is at most `most` (0: no limit); return the norm before, ()."""
    trained = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    if most > 0:
        torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients have a sharded norm


class Average:
    """Polyak averaging: a slow copy of the weights, average = d * average + (1 - d) * weights.

    d grows as (1 + step) / (10 + step) until it reaches `decay`, so that a short run is not averaged with its random
    beginning.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters: list[Tensor] = list(trained.values())  # in the order of `weights`
        self.weights = {name: p.detach().clone() for name, p in trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.weights.values()), self.parameters, 1 - decay)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give the model the averaged weights inside a `with`; its own are restored after it, bit for bit."""
        own = [p.detach().clone() for p in self.parameters]
        try:
            self.fill(self.weights.values())
            yield
        finally:
            self.fill(own)

    @torch.no_grad()
    def fill(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
