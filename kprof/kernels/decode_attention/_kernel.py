"""Decode attention in Triton: limits, kernel, schedule, launch, torch operator.

A CTA attends with the query heads of one key head, times T tokens, to one split of a sequence's
keys. A split is the result, or the last CTA to arrive merges all splits of its sequence. The cache
is contiguous or in pages that a table orders, in 16 bits or e4m3. e4m3 is loaded in pairs of
columns, whose even and odd columns are GEMMs of their own.

B batch, H heads, T query tokens, D columns of a head; M rows of a tile, query heads of a key head
times T; N keys of a tile.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.errors import KprofError
from kprof.kernels.runtime import (
    IS_INTERPRETED,
    MOST_CALLS,
    Launcher,
    alignments,
    define,
    kind_of,
    next_power_of_two,
    num_sms,
)
from kprof.kernels.tiles.online_softmax import finish, merge, store_part, weigh
from kprof.kernels.tiles.splits import counters, is_last_to_arrive, part_length

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16)
DIMS = (64, 128, 256)
# Most rows of a tile: query heads of a key head times query tokens.
MOST_ROWS = 64
# Largest second or third dimension of a grid.
MOST_PLACES = 65_535


def refusal(why: str | None) -> KprofError:
    """Return the error for a refused call."""
    return KprofError(
        f"decode_attention cannot take this call: {why}",
        fix="give it what its documentation names, or call torch's scaled_dot_product_attention",
    )


def why_refused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    has_scale: bool = False,
) -> str | None:
    """Return why the kernel does not take these tensors; None: it does."""
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        return f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}"
    if table is None and q.shape[0] != k.shape[0]:
        return f"{q.shape[0]} sequences of queries, {k.shape[0]} of keys"
    if q.dtype not in DTYPES or k.dtype not in (q.dtype, FP8) or v.dtype != k.dtype:
        return f"queries in {q.dtype}, keys in {k.dtype}: not float16 or bfloat16, and keys as they"
    if q.shape[-1] not in DIMS or k.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} and {k.shape[-1]}, not both of {', '.join(map(str, DIMS))}"
    if has_scale and k.dtype != FP8:
        return f"scales of keys and values in {k.dtype}"
    return _why_too_many(q, k) or _why_not_placed(q, lengths, table)


def _why_too_many(q: Tensor, k: Tensor) -> str | None:
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads do not share {k.shape[1]} heads of keys"
    if max(q.shape[0], k.shape[1]) > MOST_PLACES:
        return f"{q.shape[0]} sequences of {k.shape[1]} heads: more than a grid has room for"
    if q.shape[1] // k.shape[1] * q.shape[2] > MOST_ROWS:
        return f"{q.shape[2]} tokens: too many to decode"
    return None


def _why_not_placed(q: Tensor, lengths: Tensor | None, table: Tensor | None) -> str | None:
    for name, one, num_dimensions in (("lengths", lengths, 1), ("a table", table, 2)):
        if one is None:
            continue
        if one.dim() != num_dimensions or one.shape[0] != q.shape[0]:
            return f"{name} of shape {tuple(one.shape)} for {q.shape[0]} sequences"
        if one.is_floating_point() or one.dtype == torch.bool:
            return f"{name} in {one.dtype}, not in integers"
        if one.device != q.device:
            return f"{name} on {one.device}, queries on {q.device}"
    return None


@triton.jit
def _row_of(row, TOKENS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Return the row of the results, (B, T, H), for a row of this CTA's tile."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    return (batch * TOKENS + row % TOKENS) * num_heads * GROUP + head * GROUP + row // TOKENS


@triton.jit
def store(
    mean_MD, lse_M, y_BTHD, lse_BHT, place, TOKENS: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Store the results of one key head; the log-sum-exp of base 2 becomes the natural one."""
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
    """Store a split's result; the last CTA to do so merges all splits."""
    ROWS: tl.constexpr = TOKENS * GROUP
    DIM: tl.constexpr = mean_MD.shape[1]
    num_parts = tl.num_programs(0)
    means = partial + place * num_parts * (ROWS * DIM)
    # Log-sum-exps lie behind all means.
    num_places = tl.num_programs(1).to(tl.int64) * tl.num_programs(2)
    lses = partial + (num_places * DIM + place) * num_parts * ROWS
    store_part(mean_MD, lse_M, means, lses, tl.program_id(0), ROWS)
    if is_last_to_arrive(counter + place, count):
        mean_RD, lse_R = merge(means, lses, count, ROWS, DIM, R, S)
        store(mean_RD, lse_R, y_BTHD, lse_BHT, place, TOKENS, GROUP)


@triton.jit
def start_of(cache, page_step, head_step, PAGE: tl.constexpr, IS_FP8: tl.constexpr) -> tl.tensor:
    """Return the address of this CTA's head in the cache; e4m3 is addressed in pairs."""
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
    """Return the addresses of a block of keys, in a contiguous cache or in pages.

    A stride that is a compile-time constant makes it one address plus constants.
    """
    column_D = tl.arange(0, COLUMNS)
    if STEP > 0:
        at_ND = (tl.arange(0, BLOCK) * STEP)[:, None] + column_D[None, :]
        return x + tl.cast(start, tl.int64) * STEP + at_ND
    key_N = tl.arange(0, BLOCK) + start
    if PAGE == 0:
        place_N = key_N.to(tl.int64) * step
    else:
        # One entry of the table if a page holds whole blocks, else one for each key.
        if PAGE % BLOCK == 0:
            page = tl.load(table + start // PAGE)
        else:
            page = tl.load(table + key_N // PAGE, is_key_N, other=0)
        place_N = page.to(tl.int64) * page_step + (key_N % PAGE).to(tl.int64) * step
    return x + place_N[:, None] + column_D[None, :]


@triton.jit
def is_visible(
    key_N, end, oldest, lowest_M, limit_M, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr
) -> tl.tensor:
    """Return which keys of a block are valid, and which of them each row sees."""
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

    Pairs are loaded as 16 bits, the layout of the tensor cores; single bytes would take an
    instruction each. On the GPU, bytes of two pairs are picked and converted together.
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
    """Return queries in float16, and the factor of each row.

    The factor is a power of two that brings the row's largest magnitude to about 1, so only numbers
    that are negligible beside it are rounded.
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
    # e4m3: even and odd columns are GEMMs of their own.
    COLUMNS: tl.constexpr = DIM // 2 if IS_FP8 else DIM
    largest_M = tl.full([M], float("-inf"), tl.float32)
    total_MN = tl.zeros([M, BLOCK], tl.float32)
    sum_MD = tl.zeros([M, COLUMNS], tl.float32)
    if IS_FP8:
        even_MD, odd_MD = tl.split(tl.reshape(q_MD, [M, COLUMNS, 2]))
        odd_sum_MD = tl.zeros([M, COLUMNS], tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        key_N = tl.arange(0, BLOCK) + start
        is_key_N, is_seen_MN = is_visible(
            key_N, end, oldest, lowest_M, limit_M, IS_CAUSAL, HAS_WINDOW
        )
        at_ND = block_of(
            k_ND, table, start, is_key_N, k_page_step, k_step, K_STEP, PAGE, BLOCK, COLUMNS
        )
        # Keys behind the end may be NaN, which a weight of 0 does not make 0.
        k = tl.load(at_ND, is_key_N[:, None], other=0)
        if IS_FP8:
            score_MN = tl.dot(even_MD, bytes_of(k, False, IS_INTERPRETED).T)
            score_MN = tl.dot(odd_MD, bytes_of(k, True, IS_INTERPRETED).T, score_MN)
        elif M == 16:
            # Loaded in the loop, with the keys: a load before it would delay them.
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
def decode_attention_kernel(
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
    """Attend to one split of a sequence's keys, for the query heads of one key head.

    Without lengths and a window, the host computes the length and the number of splits.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = max_length
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + batch), max_length).to(tl.int32)
    oldest = tl.maximum(length - TOKENS + 1 - window, 0) if HAS_WINDOW else 0
    # Rounded down, so that blocks of keys never cross pages.
    begin = oldest // BLOCK * BLOCK
    if HAS_LENGTHS or HAS_WINDOW:
        each = part_length(length - begin, most_parts, BLOCK, BLOCK)
        # Without keys, one split stores the result.
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


# Elements of keys in a tile, bounded by registers.
TILE_ELEMENTS = 8_192
# Scores of a tile for each byte of a key, bounded by registers, of which e4m3 takes more.
SCORES_OF_BYTE = 2_048
# Registers of a thread where the compiler would otherwise spill.
REGISTERS_OF_TWO_WARPS, REGISTERS_OF_WIDE = 240, 168
# Bytes that an SM reads of a short, a medium and a long cache.
LITTLE_BYTES, MANY_BYTES, MOST_BYTES = 1 << 15, 1 << 18, 3 << 19
# Least rows of a tensor-core tile in Triton.
LEAST_ROWS = 16
# Largest head dimension for which schedules were measured.
MOST_SMALL_DIM = 128
# Elements of an accumulator for four warps.
ELEMENTS_OF_FOUR_WARPS = 4_096


@dataclass(frozen=True)
class Schedule:
    """Keys of a tile, tiles in flight, warps, and CTAs of an SM."""

    block: int
    stages: int
    warps: int
    ctas_per_sm: int = 2
    registers: int | None = None
    """Of a thread; None: the compiler's choice."""


def schedule_of(
    dim: int,
    rows: int,
    key_bytes: int,
    is_paged: bool,
    bytes_of_sm: int | None = None,
    is_crowded: bool = False,
) -> Schedule:
    """Return the schedule, as measured on an H200.

    Args:
        dim: Of a head.
        rows: Of a tile.
        key_bytes: Of an element of the cache.
        is_paged: Whether the cache is in pages.
        bytes_of_sm: What each SM reads; None: unknown, or not to matter.
        is_crowded: Whether there are more than half as many key heads as SMs: two CTAs share one.
    """
    is_small = rows <= LEAST_ROWS and dim <= MOST_SMALL_DIM
    block = TILE_ELEMENTS // (dim * key_bytes)
    if bytes_of_sm is None or is_paged or not is_small:
        warps = 4 if rows * dim <= ELEMENTS_OF_FOUR_WARPS else 8
        most = SCORES_OF_BYTE * key_bytes // max(LEAST_ROWS, next_power_of_two(rows))
        is_wide = key_bytes > 1 and (dim > 128 or (is_paged and dim > 64))
        return Schedule(
            max(LEAST_ROWS, min(2 * block, most)),
            # The table's entries are loaded two tiles ahead of the keys.
            5 if is_paged else 3,
            warps,
            registers=REGISTERS_OF_WIDE if is_wide else None,
        )
    if key_bytes == 1:
        return _schedule_of_bytes(block, bytes_of_sm)
    if is_crowded:
        return Schedule(2 * block, 3, 4)
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(2 * block, 2, 4, 1)
    if MANY_BYTES < bytes_of_sm <= MOST_BYTES:
        return Schedule(4 * block, 3, 4, 1)
    return Schedule(2 * block, 4, 4, 1)


def _schedule_of_bytes(block: int, bytes_of_sm: int) -> Schedule:
    """Return the schedule for e4m3, which is bound by instructions rather than memory."""
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(block, 2, 4, 1)
    if bytes_of_sm <= MANY_BYTES // 2:
        return Schedule(block, 3, 4, 1)
    return Schedule(block, 4, 2, registers=REGISTERS_OF_TWO_WARPS)


LOG2_E = 1.4426950408889634
# Elements of the splits that are merged at a time, bounded by registers.
MERGED_ELEMENTS = 8_192
# Largest stride of keys that is a compile-time constant.
MOST_STEP = 1 << 20
# Most splits of a sequence where results may not depend on the batch.
INVARIANT_PARTS = 32
# SMs of an H200, assumed where there is no GPU.
SMS = 132


class Options(NamedTuple):
    """Arguments of a call besides its tensors."""

    scale: float
    is_causal: bool
    window: int
    is_invariant: bool


class Partition(NamedTuple):
    """How the work of a call is split."""

    schedule: Schedule
    places: int
    """Key heads of all sequences."""
    parts: int
    """CTAs of a sequence and key head."""
    most_parts: int
    """Most splits of a sequence, which decide the length of one."""


def partition_of(q: Tensor, k: Tensor, table: Tensor | None, is_invariant: bool) -> Partition:
    """Return a partition that fills the GPU, or one that does not depend on the batch."""
    batch, query_heads, tokens, dim = q.shape
    heads, key_bytes = k.shape[1], k.element_size()
    rows = query_heads // heads * tokens
    places, most_keys = batch * heads, _most_keys(k, table)
    sms = sms_of(q.device)
    read = None if is_invariant else 2 * places * most_keys * dim * key_bytes // max(sms, 1)
    schedule = schedule_of(dim, rows, key_bytes, table is not None, read, 2 * places > sms)
    most = INVARIANT_PARTS if is_invariant else max(1, schedule.ctas_per_sm * sms // places)
    parts = max(1, min(most, -(-most_keys // schedule.block)))
    return Partition(schedule, places, parts, most)


def _most_keys(k: Tensor, table: Tensor | None) -> int:
    return k.shape[2] if table is None else table.shape[1] * k.shape[2]


def sms_of(device: torch.device) -> int:
    """Return the number of SMs; an H200's without a GPU."""
    return num_sms(device) if device.type == "cuda" else SMS


_launch = Launcher(decode_attention_kernel)
_partitions: dict[Hashable, Partition] = {}


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *given: float,
) -> tuple[Tensor, Tensor]:
    options = Options(*given)  # type: ignore[arg-type]
    if q.dim() != 4 or k.dim() != 4:
        raise refusal(why_refused(q, k, v))
    y, lse = _empty_results(q)
    if not y.numel():
        return y, lse
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    lengths = None if lengths is None else lengths.contiguous()
    table = table if table is None or table.stride(1) == 1 else table.contiguous()
    if k.dtype == FP8:
        k, v = (one if _is_pair_aligned(one) else one.clone() for one in (k, v))
        k_scale, v_scale = (_scale_of_each_head(one, q, k) for one in (k_scale, v_scale))
    call = kind_of(q, k, v, lengths, table, k_scale, v_scale), options
    partition = _partitions.get(call)
    if partition is None:
        # A call like an earlier one was checked then.
        has_scale = not (k_scale is None and v_scale is None)
        why = why_refused(q, k, v, lengths, table, has_scale)
        if why is not None:
            raise refusal(why)
        partition = _partition_first(call, q, k, table)
    partial = lse
    if partition.parts > 1:
        rows = y.numel() // (partition.places * y.shape[-1])
        size = partition.places * partition.parts * rows * (y.shape[-1] + 1)
        partial = torch.empty(size, dtype=torch.float32, device=q.device)
    counter = counters(partition.places, q.device)
    tensors = (q, k, v, y, lse, partial, counter, lengths, table, k_scale, v_scale)
    if not _launch.again(call, tensors):
        _launch_first(call, tensors, options, partition)
    return y, lse


def _partition_first(
    call: tuple[Hashable, Options], q: Tensor, k: Tensor, table: Tensor | None
) -> Partition:
    """Partition a new kind of call, and keep the partition as long as launches."""
    partition = partition_of(q, k, table, call[1].is_invariant)
    if not IS_INTERPRETED:
        if len(_partitions) >= MOST_CALLS:
            _partitions.clear()
        _partitions[call] = partition
    return partition


def _launch_first(
    call: Hashable, tensors: tuple[Tensor | None, ...], options: Options, partition: Partition
) -> None:
    """Launch for the first time on tensors of this kind."""
    q, k, v, *_, lengths, table, k_scale, v_scale = tensors
    assert q is not None and k is not None and v is not None
    heads, tokens, dim = k.shape[1], q.shape[2], q.shape[3]
    group = q.shape[1] // heads
    rows = next_power_of_two(group * tokens)
    table_step = q.shape[3] if table is None else table.stride(0)
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], table_step)
    is_known = table is None and max(k.stride(2), v.stride(2)) <= MOST_STEP
    constants = (
        *(tokens, group, dim, max(LEAST_ROWS, rows), lengths is not None),
        # A single token is the last one, and sees all keys.
        *(options.is_causal and tokens > 1, options.window > 0, k.dtype == FP8),
        0 if table is None else k.shape[2],
        *((k.stride(2), v.stride(2)) if is_known else (0, 0)),
        *(partition.schedule.block, partition.schedule.stages),
        *(rows, max(1, MERGED_ELEMENTS // (rows * dim)), IS_INTERPRETED),
    )
    types = tuple(None if one is None else one.dtype for one in tensors)
    inputs = (q, k, v, lengths, table, k_scale, v_scale)
    launching = _launching(partition.schedule)
    key = (q.device, types, constants, *launching.values(), alignments(inputs, *steps))
    most_keys = _most_keys(k, table)
    each = _part_length(most_keys, partition)
    numbers = (
        most_keys,
        partition.most_parts,
        each,
        max(1, -(-most_keys // each)),
        options.window,
        0,
    )
    arguments = (*tensors, *steps, options.scale * LOG2_E, *numbers, *constants)
    grid = (partition.parts, heads, q.shape[0])
    _launch(key, grid, arguments, launching, call=call, tensors=tensors)


def _launching(schedule: Schedule) -> dict[str, int]:
    """Return Triton's compile options."""
    registers = {} if schedule.registers is None else {"maxnreg": schedule.registers}
    return {"num_warps": schedule.warps} | registers


def _part_length(most_keys: int, partition: Partition) -> int:
    """Return the keys of a split, as the kernel computes it."""
    block = partition.schedule.block
    of_part = -(-most_keys // partition.most_parts)
    return block * max(1, -(-of_part // block))


def _is_pair_aligned(cache: Tensor) -> bool:
    """Tell whether an e4m3 cache can be read in pairs."""
    return not any(one % 2 for one in (cache.data_ptr(), *cache.stride()[:-1]))


def _scale_of_each_head(scale: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Return a scale for each head of each sequence; 1 without scales."""
    shape = q.shape[0], k.shape[1]
    if scale is None:
        return torch.ones(shape, dtype=torch.float32, device=q.device)
    return scale.float().expand(shape).contiguous()


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for y, tokens before heads as the next layer reads it, and the log-sum-exp."""
    batch, heads, tokens, dim = q.shape
    if tokens == 1:
        y = q.new_empty(batch, heads, 1, dim)
    else:
        y = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return y, q.new_empty((batch, heads, tokens), dtype=torch.float32)


decode_operator = define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? table, "
    "Tensor? k_scale, Tensor? v_scale, float scale, bool is_causal, int window, "
    "bool is_invariant) -> (Tensor, Tensor)",
    _run,
    lambda q, *others: _empty_results(q),
)
