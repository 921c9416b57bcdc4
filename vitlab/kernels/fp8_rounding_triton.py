"""Rounding a matrix to 8 bits, and turning it, in Triton: a program computes one tile.

These are two kernels, the second on words of four bytes. In one, Triton turns single bytes by way of shared memory, and
the ptxas of CUDA 12.8, which Triton 3.6 brings, then stores registers that were never written for a quarter of them.

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
    t = tl.rsqrt(1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    t = t * t  # a division takes five times as many instructions
    halves = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * halves * bell  # beyond |x|
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def round_kernel(
    x, u, scale, rounded, sums, most, M, C,
    WHAT: tl.constexpr, SUM: tl.constexpr, LOOK: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """rounded (M, C); if asked for, sums of each tile's columns, and its largest magnitude."""
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (rows[:, None] < M - row) & (columns[None, :] < C - column)
    start, places = row.to(tl.int64) * C + column, rows[:, None] * C + columns[None, :]
    value = tl.load(x + start + places, mask=inside, other=0.0).to(tl.float32)
    if WHAT == GELU:
        share, _ = normal(value)
        value = value * share
    if WHAT == SLOPE:
        at = tl.load(u + start + places, mask=inside, other=0.0).to(tl.float32)
        share, bell = normal(at)
        value = value * (share + at * bell * DENSITY)
    if LOOK:
        place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(most + place, tl.max(tl.max(tl.abs(value), 1), 0))
    if SUM:
        tl.store(sums + tl.program_id(0) * C + column + columns, tl.sum(value, 0), mask=columns < C - column)
    value = value * (1.0 / tl.load(scale))
    value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(rounded + start + places, value.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def turn_kernel(x, turned, M, C, SIDE: tl.constexpr):
    """turned (C, M) of bytes x (M, C), both as words of four: (M, C / 4) and (C, M / 4); a tile is 4 SIDE square."""
    group, word = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE  # of four rows, of four columns
    groups, words = tl.arange(0, SIDE), tl.arange(0, SIDE)
    inside = (groups[:, None] < M // 4 - group) & (words[None, :] < C // 4 - word)
    x += group.to(tl.int64) * C + word + groups[:, None] * C + words[None, :]
    a, b, c, d = (
        tl.load(x, mask=inside),
        tl.load(x + C // 4, mask=inside),
        tl.load(x + C // 2, mask=inside),
        tl.load(x + 3 * (C // 4), mask=inside),
    )  # four rows of four columns each
    turned += word.to(tl.int64) * M + group + words[:, None] * M + groups[None, :]
    for byte in tl.static_range(4):
        column = ((a >> 8 * byte) & 255) | (((b >> 8 * byte) & 255) << 8)
        column |= (((c >> 8 * byte) & 255) << 16) | ((d >> 8 * byte) << 24)
        tl.store(turned + byte * (M // 4), tl.trans(column), mask=tl.trans(inside))
