"""Decode attention on the device: one program attends with a group of heads to a part of a cache.

B batch, H heads, T query tokens, D columns of a head; M rows of a tile, the query heads of one head
of keys times T; N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_softmax import finish, merge, store_part, weigh
from kprof.kernels._tile_splits import is_last_to_arrive, part_length


@triton.jit
def _places_of(
    table, start, is_key_N, page_step, key_step, PAGE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return where a block of keys lies: in one piece, or in the pages that the table names."""
    key_N = tl.arange(0, BLOCK) + start
    if PAGE == 0:
        place_N = key_N.to(tl.int64) * key_step
    else:
        # A page of whole blocks takes one entry of the table, a smaller one takes one for each key.
        if PAGE % BLOCK == 0:
            page = tl.load(table + start // PAGE)
        else:
            page = tl.load(table + key_N // PAGE, is_key_N, other=0)
        place_N = page.to(tl.int64) * page_step + (key_N % PAGE).to(tl.int64) * key_step
    return place_N


@triton.jit
def _fit_float16(q_MD) -> tl.tensor:
    """Return queries in float16, and what each row of theirs has to be multiplied by.

    That is a power of two, which makes the row's largest about 1: nothing is rounded but what is
    next to nothing beside it.
    """
    largest_M = tl.max(tl.abs(q_MD.to(tl.float32)), axis=1)
    exponent_M = tl.minimum((largest_M.to(tl.int32, bitcast=True) >> 23) & 0xFF, 253)
    power_M = (exponent_M << 23).to(tl.float32, bitcast=True)
    inverse_M = ((254 - exponent_M) << 23).to(tl.float32, bitcast=True)
    return (q_MD.to(tl.float32) * inverse_M[:, None]).to(tl.float16), power_M


@triton.jit
def _attend(
    q_MD,
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
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Return the mean of the values from `first` to `end`, and log2 of the sum of the powers."""
    M: tl.constexpr = q_MD.shape[0]
    column_D = tl.arange(0, DIM)
    largest_M = tl.full([M], float("-inf"), tl.float32)
    total_MN = tl.zeros([M, BLOCK], tl.float32)
    sum_MD = tl.zeros([M, DIM], tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        key_N = tl.arange(0, BLOCK) + start
        is_key_N = key_N < end
        if HAS_WINDOW:
            is_key_N &= key_N >= oldest
        k_at_N = _places_of(table, start, is_key_N, k_page_step, k_step, PAGE, BLOCK)
        v_at_N = _places_of(table, start, is_key_N, v_page_step, v_step, PAGE, BLOCK)
        # What nobody is to see may be NaN, which no weight of 0 would make 0.
        k = tl.load(k_ND + k_at_N[:, None] + column_D[None, :], is_key_N[:, None], other=0.0)
        score_MN = tl.dot(q_MD, k.to(q_MD.dtype).T) * scale_M[:, None]
        is_seen_MN = is_key_N[None, :]
        if IS_CAUSAL:
            is_seen_MN &= key_N[None, :] < limit_M[:, None]
        if HAS_WINDOW:
            is_seen_MN &= key_N[None, :] >= lowest_M[:, None]
        score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
        weight_MN, shrink_M, largest_M, total_MN = weigh(score_MN, largest_M, total_MN)
        v = tl.load(v_ND + v_at_N[:, None] + column_D[None, :], is_key_N[:, None], other=0.0)
        sum_MD = tl.dot(weight_MN.to(q_MD.dtype), v.to(q_MD.dtype), sum_MD * shrink_M[:, None])
    return finish(sum_MD, largest_M, tl.sum(total_MN, axis=1))


@triton.jit
def _store(
    mean_MD, lse_M, y_BTHD, lse_BHT, place, num_heads, TOKENS: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Store the results of one head of keys; the log-sum-exp becomes the natural one."""
    row_M, column_D = tl.arange(0, mean_MD.shape[0]), tl.arange(0, mean_MD.shape[1])
    batch, head = place // num_heads, place % num_heads
    at_M = (batch * TOKENS + row_M % TOKENS) * num_heads * GROUP + head * GROUP + row_M // TOKENS
    at_MD = at_M[:, None] * mean_MD.shape[1] + column_D[None, :]
    is_row_M = row_M < TOKENS * GROUP
    tl.store(y_BTHD + at_MD, mean_MD.to(y_BTHD.dtype.element_ty), is_row_M[:, None])
    tl.store(lse_BHT + place * TOKENS * GROUP + row_M, lse_M * 0.6931471805599453, is_row_M)


@triton.jit(do_not_specialize=["max_length", "num_parts", "most_parts", "window", "num_heads"])
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
    num_parts,
    most_parts,
    window,
    num_heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    M: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FP8: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Attend to one part of the keys of one head in one sequence; the last one merges the parts."""
    part = tl.program_id(0) % num_parts
    place = (tl.program_id(0) // num_parts).to(tl.int64)
    batch, head = place // num_heads, place % num_heads
    length = max_length
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + batch), max_length).to(tl.int32)
    oldest = tl.maximum(length - TOKENS + 1 - window, 0) if HAS_WINDOW else 0
    # Blocks of keys lie in whole pages, wherever a window begins.
    begin = oldest // BLOCK * BLOCK
    each = part_length(length - begin, most_parts, BLOCK, BLOCK)
    # Without any key there is still a result.
    count = tl.maximum(tl.cdiv(length - begin, each), 1)
    if part < count:
        row_M, column_D = tl.arange(0, M), tl.arange(0, DIM)
        is_row_M = row_M < TOKENS * GROUP
        q_at_M = (head * GROUP + row_M // TOKENS) * q_head + row_M % TOKENS * q_token
        q_at_MD = batch * q_batch + q_at_M[:, None] + column_D[None, :]
        q_MD = tl.load(q_BHTD + q_at_MD, is_row_M[:, None], other=0.0)
        scale_M = tl.full([M], 1.0, tl.float32) * scale
        if IS_FP8:
            q_MD, power_M = _fit_float16(q_MD)
            scale_M *= power_M * tl.load(k_scale + place)
        if PAGE == 0:
            k_BHND += batch * k_page
            v_BHND += batch * v_page
        else:
            table += batch * table_step
        first = begin + part * each
        limit_M = length - TOKENS + 1 + row_M % TOKENS
        mean_MD, lse_M = _attend(
            q_MD,
            scale_M,
            k_BHND + head * k_head,
            v_BHND + head * v_head,
            table,
            k_page,
            k_key,
            v_page,
            v_key,
            first,
            tl.minimum(first + each, length),
            oldest,
            limit_M - window,
            limit_M,
            IS_CAUSAL,
            HAS_WINDOW,
            PAGE,
            DIM,
            BLOCK,
            STAGES,
        )
        if IS_FP8:
            mean_MD *= tl.load(v_scale + place)
        if count == 1:
            _store(mean_MD, lse_M, y_BTHD, lse_BHT, place, num_heads, TOKENS, GROUP)
        else:
            means = partial + place * num_parts * (TOKENS * GROUP * DIM)
            # Behind all means.
            lses = partial + (TOKENS * GROUP) * (
                tl.num_programs(0).to(tl.int64) * DIM + place * num_parts
            )
            store_part(mean_MD, lse_M, means, lses, part, TOKENS * GROUP)
            if is_last_to_arrive(counter + place, count):
                mean_RD, lse_R = merge(means, lses, count, TOKENS * GROUP, DIM, R, S)
                _store(mean_RD, lse_R, y_BTHD, lse_BHT, place, num_heads, TOKENS, GROUP)
