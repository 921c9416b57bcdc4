"""Rounding a matrix to 8 bits in one pass, in Triton: a program computes one tile of it.

GELU is x times the normal distribution function, by the formula 7.1.26 of Abramowitz and Stegun, which is within 1.5e-7
and shares its exponential with the derivative; the error function of CUDA would take longer than the memory does.

Shapes: M rows, C columns; ROWS and COLUMNS are a tile's, powers of two.
"""

import triton
import triton.language as tl

PLAIN, GELU, SLOPE = (tl.constexpr(number) for number in range(3))
LOG2E = tl.constexpr(1.4426950408889634)
DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0


@triton.jit
def normal(x):
    """The normal distribution function of x, and exp(-x^2 / 2)."""
    bell = tl.exp2(x * x * (-0.5 * LOG2E))
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    powers = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * t * powers * bell  # beyond |x|
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def round_kernel(
    x, u, scale, rounded, turned, sums, most, M, C,
    WHAT: tl.constexpr, SUM: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """rounded (M, C) and turned (C, M); sums of each tile's columns, and its largest magnitude."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (rows[:, None] < M) & (columns[None, :] < C)
    places = rows[:, None] * C + columns[None, :]
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if WHAT == GELU:
        share, _ = normal(value)
        value = value * share
    if WHAT == SLOPE:
        at = tl.load(u + places, mask=inside, other=0.0).to(tl.float32)
        share, bell = normal(at)
        value = value * (share + at * bell * DENSITY)
    tl.store(most + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(tl.max(tl.abs(value), 1), 0))
    if SUM:
        tl.store(sums + tl.program_id(0) * C + columns, tl.sum(value, 0), mask=columns < C)
    value = value / tl.load(scale)
    value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    small = value.to(rounded.dtype.element_ty)
    tl.store(rounded + places, small, mask=inside)
    tl.store(turned + columns[:, None] * M + rows[None, :], tl.trans(small), mask=tl.trans(inside))
