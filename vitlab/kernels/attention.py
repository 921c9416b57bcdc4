"""Attention on packed queries, keys and values as operators of torch, which torch.compile and CUDA graphs take as one.

The gradient is a Triton kernel's: for the few hundred tokens of an image the kernels that torch brings, which are made
for long texts, leave most of a GPU idle. The forward pass is cuDNN's where that is allowed and faster, else Triton's.

Shapes: B images, N tokens, H heads, K head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitlab.kernels.attention_triton import backward_kernel, forward_kernel
from vitlab.models.rotary import Turn
from vitlab.models.vit import Attention

MOST_TOKENS = 256
WIDTHS = (16, 32, 48, 64)  # of a head; a wider one's gradients do not fit in registers


@dataclass(frozen=True)
class Blocks:
    """How a kernel divides its work: how many rows of what it loops over at a time, and by how many warps."""

    rows: int
    warps: int
    stages: int = 1


# No block has a side below 64: with smaller ones Triton 3.6 and 3.7 read outside of shared memory on Hopper GPUs.
LEAST_SIDE = 64
FORWARD = Blocks(LEAST_SIDE, 4)


def backward_blocks(tokens: int) -> Blocks:
    """The fastest of those measured on an H200: at 197 tokens 0.53 ms a layer of B/16 at batch 256, cuDNN's 1.04."""
    return Blocks(64, 4) if tokens <= 64 else Blocks(128 if tokens > 128 else 64, 8, 2)


def attend_layer(layer: Attention, x: Tensor, rotary: Turn | None = None) -> Tensor:
    """What an attention layer of a model computes, without taking queries, keys and values apart."""
    if rotary is not None:
        return Attention.forward(layer, x, rotary)
    qkv = layer.pack(x)
    if is_supported(qkv):
        return layer.mix(attend(qkv).transpose(1, 2), x)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return layer.mix(F.scaled_dot_product_attention(q, k, v), x)


def is_supported(qkv: Tensor) -> bool:
    """Whether the kernels compute this: (B, N, 3, H, K) in half precision on a GPU, short enough."""
    is_half = qkv.dtype in (torch.bfloat16, torch.float16)
    return qkv.is_cuda and is_half and qkv.shape[1] <= MOST_TOKENS and qkv.shape[4] in WIDTHS


def attend(qkv: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v of every head, (B, N, H, K), from (B, N, 3, H, K) of any strides."""
    y: Tensor = attend_op(qkv)[0]
    return y


@torch.library.custom_op("vitlab::attend", mutates_args=())
def attend_op(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """The heads' values (B, N, H, K) and the logarithm of each row's sum of exponentials, (B, H, N), in float32."""
    return cudnn_forward(qkv) if prefers_cudnn(qkv) else triton_forward(qkv, FORWARD)


@torch.library.custom_op("vitlab::attend_backward", mutates_args=())
def backward_op(dy: Tensor, qkv: Tensor, y: Tensor, lse: Tensor) -> Tensor:
    """The gradient of qkv, (B, N, 3, H, K)."""
    return triton_backward(dy, qkv, y, lse, backward_blocks(qkv.shape[1]))


@attend_op.register_fake
def _(qkv: Tensor) -> tuple[Tensor, Tensor]:
    images, tokens, _, heads, width = qkv.shape
    y = qkv.new_empty(images, tokens, heads, width)
    return y, qkv.new_empty(images, heads, tokens, dtype=torch.float32)


@backward_op.register_fake
def _(dy: Tensor, qkv: Tensor, y: Tensor, lse: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> Tensor | None:
    return None if dy is None else backward_op(dy, *ctx.saved_tensors)


attend_op.register_autograd(differentiate, setup_context=keep)


# ---- the kernels


def prefers_cudnn(qkv: Tensor) -> bool:
    """Whether cuDNN's forward pass is allowed and the faster one: on an H200, 0.17 ms against 0.20 for 197 tokens of
    B/16 at batch 256, and 0.06 against 0.03 for 64 tokens of S/8 at batch 512."""
    is_there = qkv.is_cuda and torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    return is_there and torch.cuda.get_device_capability(qkv.device)[0] >= 9 and qkv.shape[1] > 128


def cudnn_forward(qkv: Tensor) -> tuple[Tensor, Tensor]:
    images, tokens, _, heads, _ = qkv.shape
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, N, K) each, nothing copied
    y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return y.transpose(1, 2).contiguous(), lse.reshape(images, heads, tokens)


def triton_forward(qkv: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    images, tokens, _, heads, width = qkv.shape
    y = qkv.new_empty(images, tokens, heads, width)
    lse = qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    sizes = {"KEYS": padded(tokens), "QUERIES": blocks.rows}
    launch(forward_kernel, (qkv, y, lse, *qkv.stride()[:4], width**-0.5), qkv, sizes, blocks)
    return y, lse


def triton_backward(dy: Tensor, qkv: Tensor, y: Tensor, lse: Tensor, blocks: Blocks) -> Tensor:
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    dy = dy.to(qkv.dtype) if dy.stride(-1) == 1 else dy.to(qkv.dtype).contiguous()
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    arguments = (qkv, y, dy, lse, dqkv, *qkv.stride()[:4], *dy.stride()[:3], qkv.shape[4] ** -0.5)
    launch(backward_kernel, arguments, qkv, {"KEYS": blocks.rows, "QUERIES": padded(qkv.shape[1])}, blocks)
    return dqkv


def launch(kernel: Any, arguments: tuple[Any, ...], qkv: Tensor, sizes: dict[str, int], blocks: Blocks) -> None:
    images, tokens, _, heads, width = qkv.shape
    sizes = sizes | {"N": tokens, "H": heads, "K": width, "WIDTH": max(LEAST_SIDE, triton.next_power_of_2(width))}
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        kernel[(images * heads,)](*arguments, **sizes, num_warps=blocks.warps, num_stages=blocks.stages)


def padded(tokens: int) -> int:
    """Rows of a block that has all tokens."""
    return max(LEAST_SIDE, int(triton.next_power_of_2(tokens)))
