"""What runs on the GPU for cross-entropy where rows lie in shared memory, and are read once.

M is rows, V the vocabulary, G the programs of a group, which take the same rows, `step` apart, and
W the warps of each; all have a share of every row. Where several programs share a row, all have to
run at once, as they wait for one another.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels._cross_entropy_letters import FLAT, IGNORED, alike, begin_letters, sums_of_row
from kprof.kernels._cross_entropy_pieces import (
    LOG2_E,
    STAGES,
    VECTOR,
    empty_ring,
    finite,
    request,
    wait_for_all_but,
    write_gradient,
    write_zeros,
)
from kprof.kernels._gluon import gl, gluon

# That a program counts at a time: so many that it seldom has to wait for them.
TARGETS = gl.constexpr(4_096)
# In the place of a target outside the vocabulary.
NOWHERE = gl.constexpr(-2)


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
    LEAST: gl.constexpr = COLUMNS // VECTOR - (GROUP - 1) * VECTORS
    row, member, stage = gl.program_id(0) // GROUP, gl.program_id(0) % GROUP, 0
    first, count = _piece(member, VECTORS, COLUMNS)
    ring = empty_ring(logits_MV.dtype.element_ty, TILES, LANES)
    pieces_M = logits_MV + first
    target, following, third = _request_first(
        ring, pieces_M, targets_M, row, step, stride, num_rows, ignore_index, count, COLUMNS, LANES
    )
    logit = _own_logit(logits_MV, row, stride, target, first, count)
    scale_1 = _scale_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN)
    shares_W = begin_letters(ring, letters_MG, row, target, count, GROUP, LEAST, TILES, LANES)
    while row < num_rows:
        # What is loaded here arrives while a row is summed. Between the load of a logit and what is
        # written over it lies a barrier.
        last = _target(targets_M, row + STAGES * step, num_rows, ignore_index)
        following_logit = _own_logit(logits_MV, row + step, stride, following, first, count)
        coming = gl.where(stage == STAGES - 1, 0, stage + 1)
        highest, total = sums_of_row(
            *(ring, (stage, coming), shares_W, letters_MG, (row, row + step), (target, following)),
            *(count, GROUP, LEAST, TILES, LANES),
        )
        about, is_own = finite(highest), _is_own(target, first, count)
        factor, dtarget = _differentiate(logit, about, total, target, scale_1, z_loss)
        # The first program tells of a row whose target is in no piece.
        if is_own | ((member == 0) & (target < 0)):
            _tell(losses_M, state_M21, row, num_rows, logit, about, total, z_loss, target)
        drow_V = dlogits_MV + row.to(tl.int64) * dstride
        _write(ring, stage, drow_V + first, target, count, about, factor, TILES, LANES)
        # All warps are through with the row: its target's gradient may follow, and another row.
        gl.thread_barrier()
        gl.store(drow_V + target, dtarget.to(drow_V.dtype.element_ty), is_own)
        fourth = _place(last, ignore_index, COLUMNS)
        request(ring, stage, pieces_M, row + STAGES * step, stride, fourth != IGNORED, count, LANES)
        wait_for_all_but(STAGES - 2)
        row, stage, logit = row + step, coming, following_logit
        target, following, third = following, third, fourth


@gluon.jit
def _piece(member, VECTORS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a piece's first column, and its vectors; the last one may be the shortest."""
    count = gl.minimum(VECTORS, COLUMNS // VECTOR - member * VECTORS)
    return member * VECTORS * VECTOR, count


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
    COLUMNS: gl.constexpr,
    LANES: gl.constexpr,
):
    """Begin to copy the pieces of the first three rows; return the places of their targets."""
    target = _target(targets_M, row, num_rows, ignore_index)
    following = _target(targets_M, row + step, num_rows, ignore_index)
    third = _target(targets_M, row + 2 * step, num_rows, ignore_index)
    request(ring, 0, pieces_M, row, stride, target != ignore_index, count, LANES)
    request(ring, 1, pieces_M, row + step, stride, following != ignore_index, count, LANES)
    request(ring, 2, pieces_M, row + 2 * step, stride, third != ignore_index, count, LANES)
    target = _place(target, ignore_index, COLUMNS)
    following = _place(following, ignore_index, COLUMNS)
    return target, following, _place(third, ignore_index, COLUMNS)


@gluon.jit
def _tell(losses_M, state_M21, row, num_rows, logit, about, total, z_loss, target):
    """Store a row's loss, what its sum is about, and the sum; 0 and 1 if it does not count."""
    log_total = gl.log(total)
    log_sum = about + log_total
    loss = log_total - (logit.to(gl.float32) - about) + z_loss * log_sum * log_sum
    gl.store(losses_M + row, gl.where(target == IGNORED, 0.0, loss))
    gl.store(state_M21 + row, about)
    gl.store(state_M21 + num_rows + row, gl.where(target == IGNORED, 1.0, total))


@gluon.jit
def _write(
    ring, stage, dpiece_V, target, count, about, factor, TILES: gl.constexpr, LANES: gl.constexpr
):
    """Write a piece of the gradient: zeros for a row that does not count."""
    if target == IGNORED:
        write_zeros(dpiece_V, count, TILES, LANES)
    else:
        write_gradient(ring, stage, dpiece_V, count, about, factor, TILES, LANES)


@gluon.jit
def _target(targets_M, row, num_rows, ignore_index):
    """Return a row's target; behind the last row there is none that counts."""
    return gl.load(targets_M + row, row < num_rows, other=ignore_index)


@gluon.jit
def _place(target, ignore_index, COLUMNS: gl.constexpr):
    """Return where in the vocabulary a target is, or why nowhere."""
    is_inside = (target >= 0) & (target < COLUMNS)
    place = gl.where(is_inside, target.to(gl.int32), NOWHERE)
    return gl.where(target == ignore_index, IGNORED, place)


@gluon.jit
def _is_own(target, first, count):
    """Tell whether a target is in this program's piece."""
    return (target >= first) & (target < first + count * VECTOR)


@gluon.jit
def _own_logit(logits_MV, row, stride, target, first, count):
    """Return the target's logit if it is in this program's piece, else NaN."""
    row_V = logits_MV + row.to(tl.int64) * stride
    return gl.load(row_V + target, _is_own(target, first, count), other=float("nan"))


@gluon.jit
def _scale_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN: gl.constexpr):
    """Return 1 / divisor in shared memory: a register for it would be one too many."""
    divisor = _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN)
    scale_1 = gl.allocate_shared_memory(gl.float32, [1], FLAT)
    scale_1.store(gl.full([1], 1.0 / divisor, gl.float32, alike(gl.num_warps())))
    return scale_1


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
def _differentiate(logit, about, total, target, scale_1, z_loss):
    """Return what a row's exponentials are multiplied by, and its target's gradient."""
    scale = gl.sum(scale_1.load(alike(gl.num_warps())), 0)
    scale = gl.where(target == NOWHERE, float("nan"), scale)
    factor = scale / total
    if z_loss != 0:
        factor *= 1 + 2 * z_loss * (about + gl.log(total))
    return factor, gl.exp2((logit.to(gl.float32) - about) * LOG2_E) * factor - scale
