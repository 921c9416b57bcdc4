"""Optimization: learning-rate schedules, weight decay, the optimizers, gradient clipping, Polyak averaging."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.training.muon import Muon, Shape, hidden_matrices

Decay = Literal["linear", "cosine", "constant", "wsd"]
OptimizerName = Literal["adamw", "sgd", "muon"]

LAST_SHARE = 0.2  # of the steps after the warm-up, in which warm-up-stable-decay decays


def learning_rate(step: int, *, base: float, steps: int, warmup: int, decay: Decay, end: float = 0.0) -> float:
    """The rate of step 0, 1, ... steps-1: up from zero over `warmup` steps, then down over the rest.

    The decay runs over the steps after the warm-up, as in the authors' code: with t from 0 to 1, linear goes from
    base to `end`, cosine is base * (1 + cos(pi t)) / 2, constant is base. Warm-up-stable-decay ("wsd") is base until
    the last fifth, and goes from there to `end` as linear does.
    """
    if step < warmup:
        return base * step / warmup
    t = (step - warmup) / (steps - warmup)
    if decay == "linear":
        return end + (base - end) * (1 - t)
    if decay == "wsd":
        return end + (base - end) * min(1.0, (1 - t) / LAST_SHARE)
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
    dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """AdamW (decay decoupled, times the learning rate), SGD with momentum, or Muon; with decay on kernels alone.

    With `capturable` the step can be recorded as a CUDA graph: the learning rate is a tensor on the GPU, which of
    torch's SGDs only the fused one reads there. `dtype` is the precision in which Muon makes updates of its matrices;
    AdamW has everything else.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = hidden_matrices(module) if kind == "muon" else {}
    rest = {name: p for name, p in trained.items() if name not in matrices}
    groups = [
        {"params": [p for name, p in rest.items() if is_decayed(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in rest.items() if not is_decayed(name, p)], "weight_decay": 0.0},
    ]
    device = next(iter(trained.values())).device
    lr: float | Tensor = torch.zeros((), device=device) if capturable else 0.0
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=capturable or None)
    fused = all(p.is_cuda for p in trained.values())
    adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=fused, capturable=capturable)
    if kind == "adamw":
        return adamw
    by_shape: dict[Shape, list[nn.Parameter]] = {}
    for name, shape in matrices.items():
        if name in trained:
            by_shape.setdefault(shape, []).append(trained[name])
    own = [{"params": ps, "shape": shape, "weight_decay": weight_decay} for shape, ps in by_shape.items()]
    return Muon(own, adamw, dtype)


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
        self.own: list[Tensor] = []  # the model's own weights, while it has the averaged ones

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.weights.values()), self.parameters, 1 - decay)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give the model the averaged weights inside a `with`; its own are restored after it, bit for bit."""
        self.own = [p.detach().clone() for p in self.parameters]
        try:
            self.fill(self.weights.values())
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Give the model its own weights back, if it has not got them; again where a signal came in the middle."""
        if self.own:
            self.fill(self.own)
            self.own = []

    @torch.no_grad()
    def fill(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
