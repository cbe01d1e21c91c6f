"""What runs on the GPU for cross-entropy where two rows of every SM fit the L2 cache.

M is rows, V the vocabulary. A program keeps the first tiles of its row in registers, a whole row of
up to 64 KB, so that all of them are on their way at once, and reads only the others twice. While it
waits, the other program of its SM works. A row is summed without looking for its maximum:
exponentials are taken about the target's logit. Where that makes too much, or no number, it is
summed again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._cross_entropy_sweeps import (
    LOG2_E,
    divisor_of,
    sweep_sums,
    sweep_zeros,
    tile_columns,
)

# Of a sum of which the target's own share is one. Beyond, exponentials are taken about the maximum,
# so that neither they nor what divides by their sum leave float32.
MOST = tl.constexpr(2.0**60)
# That a program counts at a time: so many that it seldom has to wait for them twice.
TARGETS = tl.constexpr(4_096)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "ignore_index"])
def losses_held_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    num_programs,
    ignore_index,
    z_loss,
    IS_MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HELD: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Write the loss of every row, what its sum is about, the sum, and maybe the gradient.

    `HELD` is how many tiles of a row are kept: those of a shorter row are all its tiles.
    """
    first_row = tl.program_id(0).to(tl.int64)
    divisor = divisor_of(divisor_1, targets_M, num_rows, ignore_index, IS_MEAN, TARGETS)
    if first_row == 0:
        tl.store(state_M21 + 2 * num_rows, divisor)
    row = first_row
    while row < num_rows:
        row_V = logits_MV + row * stride
        held = _held(row_V, COLUMNS, HELD, LANES, VECTOR)
        target = tl.load(targets_M + row)
        loss, about, total = 0.0, 0.0, 1.0
        if target == ignore_index:
            if dlogits_MV is not None:
                sweep_zeros(dlogits_MV + row * dstride, COLUMNS, LANES, VECTOR, True)
        else:
            is_inside = (target >= 0) & (target < COLUMNS)
            logit = tl.load(row_V + target, is_inside, other=float("nan")).to(tl.float32)
            about, total = _sum_up(row_V, held, logit, COLUMNS, LANES, VECTOR)
            log_total = tl.log(total)
            loss = log_total - (logit - about) + z_loss * (about + log_total) * (about + log_total)
            if dlogits_MV is not None:
                scale = tl.where(is_inside, 1.0 / divisor, float("nan"))
                factor = scale * (1 + 2 * z_loss * (about + log_total)) / total
                drow_V = dlogits_MV + row * dstride
                # No row has so high a number, which the compiler does not know.
                nothing = (row >> 62).to(tl.int16)
                places = row_V, drow_V, nothing
                _write_row(places, held, about, factor, COLUMNS, LANES, VECTOR, HAS_PTX)
                dx = tl.exp2((logit - about) * LOG2_E) * factor - scale
                # Over what a thread has just written there.
                tl.debug_barrier()
                tl.store(drow_V + target, dx.to(drow_V.dtype.element_ty), is_inside)
        tl.store(losses_M + row, loss)
        tl.store(state_M21 + row, about)
        tl.store(state_M21 + num_rows + row, total)
        row += num_programs


@triton.jit
def _tile(
    row_V,
    number,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    first, columns = number * (LANES * VECTOR), tile_columns(LANES, VECTOR, True)
    is_column = columns < COLUMNS - first
    # One address, and the distance of the tile beside it: all addresses would take registers.
    return tl.load(row_V + first + columns, is_column, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def _held(
    row_V, COLUMNS: tl.constexpr, HELD: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """Return the first tiles of the row, of which nothing waits for another."""
    held = ()
    for number in tl.static_range(HELD):
        tile = _tile(row_V, number, COLUMNS, LANES, VECTOR, "evict_first")
        held += (tile,)  # type: ignore[assignment]
    return held


@triton.jit
def _sum_up(row_V, held, logit, COLUMNS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return what the exponentials are about, and their sum."""
    HELD: tl.constexpr = len(held)
    TILES: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    sums = tl.zeros((LANES,), tl.float32)
    if HELD < TILES:
        x = _tile(row_V, HELD, COLUMNS, LANES, VECTOR, "evict_last")
    for number in tl.static_range(HELD):
        sums += _exponentials(held[number], logit)
    if HELD < TILES:
        for streamed in range(HELD + 1, TILES):
            following = _tile(row_V, streamed, COLUMNS, LANES, VECTOR, "evict_last")
            sums += _exponentials(x, logit)
            x = following
        sums += _exponentials(x, logit)
    about, total = logit, tl.sum(sums, axis=0)
    # Said so that NaN is too much, too.
    if not (total < MOST):
        about, total, _ = sweep_sums(row_V, COLUMNS, False, LANES, VECTOR, True)
    return about, total


@triton.jit
def _exponentials(x, about):
    """Return their sum over the columns of each lane."""
    return tl.sum(tl.exp2((x.to(tl.float32) - about) * LOG2_E), axis=1)


@triton.jit
def _write_row(
    places,
    held,
    about,
    factor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Write exp(x - about) * factor: what is held while the last of the others is on its way."""
    row_V, drow_V, nothing = places
    HELD: tl.constexpr = len(held)
    TILES: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    if HELD < TILES:
        x = _tile(row_V, TILES - 1, COLUMNS, LANES, VECTOR, "evict_first")
    for number in tl.static_range(HELD):
        again = _unknown(held[number], nothing, HAS_PTX)
        _write(drow_V, number, again, about, factor, COLUMNS, LANES, VECTOR)
    if HELD < TILES:
        for done in range(TILES - HELD - 1):
            last = TILES - 1 - done
            following = _tile(row_V, last - 1, COLUMNS, LANES, VECTOR, "evict_first")
            _write(drow_V, last, x, about, factor, COLUMNS, LANES, VECTOR)
            x = following
        _write(drow_V, HELD, x, about, factor, COLUMNS, LANES, VECTOR)


@triton.jit
def _unknown(x, nothing, HAS_PTX: tl.constexpr):
    """Return x, of which the compiler does not know that it is x.

    Else it would keep exponentials, twice as many registers as x, instead of taking them again.
    """
    if not HAS_PTX:
        return x
    nothings = tl.zeros_like(x.to(tl.int16, bitcast=True)) + nothing
    code: tl.constexpr = "xor.b32 $0, $1, $2;"
    return tl.inline_asm_elementwise(
        code, "=r,r,r", [x, nothings], dtype=x.dtype, is_pure=True, pack=2
    )


@triton.jit
def _write(
    drow_V,
    number,
    x,
    about,
    factor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first, columns = number * (LANES * VECTOR), tile_columns(LANES, VECTOR, True)
    dx = tl.exp2((x.to(tl.float32) - about) * LOG2_E) * factor
    dx = dx.to(drow_V.dtype.element_ty)
    tl.store(drow_V + first + columns, dx, columns < COLUMNS - first, eviction_policy="evict_first")
