"""The backward pass of attention on Hopper, on the host: three launches with their operators.

1. `attention_backward_prepare_kernel`: per query, the log-sum-exp and delta, the row sum of y * dy.
2. The kernel of `_hopper_backward_kernel`: dk, dv, and float32 sums of dq with permuted columns.
3. `attention_backward_round_kernel`: dq from these sums, columns in order.

B, H, T and D as in `_triton`; M rows of a CTA.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.attention._hopper import (
    L2_BYTES,
    L2_BYTES_SHORT,
    MANY_QUERIES,
    tensor_descriptor,
)
from kprof.kernels.attention._triton import (
    BackwardInputs,
    Options,
    backward_operator,
    empty_gradients,
    run_backward,
)
from kprof.kernels.runtime import Launcher, alignments

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_queries", "step"])
def attention_backward_prepare_kernel(
    y_BHTD,
    dy_BHTD,
    lse_BHT,
    dlse_BHT,
    statistics_BHTS,
    y_batch: tl.int64,
    y_head: tl.int64,
    y_token: tl.int64,
    dy_batch: tl.int64,
    dy_head: tl.int64,
    dy_token: tl.int64,
    num_queries,
    step,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store -lse in base 2 and -delta of each query, block by block; behind the last query 0."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row_M, column_D = tl.arange(0, M) + tl.program_id(0) * M, tl.arange(0, D)
    is_row_M = row_M < num_queries
    token_M = row_M.to(tl.int64)
    y_at = y_BHTD + batch * y_batch + head * y_head
    dy_at = dy_BHTD + batch * dy_batch + head * dy_head
    y_at += (token_M * y_token)[:, None] + column_D[None, :]
    dy_at += (token_M * dy_token)[:, None] + column_D[None, :]
    y_MD = tl.load(y_at, is_row_M[:, None], other=0.0).to(tl.float32)
    dy_MD = tl.load(dy_at, is_row_M[:, None], other=0.0).to(tl.float32)
    delta_M = tl.sum(y_MD * dy_MD, axis=1)
    place = batch * tl.num_programs(1) + head
    from_M = place * num_queries + row_M
    if dlse_BHT is not None:
        delta_M -= tl.load(dlse_BHT + from_M, is_row_M, other=0.0)
    lse_M = tl.load(lse_BHT + from_M, is_row_M, other=0.0)
    # A query that sees no key has no gradient, even if that of its log-sum-exp is NaN.
    delta_M = tl.where(lse_M == float("-inf"), 0.0, delta_M)
    # A block has BLOCK statistics of the first kind, then BLOCK of the second.
    to_M = statistics_BHTS + place * 2 * step + (row_M // BLOCK * 2 * BLOCK + row_M % BLOCK)
    is_place_M = row_M < step
    tl.store(to_M, lse_M * -LOG2_E, is_place_M)
    tl.store(to_M + BLOCK, -delta_M, is_place_M)


@triton.jit(do_not_specialize=["num_queries"])
def attention_backward_round_kernel(
    sums_BHTD,
    dq_BHTD,
    dq_batch: tl.int64,
    dq_head: tl.int64,
    dq_token: tl.int64,
    scale,
    num_queries,
    D: tl.constexpr,
    M: tl.constexpr,
) -> None:
    """Store the sums of dq times a scale, with their columns in order (see `store_permuted`)."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row_M, column_D = tl.arange(0, M) + tl.program_id(0) * M, tl.arange(0, D)
    is_row_MD = (row_M < num_queries)[:, None]
    token_M = row_M.to(tl.int64)
    # Bits 4 3 2 1 0 of a column are stored in the order 2 4 3 1 0.
    bit_2, bits_34 = column_D >> 2 & 1, column_D >> 3 & 3
    place_D = (column_D & -32) + bit_2 * 16 + bits_34 * 4 + (column_D & 3)
    place_D = tl.max_contiguous(tl.multiple_of(place_D, 4), 4)
    sums_at = sums_BHTD + ((batch * tl.num_programs(1) + head) * num_queries + token_M)[:, None] * D
    sum_MD = tl.load(sums_at + place_D[None, :], is_row_MD, other=0.0)
    dq_at = dq_BHTD + batch * dq_batch + head * dq_head + (token_M * dq_token)[:, None]
    tl.store(dq_at + column_D[None, :], (sum_MD * scale).to(dq_BHTD.dtype.element_ty), is_row_MD)


# Keys of a warpgroup; queries and columns of its part of dq.
ROWS = 64
# Queries of a block, by columns of a head.
QUERIES = {64: 128, 128: 64}
STAGES = 2
# Registers of a thread: as compiled for, and of a consumer.
REGISTERS, CONSUMER_REGISTERS = 168, 240
# Rows and warps of a CTA of the two small kernels.
CTA_ROWS, CTA_WARPS = 64, 4

_launch_prepare = Launcher(attention_backward_prepare_kernel)
_launch_round = Launcher(attention_backward_round_kernel)


@cache
def _launcher() -> Launcher:
    from kprof.kernels.attention._hopper_backward_kernel import attention_backward_hopper_kernel

    return Launcher(attention_backward_hopper_kernel)


def run_backward_on_hopper(
    given: BackwardInputs, options: Options, max_seqlen_k: int, *, is_ordered: bool
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv; what the Hopper kernel does not take goes to the Triton kernels.

    Unless dq is summed in one order, its last bits differ from run to run. With
    `torch.use_deterministic_algorithms`, it always is.
    """
    if _is_unsupported(given):
        return run_backward(given, options, max_seqlen_k)
    is_ordered = is_ordered or torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = empty_gradients(given)
    num_sums, (batch, heads, num_queries, dim) = given.q.numel(), given.q.shape
    # Semaphores, one a block of queries, begin with 0, as the sums do.
    num_semaphores = batch * heads * -(-num_queries // QUERIES[dim])
    zeros = torch.zeros(num_sums + num_semaphores, dtype=torch.float32, device=given.q.device)
    sums, semaphores = zeros[:num_sums].view(given.q.shape), zeros[num_sums:].view(torch.int32)
    _launch_backward(
        given, options, (_row_statistics(given), semaphores, sums), (dk, dv), is_ordered
    )
    _round_dq(sums, options.scale, dq)
    return dq, dk, dv


def _is_unsupported(given: BackwardInputs) -> bool:
    return (
        given.cu_seqlens_q is not None
        or given.q.shape[3] not in QUERIES
        or not given.q.numel()
        or not given.k.numel()
    )


def _row_statistics(given: BackwardInputs) -> Tensor:
    """Return -lse in base 2 and -delta of each query, block by block."""
    y, dy = (one if one.stride(3) == 1 else one.contiguous() for one in (given.y, given.dy))
    batch, heads, num_queries, dim = y.shape
    block = QUERIES[dim]
    step = -(-num_queries // block) * block
    shape = (batch, heads, step // block, 2 * block)
    statistics = torch.empty(shape, dtype=torch.float32, device=y.device)
    lse = given.lse.contiguous()
    dlse = None if given.dlse is None else given.dlse.contiguous()
    tensors, strides = (y, dy, lse, dlse, statistics), (*y.stride()[:3], *dy.stride()[:3])
    key = (y.device, y.dtype, dim, dlse is None, alignments(tensors, *strides))
    arguments = (*tensors, *strides, num_queries, step, dim, CTA_ROWS, block)
    grid = (-(-step // CTA_ROWS), heads, batch)
    _launch_prepare(key, grid, arguments, {"num_warps": CTA_WARPS})
    return statistics


def _round_dq(sums: Tensor, scale: float, dq: Tensor) -> None:
    batch, heads, num_queries, dim = sums.shape
    strides = dq.stride()[:3]
    key = (dq.device, dq.dtype, dim, alignments((sums, dq), *strides))
    arguments = (sums, dq, *strides, scale, num_queries, dim, CTA_ROWS)
    grid = (-(-num_queries // CTA_ROWS), heads, batch)
    _launch_round(key, grid, arguments, {"num_warps": CTA_WARPS})


def _launch_backward(
    given: BackwardInputs,
    options: Options,
    prepared: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    is_ordered: bool,
) -> None:
    statistics, semaphores, sums = prepared
    q, k = given.q, given.k
    batch, heads, num_queries, dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    left, right = options.bounds(num_queries, num_keys)
    tensors = (q, given.dy, k, given.v)
    rows = (QUERIES[dim], QUERIES[dim], ROWS, ROWS)
    descs = [tensor_descriptor(statistics, 1, is_swizzled=False)]
    descs += [tensor_descriptor(one, n) for one, n in zip(tensors, rows, strict=True)]
    descs += [
        tensor_descriptor(sums, ROWS, ROWS),
        *(tensor_descriptor(one, ROWS) for one in of_keys),
    ]
    num_heads, group = batch * key_heads, heads // key_heads
    # For a key head, L2 holds q, dy and the float32 dq; keys and their gradients take as much where
    # queries are few. Measured on an H100.
    bytes_of_head = group * num_queries * dim * (2 * q.element_size() + 4)
    is_short = options.sees_all(num_queries, num_keys) or num_queries < MANY_QUERIES
    l2_bytes = L2_BYTES_SHORT if is_short else L2_BYTES
    section = min(num_heads, max(1, l2_bytes // bytes_of_head))
    sizes = (num_queries, num_keys, left or 0, right or 0, key_heads, num_heads, section)
    config = (left is not None, right is not None, group, QUERIES[dim])
    constants = (*config, is_ordered, STAGES, CONSUMER_REGISTERS)
    arguments = (semaphores, *descs, options.scale, *sizes, *constants)
    grid = -(-num_keys // (2 * ROWS)) * num_heads
    key = (q.device, q.dtype, dim, constants)
    _launcher()(key, grid, arguments, {"num_warps": 4, "maxnreg": REGISTERS})


backward_hopper = backward_operator(
    "attention_backward_on_hopper", partial(run_backward_on_hopper, is_ordered=False)
)
backward_hopper_ordered = backward_operator(
    "attention_backward_in_order_on_hopper", partial(run_backward_on_hopper, is_ordered=True)
)
