"""Reading a cache of keys and values: where it lies, in one piece or in pages; and e4m3 numbers.

N keys of a tile, M rows of queries, D columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
