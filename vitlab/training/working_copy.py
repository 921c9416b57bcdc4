"""A copy of a model in bfloat16 that computes, while the model itself stays in float32 for the optimizer.

Mixed precision casts every weight in every pass, and keeps the tokens between blocks in float32, since the positions
added first are. The copy is cast once a step, and its tokens are bfloat16 throughout: half of the memory traffic of
norms, residuals and dropout. Each product sees the weights it sees in mixed precision, and norms compute in float32
with the very parameters of the model; what is new is that the sums of tokens and branches are rounded to bfloat16.

Checkpoints, averages and evaluation know the model alone: the copy is a function of it, except for the scales of
products in 8 bits, which are part of a checkpoint.
"""

import copy

import torch
from torch import Tensor, nn

from vitlab.kernels.fp8 import Maxima, use_float8
from vitlab.kernels.fp8_mlp import use_mlps
from vitlab.kernels.rounding import KEPT, round_weights


class WorkingCopy:
    """`module` computes; the parameters that both share have their gradients in place, the others' are moved.

    With `float8`, the products of its MLPs are in 8 bits.
    """

    def __init__(self, core: nn.Module, *, float8: bool = False) -> None:
        kept = [p for part in core.modules() if isinstance(part, KEPT) for p in part.parameters(recurse=False)]
        self.module = copy.deepcopy(core, {id(p): p for p in kept})  # what a memo has is not copied
        round_weights(self.module)
        self.rounded = rounded_pairs(core, self.module)  # the model's tensors and the copy's of them
        trained = [(own, cast) for own, cast in self.rounded if own.requires_grad]
        self.own: list[Tensor] = [own for own, _ in trained]
        self.cast: list[Tensor] = [cast for _, cast in trained]
        self.float8 = use_float8(self.module) if float8 else {}
        self.maxima = Maxima(self.float8.values())
        if self.float8:
            use_mlps(self.module)

    def scales(self) -> dict[str, Tensor]:
        """The state of its own that the copy has, by the names of layers."""
        return {name: layer.maxima for name, layer in self.float8.items()}

    def follow(self) -> None:
        """After a step of the optimizer."""
        self.maxima.update()
        self.refresh_trained()

    def forget(self) -> None:
        """Drop what the passes of a step that is not completed have left."""
        self.module.zero_grad()
        self.maxima.seen = {}

    @torch.no_grad()
    def refresh_trained(self) -> None:
        """Round the weights that the optimizer has changed."""
        torch._foreach_copy_(self.cast, self.own)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round everything the model has, frozen weights and tables too: a checkpoint was loaded into it."""
        for own, cast in self.rounded:
            cast.copy_(own)

    @torch.no_grad()
    def move_gradients(self) -> None:
        """After a pass: add the copy's gradients to the model's, in float32; the copy keeps none."""
        self.maxima.note()
        new: list[Tensor] = []
        first: list[Tensor] = []
        total: list[Tensor] = []
        later: list[Tensor] = []
        for own, cast in zip(self.own, self.cast, strict=True):
            if cast.grad is None:
                continue
            if own.grad is None:
                own.grad = torch.empty_like(own)
                new.append(own.grad)
                first.append(cast.grad)
            else:
                total.append(own.grad)
                later.append(cast.grad)
            cast.grad = None
        if first:
            torch._foreach_copy_(new, first)
        if later:
            torch._foreach_add_(total, later)


def rounded_pairs(core: nn.Module, copied: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """A module's parameters and tables, each with what a copy has rounded it to; not what is not rounded."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for part, other in zip(core.modules(), copied.modules(), strict=True):
        if not isinstance(part, KEPT):
            pairs += zip(part.parameters(recurse=False), other.parameters(recurse=False), strict=True)
            tables = zip(part.buffers(recurse=False), other.buffers(recurse=False), strict=True)
            pairs += [(own, cast) for own, cast in tables if own.is_floating_point()]
    return pairs
