"""Gradients of attention on Hopper, on the host: what goes before and behind, and descriptors.

What goes before and behind attention's gradients on Hopper: numbers of each query, and rounding.

B, H, T and D as in `_attention_device`; M rows of a program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.attention._hopper import KEPT_BYTES, MANY_QUERIES, SHORT_KEPT_BYTES, describe
from kprof.kernels.attention._triton import SCHEMA, Given, Options, empty_gradients, run_tiled_back
from kprof.kernels.runtime.launcher import Launcher, alignments
from kprof.kernels.runtime.operator import define

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_queries", "step"])
def prepare(
    y_BHTD,
    dy_BHTD,
    lse_BHT,
    dlse_BHT,
    numbers_BHTS,
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
    """Store what a query's scores, and their gradients, begin with; behind the last query 0.

    That is its log-sum-exp in powers of 2, and its share of the gradients, both to be taken off.
    """
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
    share_M = tl.sum(y_MD * dy_MD, axis=1)
    place = batch * tl.num_programs(1) + head
    from_M = place * num_queries + row_M
    if dlse_BHT is not None:
        share_M -= tl.load(dlse_BHT + from_M, is_row_M, other=0.0)
    lse_M = tl.load(lse_BHT + from_M, is_row_M, other=0.0)
    # Who sees nothing gives nothing, even where its log-sum-exp gets no number.
    share_M = tl.where(lse_M == float("-inf"), 0.0, share_M)
    # Of each block the one, then the other.
    to_M = numbers_BHTS + place * 2 * step + (row_M // BLOCK * 2 * BLOCK + row_M % BLOCK)
    is_place_M = row_M < step
    tl.store(to_M, lse_M * -LOG2_E, is_place_M)
    tl.store(to_M + BLOCK, -share_M, is_place_M)


@triton.jit(do_not_specialize=["num_queries"])
def round_sums(
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
    """Store sums times a scale, columns in their order, where sums have them as they were added."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row_M, column_D = tl.arange(0, M) + tl.program_id(0) * M, tl.arange(0, D)
    is_row_MD = (row_M < num_queries)[:, None]
    token_M = row_M.to(tl.int64)
    # Bits 4 3 2 1 0 of a column lie in the order 2 4 3 1 0.
    bit_2, bits_34 = column_D >> 2 & 1, column_D >> 3 & 3
    place_D = (column_D & -32) + bit_2 * 16 + bits_34 * 4 + (column_D & 3)
    place_D = tl.max_contiguous(tl.multiple_of(place_D, 4), 4)
    sums_at = sums_BHTD + ((batch * tl.num_programs(1) + head) * num_queries + token_M)[:, None] * D
    sum_MD = tl.load(sums_at + place_D[None, :], is_row_MD, other=0.0)
    dq_at = dq_BHTD + batch * dq_batch + head * dq_head + (token_M * dq_token)[:, None]
    tl.store(dq_at + column_D[None, :], (sum_MD * scale).to(dq_BHTD.dtype.element_ty), is_row_MD)


# Keys of a warpgroup, and queries and columns for which it multiplies.
ROWS = 64
# Queries of a block, by columns of a head.
QUERIES = {64: 128, 128: 64}
STAGES = 2
# Of a thread: as compiled for, and of those that compute.
REGISTERS, MOST_REGISTERS = 168, 240
# Of a program of the launches before and behind.
BESIDE_ROWS, BESIDE_WARPS = 64, 4

_launch_prepare, _launch_rounding = Launcher(prepare), Launcher(round_sums)


@cache
def _launcher() -> Launcher:
    from kprof.kernels.attention._hopper_backward_kernel import attend_back

    return Launcher(attend_back)


def run_ring_back(
    given: Given, options: Options, most_keys: int, *, is_ordered: bool
) -> tuple[Tensor, ...]:
    """Return the gradients, by the kernel for Hopper; what that does not do, plain Triton does.

    Unless the queries' gradient is added up in one order, its last bits differ from run to run;
    who told torch to be deterministic gets that order, too.
    """
    if _is_for_others(given):
        return run_tiled_back(given, options, most_keys)
    is_ordered = is_ordered or torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = empty_gradients(given)
    num_sums, (batch, heads, num_queries, dim) = given.q.numel(), given.q.shape
    # What tiles tell each other of each block begins with zeros as sums do.
    num_told = batch * heads * -(-num_queries // QUERIES[dim])
    zeros = torch.zeros(num_sums + num_told, dtype=torch.float32, device=given.q.device)
    sums, told = zeros[:num_sums].view(given.q.shape), zeros[num_sums:].view(torch.int32)
    _attend_back(given, options, (_numbers_of(given), told, sums), (dk, dv), is_ordered)
    _round(sums, options.scale, dq)
    return dq, dk, dv


def _is_for_others(given: Given) -> bool:
    return (
        given.q_starts is not None
        or given.q.shape[3] not in QUERIES
        or not given.q.numel()
        or not given.k.numel()
    )


def _numbers_of(given: Given) -> Tensor:
    """Return what products of queries begin with, block by block."""
    y, dy = (one if one.stride(3) == 1 else one.contiguous() for one in (given.y, given.dy))
    batch, heads, num_queries, dim = y.shape
    block = QUERIES[dim]
    step = -(-num_queries // block) * block
    shape = (batch, heads, step // block, 2 * block)
    numbers = torch.empty(shape, dtype=torch.float32, device=y.device)
    lse = given.lse.contiguous()
    dlse = None if given.dlse is None else given.dlse.contiguous()
    tensors, steps = (y, dy, lse, dlse, numbers), (*y.stride()[:3], *dy.stride()[:3])
    key = (y.device, y.dtype, dim, dlse is None, alignments(tensors, *steps))
    arguments = (*tensors, *steps, num_queries, step, dim, BESIDE_ROWS, block)
    grid = (-(-step // BESIDE_ROWS), heads, batch)
    _launch_prepare(key, grid, arguments, {"num_warps": BESIDE_WARPS})
    return numbers


def _round(sums: Tensor, scale: float, dq: Tensor) -> None:
    batch, heads, num_queries, dim = sums.shape
    steps = dq.stride()[:3]
    key = (dq.device, dq.dtype, dim, alignments((sums, dq), *steps))
    arguments = (sums, dq, *steps, scale, num_queries, dim, BESIDE_ROWS)
    grid = (-(-num_queries // BESIDE_ROWS), heads, batch)
    _launch_rounding(key, grid, arguments, {"num_warps": BESIDE_WARPS})


def _attend_back(
    given: Given,
    options: Options,
    prepared: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    is_ordered: bool,
) -> None:
    numbers, told, sums = prepared
    q, k = given.q, given.k
    batch, heads, num_queries, dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    left, right = options.bounds(num_queries, num_keys)
    tensors = (q, given.dy, k, given.v)
    rows = (QUERIES[dim], QUERIES[dim], ROWS, ROWS)
    descs = [describe(numbers, 1, is_swizzled=False)]
    descs += [describe(one, n) for one, n in zip(tensors, rows, strict=True)]
    descs += [describe(sums, ROWS, ROWS), *(describe(one, ROWS) for one in of_keys)]
    num_heads, group = batch * key_heads, heads // key_heads
    # Of a head of keys L2 holds queries and gradients, those of the queries in 32 bits; and beside
    # them keys and what becomes of them, which take as much where queries are few. By measurement
    # on an H100.
    bytes_of_head = group * num_queries * dim * (2 * q.element_size() + 4)
    is_short = options.sees_all(num_queries, num_keys) or num_queries < MANY_QUERIES
    kept_bytes = SHORT_KEPT_BYTES if is_short else KEPT_BYTES
    together = min(num_heads, max(1, kept_bytes // bytes_of_head))
    sizes = (num_queries, num_keys, left or 0, right or 0, key_heads, num_heads, together)
    how = (left is not None, right is not None, group, QUERIES[dim])
    constants = (*how, is_ordered, STAGES, MOST_REGISTERS)
    arguments = (told, *descs, options.scale, *sizes, *constants)
    grid = -(-num_keys // (2 * ROWS)) * num_heads
    key = (q.device, q.dtype, dim, constants)
    _launcher()(key, grid, arguments, {"num_warps": 4, "maxnreg": REGISTERS})


def _run_with(is_ordered: bool) -> Callable[..., tuple[Tensor, ...]]:
    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        num_tensors = len(Given._fields)
        *options, most_keys = arguments[num_tensors:]
        given = Given(*arguments[:num_tensors])
        return run_ring_back(given, Options(*options), int(most_keys), is_ordered=is_ordered)

    return run


def _empty(*arguments: Tensor) -> tuple[Tensor, ...]:
    return empty_gradients(Given(*arguments[: len(Given._fields)]))


run_attention_back_on_hopper = define(
    f"attention_backward_on_hopper{SCHEMA}", _run_with(False), _empty
)
run_attention_back_in_order = define(
    f"attention_backward_in_order_on_hopper{SCHEMA}", _run_with(True), _empty
)
