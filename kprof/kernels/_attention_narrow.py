"""Attention with queries, keys and values in FP8: heads get scales, then Hopper's kernel runs.

The largest number of each head is found in one launch, everything is rounded in a second. Values
are turned over meanwhile, as tensor cores take 8 bits with what is summed over side by side: block
after block of keys, columns first, keys in the order of `pack_narrow` of `_gluon`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels._attention import Options, empty_results
from kprof.kernels._attention_ring import Ring, attend_in_ring, deals
from kprof.kernels._fp8 import FP8, LARGEST, LEAST
from kprof.kernels._launch import Launcher, alignments
from kprof.kernels._operator import define

ROWS, WARPS = 128, 8


@triton.jit
def _tile(x_BHTD, steps, head, row_M, num_rows, D: tl.constexpr) -> tl.tensor:
    """Return rows of one head in float32, with zeros where there are none."""
    batch, column_D = tl.program_id(2), tl.arange(0, D)
    at = x_BHTD + batch * steps[0] + head * steps[1]
    at_MD = at + row_M.to(tl.int64)[:, None] * steps[2] + column_D[None, :]
    return tl.load(at_MD, (row_M < num_rows)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _raise(largest_BH, x_MD) -> None:
    """Take the magnitudes of a tile into its head's largest; as integers, NaN is the largest."""
    bits_MD = tl.abs(x_MD).to(tl.int32, bitcast=True)
    place = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    tl.atomic_max(largest_BH + place, tl.max(tl.max(bits_MD, axis=1), axis=0))


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def find_largest(
    largest_BH,
    q_BHTD,
    k_BHND,
    v_BHND,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    num_queries,
    num_keys,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
) -> None:
    """Find the largest magnitude of each head: of queries, then of keys, then of values."""
    head = tl.program_id(1)
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    if head < HEADS:
        _raise(largest_BH, _tile(q_BHTD, (q_batch, q_head, q_row), head, row_M, num_queries, D))
    elif head < HEADS + KEY_HEADS:
        _raise(
            largest_BH, _tile(k_BHND, (k_batch, k_head, k_row), head - HEADS, row_M, num_keys, D)
        )
    else:
        head -= HEADS + KEY_HEADS
        _raise(largest_BH, _tile(v_BHND, (v_batch, v_head, v_row), head, row_M, num_keys, D))


@triton.jit
def _rounded(x_MD, largest, LARGEST: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return numbers of 8 bits, the largest of which is LARGEST."""
    largest = tl.where(largest < LEAST, LEAST, largest)
    return (x_MD * tl.div_rn(LARGEST, largest)).to(tl.float8e4nv)


@triton.jit
def _store_rows(y_BHTD, y_MD, head, heads, row_M, num_rows, D: tl.constexpr) -> None:
    at = (tl.program_id(2) * heads + head).to(tl.int64) * num_rows
    at_MD = (at + row_M)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(y_BHTD + at_MD, y_MD, (row_M < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def narrow(
    largest_BH,
    q_BHTD,
    k_BHND,
    v_BHND,
    into_q,
    into_k,
    into_v,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    num_queries,
    num_keys,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Round all heads to 8 bits; values in blocks of M keys, turned over."""
    head, batch = tl.program_id(1), tl.program_id(2)
    largest = tl.load(largest_BH + batch * tl.num_programs(1) + head)
    block, place_M = tl.program_id(0), tl.arange(0, M)
    row_M = block * M + place_M
    if head < HEADS:
        x_MD = _tile(q_BHTD, (q_batch, q_head, q_row), head, row_M, num_queries, D)
        y_MD = _rounded(x_MD, largest, LARGEST, LEAST)
        _store_rows(into_q, y_MD, head, HEADS, row_M, num_queries, D)
    elif head < HEADS + KEY_HEADS:
        head -= HEADS
        x_MD = _tile(k_BHND, (k_batch, k_head, k_row), head, row_M, num_keys, D)
        y_MD = _rounded(x_MD, largest, LARGEST, LEAST)
        _store_rows(into_k, y_MD, head, KEY_HEADS, row_M, num_keys, D)
    elif block * M < num_keys:
        head -= HEADS + KEY_HEADS
        key_M = place_M // 16 * 16 + place_M % 4 // 2 * 8 + place_M % 16 // 4 * 2 + place_M % 2
        x_MD = _tile(v_BHND, (v_batch, v_head, v_row), head, block * M + key_M, num_keys, D)
        y_DM = tl.trans(_rounded(x_MD, largest, LARGEST, LEAST))
        at = (batch * KEY_HEADS + head) * tl.cdiv(num_keys, M) + block
        at_DM = at.to(tl.int64) * D * M + tl.arange(0, D)[:, None] * M + place_M[None, :]
        tl.store(into_v + at_DM, y_DM)


_launch_find, _launch_narrow = Launcher(find_largest), Launcher(narrow)


def narrowed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values turned over, and the largest magnitude of each head.

    Args:
        q: (B, H, T, D); float16 or bfloat16, D a power of two.
        k: (B, heads, N, D).
        v: As k. Of the results it has (B, heads, blocks of 128 keys times D, 128).
    """
    batch, heads, num_queries, dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    largest = q.new_zeros((batch, heads + 2 * key_heads), dtype=torch.float32)
    in_blocks = (batch, key_heads, -(-num_keys // ROWS) * dim, ROWS)
    made = tuple(torch.empty(s, dtype=FP8, device=q.device) for s in (q.shape, k.shape, in_blocks))
    steps = tuple(step for one in (q, k, v) for step in one.stride()[:3])
    numbers = (*steps, num_queries, num_keys, heads, key_heads, dim, ROWS)
    grid = (-(-max(num_queries, num_keys) // ROWS), heads + 2 * key_heads, batch)
    dtypes = (q.dtype, k.dtype, v.dtype)
    key = (q.device, *dtypes, heads, key_heads, dim, alignments((q, k, v), *steps))
    options = {"num_warps": WARPS}
    _launch_find(key, grid, (largest.view(torch.int32), q, k, v, *numbers), options)
    _launch_narrow(key, grid, (largest, q, k, v, *made, *numbers, LARGEST, LEAST), options)
    return *made, largest


def run_narrow(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Attend in FP8."""
    y, lse = empty_results(q)
    if not q.numel() or not k.numel():
        return y.zero_(), lse.fill_(-math.inf)
    attend_to(narrowed(q, k, v), y, lse, options)
    return y, lse


def attend_to(made: tuple[Tensor, ...], y: Tensor, lse: Tensor, options: Options) -> None:
    """Attend to what `narrowed` made, in blocks as its values lie in, and store results."""
    q, k, v, largest = made
    sees_all = options.sees_all(q.shape[2], k.shape[2])
    ring = Ring(ROWS, 4, is_dealt=deals(q.shape[3], q.shape[2], sees_all))
    attend_in_ring(q, k, v, largest, y, lse, options, ring)


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    return run_narrow(q, k, v, Options(scale, is_causal, window, q.shape[2]))


attend_narrow = define(
    "attention_fp8(Tensor q, Tensor k, Tensor v, float scale, bool is_causal, int window) "
    "-> (Tensor, Tensor)",
    _run,
    lambda q, *others: empty_results(q),
)
