"""Attention of many queries on the host: how the work is cut, and the operator that launches it.

Attention of many queries on the device, in plain Triton, for every GPU that Triton knows.

B batch, H query heads, T queries of a sequence, D columns of a head; M queries of a tile, N keys of
a block.

Gradients of attention of many queries in plain Triton, for every GPU, and their torch operator.

The kernel of the queries runs first: a tile of queries stays while keys and values pass by, and
scores are computed again from the log-sum-exp of the forward pass. In the kernel of keys and values
a tile of keys stays while the queries that see it pass by, of all query heads that share it; scores
lie keys first, so that weights are an operand as they are. Each gradient is summed by one CTA in
one order, so its bits are always the same. B, H, T, D, M and N as in `_portable`.
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
from kprof.kernels.tiles.key_range import is_in_reach, reach_of, sequence_at
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


_launch_forward = Launcher(attend)


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
    if not _launch_forward.again(call, given):
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
    _launch_forward(key, grid, arguments, {"num_warps": schedule.warps}, call=call, tensors=tensors)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return places for the results: tokens before heads in memory, as what comes next wants."""
    batch, heads, tokens, dim = q.shape
    y = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return y, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _run_forward(
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
    _run_forward,
    lambda q, *others: empty_results(q),
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_keys(
    state,
    keys,
    queries,
    steps,
    begin,
    end,
    num_queries,
    before,
    after,
    scale,
    GROUP: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Add what queries from `begin` to `end` of all heads give to the gradients of a tile of keys.

    One loop for all of these heads: two, one within the other, spill. It counts heads along, of a
    single one, too, and there are always three ranges of queries where it does: in other forms the
    assembler makes every product wait for the one before.
    """
    dk_ND, dv_ND = state
    k_ND, v_ND, own_N = keys
    q_TD, dy_TD, lse_T, share_T = queries
    q_head, q_token, dy_head, dy_token, lse_head = steps
    column_D = tl.arange(0, k_ND.shape[1])
    start, member = begin, 0
    for _ in tl.range(0, GROUP * tl.cdiv(end - begin, BLOCK), num_stages=STAGES):
        row_M = tl.arange(0, BLOCK) + start
        at_M1 = row_M.to(tl.int64)[:, None]
        at_q = q_TD + member * q_head + at_M1 * q_token + column_D[None, :]
        at_dy = dy_TD + member * dy_head + at_M1 * dy_token + column_D[None, :]
        lse_at, share_at = lse_T + member * lse_head, share_T + member * lse_head
        if IS_MASKED:
            is_row_M = row_M < num_queries
            q = tl.load(at_q, is_row_M[:, None], other=0.0)
            dy = tl.load(at_dy, is_row_M[:, None], other=0.0)
            lse_M = tl.load(lse_at + row_M, is_row_M, other=0.0)
            share_M = tl.load(share_at + row_M, is_row_M, other=0.0)
        else:
            q, dy = tl.load(at_q), tl.load(at_dy)
            lse_M, share_M = tl.load(lse_at + row_M), tl.load(share_at + row_M)
        weight_NM = tl.exp2(tl.dot(k_ND, q.T) * (scale * _LOG2_E) - (lse_M * _LOG2_E)[None, :])
        # What is taken off of a product is where it begins: it needs no registers beside it.
        less_NM = tl.broadcast_to(-share_M[None, :], [k_ND.shape[0], BLOCK])
        score_NM = weight_NM * tl.dot(v_ND, dy.T, less_NM)
        if IS_MASKED:
            is_seen_NM = is_in_reach(
                own_N, row_M, num_queries, before, after, HAS_BEFORE, HAS_AFTER
            )
            weight_NM = tl.where(is_seen_NM, weight_NM, 0.0)
            score_NM = tl.where(is_seen_NM, score_NM, 0.0)
        dv_ND = tl.dot(weight_NM.to(dy.dtype), dy, dv_ND)
        dk_ND = tl.dot(score_NM.to(q.dtype), q, dk_ND)
        start += BLOCK
        if GROUP > 1 or HAS_BEFORE:
            member += tl.where(start >= end, 1, 0)
            start = tl.where(start >= end, begin, start)
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=["num_queries", "num_keys", "left", "right"])
def attend_back_to_keys(
    q_BHTD,
    k_BHND,
    v_BHND,
    dy_BHTD,
    lse_BHT,
    share_BHT,
    q_starts,
    k_starts,
    dk_BHND,
    dv_BHND,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_token: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_key: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_key: tl.int64,
    dy_batch: tl.int64,
    dy_head: tl.int64,
    dy_token: tl.int64,
    dk_batch: tl.int64,
    dk_head: tl.int64,
    dk_key: tl.int64,
    dv_batch: tl.int64,
    dv_head: tl.int64,
    dv_key: tl.int64,
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
    """Store the gradients of a tile of keys and its values, from all query heads that share it."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    # Where the numbers of the first query head are that shares these keys; how far to the next.
    lse_at, lse_head = (batch * tl.num_programs(1) + head) * GROUP * num_queries, num_queries
    q_start, k_start = 0, 0
    if HAS_STARTS:
        lse_at -= batch * tl.num_programs(1) * GROUP * num_queries
        q_start, num_queries = sequence_at(q_starts, batch)
        k_start, num_keys = sequence_at(k_starts, batch)
        lse_at += q_start
        batch *= 0
    # The first keys are seen most where later ones are not seen.
    first_key = tl.program_id(0) * N
    if first_key < num_keys:
        key_N, column_1D = tl.arange(0, N) + first_key, tl.arange(0, D)[None, :]
        is_key_ND = (key_N < num_keys)[:, None]
        token_N1 = (k_start + key_N)[:, None]
        k_at = k_BHND + batch * k_batch + head * k_head + token_N1 * k_key + column_1D
        v_at = v_BHND + batch * v_batch + head * v_head + token_N1 * v_key + column_1D
        k_ND = tl.load(k_at, is_key_ND, other=0.0)
        v_ND = tl.load(v_at, is_key_ND, other=0.0)
        # Key j is seen from the query j + T - N, its own, on, as far as that query's reach goes
        # the other way round.
        first_own = first_key + num_queries - num_keys
        begin, inner_begin, inner_end, end = reach_of(
            first_own, N, num_queries, right, left, M, HAS_RIGHT, HAS_LEFT
        )
        keys = (k_ND, v_ND, key_N + (num_queries - num_keys))
        state = (tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32))
        q_TD = q_BHTD + batch * q_batch + head * GROUP * q_head + q_start * q_token
        dy_TD = dy_BHTD + batch * dy_batch + head * GROUP * dy_head + q_start * dy_token
        queries = (q_TD, dy_TD, lse_BHT + lse_at, share_BHT + lse_at)
        steps = (q_head, q_token, dy_head, dy_token, lse_head)
        # fmt: off
        if GROUP > 1 or HAS_RIGHT:
            state = _to_keys(
                state, keys, queries, steps, begin, inner_begin, num_queries, right, left, scale,
                GROUP, HAS_RIGHT, HAS_LEFT, True, M, STAGES,
            )
        state = _to_keys(
            state, keys, queries, steps, inner_begin, inner_end, num_queries, right, left, scale,
            GROUP, HAS_RIGHT, HAS_LEFT, False, M, STAGES,
        )
        state = _to_keys(
            state, keys, queries, steps, inner_end, end, num_queries, right, left, scale,
            GROUP, HAS_RIGHT, HAS_LEFT, True, M, STAGES,
        )
        # fmt: on
        dk_ND, dv_ND = state
        dk_at = dk_BHND + batch * dk_batch + head * dk_head + token_N1 * dk_key + column_1D
        dv_at = dv_BHND + batch * dv_batch + head * dv_head + token_N1 * dv_key + column_1D
        tl.store(dk_at, (dk_ND * scale).to(dk_BHND.dtype.element_ty), is_key_ND)
        tl.store(dv_at, dv_ND.to(dv_BHND.dtype.element_ty), is_key_ND)


@triton.jit
def _to_queries(
    dq_MD,
    queries,
    k_ND,
    v_ND,
    k_key,
    v_key,
    begin,
    end,
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
    """Add what the keys from `begin` to `end` give to the gradient of a tile of queries."""
    q_MD, dy_MD, own_M, lse_M, share_M = queries
    column_D = tl.arange(0, q_MD.shape[1])
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        key_N = tl.arange(0, BLOCK) + start
        at_N = key_N.to(tl.int64)
        at_k = k_ND + at_N[:, None] * k_key + column_D[None, :]
        at_v = v_ND + at_N[:, None] * v_key + column_D[None, :]
        if IS_MASKED:
            is_key_ND = (key_N < num_keys)[:, None]
            k, v = tl.load(at_k, is_key_ND, other=0.0), tl.load(at_v, is_key_ND, other=0.0)
        else:
            k, v = tl.load(at_k), tl.load(at_v)
        weight_MN = tl.exp2(tl.dot(q_MD, k.T) * (scale * _LOG2_E) - lse_M[:, None])
        score_MN = weight_MN * (tl.dot(dy_MD, v.T) - share_M[:, None])
        if IS_MASKED:
            is_seen_MN = is_in_reach(own_M, key_N, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
            score_MN = tl.where(is_seen_MN, score_MN, 0.0)
        dq_MD = tl.dot(score_MN.to(k.dtype), k, dq_MD)
    return dq_MD


@triton.jit(do_not_specialize=["num_queries", "num_keys", "left", "right"])
def attend_back_to_queries(
    q_BHTD,
    k_BHND,
    v_BHND,
    y_BHTD,
    dy_BHTD,
    lse_BHT,
    dlse_BHT,
    q_starts,
    k_starts,
    dq_BHTD,
    share_BHT,
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
    y_head: tl.int64,
    y_token: tl.int64,
    dy_batch: tl.int64,
    dy_head: tl.int64,
    dy_token: tl.int64,
    dq_batch: tl.int64,
    dq_head: tl.int64,
    dq_token: tl.int64,
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
    """Store the gradient of one tile of queries, and what its scores' gradients are reduced by."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lse_at = (batch * tl.num_programs(1) + head) * num_queries
    q_start, k_start = 0, 0
    if HAS_STARTS:
        lse_at -= batch * tl.num_programs(1) * num_queries
        q_start, num_queries = sequence_at(q_starts, batch)
        k_start, num_keys = sequence_at(k_starts, batch)
        lse_at += q_start
        batch *= 0
    # The last rows see most where later keys are not seen: they begin first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if first_row < num_queries:
        row_M, column_1D = tl.arange(0, M) + first_row, tl.arange(0, D)[None, :]
        is_row_M, token_M1 = row_M < num_queries, (q_start + row_M)[:, None]
        is_row_MD = is_row_M[:, None]
        q_at = q_BHTD + batch * q_batch + head * q_head + token_M1 * q_token + column_1D
        y_at = y_BHTD + batch * y_batch + head * y_head + token_M1 * y_token + column_1D
        dy_at = dy_BHTD + batch * dy_batch + head * dy_head + token_M1 * dy_token + column_1D
        q_MD, y_MD = tl.load(q_at, is_row_MD, other=0.0), tl.load(y_at, is_row_MD, other=0.0)
        dy_MD = tl.load(dy_at, is_row_MD, other=0.0)
        share_M = tl.sum(y_MD.to(tl.float32) * dy_MD.to(tl.float32), axis=1)
        if dlse_BHT is not None:
            share_M -= tl.load(dlse_BHT + lse_at + row_M, is_row_M, other=0.0)
        tl.store(share_BHT + lse_at + row_M, share_M, is_row_M)
        lse_M = tl.load(lse_BHT + lse_at + row_M, is_row_M, other=0.0) * _LOG2_E
        first_own = first_row + num_keys - num_queries
        begin, inner_begin, inner_end, end = reach_of(
            first_own, M, num_keys, left, right, N, HAS_LEFT, HAS_RIGHT
        )
        own_M = row_M + (num_keys - num_queries)
        queries = (q_MD, dy_MD, own_M, lse_M, share_M)
        k_ND = k_BHND + batch * k_batch + head // GROUP * k_head + k_start * k_key
        v_ND = v_BHND + batch * v_batch + head // GROUP * v_head + k_start * v_key
        dq_MD = tl.zeros([M, D], tl.float32)
        # fmt: off
        if HAS_LEFT:
            dq_MD = _to_queries(
                dq_MD, queries, k_ND, v_ND, k_key, v_key, begin, inner_begin, num_keys,
                left, right, scale, HAS_LEFT, HAS_RIGHT, True, N, STAGES,
            )
        dq_MD = _to_queries(
            dq_MD, queries, k_ND, v_ND, k_key, v_key, inner_begin, inner_end, num_keys,
            left, right, scale, HAS_LEFT, HAS_RIGHT, False, N, STAGES,
        )
        dq_MD = _to_queries(
            dq_MD, queries, k_ND, v_ND, k_key, v_key, inner_end, end, num_keys,
            left, right, scale, HAS_LEFT, HAS_RIGHT, True, N, STAGES,
        )
        # fmt: on
        dq_at = dq_BHTD + batch * dq_batch + head * dq_head + token_M1 * dq_token + column_1D
        tl.store(dq_at, (dq_MD * scale).to(dq_BHTD.dtype.element_ty), is_row_MD)


class Given(NamedTuple):
    """What a backward pass begins with: gradients that arrive, and what the forward pass kept."""

    dy: Tensor
    dlse: Tensor | None
    """Of the log-sum-exps; None: nobody used them."""
    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    lse: Tensor
    q_starts: Tensor | None
    k_starts: Tensor | None


def queries_tiled_for(dim: int) -> Tiled:
    """Return the schedule for the queries' gradient, the fastest on an H200; not so of 256."""
    if dim <= 64:
        return Tiled(64, 64, 4, 3)
    return Tiled(64, 64, 4, 2) if dim <= 128 else Tiled(64, 32, 8, 2)


def keys_tiled_for(dim: int) -> Tiled:
    """Return the schedule for the gradients of keys and values, as for queries."""
    if dim <= 64:
        return Tiled(64, 64, 4, 2)
    # That of 64 is up to 15 % faster here, too, but spills.
    return Tiled(64, 128, 8, 2) if dim <= 128 else Tiled(16, 64, 8, 3)


_launch_queries = Launcher(attend_back_to_queries)
_launch_keys = Launcher(attend_back_to_keys)


def run_tiled_back(given: Given, options: Options, most_keys: int) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, by plain Triton."""
    dq, dk, dv = empty_gradients(given)
    rows = ("dy", "q", "k", "v", "y")
    found = given._replace(**{one: _side_by_side(getattr(given, one)) for one in rows})
    dlse = None if given.dlse is None else given.dlse.contiguous()
    found = found._replace(dlse=dlse, lse=given.lse.contiguous())
    # What the gradients of a query's scores are reduced by: its weights' mean of them.
    share = torch.empty_like(found.lse)
    if dq.numel():
        _back_to_queries(found, options, dq, share)
    if dk.numel():
        _back_to_keys(found, options, dk, dv, share, most_keys)
    return dq, dk, dv


def _back_to_queries(given: Given, options: Options, dq: Tensor, share: Tensor) -> None:
    dy, dlse, q, k, v, y, lse, q_starts, k_starts = given
    tensors = (q, k, v, y, dy, lse, dlse, q_starts, k_starts, dq, share)
    steps = [step for one in (q, k, v, y, dy, dq) for step in one.stride()[:3]]
    most = options.most_queries if q_starts is not None else q.shape[2]
    schedule = queries_tiled_for(q.shape[3])
    tiles = -(-most // schedule.rows), q.shape[1]
    _launch_backward(_launch_queries, given, options, schedule, tensors, steps, tiles)


def _back_to_keys(
    given: Given, options: Options, dk: Tensor, dv: Tensor, share: Tensor, most_keys: int
) -> None:
    dy, _, q, k, v, _, lse, q_starts, k_starts = given
    tensors = (q, k, v, dy, lse, share, q_starts, k_starts, dk, dv)
    steps = [step for one in (q, k, v, dy, dk, dv) for step in one.stride()[:3]]
    most = most_keys if k_starts is not None else k.shape[2]
    schedule = keys_tiled_for(q.shape[3])
    tiles = -(-most // schedule.keys), k.shape[1]
    _launch_backward(_launch_keys, given, options, schedule, tensors, steps, tiles)


def _launch_backward(
    launcher: Launcher,
    given: Given,
    options: Options,
    schedule: Tiled,
    tensors: tuple[Tensor | None, ...],
    steps: list[int],
    tiles: tuple[int, int],
) -> None:
    call = (kind_of(*tensors), options, schedule, tiles)
    if launcher.again(call, tensors):
        return
    q, k, q_starts = given.q, given.k, given.q_starts
    num_sequences = q.shape[0] if q_starts is None else q_starts.numel() - 1
    left, right = options.bounds(q.shape[2], k.shape[2])
    constants = (
        *(q.shape[1] // k.shape[1], q_starts is not None, left is not None, right is not None),
        *(q.shape[3], schedule.rows, schedule.keys, schedule.stages),
    )
    types = tuple(None if one is None else one.dtype for one in tensors)
    key = (q.device, types, constants, schedule.warps, alignments(tensors, *steps))
    numbers = (q.shape[2], k.shape[2], left or 0, right or 0)
    arguments = (*tensors, *steps, options.scale, *numbers, *constants)
    grid = (*tiles, num_sequences)
    launcher(key, grid, arguments, {"num_warps": schedule.warps}, call=call, tensors=tensors)


def empty_gradients(given: Given) -> tuple[Tensor, ...]:
    """Return places for the gradients, in the order in memory of what they are gradients of.

    Between sequences there may be tokens of none, whose gradient is 0.
    """
    make = torch.empty_like if given.q_starts is None else torch.zeros_like
    found = (make(one) for one in (given.q, given.k, given.v))
    return tuple(
        one if one.stride(-1) == 1 else make(one, memory_format=torch.contiguous_format)
        for one in found
    )


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _run_backward(
    dy: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    *options: float,
) -> tuple[Tensor, ...]:
    given = Given(dy, dlse, q, k, v, y, lse, q_starts, k_starts)
    *others, most_keys = options
    return run_tiled_back(given, Options(*others), int(most_keys))  # type: ignore[arg-type]


def _empty(*arguments: Tensor) -> tuple[Tensor, ...]:
    return empty_gradients(Given(*arguments[: len(Given._fields)]))


SCHEMA = (
    "(Tensor dy, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
    "Tensor? q_starts, Tensor? k_starts, float scale, bool is_causal, int window, "
    "int most_queries, int most_keys) -> (Tensor, Tensor, Tensor)"
)
run_attention_back = define(f"attention_backward{SCHEMA}", _run_backward, _empty)
