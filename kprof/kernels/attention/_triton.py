"""Attention of many queries in Triton, for every GPU, with its backward pass.

Forward: y = softmax(scale * q k') v, and the log-sum-exp of each row's scores. A CTA has one tile
of queries of one head; blocks of keys and values pass by, and scores never leave the chip.

Backward recomputes the scores from the log-sum-exp, in two kernels. In the first, for dq, a tile of
queries stays while keys and values pass by; it also stores delta, the row sums of y * dy. In the
second, for dk and dv, a tile of keys stays while the queries that see it pass by, of all query
heads that share it; its scores are transposed, so weights are an operand as they are. One CTA sums
a gradient in one order, so its bits are the same in every run.

Order: call options, forward kernel, backward kernels, schedules and launches, operators.

B batch, H query heads, T queries of a sequence, D columns of a head; M queries of a tile, N keys of
a block. With `cu_seqlens`, sequences lie one after another in T and N, and B is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.runtime import Launcher, alignments, define, kind_of
from kprof.kernels.tiles.key_range import is_visible, key_ranges, sequence_at
from kprof.kernels.tiles.online_softmax import (
    finish,
    partial_sums,
    raise_max,
    row_max,
    settle,
    weigh_scores,
)

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)


class Options(NamedTuple):
    """Arguments of a call besides its tensors."""

    scale: float
    is_causal: bool
    window: int
    max_seqlen_q: int
    """Most queries of a sequence, with `cu_seqlens_q`."""

    def bounds(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        """Return the window on the left and on the right of a row's own key; None: no bound."""
        side = self.window - 1 if 0 < self.window < max(num_queries, num_keys) else None
        return side, 0 if self.is_causal else side

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Tell whether every row sees every key."""
        return self.bounds(num_queries, num_keys) == (None, None)


@triton.jit
def _sequence_of(
    cu_seqlens_q, cu_seqlens_k, batch, num_queries, num_keys, IS_VARLEN: tl.constexpr
) -> tl.tensor:
    """Return batch index, first query and key, and both lengths of a CTA's sequence."""
    q_start, k_start = 0, 0
    if IS_VARLEN:
        q_start, num_queries = sequence_at(cu_seqlens_q, batch)
        k_start, num_keys = sequence_at(cu_seqlens_k, batch)
        batch *= 0
    return batch, q_start, k_start, num_queries, num_keys


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
    """Process the keys from `begin` to `end`, and return the state."""
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
            is_seen_MN = is_visible(own_M, key_N, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
            score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
            # Values behind the last key may be NaN, which a weight of 0 does not make 0.
            v = tl.load(at_v, is_key_ND, other=0.0)
        else:
            v = tl.load(at_v)
        shrink_M, largest_M = raise_max(row_max(score_MN), largest_M, scale)
        weight_MN = weigh_scores(score_MN, largest_M, scale)
        total_M4 = total_M4 * shrink_M[:, None] + partial_sums(weight_MN)
        sum_MD = tl.dot(weight_MN.to(v.dtype), v, sum_MD * shrink_M[:, None])
    return sum_MD, largest_M, total_M4


@triton.jit(do_not_specialize=["num_queries", "num_keys", "left", "right"])
def attention_forward_kernel(
    q_BHTD,
    k_BHND,
    v_BHND,
    y_BTHD,
    lse_BHT,
    cu_seqlens_q,
    cu_seqlens_k,
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
    IS_VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute one tile of queries of one head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lse_head = num_queries
    batch, q_start, k_start, num_queries, num_keys = _sequence_of(
        cu_seqlens_q, cu_seqlens_k, batch, num_queries, num_keys, IS_VARLEN
    )
    lse_BHT += (batch * tl.num_programs(1) + head) * lse_head + q_start
    q_first, k_first = batch * q_batch + q_start * q_token, batch * k_batch + k_start * k_key
    v_first, y_first = batch * v_batch + k_start * v_key, batch * y_batch + q_start * y_token
    # With a causal mask the last rows have most keys: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if first_row < num_queries:
        row_M, column_D = tl.arange(0, M) + first_row, tl.arange(0, D)
        is_row_M = row_M < num_queries
        q_at_M = row_M.to(tl.int64) * q_token
        q_at_MD = q_BHTD + q_first + head * q_head + (q_at_M[:, None] + column_D[None, :])
        q_MD = tl.load(q_at_MD, is_row_M[:, None], other=0.0)
        first_own = first_row + num_keys - num_queries
        begin, inner_begin, inner_end, end = key_ranges(
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


@triton.jit
def _add_to_dkdv(
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
    """Add the contribution of queries from `begin` to `end` of a group's heads to dk and dv.

    One loop over heads and blocks, as nested loops spill. It counts heads even for a group of one,
    and then there are always three ranges of queries: in other forms ptxas makes every GEMM wait
    for the one before.
    """
    dk_ND, dv_ND = state
    k_ND, v_ND, own_N = keys
    q_TD, dy_TD, lse_T, delta_T = queries
    q_head, q_token, dy_head, dy_token, lse_head = steps
    column_D = tl.arange(0, k_ND.shape[1])
    start, member = begin, 0
    for _ in tl.range(0, GROUP * tl.cdiv(end - begin, BLOCK), num_stages=STAGES):
        row_M = tl.arange(0, BLOCK) + start
        at_M1 = row_M.to(tl.int64)[:, None]
        at_q = q_TD + member * q_head + at_M1 * q_token + column_D[None, :]
        at_dy = dy_TD + member * dy_head + at_M1 * dy_token + column_D[None, :]
        lse_at, delta_at = lse_T + member * lse_head, delta_T + member * lse_head
        if IS_MASKED:
            is_row_M = row_M < num_queries
            q = tl.load(at_q, is_row_M[:, None], other=0.0)
            dy = tl.load(at_dy, is_row_M[:, None], other=0.0)
            lse_M = tl.load(lse_at + row_M, is_row_M, other=0.0)
            delta_M = tl.load(delta_at + row_M, is_row_M, other=0.0)
        else:
            q, dy = tl.load(at_q), tl.load(at_dy)
            lse_M, delta_M = tl.load(lse_at + row_M), tl.load(delta_at + row_M)
        weight_NM = tl.exp2(tl.dot(k_ND, q.T) * (scale * _LOG2_E) - (lse_M * _LOG2_E)[None, :])
        # The GEMM accumulates onto -delta, which therefore needs no registers of its own.
        less_NM = tl.broadcast_to(-delta_M[None, :], [k_ND.shape[0], BLOCK])
        score_NM = weight_NM * tl.dot(v_ND, dy.T, less_NM)
        if IS_MASKED:
            is_seen_NM = is_visible(own_N, row_M, num_queries, before, after, HAS_BEFORE, HAS_AFTER)
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
def attention_dkdv_kernel(
    q_BHTD,
    k_BHND,
    v_BHND,
    dy_BHTD,
    lse_BHT,
    delta_BHT,
    cu_seqlens_q,
    cu_seqlens_k,
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
    IS_VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Store dk and dv of one tile of keys, summed over the query heads that share it."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lse_head = num_queries
    batch, q_start, k_start, num_queries, num_keys = _sequence_of(
        cu_seqlens_q, cu_seqlens_k, batch, num_queries, num_keys, IS_VARLEN
    )
    # Of the first query head that shares these keys; the next ones are `lse_head` apart.
    lse_at = (batch * tl.num_programs(1) + head) * GROUP * lse_head + q_start
    # With a causal mask the first keys have most queries: they start first.
    first_key = tl.program_id(0) * N
    if first_key < num_keys:
        key_N, column_1D = tl.arange(0, N) + first_key, tl.arange(0, D)[None, :]
        is_key_ND = (key_N < num_keys)[:, None]
        token_N1 = (k_start + key_N)[:, None]
        k_at = k_BHND + batch * k_batch + head * k_head + token_N1 * k_key + column_1D
        v_at = v_BHND + batch * v_batch + head * v_head + token_N1 * v_key + column_1D
        k_ND = tl.load(k_at, is_key_ND, other=0.0)
        v_ND = tl.load(v_at, is_key_ND, other=0.0)
        # Key j is the own key of query j + T - N; the window is mirrored.
        first_own = first_key + num_queries - num_keys
        begin, inner_begin, inner_end, end = key_ranges(
            first_own, N, num_queries, right, left, M, HAS_RIGHT, HAS_LEFT
        )
        keys = (k_ND, v_ND, key_N + (num_queries - num_keys))
        state = (tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32))
        q_TD = q_BHTD + batch * q_batch + head * GROUP * q_head + q_start * q_token
        dy_TD = dy_BHTD + batch * dy_batch + head * GROUP * dy_head + q_start * dy_token
        queries = (q_TD, dy_TD, lse_BHT + lse_at, delta_BHT + lse_at)
        steps = (q_head, q_token, dy_head, dy_token, lse_head)
        # fmt: off
        if GROUP > 1 or HAS_RIGHT:
            state = _add_to_dkdv(
                state, keys, queries, steps, begin, inner_begin, num_queries, right, left, scale,
                GROUP, HAS_RIGHT, HAS_LEFT, True, M, STAGES,
            )
        state = _add_to_dkdv(
            state, keys, queries, steps, inner_begin, inner_end, num_queries, right, left, scale,
            GROUP, HAS_RIGHT, HAS_LEFT, False, M, STAGES,
        )
        state = _add_to_dkdv(
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
def _add_to_dq(
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
    """Add the contribution of the keys from `begin` to `end` to dq."""
    q_MD, dy_MD, own_M, lse_M, delta_M = queries
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
        score_MN = weight_MN * (tl.dot(dy_MD, v.T) - delta_M[:, None])
        if IS_MASKED:
            is_seen_MN = is_visible(own_M, key_N, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
            score_MN = tl.where(is_seen_MN, score_MN, 0.0)
        dq_MD = tl.dot(score_MN.to(k.dtype), k, dq_MD)
    return dq_MD


@triton.jit(do_not_specialize=["num_queries", "num_keys", "left", "right"])
def attention_dq_kernel(
    q_BHTD,
    k_BHND,
    v_BHND,
    y_BHTD,
    dy_BHTD,
    lse_BHT,
    dlse_BHT,
    cu_seqlens_q,
    cu_seqlens_k,
    dq_BHTD,
    delta_BHT,
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
    IS_VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Store dq and delta of one tile of queries."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lse_head = num_queries
    batch, q_start, k_start, num_queries, num_keys = _sequence_of(
        cu_seqlens_q, cu_seqlens_k, batch, num_queries, num_keys, IS_VARLEN
    )
    lse_at = (batch * tl.num_programs(1) + head) * lse_head + q_start
    # With a causal mask the last rows have most keys: they start first.
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
        delta_M = tl.sum(y_MD.to(tl.float32) * dy_MD.to(tl.float32), axis=1)
        if dlse_BHT is not None:
            delta_M -= tl.load(dlse_BHT + lse_at + row_M, is_row_M, other=0.0)
        tl.store(delta_BHT + lse_at + row_M, delta_M, is_row_M)
        lse_M = tl.load(lse_BHT + lse_at + row_M, is_row_M, other=0.0) * _LOG2_E
        first_own = first_row + num_keys - num_queries
        begin, inner_begin, inner_end, end = key_ranges(
            first_own, M, num_keys, left, right, N, HAS_LEFT, HAS_RIGHT
        )
        own_M = row_M + (num_keys - num_queries)
        queries = (q_MD, dy_MD, own_M, lse_M, delta_M)
        k_ND = k_BHND + batch * k_batch + head // GROUP * k_head + k_start * k_key
        v_ND = v_BHND + batch * v_batch + head // GROUP * v_head + k_start * v_key
        dq_MD = tl.zeros([M, D], tl.float32)
        # fmt: off
        if HAS_LEFT:
            dq_MD = _add_to_dq(
                dq_MD, queries, k_ND, v_ND, k_key, v_key, begin, inner_begin, num_keys,
                left, right, scale, HAS_LEFT, HAS_RIGHT, True, N, STAGES,
            )
        dq_MD = _add_to_dq(
            dq_MD, queries, k_ND, v_ND, k_key, v_key, inner_begin, inner_end, num_keys,
            left, right, scale, HAS_LEFT, HAS_RIGHT, False, N, STAGES,
        )
        dq_MD = _add_to_dq(
            dq_MD, queries, k_ND, v_ND, k_key, v_key, inner_end, end, num_keys,
            left, right, scale, HAS_LEFT, HAS_RIGHT, True, N, STAGES,
        )
        # fmt: on
        dq_at = dq_BHTD + batch * dq_batch + head * dq_head + token_M1 * dq_token + column_1D
        tl.store(dq_at, (dq_MD * scale).to(dq_BHTD.dtype.element_ty), is_row_MD)


@dataclass(frozen=True)
class Schedule:
    """Queries and keys of a tile, warps of a CTA, and blocks in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def forward_schedule(dim: int, num_queries: int) -> Schedule:
    """Return the fastest forward schedule on an H200; up to 64 queries, none was measured."""
    if num_queries <= 64:
        return Schedule(64, 64, 4, 3) if dim <= 128 else Schedule(64, 32, 8, 2)
    if dim <= 64:
        return Schedule(64, 128, 4, 3)
    return Schedule(128, 128, 8, 2) if dim <= 128 else Schedule(128, 64, 8, 2)


def dq_schedule(dim: int) -> Schedule:
    """Return the fastest schedule for dq on an H200; heads of 256 were not measured."""
    if dim <= 64:
        return Schedule(64, 64, 4, 3)
    return Schedule(64, 64, 4, 2) if dim <= 128 else Schedule(64, 32, 8, 2)


def dkdv_schedule(dim: int) -> Schedule:
    """Return the fastest schedule for dk and dv on an H200; heads of 256 were not measured."""
    if dim <= 64:
        return Schedule(64, 64, 4, 2)
    # For heads of 128, tiles of 64 keys are up to 15 % faster, but spill.
    return Schedule(64, 128, 8, 2) if dim <= 128 else Schedule(16, 64, 8, 3)


class BackwardInputs(NamedTuple):
    """Gradients of the results, and what the forward pass saved."""

    dy: Tensor
    dlse: Tensor | None
    """Gradient of the log-sum-exp; None: it was not used."""
    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


_launch_forward = Launcher(attention_forward_kernel)
_launch_dq, _launch_dkdv = Launcher(attention_dq_kernel), Launcher(attention_dkdv_kernel)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return y and the log-sum-exp."""
    y, lse = empty_results(q)
    if not y.numel():
        return y, lse
    q, k, v = (_with_contiguous_rows(one) for one in (q, k, v))
    call = (kind_of(q, k, v, cu_seqlens_q, cu_seqlens_k), options)
    tensors = (q, k, v, y, lse, cu_seqlens_q, cu_seqlens_k)
    if _launch_forward.again(call, tensors):
        return y, lse
    most = q.shape[2] if cu_seqlens_q is None else options.max_seqlen_q
    schedule = forward_schedule(q.shape[3], most)
    strides = (*(step for one in (q, k, v) for step in one.stride()[:3]), y.stride(0), y.stride(2))
    scaled = options._replace(scale=options.scale * LOG2_E)
    tiles = (-(-most // schedule.rows), q.shape[1])
    _launch(_launch_forward, call, tensors, strides, (q, k, cu_seqlens_q), scaled, schedule, tiles)
    return y, lse


def run_backward(given: BackwardInputs, options: Options, max_seqlen_k: int) -> tuple[Tensor, ...]:
    """Return dq, dk and dv."""
    dq, dk, dv = empty_gradients(given)
    rows = ("dy", "q", "k", "v", "y")
    found = given._replace(**{one: _with_contiguous_rows(getattr(given, one)) for one in rows})
    dlse = None if given.dlse is None else given.dlse.contiguous()
    found = found._replace(dlse=dlse, lse=given.lse.contiguous())
    delta = torch.empty_like(found.lse)
    if dq.numel():
        _run_dq(found, options, dq, delta)
    if dk.numel():
        _run_dkdv(found, options, (dk, dv), delta, max_seqlen_k)
    return dq, dk, dv


def _run_dq(given: BackwardInputs, options: Options, dq: Tensor, delta: Tensor) -> None:
    dy, dlse, q, k, v, y, lse, cu_seqlens_q, cu_seqlens_k = given
    tensors = (q, k, v, y, dy, lse, dlse, cu_seqlens_q, cu_seqlens_k, dq, delta)
    call = (kind_of(*tensors), options)
    if _launch_dq.again(call, tensors):
        return
    strides = tuple(step for one in (q, k, v, y, dy, dq) for step in one.stride()[:3])
    schedule = dq_schedule(q.shape[3])
    most = q.shape[2] if cu_seqlens_q is None else options.max_seqlen_q
    tiles = (-(-most // schedule.rows), q.shape[1])
    _launch(_launch_dq, call, tensors, strides, (q, k, cu_seqlens_q), options, schedule, tiles)


def _run_dkdv(
    given: BackwardInputs,
    options: Options,
    results: tuple[Tensor, Tensor],
    delta: Tensor,
    max_seqlen_k: int,
) -> None:
    dy, _, q, k, v, _, lse, cu_seqlens_q, cu_seqlens_k = given
    tensors = (q, k, v, dy, lse, delta, cu_seqlens_q, cu_seqlens_k, *results)
    call = (kind_of(*tensors), options, max_seqlen_k)
    if _launch_dkdv.again(call, tensors):
        return
    strides = tuple(step for one in (q, k, v, dy, *results) for step in one.stride()[:3])
    schedule = dkdv_schedule(q.shape[3])
    most = k.shape[2] if cu_seqlens_k is None else max_seqlen_k
    tiles = (-(-most // schedule.keys), k.shape[1])
    _launch(_launch_dkdv, call, tensors, strides, (q, k, cu_seqlens_q), options, schedule, tiles)


def _launch(
    launcher: Launcher,
    call: Hashable,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    sequences: tuple[Tensor, Tensor, Tensor | None],
    options: Options,
    schedule: Schedule,
    tiles: tuple[int, int],
) -> None:
    """Launch a kernel of this file, and keep the launch for the next such call.

    Args:
        launcher: The kernel's.
        call: What `Launcher.again` is asked for.
        tensors: The kernel's, in its order.
        strides: The kernel's, in its order.
        sequences: q, k and cu_seqlens_q.
        options: Of the call, with the scale that the kernel takes.
        schedule: Of the kernel.
        tiles: Tiles of the longest sequence, and heads that have them.
    """
    q, k, cu_seqlens_q = sequences
    num_sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    left, right = options.bounds(q.shape[2], k.shape[2])
    constants = (
        *(q.shape[1] // k.shape[1], cu_seqlens_q is not None, left is not None, right is not None),
        *(q.shape[3], schedule.rows, schedule.keys, schedule.stages),
    )
    types = tuple(None if one is None else one.dtype for one in tensors)
    key = (q.device, types, constants, schedule.warps, alignments(tensors, *strides))
    numbers = (q.shape[2], k.shape[2], left or 0, right or 0)
    arguments = (*tensors, *strides, options.scale, *numbers, *constants)
    warps = {"num_warps": schedule.warps}
    launcher(key, (*tiles, num_sequences), arguments, warps, call=call, tensors=tensors)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for y, tokens before heads as the next layer reads it, and the log-sum-exp."""
    batch, heads, tokens, dim = q.shape
    y = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return y, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def empty_gradients(given: BackwardInputs) -> tuple[Tensor, ...]:
    """Return memory for dq, dk and dv, in the memory order of q, k and v.

    Tokens between sequences belong to none; their gradient is 0.
    """
    make = torch.empty_like if given.cu_seqlens_q is None else torch.zeros_like
    found = (make(one) for one in (given.q, given.k, given.v))
    return tuple(
        one if one.stride(-1) == 1 else make(one, memory_format=torch.contiguous_format)
        for one in found
    )


FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, "
    "bool is_causal, int window, int max_seqlen_q) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor dy, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, bool is_causal, int window, "
    "int max_seqlen_q, int max_seqlen_k) -> (Tensor, Tensor, Tensor)"
)


def forward_operator(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Register a forward pass as a torch operator; `run` takes five tensors and Options."""

    def forward(*arguments: Any) -> Any:
        return run(*arguments[:5], Options(*arguments[5:]))

    return define(name + FORWARD_SCHEMA, forward, lambda q, *others: empty_results(q))


def backward_operator(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Register a backward pass; `run` takes BackwardInputs, Options and max_seqlen_k."""
    count = len(BackwardInputs._fields)

    def backward(*arguments: Any) -> Any:
        *options, max_seqlen_k = arguments[count:]
        return run(BackwardInputs(*arguments[:count]), Options(*options), max_seqlen_k)

    def empty(*arguments: Any) -> tuple[Tensor, ...]:
        return empty_gradients(BackwardInputs(*arguments[:count]))

    return define(name + BACKWARD_SCHEMA, backward, empty)


forward_triton = forward_operator("attention_forward", run_forward)
backward_triton = backward_operator("attention_backward", run_backward)
