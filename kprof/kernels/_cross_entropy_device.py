"""What runs on the GPU for cross-entropy: the loss and the gradient of rows of logits.

M is rows, V the vocabulary. A row is swept twice: once for its maximum and its sum, once for its
gradient. So few rows are under way at a time that the second sweep finds them in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._cross_entropy_sweeps import (
    LOG2_E,
    divisor_of,
    sweep_sums,
    sweep_zeros,
    write_gradient,
)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "ignore_index"])
def losses_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    num_columns,
    num_programs,
    ignore_index,
    smoothing,
    z_loss,
    IS_MEAN: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write the loss of every row, its maximum and sum, and the gradient if there is a place."""
    program = tl.program_id(0)
    divisor = divisor_of(divisor_1, targets_M, num_rows, ignore_index, IS_MEAN, LANES)
    if program == 0:
        tl.store(state_M21 + 2 * num_rows, divisor)
    for number in range(program, num_rows, num_programs):
        row = tl.zeros((), tl.int64) + number
        target = tl.load(targets_M + row)
        loss, about, total = 0.0, 0.0, 1.0
        if target == ignore_index:
            if dlogits_MV is not None:
                sweep_zeros(dlogits_MV + row * dstride, num_columns, LANES, VECTOR, IS_EVEN)
        else:
            row_V = logits_MV + row * stride
            # A target outside the vocabulary is no index to read at: its loss is NaN.
            is_inside = (target >= 0) & (target < num_columns)
            x = tl.load(row_V + target, is_inside, other=float("nan")).to(tl.float32)
            about, total, plain = sweep_sums(
                row_V, num_columns, IS_SMOOTHED, LANES, VECTOR, IS_EVEN
            )
            log_total = tl.log(total)
            loss = log_total - (x - about)
            if IS_SMOOTHED:
                smooth = log_total - (plain / num_columns - about)
                loss = loss * (1 - smoothing) + smooth * smoothing
            loss += z_loss * (about + log_total) * (about + log_total)
            if dlogits_MV is not None:
                scale = tl.where(is_inside, 1.0 / divisor, float("nan"))
                write_gradient(
                    row_V,
                    dlogits_MV + row * dstride,
                    target,
                    num_columns,
                    about,
                    total,
                    scale,
                    smoothing,
                    z_loss,
                    num_columns,
                    LANES,
                    VECTOR,
                    IS_EVEN,
                )
        tl.store(losses_M + row, loss)
        tl.store(state_M21 + row, about)
        tl.store(state_M21 + num_rows + row, total)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_programs",
        "ignore_index",
        "dloss_stride",
        "first_column",
        "vocabulary",
    ]
)
def gradients_kernel(
    dloss_M,
    logits_MV,
    targets_M,
    state_M21,
    dlogits_MV,
    dloss_stride,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    num_columns,
    num_programs,
    ignore_index,
    first_column,
    vocabulary,
    smoothing,
    z_loss,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write the gradient of every row from the maximum and the sum that were found before.

    The columns may be a piece of the vocabulary, from `first_column` on.
    """
    divisor = tl.load(state_M21 + 2 * num_rows)
    for number in range(tl.program_id(0), num_rows, num_programs):
        row = tl.zeros((), tl.int64) + number
        target = tl.load(targets_M + row)
        drow_V = dlogits_MV + row * dstride
        if target == ignore_index:
            sweep_zeros(drow_V, num_columns, LANES, VECTOR, IS_EVEN)
        else:
            scale = tl.load(dloss_M + row * dloss_stride).to(tl.float32) / divisor
            scale = tl.where((target >= 0) & (target < vocabulary), scale, float("nan"))
            about = tl.load(state_M21 + row)
            total = tl.load(state_M21 + num_rows + row)
            write_gradient(
                logits_MV + row * stride,
                drow_V,
                target - first_column,
                num_columns,
                about,
                total,
                scale,
                smoothing,
                z_loss,
                vocabulary,
                LANES,
                VECTOR,
                IS_EVEN,
            )


@triton.jit(do_not_specialize=["num_rows", "first_column"])
def merge_kernel(
    logits_MV,
    targets_M,
    state_4M,
    stride: tl.int64,
    num_rows,
    num_columns,
    first_column,
    IS_SMOOTHED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Add a piece of the vocabulary to what is known of each row.

    That is its maximum, its sum of exponentials about it, the target's logit and the plain sum.
    """
    row = tl.program_id(0).to(tl.int64)
    row_V = logits_MV + row * stride
    target = tl.load(targets_M + row) - first_column
    is_inside = (target >= 0) & (target < num_columns)
    x = tl.load(row_V + target, is_inside, other=0.0).to(tl.float32)
    about, total, plain = sweep_sums(row_V, num_columns, IS_SMOOTHED, LANES, VECTOR, IS_EVEN)
    row_4 = state_4M + row
    about_before, total_before = tl.load(row_4), tl.load(row_4 + num_rows)
    # A piece of nothing but -inf has no sum, and no say in what the sums are about.
    about = tl.where(total == 0.0, about_before, about)
    higher = tl.where(total_before == 0.0, about, tl.maximum(about, about_before))
    total = total * tl.exp2((about - higher) * LOG2_E)
    total += total_before * tl.exp2(
        tl.where(total_before == 0.0, 0.0, about_before - higher) * LOG2_E
    )
    tl.store(row_4, higher)
    tl.store(row_4 + num_rows, total)
    if is_inside:
        tl.store(row_4 + 2 * num_rows, x)
    if IS_SMOOTHED:
        tl.store(row_4 + 3 * num_rows, tl.load(row_4 + 3 * num_rows) + plain)
