"""Attention of many queries on the device, in plain Triton, for every GPU that Triton knows.

B batch, H query heads, T queries of a sequence, D columns of a head; M queries of a tile, N keys of
a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_reach import is_in_reach, reach_of
from kprof.kernels._tile_scores import largest_of, parts_of, raise_largest, settle, weigh_scores
from kprof.kernels._tile_softmax import finish

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
