"""Attention over sequences of up to 256 tokens, in Triton: a program computes one head of one image.

A head fits on a multiprocessor, so that each number is read once and the softmax of a row is computed at once: the
forward pass holds all keys and values, and takes the queries block by block. The backward pass holds all queries and
their gradients, and takes keys and values block by block, so that it needs neither atomics nor a second pass.

Queries, keys and values come packed, (B, N, 3, H, K), and so do their gradients. Logits and sums are float32.

Shapes: B images, N tokens, H heads, K head width; KEYS, QUERIES and WIDTH are block sizes, powers of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(start, stride, rows, columns, N, K):
    """Rows of one head's matrix, zeros outside of it."""
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    return tl.load(start + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(start, stride, values, rows, columns, N, K):
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    tl.store(start + rows[:, None] * stride + columns[None, :], values.to(start.dtype.element_ty), mask=inside)


@triton.jit
def forward_kernel(
    qkv, y, lse, image_stride, row_stride, part_stride, head_stride, scale,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y (B, N, H, K) and the logarithm of each row's sum of exponentials, (B, H, N); KEYS covers all keys."""
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * image_stride + head * head_stride
    y += (image * N * H + head) * K
    lse += (image * H + head) * N
    keys, columns = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    k = load_rows(qkv + part_stride, row_stride, keys, columns, N, K)
    v = load_rows(qkv + 2 * part_stride, row_stride, keys, columns, N, K)
    for start in range(0, N, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        q = load_rows(qkv, row_stride, rows, columns, N, K)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)  # (QUERIES, KEYS), in powers of two
        s = tl.where(keys[None, :] < N, s, float("-inf"))
        most = tl.max(s, 1)
        p = tl.exp2(s - most[:, None])
        total = tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total[:, None]
        store_rows(y, H * K, out, rows, columns, N, K)
        tl.store(lse + rows, (most + tl.log2(total)) / LOG2E, mask=rows < N)


@triton.jit
def backward_kernel(
    qkv, y, dy, lse, dqkv, image_stride, row_stride, part_stride, head_stride,
    dy_image_stride, dy_row_stride, dy_head_stride, scale,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dqkv (B, N, 3, H, K); QUERIES covers all queries."""
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * image_stride + head * head_stride
    dy += image * dy_image_stride + head * dy_head_stride
    y += (image * N * H + head) * K
    dqkv += (image * N * 3 * H + head) * K
    lse += (image * H + head) * N
    rows, columns = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    q = load_rows(qkv, row_stride, rows, columns, N, K)
    do = load_rows(dy, dy_row_stride, rows, columns, N, K)
    out = load_rows(y, H * K, rows, columns, N, K)
    total = tl.load(lse + rows, mask=rows < N, other=float("inf")) * LOG2E  # no weight in rows that are not there
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, N, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(qkv + part_stride, row_stride, keys, columns, N, K)
        v = load_rows(qkv + 2 * part_stride, row_stride, keys, columns, N, K)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.where(keys[None, :] < N, tl.exp2(s - total[:, None]), 0.0)
        dv = tl.dot(tl.trans(do), p.to(do.dtype), input_precision="ieee")  # (WIDTH, KEYS)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(q), ds, input_precision="ieee")
        dq = tl.dot(ds, k, dq, input_precision="ieee")
        store_rows(dqkv + H * K, 3 * H * K, tl.trans(dk) * scale, keys, columns, N, K)
        store_rows(dqkv + 2 * H * K, 3 * H * K, tl.trans(dv), keys, columns, N, K)
    store_rows(dqkv, 3 * H * K, dq * scale, rows, columns, N, K)
