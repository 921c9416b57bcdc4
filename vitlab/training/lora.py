"""LoRA while training: the body is frozen, and low-rank updates of the blocks' dense layers learn in its place.

A layer computes x W^T + alpha / rank * (x A^T) B^T without making W + alpha / rank * B A, so that no gradient is as
large as W. B starts at zero: the first step sees the model as it was. The names of all other parameters stay.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.variants import Model
from vitlab.weights.lora import updated_layers


class LowRankLinear(nn.Linear):
    """A dense layer, its weight and bias as they are, with a low-rank update beside them."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        self.lora_a = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.lora_b = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5), generator=generator)  # as a dense layer of torch
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora_b(self.lora_a(x) * self.scale)


def check_rank(config: ModelConfig, rank: int) -> None:
    """Raise UserError for a model that cannot have updates of this rank; 0 is none."""
    if rank and not isinstance(config, ViTConfig):
        raise UserError(f"lora={rank} updates a transformer's blocks, and this model is a ResNet; leave lora")
    if isinstance(config, ViTConfig) and rank > config.width:
        raise UserError(f"lora={rank} is more than the width {config.width}, at which it can express any update")


def add_updates(model: Model, rank: int, alpha: float, seed: int) -> None:
    """Give the dense layers of a model's blocks low-rank updates, in place; these and the head learn, nothing else."""
    check_rank(model.config, rank)
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name in updated_layers(model.state_dict()):
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(parent), child, LowRankLinear(layer, rank, alpha, generator))
    if model.head is not None:
        model.head.requires_grad_(True)


def own_state(module: nn.Module) -> dict[str, Tensor]:
    """The state that a run keeps of a module: all of it or, with low-rank updates, what learns; the rest is the base's.

    Nothing is copied.
    """
    state = module.state_dict()
    if not any(isinstance(part, LowRankLinear) for part in module.modules()):
        return dict(state)
    return {name: state[name] for name, p in module.named_parameters() if p.requires_grad}
