"""Gradients of attention's keys and values on the device, in plain Triton: queries pass by.

A tile of keys stays, with its values, and the queries pass by that see it, of all query heads that
share it. Scores lie keys first, so that weights are an operand as they are. Else as in
`_attention_back_queries`, which has to run before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_reach import is_in_reach, reach_of, sequence_at

LOG2_E = tl.constexpr(1.4426950408889634)


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
        weight_NM = tl.exp2(tl.dot(k_ND, q.T) * (scale * LOG2_E) - (lse_M * LOG2_E)[None, :])
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
