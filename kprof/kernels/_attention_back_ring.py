"""Gradients of attention on Hopper, on the host: what goes before and behind, and descriptors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kprof.kernels._attention import Options
from kprof.kernels._attention_back import SCHEMA, Given, empty_gradients, run_tiled_back
from kprof.kernels._attention_back_sums import prepare
from kprof.kernels._attention_ring import KEPT_BYTES, describe
from kprof.kernels._launch import Launcher, alignments
from kprof.kernels._operator import define

# Keys of a warpgroup, and queries and columns for which it multiplies.
ROWS = 64
# Queries of a block, by columns of a head.
QUERIES = {64: 128, 128: 64}
STAGES = 2
# Of a thread: as compiled for, and of those that compute.
REGISTERS, MOST_REGISTERS = 168, 240
PREPARED_ROWS, PREPARED_WARPS = 64, 4

_launch_prepare = Launcher(prepare)


@cache
def _launcher() -> Launcher:
    from kprof.kernels._attention_back_hopper import attend_back

    return Launcher(attend_back)


def run_ring_back(given: Given, options: Options, most_keys: int) -> tuple[Tensor, ...]:
    """Return the gradients, by the kernel for Hopper; what that does not do, plain Triton does.

    The order in which the queries' gradient is added up differs from run to run, so who told torch
    to be deterministic gets plain Triton's, too.
    """
    if _is_for_others(given):
        return run_tiled_back(given, options, most_keys)
    gradients = empty_gradients(given)
    sums = torch.zeros(given.q.shape, dtype=torch.float32, device=given.q.device)
    _attend_back(given, options, _numbers_of(given), sums, *gradients[1:])
    torch.mul(sums, options.scale, out=gradients[0])
    return gradients


def _is_for_others(given: Given) -> bool:
    return (
        given.q_starts is not None
        or given.q.shape[3] not in QUERIES
        or not given.q.numel()
        or not given.k.numel()
        or torch.are_deterministic_algorithms_enabled()
    )


def _numbers_of(given: Given) -> Tensor:
    """Return what products of queries begin with, block by block."""
    y, dy = (one if one.stride(3) == 1 else one.contiguous() for one in (given.y, given.dy))
    batch, heads, num_queries, dim = y.shape
    block = QUERIES[dim]
    step = -(-num_queries // block) * block
    shape = (batch, heads, step // block, 2, block)
    numbers = torch.empty(shape, dtype=torch.float32, device=y.device)
    lse = given.lse.contiguous()
    dlse = None if given.dlse is None else given.dlse.contiguous()
    tensors, steps = (y, dy, lse, dlse, numbers), (*y.stride()[:3], *dy.stride()[:3])
    key = (y.device, y.dtype, dim, dlse is None, alignments(tensors, *steps))
    arguments = (*tensors, *steps, num_queries, step, dim, PREPARED_ROWS, block)
    grid = (-(-step // PREPARED_ROWS), heads, batch)
    _launch_prepare(key, grid, arguments, {"num_warps": PREPARED_WARPS})
    return numbers


def _attend_back(
    given: Given, options: Options, numbers: Tensor, sums: Tensor, dk: Tensor, dv: Tensor
) -> None:
    q, k = given.q, given.k
    batch, heads, num_queries, dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    left, right = options.bounds(num_queries, num_keys)
    tensors = (q, given.dy, k, given.v)
    rows = (QUERIES[dim], QUERIES[dim], ROWS, ROWS)
    descs = [describe(one, n) for one, n in zip(tensors, rows, strict=True)]
    descs += [describe(sums, ROWS, ROWS), describe(dk, ROWS), describe(dv, ROWS)]
    num_heads, group = batch * key_heads, heads // key_heads
    # Of a head of keys L2 holds queries and gradients, those of the queries in 32 bits.
    bytes_of_head = group * num_queries * dim * (2 * q.element_size() + 4)
    together = min(num_heads, max(1, KEPT_BYTES // bytes_of_head))
    sizes = (num_queries, num_keys, left or 0, right or 0, key_heads, num_heads, together)
    constants = (left is not None, right is not None, group, QUERIES[dim], STAGES, MOST_REGISTERS)
    arguments = (numbers, *descs, options.scale, *sizes, *constants)
    grid = -(-num_keys // (2 * ROWS)) * num_heads
    key = (q.device, q.dtype, dim, constants)
    _launcher()(key, grid, arguments, {"num_warps": 4, "maxnreg": REGISTERS})


def _run(*arguments: Tensor) -> tuple[Tensor, ...]:
    num_tensors = len(Given._fields)
    *options, most_keys = arguments[num_tensors:]
    given = Given(*arguments[:num_tensors])
    return run_ring_back(given, Options(*options), int(most_keys))


def _empty(*arguments: Tensor) -> tuple[Tensor, ...]:
    return empty_gradients(Given(*arguments[: len(Given._fields)]))


run_attention_back_on_hopper = define(f"attention_backward_on_hopper{SCHEMA}", _run, _empty)
