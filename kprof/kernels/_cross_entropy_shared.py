"""What runs on the GPU for cross-entropy where several SMs share a row, which is read once.

M is rows, V the vocabulary, G the programs of a group, which take the same rows, `step` apart, and
W the warps of each; all have a share of every row. A warp leaves its share's maximum and sum for
all others, those of its own program, too, as a letter in memory, and sums the next row before it
looks for theirs. Zeros are no letter. All programs have to run at once, as they wait for one
another.

A letter is one aligned word, read whole, and all that anybody is told: nothing else has to be
visible before it, so it needs no order, only to arrive. It is written into L2, and read there
(`volatile`). A warp's letters for a row leave before it waits for that row or for a barrier, and as
all are in one array, no compiler moves a write behind a later read.
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
    sums_of,
    wait_for_all_but,
    write_gradient,
    write_zeros,
)
from kprof.kernels._gluon import gl, gluon

# That a program counts at a time: so many that it seldom has to wait for them.
TARGETS = gl.constexpr(4_096)
# A letter from nobody: a maximum of -inf, and a sum of -0.
NOBODY = gl.constexpr(-(1 << 55) + (1 << 31))
# In the place of a target that does not count, and of one outside the vocabulary.
IGNORED = gl.constexpr(-1)
NOWHERE = gl.constexpr(-2)


@gluon.jit(do_not_specialize=["num_rows", "step", "ignore_index"])
def losses_shared_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    letters_MGW,
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
        ring, pieces_M, targets_M, row, step, stride, num_rows, ignore_index, count, COLUMNS, LANES
    )
    logit = _own_logit(logits_MV, row, stride, target, first, count)
    share = 1.0 / _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN)
    wait_for_all_but(STAGES - 2)
    _send(ring, 0, letters_MGW, row, target, count, GROUP, LEAST, TILES, LANES)
    while row < num_rows:
        # What is loaded here arrives while the next row is summed. Between the load of a logit and
        # what is written over it lies a barrier.
        last = _target(targets_M, row + STAGES * step, num_rows, ignore_index)
        words_GW = _receive(letters_MGW, row, target != IGNORED, GROUP)
        following_logit = _own_logit(logits_MV, row + step, stride, following, first, count)
        coming = gl.where(stage == STAGES - 1, 0, stage + 1)
        _send(ring, coming, letters_MGW, row + step, following, count, GROUP, LEAST, TILES, LANES)
        about, total = _merge(letters_MGW, row, words_GW, GROUP)
        factor, dtarget = _differentiate(logit, about, total, target, share, z_loss)
        is_own = _is_own(target, first, count)
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
def _differentiate(logit, about, total, target, share, z_loss):
    """Return what a row's exponentials are multiplied by, and its target's gradient."""
    scale = gl.where(target == NOWHERE, float("nan"), share)
    factor = scale / total
    if z_loss != 0:
        factor *= 1 + 2 * z_loss * (about + gl.log(total))
    return factor, gl.exp2((logit.to(gl.float32) - about) * LOG2_E) * factor - scale


@gluon.jit
def _send(
    ring,
    stage,
    letters_MGW,
    row,
    target,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Sum a row's piece and leave a letter of every warp, if the row counts.

    The sum is sent with a minus, so that none is all zeros.
    """
    if target != IGNORED:
        highest_W, total_W = sums_of(ring, stage, count, LEAST, TILES, LANES)
        word_W = highest_W.to(gl.int32, bitcast=True).to(gl.int64) << 32
        word_W |= (total_W * -1.0).to(gl.uint32, bitcast=True).to(gl.int64)
        WARPS: gl.constexpr = LANES // 32
        first = (row.to(tl.int64) * GROUP + gl.program_id(0) % GROUP) * WARPS
        gl.store(letters_MGW + first + gl.arange(0, WARPS, word_W.type.layout), word_W)


@gluon.jit
def _receive(letters_MGW, row, is_needed, GROUP: gl.constexpr):
    """Return the letters of a row, zeros where they are not there yet; each warp reads all."""
    PADDED: gl.constexpr = 1 << (GROUP - 1).bit_length()
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = gl.BlockedLayout([PADDED, 1], [1, 32], [WARPS, 1], [1, 0])
    member_G1 = gl.arange(0, PADDED, gl.SliceLayout(1, EACH))[:, None]
    warp_1W = gl.arange(0, WARPS, gl.SliceLayout(0, EACH))[None, :]
    letters_GW = letters_MGW + row.to(tl.int64) * (GROUP * WARPS) + (member_G1 * WARPS + warp_1W)
    return gl.load(letters_GW, (member_G1 < GROUP) & is_needed, other=NOBODY, volatile=True)


@gluon.jit
def _merge(letters_MGW, row, words_GW, GROUP: gl.constexpr):
    """Return what the sums of all pieces are about and their sum, once all letters are there."""
    # Over the lanes first: what a lane does alone, the assembler would do, and wait for the words,
    # before the next row is summed.
    while gl.min(gl.min(words_GW.to(gl.uint32), 1), 0) == 0:
        words_GW = _receive(letters_MGW, row, True, GROUP)
    highest_GW = (words_GW >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    minus_GW = words_GW.to(gl.int32).to(gl.float32, bitcast=True)
    about = finite(gl.max(gl.max(highest_GW, 0), 0))
    minus_W = gl.sum(minus_GW * gl.exp2((highest_GW - about) * LOG2_E), 0)
    return about, -1.0 * gl.sum(minus_W, 0)
