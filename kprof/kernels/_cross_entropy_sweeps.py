"""Sweeps over a row of logits: its sums, its gradient, or zeros in its place.

V is the vocabulary. Within a sweep every thread keeps a maximum and a sum of its own, and waits
for nobody.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def divisor_of(
    divisor_1, targets_M, num_rows, ignore_index, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Return what was given, else for a mean how many targets count, as a float."""
    divisor = 1.0
    if divisor_1 is not None:
        divisor = tl.load(divisor_1).to(tl.float32)
    elif IS_MEAN:
        counts = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, num_rows, BLOCK):
            rows = tl.arange(0, BLOCK) + first
            targets = tl.load(targets_M + rows, rows < num_rows, other=ignore_index)
            counts += (targets != ignore_index).to(tl.int32)
        divisor = tl.sum(counts, axis=0).to(tl.float32)
    return divisor


@triton.jit
def tile_columns(LANES: tl.constexpr, VECTOR: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return the columns of the first tile; those of one lane belong to one thread.

    A lane's columns lie side by side where they can be loaded at once; else the lanes do.
    """
    lanes, numbers = tl.arange(0, LANES)[:, None], tl.arange(0, VECTOR)[None, :]
    if IS_EVEN:
        return lanes * VECTOR + numbers
    return lanes + numbers * LANES


@triton.jit
def sweep_sums(
    row_V,
    num_columns,
    IS_SMOOTHED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Return the row's maximum (0 for -inf), the sum of exponentials about it, and its sum."""
    lanes = tile_columns(LANES, VECTOR, IS_EVEN)
    maximum = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    plain = tl.zeros((LANES,), tl.float32)
    for first in range(0, num_columns, LANES * VECTOR):
        columns = lanes + first
        is_column = columns < num_columns
        x = tl.load(row_V + columns, is_column, other=float("-inf"), eviction_policy="evict_last")
        x32 = x.to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x32, axis=1))
        # -inf less -inf would be NaN, where nothing but -inf has come yet.
        about = tl.where(higher == float("-inf"), 0.0, higher)
        total *= tl.exp2((maximum - about) * LOG2_E)
        total += tl.sum(tl.exp2((x32 - about[:, None]) * LOG2_E), axis=1)
        maximum = higher
        if IS_SMOOTHED:
            plain += tl.sum(tl.where(is_column, x32, 0.0), axis=1)
    highest = tl.max(maximum, axis=0)
    about = tl.where(highest == float("-inf"), 0.0, highest)
    return about, tl.sum(total * tl.exp2((maximum - about) * LOG2_E), axis=0), tl.sum(plain, axis=0)


@triton.jit
def _sweep_gradient(
    row_V,
    drow_V,
    num_columns,
    about,
    factor,
    each,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write exp(x - about) * factor - each; from the end, of which most is still in the cache."""
    lanes = tile_columns(LANES, VECTOR, IS_EVEN)
    num_tiles = tl.cdiv(num_columns, LANES * VECTOR)
    for done in range(num_tiles):
        columns = lanes + (num_tiles - 1 - done) * (LANES * VECTOR)
        is_column = columns < num_columns
        x = tl.load(row_V + columns, is_column, other=0.0, eviction_policy="evict_first")
        dx = tl.exp2((x.to(tl.float32) - about) * LOG2_E) * factor - each
        dx = dx.to(drow_V.dtype.element_ty)
        tl.store(drow_V + columns, dx, is_column, eviction_policy="evict_first")


@triton.jit
def sweep_zeros(
    drow_V, num_columns, LANES: tl.constexpr, VECTOR: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Write zeros over the row."""
    lanes = tile_columns(LANES, VECTOR, IS_EVEN)
    zeros = tl.zeros((LANES, VECTOR), drow_V.dtype.element_ty)
    for first in range(0, num_columns, LANES * VECTOR):
        columns = lanes + first
        tl.store(drow_V + columns, zeros, columns < num_columns, eviction_policy="evict_first")


@triton.jit
def write_gradient(
    row_V,
    drow_V,
    target,
    num_columns,
    about,
    total,
    scale,
    smoothing,
    z_loss,
    vocabulary,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write the gradient of a row, or of a piece of it; `row_V` and `drow_V` may be the same."""
    is_inside = (target >= 0) & (target < num_columns)
    x = tl.load(row_V + target, is_inside, other=0.0).to(tl.float32)
    factor = scale * (1 + 2 * z_loss * (about + tl.log(total))) / total
    each = scale * smoothing / vocabulary
    # All threads must have read the target's logit before one of them writes there.
    tl.debug_barrier()
    _sweep_gradient(row_V, drow_V, num_columns, about, factor, each, LANES, VECTOR, IS_EVEN)
    dx = tl.exp2((x - about) * LOG2_E) * factor - each - scale * (1 - smoothing)
    tl.debug_barrier()
    tl.store(drow_V + target, dx.to(drow_V.dtype.element_ty), is_inside)
