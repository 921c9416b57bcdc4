"""Dropout that draws eight elements' fates from one call of the random generator, and keeps them as one byte.

A compiled model draws a 32-bit number for every element, which is most of what dropout costs, and keeps a byte for each
until the backward pass. Here an element has 16 bits of a number, so rates are multiples of 1/65536 (the factor that
keeps the mean is that of the rate drawn), and masks are bits, which torch.compile unpacks where they are used.

The draws are a function of torch's generator alone, so a resumed run repeats them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

LEVELS = 1 << 16
BLOCK = 512  # bytes of a program


def drop(layer: nn.Dropout, x: Tensor) -> Tensor:
    """What a dropout layer computes, with other draws."""
    dropped = round(layer.p * LEVELS)
    if not layer.training or dropped == 0 or x.numel() % 8:
        return nn.Dropout.forward(layer, x)
    seed = torch.randint(1 << 62, (1,), device=x.device)
    bits = keep_bits(seed, x.numel() // 8, dropped)
    places = torch.arange(8, device=x.device, dtype=torch.uint8)
    keep = (bits[:, None] >> places) & 1
    return x * keep.reshape(x.shape) * (LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0)


@torch.library.custom_op("vitlab::keep_bits", mutates_args=())
def keep_bits(seed: Tensor, count: int, dropped: int) -> Tensor:
    """Bytes (count,) in which a bit is 0 with a probability of `dropped` / 65536, drawn from a seed, (1,) int64."""
    bits = torch.empty(count, dtype=torch.uint8, device=seed.device)
    with torch.cuda.device_of(seed):  # Triton launches on the current device
        draw_bits[(triton.cdiv(count, BLOCK),)](seed, bits, count, dropped, BLOCK=BLOCK)
    return bits


@keep_bits.register_fake
def _(seed: Tensor, count: int, dropped: int) -> Tensor:
    return seed.new_empty(count, dtype=torch.uint8)


@triton.jit
def draw_bits(seed, bits, count, dropped, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(tl.load(seed), places)
    byte = halves(a, dropped) | (halves(b, dropped) << 2) | (halves(c, dropped) << 4) | (halves(d, dropped) << 6)
    tl.store(bits + places, byte.to(tl.uint8), mask=places < count)


@triton.jit
def halves(number, dropped):
    """Two bits from the halves of 32-bit numbers."""
    low, high = number & 0xFFFF, (number >> 16) & 0xFFFF
    return (low >= dropped).to(tl.int32) | ((high >= dropped).to(tl.int32) << 1)
