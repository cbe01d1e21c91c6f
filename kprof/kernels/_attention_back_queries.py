"""Gradients of attention's queries on the device, in plain Triton: keys and values pass by.

A tile of queries stays; scores are computed again from the log-sum-exp of the forward pass. Each
gradient is added up by one program in one order, so its bits are always the same. B, H, T, D, M and
N as in `_attention_device`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_reach import is_in_reach, reach_of, sequence_at

LOG2_E = tl.constexpr(1.4426950408889634)


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
        weight_MN = tl.exp2(tl.dot(q_MD, k.T) * (scale * LOG2_E) - lse_M[:, None])
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
        lse_M = tl.load(lse_BHT + lse_at + row_M, is_row_M, other=0.0) * LOG2_E
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
