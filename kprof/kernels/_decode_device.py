"""Decode attention on the device: one program attends with a group of heads to a part of a cache.

B batch, H heads, T query tokens, D columns of a head; M rows of a tile, the query heads of one head
of keys times T; N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._decode_results import merge_as_last, store
from kprof.kernels._tile_cache import block_of, bytes_of, fit_float16, is_seen, start_of
from kprof.kernels._tile_softmax import finish, weigh
from kprof.kernels._tile_splits import part_length


@triton.jit
def _attend(
    q_MD,
    q_at_MD,
    is_row_M,
    zero,
    scale_M,
    k_ND,
    v_ND,
    table,
    k_page_step,
    k_step,
    v_page_step,
    v_step,
    first,
    end,
    oldest,
    lowest_M,
    limit_M,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FP8: tl.constexpr,
    PAGE: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Return the mean of the values from `first` to `end`, and log2 of the sum of the powers."""
    M: tl.constexpr = q_MD.shape[0]
    # Of e4m3, two columns at a time: the even ones and the odd ones are products of their own.
    COLUMNS: tl.constexpr = DIM // 2 if IS_FP8 else DIM
    largest_M = tl.full([M], float("-inf"), tl.float32)
    total_MN = tl.zeros([M, BLOCK], tl.float32)
    sum_MD = tl.zeros([M, COLUMNS], tl.float32)
    if IS_FP8:
        even_MD, odd_MD = tl.split(tl.reshape(q_MD, [M, COLUMNS, 2]))
        odd_sum_MD = tl.zeros([M, COLUMNS], tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        key_N = tl.arange(0, BLOCK) + start
        is_key_N, is_seen_MN = is_seen(key_N, end, oldest, lowest_M, limit_M, IS_CAUSAL, HAS_WINDOW)
        at_ND = block_of(
            k_ND, table, start, is_key_N, k_page_step, k_step, K_STEP, PAGE, BLOCK, COLUMNS
        )
        # What nobody is to see may be NaN, which no weight of 0 would make 0.
        k = tl.load(at_ND, is_key_N[:, None], other=0)
        if IS_FP8:
            score_MN = tl.dot(even_MD, bytes_of(k, False, IS_INTERPRETED).T)
            score_MN = tl.dot(odd_MD, bytes_of(k, True, IS_INTERPRETED).T, score_MN)
        elif M == 16:
            # Read as the keys are, with them: read before, it would hold them up.
            q = tl.load(q_at_MD + tl.multiple_of(start * zero, 16), is_row_M[:, None], other=0.0)
            score_MN = tl.dot(q, k.T)
        else:
            score_MN = tl.dot(q_MD, k.T)
        score_MN = tl.where(is_seen_MN, score_MN * scale_M[:, None], float("-inf"))
        weight_MN, shrink_M, largest_M, total_MN = weigh(score_MN, largest_M, total_MN)
        at_ND = block_of(
            v_ND, table, start, is_key_N, v_page_step, v_step, V_STEP, PAGE, BLOCK, COLUMNS
        )
        v = tl.load(at_ND, is_key_N[:, None], other=0)
        weight = weight_MN.to(q_MD.dtype)
        sum_MD = sum_MD * shrink_M[:, None]
        if IS_FP8:
            sum_MD = tl.dot(weight, bytes_of(v, False, IS_INTERPRETED), sum_MD)
            odd_sum_MD = odd_sum_MD * shrink_M[:, None]
            odd_sum_MD = tl.dot(weight, bytes_of(v, True, IS_INTERPRETED), odd_sum_MD)
        else:
            sum_MD = tl.dot(weight, v, sum_MD)
    if IS_FP8:
        sum_MD = tl.reshape(tl.join(sum_MD, odd_sum_MD), [M, DIM])
    return finish(sum_MD, largest_M, tl.sum(total_MN, axis=1))


@triton.jit(do_not_specialize=["max_length", "most_parts", "each", "count", "window", "zero"])
def decode(
    q_BHTD,
    k_BHND,
    v_BHND,
    y_BTHD,
    lse_BHT,
    partial,
    counter,
    lengths,
    table,
    k_scale,
    v_scale,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_token: tl.int64,
    k_page: tl.int64,
    k_head: tl.int64,
    k_key: tl.int64,
    v_page: tl.int64,
    v_head: tl.int64,
    v_key: tl.int64,
    table_step: tl.int64,
    scale,
    max_length,
    most_parts,
    each,
    count,
    window,
    zero,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    M: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FP8: tl.constexpr,
    PAGE: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
) -> None:
    """Attend to one part of the keys of one head in one sequence, and put the parts together.

    Without lengths and a window, the host says how long each part is, and how many there are.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = max_length
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + batch), max_length).to(tl.int32)
    oldest = tl.maximum(length - TOKENS + 1 - window, 0) if HAS_WINDOW else 0
    # Blocks of keys lie in whole pages, wherever a window begins.
    begin = oldest // BLOCK * BLOCK
    if HAS_LENGTHS or HAS_WINDOW:
        each = part_length(length - begin, most_parts, BLOCK, BLOCK)
        # Without any key there is still a result.
        count = tl.maximum(tl.cdiv(length - begin, each), 1)
    if tl.program_id(0) < count:
        place = batch * tl.num_programs(1) + head
        row_M, column_D = tl.arange(0, M), tl.arange(0, DIM)
        is_row_M = row_M < TOKENS * GROUP
        q_at_M = (head * GROUP + row_M // TOKENS) * q_head + row_M % TOKENS * q_token
        q_at_MD = q_BHTD + (batch * q_batch + q_at_M[:, None] + column_D[None, :])
        q_MD = tl.load(q_at_MD, is_row_M[:, None], other=0.0)
        scale_M = tl.full([M], 1.0, tl.float32) * scale
        PAIR: tl.constexpr = 2 if IS_FP8 else 1
        if IS_FP8:
            q_MD, power_M = fit_float16(q_MD)
            scale_M *= power_M * tl.load(k_scale + place)
        first = begin + tl.program_id(0) * tl.multiple_of(each, BLOCK)
        limit_M = length - TOKENS + 1 + row_M % TOKENS
        mean_MD, lse_M = _attend(
            q_MD,
            q_at_MD,
            is_row_M,
            zero,
            scale_M,
            start_of(k_BHND, k_page, k_head, PAGE, IS_FP8),
            start_of(v_BHND, v_page, v_head, PAGE, IS_FP8),
            table + batch * table_step if PAGE > 0 else table,
            k_page // PAIR,
            k_key // PAIR,
            v_page // PAIR,
            v_key // PAIR,
            first,
            tl.minimum(first + each, length),
            oldest,
            limit_M - window,
            limit_M,
            IS_CAUSAL,
            HAS_WINDOW,
            IS_FP8,
            PAGE,
            K_STEP // PAIR,
            V_STEP // PAIR,
            DIM,
            BLOCK,
            STAGES,
            IS_INTERPRETED,
        )
        if IS_FP8:
            mean_MD *= tl.load(v_scale + place)
        if count == 1:
            store(mean_MD, lse_M, y_BTHD, lse_BHT, place, TOKENS, GROUP)
        else:
            merge_as_last(
                mean_MD,
                lse_M,
                y_BTHD,
                lse_BHT,
                partial,
                counter,
                place,
                count,
                TOKENS,
                GROUP,
                R,
                S,
            )
