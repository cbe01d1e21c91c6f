"""What runs on the GPU for cross-entropy where two rows of every SM fit the L2 cache.

M is rows, V the vocabulary, of two tiles at least. The next tile of a row, or the first one of the
next row, is always on its way while one is worked on. A row is summed without looking for its
maximum: exponentials are taken about the target's logit. Where that makes too much, or no number,
it is summed again.
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
def losses_ahead_kernel(
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
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Write the loss of every row, what its sum is about, the sum, and maybe the gradient."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_M + row)
    logit = _logit(logits_MV + row * stride, target, COLUMNS)
    x = _tile(logits_MV + row * stride, 0, COLUMNS, LANES, VECTOR, "evict_last")
    divisor = divisor_of(divisor_1, targets_M, num_rows, ignore_index, IS_MEAN, TARGETS)
    if row == 0:
        tl.store(state_M21 + 2 * num_rows, divisor)
    while row < num_rows:
        row_V = logits_MV + row * stride
        # After the last row, something that nobody looks at.
        following = tl.minimum(row + num_programs, num_rows - 1)
        next_V = logits_MV + following * stride
        next_target = tl.load(targets_M + following)
        next_logit = _logit(next_V, next_target, COLUMNS)
        loss, about, total = 0.0, 0.0, 1.0
        if target == ignore_index:
            x = _tile(next_V, 0, COLUMNS, LANES, VECTOR, "evict_last")
            if dlogits_MV is not None:
                sweep_zeros(dlogits_MV + row * dstride, COLUMNS, LANES, VECTOR, True)
        else:
            about, total, x, before = _sum_up(row_V, x, logit, COLUMNS, LANES, VECTOR)
            log_total = tl.log(total)
            loss = log_total - (logit - about) + z_loss * (about + log_total) * (about + log_total)
            if dlogits_MV is not None:
                scale = tl.where(_is_inside(target, COLUMNS), 1.0 / divisor, float("nan"))
                factor = scale * (1 + 2 * z_loss * (about + log_total)) / total
                drow_V = dlogits_MV + row * dstride
                places = row_V, drow_V, next_V
                x = _write_row(places, x, before, about, factor, COLUMNS, LANES, VECTOR)
                dx = tl.exp2((logit - about) * LOG2_E) * factor - scale
                tl.debug_barrier()
                dx = dx.to(drow_V.dtype.element_ty)
                tl.store(drow_V + target, dx, _is_inside(target, COLUMNS))
            else:
                x = _tile(next_V, 0, COLUMNS, LANES, VECTOR, "evict_last")
        tl.store(losses_M + row, loss)
        tl.store(state_M21 + row, about)
        tl.store(state_M21 + num_rows + row, total)
        row += num_programs
        target, logit = next_target, next_logit


@triton.jit
def _is_inside(target, COLUMNS: tl.constexpr):
    return (target >= 0) & (target < COLUMNS)


@triton.jit
def _logit(row_V, target, COLUMNS: tl.constexpr):
    """Return the target's logit; NaN where there is none."""
    return tl.load(row_V + target, _is_inside(target, COLUMNS), other=float("nan")).to(tl.float32)


@triton.jit
def _tile(
    row_V,
    first,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    columns = first + tile_columns(LANES, VECTOR, True)
    return tl.load(row_V + columns, columns < COLUMNS, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def _sum_up(row_V, x, logit, COLUMNS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return what the exponentials are about, their sum, the last tile, and the one before it.

    `x` is the first tile.
    """
    TILE: tl.constexpr = LANES * VECTOR
    TILES: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    sums = tl.zeros((LANES,), tl.float32)
    for number in range(1, TILES):
        following = _tile(row_V, number * TILE, COLUMNS, LANES, VECTOR, "evict_last")
        sums += tl.sum(tl.exp2((x.to(tl.float32) - logit) * LOG2_E), axis=1)
        x = following
    sums += tl.sum(tl.exp2((x.to(tl.float32) - logit) * LOG2_E), axis=1)
    # On its way while all threads wait for the sum.
    before = _tile(row_V, (TILES - 2) * TILE, COLUMNS, LANES, VECTOR, "evict_first")
    about, total = logit, tl.sum(sums, axis=0)
    # Said so that NaN is too much, too.
    if not (total < MOST):
        about, total, _ = sweep_sums(row_V, COLUMNS, False, LANES, VECTOR, True)
    return about, total, x, before


@triton.jit
def _write_row(
    places,
    x,
    before,
    about,
    factor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Write exp(x - about) * factor, backwards from the last tile; return the next row's first."""
    row_V, drow_V, next_V = places
    TILE: tl.constexpr = LANES * VECTOR
    TILES: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    for done in range(TILES - 2):
        first = (TILES - 1 - done) * TILE
        following = _tile(row_V, first - 2 * TILE, COLUMNS, LANES, VECTOR, "evict_first")
        _write(drow_V, first, x, about, factor, COLUMNS, LANES, VECTOR)
        x = before
        before = following
    _write(drow_V, TILE, x, about, factor, COLUMNS, LANES, VECTOR)
    next_x = _tile(next_V, 0, COLUMNS, LANES, VECTOR, "evict_last")
    _write(drow_V, 0, before, about, factor, COLUMNS, LANES, VECTOR)
    return next_x


@triton.jit
def _write(
    drow_V,
    first,
    x,
    about,
    factor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    columns = first + tile_columns(LANES, VECTOR, True)
    dx = tl.exp2((x.to(tl.float32) - about) * LOG2_E) * factor
    dx = dx.to(drow_V.dtype.element_ty)
    tl.store(drow_V + columns, dx, columns < COLUMNS, eviction_policy="evict_first")
