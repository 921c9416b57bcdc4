"""How weights move: learning-rate schedules, which weights decay, the two optimizers, clipping, Polyak averaging."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

Decay = Literal["linear", "cosine", "constant"]
OptimizerName = Literal["adamw", "sgd"]


def learning_rate(step: int, *, base: float, steps: int, warmup: int, decay: Decay) -> float:
    """The rate of step 0, 1, ... steps-1: up from zero over `warmup` steps, then down to zero over the rest.

    The decay runs over the steps after the warm-up, as in the authors' code: with t from 0 to 1,
    linear is 1 - t, cosine is (1 + cos(pi t)) / 2, constant is 1.
    """
    if step < warmup:
        return base * step / warmup
    t = (step - warmup) / (steps - warmup)
    return base * {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "constant": 1.0}[decay]


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay touches a parameter: kernels only.

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
    recorded: bool = False,
) -> torch.optim.Optimizer:
    """AdamW (decay decoupled, times the learning rate) or SGD with momentum, with decay on kernels alone.

    Where AdamW's step is `recorded` as a CUDA graph, its learning rate is a tensor on the GPU.
    """
    learned = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in learned if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in learned if not decays(name, p)], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        fused = all(p.is_cuda for _, p in learned)
        lr: float | Tensor = torch.zeros((), device=learned[0][1].device) if recorded else 0.0
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=fused, capturable=recorded)
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale gradients so that their global norm is at most `most` (0: leave them); the norm before."""
    learned = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in learned if p.grad is not None])
    if most > 0:
        torch.nn.utils.clip_grads_with_norm_(learned, most, norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients: a norm in pieces


class Average:
    """Polyak averaging: a slow copy of the weights, average = d * average + (1 - d) * weights.

    d grows as (1 + step) / (10 + step) until it reaches its final value, so that a short run is not averaged with
    its random beginning.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = module
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.own: list[Tensor] = list(own.values())  # in the order of `weights`
        self.weights = {name: p.detach().clone() for name, p in own.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.weights.values()), self.own, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights, for the time of a `with`; its own come back bit for bit."""
        own = {name: p for name, p in self.module.named_parameters() if name in self.weights}
        kept = {name: p.detach().clone() for name, p in own.items()}
        try:
            fill(own, self.weights)
            yield
        finally:
            fill(own, kept)


@torch.no_grad()
def fill(targets: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])
