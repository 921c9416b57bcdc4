"""The weights of a model in 16 bits, as mixed precision would cast them in every pass, and its tokens with them."""

import torch
from torch import nn

from vitlab.models.resnet import StdConv
from vitlab.models.rotary import Rotary

# Their parameters stay, in float32: what they compute is computed in float32 in mixed precision too.
KEPT = (nn.LayerNorm, nn.GroupNorm, StdConv, Rotary)


def round_weights(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round parameters and tables, in place; the module is then called in mixed precision, for what stays."""
    for part in module.modules():
        if not isinstance(part, KEPT):
            cast_tensors(part, dtype)


def cast_tensors(part: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round a module's own parameters and tables, not those of the modules inside it."""
    for name, parameter in list(part.named_parameters(recurse=False)):
        rounded = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        setattr(part, name, rounded)
    for name, buffer in list(part.named_buffers(recurse=False)):
        if buffer.is_floating_point():
            setattr(part, name, buffer.to(dtype))
