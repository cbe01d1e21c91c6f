"""Gradients of attention on Hopper, on the host: what goes before and behind, and descriptors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kprof.kernels._attention import Options
from kprof.kernels._attention_back import SCHEMA, Given, empty_gradients, run_tiled_back
from kprof.kernels._attention_back_sums import prepare, round_sums
from kprof.kernels._attention_ring import KEPT_BYTES, MANY_QUERIES, SHORT_KEPT_BYTES, describe
from kprof.kernels._launch import Launcher, alignments
from kprof.kernels._operator import define

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
    from kprof.kernels._attention_back_hopper import attend_back

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
