"""Decode attention on the device: a CTA attends with a group of heads to a split of a cache.

A split is a result, or one of several that the last CTA merges. The cache lies in one piece or in
pages, in 16 bits or e4m3. B batch, H heads, T query tokens, D columns of a head; M rows of a tile:
the query heads of one key head times T; N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels.tiles.online_softmax import finish, merge, store_part, weigh
from kprof.kernels.tiles.splits import is_last_to_arrive, part_length


@triton.jit
def _row_of(row, TOKENS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Return which row of the results, (B, T, H), a row of this program's tile is."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    return (batch * TOKENS + row % TOKENS) * num_heads * GROUP + head * GROUP + row // TOKENS


@triton.jit
def store(
    mean_MD, lse_M, y_BTHD, lse_BHT, place, TOKENS: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Store the results of one head of keys; the log-sum-exp becomes the natural one."""
    row_M, column_D = tl.arange(0, mean_MD.shape[0]), tl.arange(0, mean_MD.shape[1])
    at_M = _row_of(row_M, TOKENS, GROUP) * mean_MD.shape[1]
    is_row_M = row_M < TOKENS * GROUP
    mean_MD = mean_MD.to(y_BTHD.dtype.element_ty)
    tl.store(y_BTHD + (at_M[:, None] + column_D[None, :]), mean_MD, is_row_M[:, None])
    tl.store(lse_BHT + place * TOKENS * GROUP + row_M, lse_M * 0.6931471805599453, is_row_M)


@triton.jit
def merge_as_last(
    mean_MD,
    lse_M,
    y_BTHD,
    lse_BHT,
    partial,
    counter,
    place,
    count,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Leave a part in memory; the last program to do so puts all of them together."""
    ROWS: tl.constexpr = TOKENS * GROUP
    DIM: tl.constexpr = mean_MD.shape[1]
    num_parts = tl.num_programs(0)
    means = partial + place * num_parts * (ROWS * DIM)
    # Behind all means.
    num_places = tl.num_programs(1).to(tl.int64) * tl.num_programs(2)
    lses = partial + (num_places * DIM + place) * num_parts * ROWS
    store_part(mean_MD, lse_M, means, lses, tl.program_id(0), ROWS)
    if is_last_to_arrive(counter + place, count):
        mean_RD, lse_R = merge(means, lses, count, ROWS, DIM, R, S)
        store(mean_RD, lse_R, y_BTHD, lse_BHT, place, TOKENS, GROUP)


@triton.jit
def start_of(cache, page_step, head_step, PAGE: tl.constexpr, IS_FP8: tl.constexpr) -> tl.tensor:
    """Return where this program's head of a cache begins; e4m3 numbers are read two at a time."""
    cache += tl.program_id(1).to(tl.int64) * head_step
    if PAGE == 0:
        cache += tl.program_id(2).to(tl.int64) * page_step
    if IS_FP8:
        cache = cache.to(tl.pointer_type(tl.int16), bitcast=True)
    return cache


@triton.jit
def block_of(
    x,
    table,
    start,
    is_key_N,
    page_step,
    step,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return where a block of keys lies: in one piece, or in the pages that the table names.

    A step that the compiler knows makes it one address, and what is known beside it.
    """
    column_D = tl.arange(0, COLUMNS)
    if STEP > 0:
        at_ND = (tl.arange(0, BLOCK) * STEP)[:, None] + column_D[None, :]
        return x + tl.cast(start, tl.int64) * STEP + at_ND
    key_N = tl.arange(0, BLOCK) + start
    if PAGE == 0:
        place_N = key_N.to(tl.int64) * step
    else:
        # A page of whole blocks takes one entry of the table, a smaller one takes one for each key.
        if PAGE % BLOCK == 0:
            page = tl.load(table + start // PAGE)
        else:
            page = tl.load(table + key_N // PAGE, is_key_N, other=0)
        place_N = page.to(tl.int64) * page_step + (key_N % PAGE).to(tl.int64) * step
    return x + place_N[:, None] + column_D[None, :]


@triton.jit
def is_seen(
    key_N, end, oldest, lowest_M, limit_M, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr
) -> tl.tensor:
    """Return which keys of a block anyone sees, and which of them each row does."""
    is_key_N = key_N < end
    if HAS_WINDOW:
        is_key_N &= key_N >= oldest
    is_seen_MN = is_key_N[None, :] & (limit_M >= limit_M)[:, None]
    if IS_CAUSAL:
        is_seen_MN &= key_N[None, :] < limit_M[:, None]
    if HAS_WINDOW:
        is_seen_MN &= key_N[None, :] >= lowest_M[:, None]
    return is_key_N, is_seen_MN


@triton.jit
def bytes_of(pair, IS_HIGH: tl.constexpr, IS_INTERPRETED: tl.constexpr) -> tl.tensor:
    """Return the first or the second of each pair of e4m3 numbers, in float16.

    The tensor cores take pairs of 16 bits as they lie; loaded one by one, each byte is an
    instruction. On the GPU, of two pairs the bytes are picked, and converted together.
    """
    if IS_INTERPRETED:
        byte = (pair >> 8) if IS_HIGH else pair
        return (byte & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    pick: tl.constexpr = "0x7531" if IS_HIGH else "0x6420"
    code: tl.constexpr = (
        "{ .reg .b32 both; .reg .b16 first, second; prmt.b32 both, $1, $1, "
        + pick
        + "; mov.b32 {first, second}, both; cvt.rn.f16x2.e4m3x2 $0, first; }"
    )
    return tl.inline_asm_elementwise(code, "=r,r", [pair], tl.float16, is_pure=True, pack=2)


@triton.jit
def fit_float16(q_MD) -> tl.tensor:
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
