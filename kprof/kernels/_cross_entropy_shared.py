"""What runs on the GPU for cross-entropy where several SMs share a row, which is read once.

M is rows, V the vocabulary, G the programs of a group, which take the same rows, `step` apart; each
has a piece of every row. It leaves the piece's maximum and sum for the others as a letter in
memory, one word, and sums the next row before it looks for theirs. Zeros are no letter. All
programs have to run at once, as they wait for one another.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels._cross_entropy_pieces import (
    LOG2_E,
    STAGES,
    VECTOR,
    empty_ring,
    finite,
    request,
    sum_of,
    wait_for_all_but,
    write_gradient,
    write_zeros,
)
from kprof.kernels._gluon import gl, gluon

# That a program counts at a time: so many that it seldom has to wait for them.
TARGETS = gl.constexpr(4_096)
# A letter from nobody: a maximum of -inf, and no sum.
NOBODY = gl.constexpr(-(1 << 55))


@gluon.jit(do_not_specialize=["num_rows", "step", "ignore_index"])
def losses_shared_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    letters_MG,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    step,
    ignore_index,
    z_loss,
    IS_MEAN: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    LANES: gl.constexpr,
):
    """Write the loss of every row, its maximum and sum, and its gradient."""
    VECTORS: gl.constexpr = (COLUMNS // VECTOR + GROUP - 1) // GROUP
    TILES: gl.constexpr = (VECTORS + LANES - 1) // LANES
    # The last piece may be the shortest.
    LEAST: gl.constexpr = COLUMNS // VECTOR - (GROUP - 1) * VECTORS
    row, member, stage = gl.program_id(0) // GROUP, gl.program_id(0) % GROUP, 0
    first = member * VECTORS * VECTOR
    count = gl.minimum(VECTORS, COLUMNS // VECTOR - member * VECTORS)
    ring = empty_ring(logits_MV.dtype.element_ty, TILES, LANES)
    pieces_M = logits_MV + first
    target, following, third = _request_first(
        ring, pieces_M, targets_M, row, step, stride, num_rows, ignore_index, count, LANES
    )
    divisor = _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN)
    wait_for_all_but(STAGES - 1)
    _send(ring, 0, letters_MG, row, target != ignore_index, count, GROUP, LEAST, TILES, LANES)
    while row < num_rows:
        # What is loaded here arrives while the next row is summed.
        last = _target(targets_M, row + STAGES * step, num_rows, ignore_index)
        words_G = _receive(letters_MG, row, target == ignore_index, GROUP)
        is_own = (target >= first) & (target < first + count * VECTOR)
        logit = gl.load(logits_MV + row.to(tl.int64) * stride + target, is_own, other=float("nan"))
        next_stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        wait_for_all_but(STAGES - 2)
        is_next = following != ignore_index
        _send(ring, next_stage, letters_MG, row + step, is_next, count, GROUP, LEAST, TILES, LANES)
        about, total = _merge(letters_MG, row, words_G, GROUP)
        is_inside = (target >= 0) & (target < COLUMNS)
        loss, factor, dtarget = _differentiate(logit, about, total, z_loss, divisor, is_inside)
        drow_V = dlogits_MV + row.to(tl.int64) * dstride
        if target == ignore_index:
            loss, total = 0.0, 1.0
            write_zeros(drow_V + first, count, TILES, LANES)
        else:
            write_gradient(ring, stage, drow_V + first, count, about, factor, TILES, LANES)
            gl.store(drow_V + target, dtarget.to(drow_V.dtype.element_ty), is_own)
        is_teller = is_own | ((member == 0) & (is_inside == 0))
        _store(losses_M, state_M21, row, num_rows, loss, about, total, is_teller)
        is_last = last != ignore_index
        request(ring, stage, pieces_M, row + STAGES * step, stride, is_last, count, LANES)
        row, stage, target, following, third = row + step, next_stage, following, third, last


@gluon.jit
def _request_first(
    ring,
    pieces_M,
    targets_M,
    row,
    step,
    stride,
    num_rows,
    ignore_index,
    count,
    LANES: gl.constexpr,
):
    """Begin to copy the pieces of the first three rows; return their targets."""
    target = _target(targets_M, row, num_rows, ignore_index)
    following = _target(targets_M, row + step, num_rows, ignore_index)
    third = _target(targets_M, row + 2 * step, num_rows, ignore_index)
    request(ring, 0, pieces_M, row, stride, target != ignore_index, count, LANES)
    request(ring, 1, pieces_M, row + step, stride, following != ignore_index, count, LANES)
    request(ring, 2, pieces_M, row + 2 * step, stride, third != ignore_index, count, LANES)
    return target, following, third


@gluon.jit
def _store(losses_M, state_M21, row, num_rows, loss, about, total, is_teller):
    """Store what a row comes to, if it is this program that tells.

    It is the one with the target in its piece; of a target that is nowhere, the first one.
    """
    gl.store(losses_M + row, loss, is_teller)
    gl.store(state_M21 + row, about, is_teller)
    gl.store(state_M21 + num_rows + row, total, is_teller)


@gluon.jit
def _target(targets_M, row, num_rows, ignore_index):
    """Return a row's target; behind the last row there is none that counts."""
    return gl.load(targets_M + row, row < num_rows, other=ignore_index)


@gluon.jit
def _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN: gl.constexpr):
    """Return and store what was given, else for a mean how many targets count, as a float."""
    divisor = 1.0
    if divisor_1 is not None:
        divisor = gl.load(divisor_1).to(gl.float32)
    elif IS_MEAN:
        EACH: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
        counts = gl.zeros([TARGETS], gl.int32, EACH)
        for begin in range(0, num_rows, TARGETS):
            rows = begin + gl.arange(0, TARGETS, EACH)
            targets = gl.load(targets_M + rows, rows < num_rows, other=ignore_index)
            counts += (targets != ignore_index).to(gl.int32)
        divisor = gl.sum(counts, 0).to(gl.float32)
    gl.store(state_M21 + 2 * num_rows, divisor, gl.program_id(0) == 0)
    return divisor


@gluon.jit
def _differentiate(logit, about, total, z_loss, divisor, is_inside):
    """Return a row's loss, what its exponentials are multiplied by, and its target's gradient.

    Of a target outside the vocabulary all are NaN.
    """
    scale = gl.where(is_inside, 1.0 / divisor, float("nan"))
    logit = logit.to(gl.float32)
    log_total = gl.log(total)
    log_sum = about + log_total
    loss = log_total - (logit - about) + z_loss * log_sum * log_sum
    factor = scale * (1 + 2 * z_loss * log_sum) / total
    return loss, factor, gl.exp2((logit - about) * LOG2_E) * factor - scale


@gluon.jit
def _send(
    ring,
    stage,
    letters_MG,
    row,
    is_needed,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Sum a row's piece and leave a letter, if the row counts."""
    if is_needed:
        highest, total = sum_of(ring, stage, count, LEAST, TILES, LANES)
        word = highest.to(gl.int32, bitcast=True).to(gl.int64) << 32
        word |= total.to(gl.uint32, bitcast=True).to(gl.int64)
        gl.store(letters_MG + row.to(tl.int64) * GROUP + gl.program_id(0) % GROUP, word)


@gluon.jit
def _receive(letters_MG, row, is_unneeded, GROUP: gl.constexpr):
    """Return the letters of a row, zeros where they are not there yet; each warp reads all."""
    PADDED: gl.constexpr = 1 << (GROUP - 1).bit_length()
    member_G = gl.arange(0, PADDED, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    is_real_G = (member_G < GROUP) & (is_unneeded == 0)
    letters_G = letters_MG + row.to(tl.int64) * GROUP
    return gl.load(letters_G + member_G, is_real_G, other=NOBODY, volatile=True)


@gluon.jit
def _merge(letters_MG, row, words_G, GROUP: gl.constexpr):
    """Return what the sums of all pieces are about and their sum, once all letters are there."""
    while gl.min((words_G != 0).to(gl.int32), 0) == 0:
        words_G = _receive(letters_MG, row, False, GROUP)
    highest_G = (words_G >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    total_G = words_G.to(gl.int32).to(gl.float32, bitcast=True)
    about = finite(gl.max(highest_G, 0))
    return about, gl.sum(total_G * gl.exp2((highest_G - about) * LOG2_E), 0)
