"""Attention of many queries on the host: how the work is cut, and the operator that launches it.

Attention of many queries on the device, in plain Triton, for every GPU that Triton knows.

B batch, H query heads, T queries of a sequence, D columns of a head; M queries of a tile, N keys of
a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.runtime.launcher import Launcher, alignments, kind_of
from kprof.kernels.runtime.operator import define
from kprof.kernels.tiles.key_range import is_in_reach, reach_of
from kprof.kernels.tiles.online_softmax import (
    finish,
    largest_of,
    parts_of,
    raise_largest,
    settle,
    weigh_scores,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    state,
    q_MD,
    k_ND,
    v_ND,
    k_key,
    v_key,
    begin,
    end,
    own_M,
    num_keys,
    left,
    right,
    scale,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Take the keys from `begin` to `end` in, and return the state after them."""
    sum_MD, largest_M, total_M4 = state
    column_D = tl.arange(0, q_MD.shape[1])
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        key_N = tl.arange(0, BLOCK) + start
        at_N = key_N.to(tl.int64)
        at_k = k_ND + at_N[:, None] * k_key + column_D[None, :]
        at_v = v_ND + at_N[:, None] * v_key + column_D[None, :]
        if IS_MASKED:
            is_key_ND = (key_N < num_keys)[:, None]
            k = tl.load(at_k, is_key_ND, other=0.0)
        else:
            k = tl.load(at_k)
        score_MN = tl.dot(q_MD, k.T)
        if IS_MASKED:
            is_seen_MN = is_in_reach(own_M, key_N, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
            score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
            # What lies beyond may be NaN, which no weight of 0 would make 0.
            v = tl.load(at_v, is_key_ND, other=0.0)
        else:
            v = tl.load(at_v)
        shrink_M, largest_M = raise_largest(largest_of(score_MN), largest_M, scale)
        weight_MN = weigh_scores(score_MN, largest_M, scale)
        total_M4 = total_M4 * shrink_M[:, None] + parts_of(weight_MN)
        sum_MD = tl.dot(weight_MN.to(v.dtype), v, sum_MD * shrink_M[:, None])
    return sum_MD, largest_M, total_M4


@triton.jit(do_not_specialize=["num_queries", "num_keys", "left", "right"])
def attend(
    q_BHTD,
    k_BHND,
    v_BHND,
    y_BTHD,
    lse_BHT,
    q_starts,
    k_starts,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_token: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_key: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_key: tl.int64,
    y_batch: tl.int64,
    y_token: tl.int64,
    scale,
    num_queries,
    num_keys,
    left,
    right,
    GROUP: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Attend with one tile of queries of one head; with starts, sequences lie one after another."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lse_BHT += (batch * tl.num_programs(1) + head) * num_queries
    q_first, k_first = batch * q_batch, batch * k_batch
    v_first, y_first = batch * v_batch, batch * y_batch
    if HAS_STARTS:
        q_start, k_start = tl.load(q_starts + batch), tl.load(k_starts + batch)
        lse_BHT += q_start - batch * tl.num_programs(1) * num_queries
        num_queries = (tl.load(q_starts + batch + 1) - q_start).to(tl.int32)
        num_keys = (tl.load(k_starts + batch + 1) - k_start).to(tl.int32)
        q_first, k_first = q_start.to(tl.int64) * q_token, k_start.to(tl.int64) * k_key
        v_first, y_first = k_start.to(tl.int64) * v_key, q_start.to(tl.int64) * y_token
    # The last rows see most where later keys are not seen: they begin first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if first_row < num_queries:
        row_M, column_D = tl.arange(0, M) + first_row, tl.arange(0, D)
        is_row_M = row_M < num_queries
        q_at_M = row_M.to(tl.int64) * q_token
        q_at_MD = q_BHTD + q_first + head * q_head + (q_at_M[:, None] + column_D[None, :])
        q_MD = tl.load(q_at_MD, is_row_M[:, None], other=0.0)
        first_own = first_row + num_keys - num_queries
        begin, inner_begin, inner_end, end = reach_of(
            first_own, M, num_keys, left, right, N, HAS_LEFT, HAS_RIGHT
        )
        own_M = row_M + (num_keys - num_queries)
        k_ND = k_BHND + k_first + head // GROUP * k_head
        v_ND = v_BHND + v_first + head // GROUP * v_head
        state = (
            tl.zeros([M, D], tl.float32),
            tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M, 4], tl.float32),
        )
        # fmt: off
        if HAS_LEFT:
            state = _attend(
                state, q_MD, k_ND, v_ND, k_key, v_key, begin, inner_begin, own_M, num_keys,
                left, right, scale, HAS_LEFT, HAS_RIGHT, True, N, STAGES,
            )
        state = _attend(
            state, q_MD, k_ND, v_ND, k_key, v_key, inner_begin, inner_end, own_M, num_keys,
            left, right, scale, HAS_LEFT, HAS_RIGHT, False, N, STAGES,
        )
        state = _attend(
            state, q_MD, k_ND, v_ND, k_key, v_key, inner_end, end, own_M, num_keys,
            left, right, scale, HAS_LEFT, HAS_RIGHT, True, N, STAGES,
        )
        # fmt: on
        sum_MD, largest_M, total_M4 = state
        total_M = settle(tl.sum(total_M4, axis=1), largest_M, scale, v_BHND.dtype.element_ty)
        mean_MD, lse_M = finish(sum_MD, largest_M * scale, total_M)
        y_at_M = row_M.to(tl.int64) * y_token
        y_at_MD = y_BTHD + y_first + head * D + (y_at_M[:, None] + column_D[None, :])
        tl.store(y_at_MD, mean_MD.to(y_BTHD.dtype.element_ty), is_row_M[:, None])
        tl.store(lse_BHT + row_M, lse_M * LN_2, is_row_M)


LOG2_E = 1.4426950408889634


class Options(NamedTuple):
    """What a call is given beside its tensors."""

    scale: float
    is_causal: bool
    window: int
    most_queries: int
    """Of a sequence, where they lie one after another."""

    def bounds(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        """Return how many keys before and after its own a row sees; None: all there are."""
        side = self.window - 1 if 0 < self.window < max(num_queries, num_keys) else None
        return side, 0 if self.is_causal else side

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Tell whether every row sees every key."""
        return self.bounds(num_queries, num_keys) == (None, None)


@dataclass(frozen=True)
class Tiled:
    """How plain Triton cuts a call: queries of a tile, keys of a block, warps, blocks in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiled_for(dim: int, num_queries: int) -> Tiled:
    """Return the schedule that was the fastest on an H200; of few queries none was measured."""
    if num_queries <= 64:
        return Tiled(64, 64, 4, 3) if dim <= 128 else Tiled(64, 32, 8, 2)
    if dim <= 64:
        return Tiled(64, 128, 4, 3)
    return Tiled(128, 128, 8, 2) if dim <= 128 else Tiled(128, 64, 8, 2)


_launch = Launcher(attend)


def run_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend with plain Triton."""
    y, lse = empty_results(q)
    if not y.numel():
        return y, lse
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    call, tensors = (kind_of(q, k, v, q_starts, k_starts), options), (q, k, v, y, lse)
    given = (*tensors, q_starts, k_starts)
    if not _launch.again(call, given):
        _launch_first(call, given, options)
    return y, lse


def _launch_first(call: object, tensors: tuple[Tensor | None, ...], options: Options) -> None:
    q, k, v, y, _, q_starts, k_starts = tensors
    assert q is not None and k is not None and v is not None and y is not None
    batch, heads, num_queries, dim = q.shape
    num_sequences, most = batch, num_queries
    if q_starts is not None:
        num_sequences, most = q_starts.numel() - 1, options.most_queries
    schedule = tiled_for(dim, most)
    left, right = options.bounds(num_queries, k.shape[2])
    constants = (
        *(heads // k.shape[1], q_starts is not None, left is not None, right is not None),
        *(dim, schedule.rows, schedule.keys, schedule.stages),
    )
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], y.stride(0), y.stride(2))
    types = tuple(None if one is None else one.dtype for one in tensors)
    inputs = (q, k, v, q_starts, k_starts)
    key = (q.device, types, constants, schedule.warps, alignments(inputs, *steps))
    numbers = (num_queries, k.shape[2], left or 0, right or 0)
    arguments = (*tensors, *steps, options.scale * LOG2_E, *numbers, *constants)
    grid = (-(-most // schedule.rows), heads, num_sequences)
    _launch(key, grid, arguments, {"num_warps": schedule.warps}, call=call, tensors=tensors)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return places for the results: tokens before heads in memory, as what comes next wants."""
    batch, heads, tokens, dim = q.shape
    y = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return y, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    *given: float,
) -> tuple[Tensor, Tensor]:
    return run_tiled(q, k, v, q_starts, k_starts, Options(*given))  # type: ignore[arg-type]


run_attention = define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? q_starts, Tensor? k_starts, "
    "float scale, bool is_causal, int window, int most_queries) -> (Tensor, Tensor)",
    _run,
    lambda q, *others: empty_results(q),
)
