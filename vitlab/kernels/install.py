"""Put kernels into a model that is there. Its parameters, their names and the types of its modules stay; what the
kernels do not support is computed as before."""

import functools
from importlib.util import find_spec

import torch
from torch import nn

from vitlab.kernels.patches import is_patch_projection, project_patches
from vitlab.models.vit import Attention

OLDEST = (8, 0)  # compute capability of the first GPUs with bfloat16


def use_kernels(module: nn.Module, *, compiled: bool) -> None:
    """Let a model's attention and patch projection use the kernels, in place, where this machine allows it.

    So do its dropout layers, if it is to be compiled: masks of bits pay where they are unpacked along the way.
    """
    device = next(module.parameters()).device
    if device.type != "cuda" or find_spec("triton") is None or torch.cuda.get_device_capability(device) < OLDEST:
        return
    from vitlab.kernels.attention import attend_layer  # these import Triton, which takes a while
    from vitlab.kernels.dropout import drop

    for layer in module.modules():  # methods are replaced on instances: neither names nor types of modules change
        if isinstance(layer, Attention) and is_plain(layer):
            layer.forward = functools.partial(attend_layer, layer)  # type: ignore[method-assign]
        elif isinstance(layer, nn.Conv2d) and is_patch_projection(layer):
            layer.forward = functools.partial(project_patches, layer)  # type: ignore[method-assign]
        elif isinstance(layer, nn.Dropout) and layer.p > 0 and compiled:
            layer.forward = functools.partial(drop, layer)  # type: ignore[method-assign]


def is_plain(layer: Attention) -> bool:
    """Whether queries and keys go into attention as they were projected."""
    return layer.relative is None and isinstance(layer.q_norm, nn.Identity)
