"""Put kernels into a model that is there. Its parameters, their names and the types of its modules stay; what the
kernels do not support is computed as before."""

import functools
import logging
from collections.abc import Callable

import torch
from torch import nn

from vitlab.kernels.patches import is_patch_projection, project_patches
from vitlab.models.vit import Attention
from vitlab.text import brief

OLDEST = (8, 0)  # compute capability of the first GPUs with bfloat16

log = logging.getLogger("vitlab")


def use_kernels(module: nn.Module, *, compiled: bool) -> None:
    """Let a model's attention and patch projection use the kernels, in place, where this machine allows it.

    So do its dropout layers, if it is to be compiled: masks of bits pay where they are unpacked along the way.
    """
    device = next(module.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST:
        use_projection(module)
        use_attention(module, device)
        if compiled:
            use_dropout(module, device)


# Methods are replaced on instances: neither names nor types of modules change. Triton takes a while to import.


def use_projection(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and is_patch_projection(layer):
            layer.forward = functools.partial(project_patches, layer)  # type: ignore[method-assign]


def use_attention(module: nn.Module, device: torch.device) -> None:
    layers = [layer for layer in module.modules() if isinstance(layer, Attention) and is_plain(layer)]
    if layers and runs_here("attention", try_attention, device):
        from vitlab.kernels.attention import attend_layer

        for layer in layers:
            layer.forward = functools.partial(attend_layer, layer)  # type: ignore[method-assign]


def use_dropout(module: nn.Module, device: torch.device) -> None:
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Dropout) and layer.p > 0]
    if layers and runs_here("dropout", try_dropout, device):
        from vitlab.kernels.dropout import drop

        for layer in layers:
            layer.forward = functools.partial(drop, layer)  # type: ignore[method-assign]


def is_plain(layer: Attention) -> bool:
    """Whether queries and keys go into attention as they were projected."""
    return layer.relative is None and isinstance(layer.q_norm, nn.Identity)


# ---- trials: whether a kernel runs depends on the GPU's shared memory, a C compiler, the builds of torch and Triton


def runs_here(what: str, attempt: Callable[[torch.device], None], device: torch.device) -> bool:
    """Whether an attempt on a device raises nothing; else a line names the reason."""
    try:
        attempt(device)
    except Exception as error:  # of Triton, the compiler it calls, cuDNN or the driver
        log.info("%s is computed by torch, as the faster kernel does not run here: %s", what, brief(error))
        return False
    return True


def try_attention(device: torch.device) -> None:
    """Forward and backward once, with the largest blocks; on zeros, since random numbers would change a run's."""
    from vitlab.kernels.attention import attend

    qkv = torch.zeros(1, 197, 3, 1, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend(qkv).sum(), qkv)
    gradient.cpu()  # waits


def try_dropout(device: torch.device) -> None:
    from vitlab.kernels.dropout import keep_bits

    keep_bits(torch.zeros(1, device=device, dtype=torch.int64), 1, 1).cpu()
