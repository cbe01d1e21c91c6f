"""Rounding of queries, keys and values to FP8: what programs of one launch do.

Each head gets a scale by its largest number, so all of it is read twice. Programs that look and
programs that round take turns: rounding comes so far behind that its head has been looked through,
and so near that L2 still holds it. It waits for programs of lower numbers alone, which have begun
before. Values are turned over as `_attention_narrow` says.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _packed(x_MD) -> tl.tensor:
    """Return 16 bits of two columns as one number; loaded halves else take a register each."""
    if x_MD.dtype.primitive_bitwidth == 16:
        M: tl.constexpr = x_MD.shape[0]
        N: tl.constexpr = x_MD.shape[1] // 2
        low_MN, high_MN = tl.split(x_MD.to(tl.uint16, bitcast=True).reshape([M, N, 2]))
        return low_MN.to(tl.uint32) | high_MN.to(tl.uint32) << 16
    else:  # noqa: RET505
        return x_MD


@triton.jit
def _unpacked(x_MN, DTYPE: tl.constexpr) -> tl.tensor:
    """Return in float32 what was packed."""
    if DTYPE.primitive_bitwidth == 16:
        x_MN2 = tl.join(x_MN.to(tl.uint16), (x_MN >> 16).to(tl.uint16))
        x_MD = x_MN2.reshape([x_MN.shape[0], 2 * x_MN.shape[1]])
        return x_MD.to(DTYPE, bitcast=True).to(tl.float32)
    else:  # noqa: RET505
        return x_MN.to(tl.float32)


@triton.jit
def _tile(x, batch, head, row_M, num_rows, D: tl.constexpr, POLICY: tl.constexpr) -> tl.tensor:
    """Return rows of one head, packed, with zeros where there are none."""
    x_BHTD, step_B, step_H, step_T = x
    at = x_BHTD + batch * step_B + head * step_H
    at_MD = at + row_M.to(tl.int64)[:, None] * step_T + tl.arange(0, D)[None, :]
    return _packed(tl.load(at_MD, (row_M < num_rows)[:, None], other=0.0, eviction_policy=POLICY))


@triton.jit
def _halves(x, batch, head, row_M, num_rows, D: tl.constexpr, POLICY: tl.constexpr):
    """Return two tiles, one behind the other; registers hold one of them in float32."""
    first_MD = _tile(x, batch, head, row_M, num_rows, D, POLICY)
    return first_MD, _tile(x, batch, head, row_M + row_M.shape[0], num_rows, D, POLICY)


@triton.jit
def _magnitudes(x, DTYPE: tl.constexpr) -> tl.tensor:
    """Return magnitudes as integers, of which NaN is the largest: of packed ones, of each pair."""
    if DTYPE.primitive_bitwidth == 16:
        # Behind the bits of a magnitude, those of the other one decide nothing.
        return tl.maximum(x << 1, x << 17)
    else:  # noqa: RET505
        return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _raise(largest_at, x, DTYPE: tl.constexpr) -> None:
    """Take the magnitudes of two tiles into their head's largest, of float32 as integers."""
    largest = tl.max(tl.maximum(_magnitudes(x[0], DTYPE), _magnitudes(x[1], DTYPE)))
    if DTYPE.primitive_bitwidth == 16:
        largest = (largest >> 17).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        largest = largest.to(tl.int32, bitcast=True)
    tl.atomic_max(largest_at, largest, sem="relaxed")


@triton.jit
def _find(largest_U, given, place, sizes, HOW: tl.constexpr) -> None:
    """Look for the largest magnitude of a head in M rows."""
    HEADS: tl.constexpr = HOW[0]
    KEY_HEADS: tl.constexpr = HOW[1]
    D: tl.constexpr = HOW[2]
    M: tl.constexpr = HOW[3]
    q, k, v = given
    unit, block = place
    largest_at = largest_U + unit
    batch, head = unit // (HEADS + 2 * KEY_HEADS), unit % (HEADS + 2 * KEY_HEADS)
    row_M = block * M + tl.arange(0, M // 2)
    if head < HEADS:
        x = _halves(q, batch, head, row_M, sizes[0], D, "")
        _raise(largest_at, x, q[0].dtype.element_ty)
    elif head < HEADS + KEY_HEADS:
        x = _halves(k, batch, head - HEADS, row_M, sizes[1], D, "")
        _raise(largest_at, x, k[0].dtype.element_ty)
    else:
        x = _halves(v, batch, head - HEADS - KEY_HEADS, row_M, sizes[1], D, "")
        _raise(largest_at, x, v[0].dtype.element_ty)


@triton.jit
def _factor(largest_at, found_at, count, LARGEST: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return by what a head is multiplied, once `count` programs have looked through it."""
    while tl.atomic_add(found_at, 0, sem="acquire", scope="gpu") < count:
        pass
    # Past L1, which may hold what it was before.
    largest = tl.load(largest_at, cache_modifier=".cg").to(tl.float32, bitcast=True)
    return tl.div_rn(LARGEST, tl.where(largest < LEAST, LEAST, largest))


@triton.jit
def _narrowed(x, factor, DTYPE: tl.constexpr) -> tl.tensor:
    return (_unpacked(x, DTYPE) * factor).to(tl.float8e4nv)


@triton.jit
def _store_rows(
    y_BHTD, x, factor, head, row_M, num_rows, D: tl.constexpr, DTYPE: tl.constexpr
) -> None:
    """Round two tiles and store them."""
    for half in tl.static_range(2):
        own_M = row_M + half * row_M.shape[0]
        at_MD = (head.to(tl.int64) * num_rows + own_M)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(y_BHTD + at_MD, _narrowed(x[half], factor, DTYPE), (own_M < num_rows)[:, None])


@triton.jit
def _store_turned(
    y_BHDM, x, factor, block, D: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr
) -> None:
    """Round two tiles and store them as one block, columns first."""
    HALF: tl.constexpr = M // 2
    at_DM = tl.arange(0, D)[:, None] * M + tl.arange(0, HALF)[None, :]
    at_DM += block.to(tl.int64) * (D * M)
    for half in tl.static_range(2):
        tl.store(y_BHDM + at_DM + half * HALF, tl.trans(_narrowed(x[half], factor, DTYPE)))


@triton.jit
def _round(largest_U, found_U, count, given, made, place, sizes, HOW: tl.constexpr) -> None:
    """Round M rows; of values, turn them over."""
    HEADS: tl.constexpr = HOW[0]
    KEY_HEADS: tl.constexpr = HOW[1]
    D: tl.constexpr = HOW[2]
    M: tl.constexpr = HOW[3]
    LARGEST: tl.constexpr = HOW[4]
    LEAST: tl.constexpr = HOW[5]
    q, k, v = given
    unit, block = place
    num_queries, num_keys = sizes
    # Once it is read again, nobody needs it any more.
    LAST: tl.constexpr = "evict_first"
    batch, head = unit // (HEADS + 2 * KEY_HEADS), unit % (HEADS + 2 * KEY_HEADS)
    largest_at, found_at = largest_U + unit, found_U + unit
    place_M = tl.arange(0, M // 2)
    row_M = block * M + place_M
    # It is on its way while the largest is waited for.
    if head < HEADS:
        x = _halves(q, batch, head, row_M, num_queries, D, LAST)
        factor = _factor(largest_at, found_at, count, LARGEST, LEAST)
        _store_rows(
            made[0], x, factor, batch * HEADS + head, row_M, num_queries, D, q[0].dtype.element_ty
        )
    elif head < HEADS + KEY_HEADS:
        head -= HEADS
        x = _halves(k, batch, head, row_M, num_keys, D, LAST)
        factor = _factor(largest_at, found_at, count, LARGEST, LEAST)
        _store_rows(
            made[1], x, factor, batch * KEY_HEADS + head, row_M, num_keys, D, k[0].dtype.element_ty
        )
    elif block * M < num_keys:
        head -= HEADS + KEY_HEADS
        key_M = place_M // 16 * 16 + place_M % 4 // 2 * 8 + place_M % 16 // 4 * 2 + place_M % 2
        x = _halves(v, batch, head, block * M + key_M, num_keys, D, LAST)
        factor = _factor(largest_at, found_at, count, LARGEST, LEAST)
        at = (batch * KEY_HEADS + head) * tl.cdiv(num_keys, M) + block
        _store_turned(made[2], x, factor, at, D, M, v[0].dtype.element_ty)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_units"])
def narrow(
    found_U,
    q_BHTD,
    k_BHND,
    v_BHND,
    into_q,
    into_k,
    into_v,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    num_queries,
    num_keys,
    num_units,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    APART: tl.constexpr,
) -> None:
    """Round all heads to 8 bits; values in blocks of M keys, turned over.

    Every other program looks for the largest magnitude of a head; rounding comes APART tiles behind
    a whole head. `found_U` holds what was found of each head, then how many programs have looked.
    """
    of_q, of_k = (q_BHTD, q_batch, q_head, q_row), (k_BHND, k_batch, k_head, k_row)
    given = (of_q, of_k, (v_BHND, v_batch, v_head, v_row))
    made, sizes = (into_q, into_k, into_v), (num_queries, num_keys)
    HOW: tl.constexpr = (HEADS, KEY_HEADS, D, M, LARGEST, LEAST)
    blocks = tl.cdiv(tl.maximum(num_queries, num_keys), M)
    counts_U, tile = found_U + num_units, tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        place = (tile // blocks, tile % blocks)
        if tile < num_units * blocks:
            _find(found_U, given, place, sizes, HOW)
            # The thread that counts is the one that raised the largest.
            tl.atomic_add(counts_U + place[0], 1, sem="release", scope="gpu")
    else:
        tile -= blocks + APART
        place = (tile // blocks, tile % blocks)
        if tile >= 0:
            _round(found_U, counts_U, blocks, given, made, place, sizes, HOW)
