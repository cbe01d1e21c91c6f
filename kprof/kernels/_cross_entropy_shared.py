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
    WIDTH,
    empty_boxes,
    empty_ring,
    finite,
    request,
    send_boxes,
    write_gradient,
)
from kprof.kernels._gluon import gl, gluon, tma

# That a program counts at a time: so many that it seldom has to wait for them.
TARGETS = gl.constexpr(4_096)
# In the place of a target outside the vocabulary.
NOWHERE = gl.constexpr(-1)


@gluon.jit(do_not_specialize=["num_rows", "step", "ignore_index"])
def losses_shared_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    letters_MG,
    logits_desc,
    dlogits_desc,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    step,
    ignore_index,
    z_loss,
    IS_MEAN: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Write the loss of every row, its maximum and sum, and its gradient.

    `logits_desc` and `dlogits_desc` are boxes of (M, P, V // P // WIDTH, WIDTH): P pieces that are
    alike, or 1 where they are not.
    """
    VECTORS: gl.constexpr = _vectors_of(COLUMNS, GROUP)
    LEAST: gl.constexpr = COLUMNS // VECTOR - (GROUP - 1) * VECTORS
    member = gl.program_id(0) % GROUP
    count = gl.minimum(VECTORS, COLUMNS // VECTOR - member * VECTORS)
    first = member * VECTORS * VECTOR
    # The first column, the vectors, and in which piece of the boxes and where in it that is.
    IS_EVEN: gl.constexpr = COLUMNS % (GROUP * WIDTH) == 0
    piece = (first, count, member, 0) if IS_EVEN else (first, count, 0, first // WIDTH)
    logits = (logits_MV, stride, logits_desc)
    gradient = (dlogits_MV, dstride, dlogits_desc)
    how = (targets_M, num_rows, step, ignore_index, z_loss)
    ring = empty_ring(logits_desc)
    targets = _request_first(ring, logits_desc, how, piece, COLUMNS, GROUP)
    divisor = _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN)
    results = (losses_M, state_M21, _scale_of(divisor))
    _walk(ring, letters_MG, logits, gradient, how, results, piece, targets, COLUMNS, GROUP, LEAST)


@gluon.jit
def _walk(
    ring,
    letters_MG,
    logits,
    gradient,
    how,
    results,
    piece,
    targets,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
):
    """Sum this program's piece of every row and write it, of which the first are requested."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    TILES: gl.constexpr = (_vectors_of(COLUMNS, GROUP) + LANES - 1) // LANES
    # Rows that are summed ahead of the one that is written.
    AHEAD: gl.constexpr = 1 if GROUP > 1 else 0
    _, num_rows, step, ignore_index, _ = how
    row, count = gl.program_id(0) // GROUP, piece[1]
    # Half of a gradient leaves from registers: the two ways beside each other take the least time.
    boxes = empty_boxes(gradient[2], _least(TILES // 2, LEAST // LANES))
    logit = _own_logit(logits, row, targets[0], piece)
    shares_W, left, phases = begin_letters(
        ring, letters_MG, row, targets[0], count, GROUP, LEAST, TILES, LANES
    )
    if AHEAD:
        targets += (_place(_target(how, row + STAGES * step), ignore_index, COLUMNS),)
        request(ring, 0, logits[2], row + STAGES * step, piece, targets[STAGES] != IGNORED)
    # Else the compiler, which does not know that it is not needed, puts one into the loop.
    gl.thread_barrier()
    stage = AHEAD
    while row < num_rows:
        following, coming = row + step, row + (STAGES + AHEAD) * step
        # Arrive while a row is summed.
        coming_target = _target(how, coming)
        following_logit = _own_logit(logits, following, targets[1], piece)
        highest, total, following_left, phases = sums_of_row(
            *(ring, stage, phases, shares_W, letters_MG, (row, following), targets),
            *(count, GROUP, LEAST, TILES, LANES),
        )
        # All warps are through with what was summed: another row may take its place.
        targets += (_place(coming_target, ignore_index, COLUMNS),)
        request(ring, stage, logits[2], coming, piece, targets[STAGES + AHEAD] != IGNORED)
        if not AHEAD:
            left = following_left
        sums = logit, highest, total
        _finish(results, boxes, left, gradient, row, how, targets[0], piece, sums, TILES)
        row, stage = following, (stage + 1) % STAGES
        logit, left, targets = following_logit, following_left, targets[1:]
    tma.store_wait(0)


@gluon.constexpr_function
def _least(a, b):
    return min(a, b)


@gluon.constexpr_function
def _vectors_of(columns, group):
    """Return the vectors of all pieces but the last one, which may be shorter: rows of boxes."""
    each = WIDTH // VECTOR
    return -(-columns // (VECTOR * group * each)) * each


@gluon.jit
def _target(how, row):
    """Return a row's target; behind the last row there is none that counts."""
    targets_M, num_rows, _, ignore_index, _ = how
    return gl.load(targets_M + row, row < num_rows, other=ignore_index)


@gluon.jit
def _place(target, ignore_index, COLUMNS: gl.constexpr):
    """Return where in the vocabulary a target is, or why nowhere."""
    is_inside = (target >= 0) & (target < COLUMNS)
    place = gl.where(is_inside, target.to(gl.int32), NOWHERE)
    return gl.where(target == ignore_index, IGNORED, place)


@gluon.jit
def _request_first(ring, logits_desc, how, piece, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """Begin to copy the first rows' pieces; return where their targets are."""
    targets = ()
    for stage in gl.static_range(STAGES):
        row = gl.program_id(0) // GROUP + stage * how[2]
        targets += (_place(_target(how, row), how[3], COLUMNS),)  # type: ignore[assignment]
        request(ring, stage, logits_desc, row, piece, targets[stage] != IGNORED)
    return targets


@gluon.jit
def _finish(results, boxes, left, gradient, row, how, target, piece, sums, TILES: gl.constexpr):
    """Store what is told of a row, and begin to write what is left of its piece as its gradient."""
    logit, highest, total = sums
    by = _conclude(results, row, how, target, piece, logit, highest, total)
    write_gradient(boxes, left, gradient, row, piece, target - piece[0], by, TILES)
    gl.thread_barrier()
    send_boxes(boxes, gradient[2], row, piece)


@gluon.jit
def _conclude(results, row, how, target, piece, logit, highest, total):
    """Store what is told of a row; return what its sum is about, and its derivatives.

    Of a row that does not count nothing was summed: zeros about 0 whose sum is 1.
    """
    losses_M, state_M21, scale_1 = results
    _, num_rows, _, _, z_loss = how
    about = gl.where(target == IGNORED, 0.0, finite(highest))
    total = gl.where(target == IGNORED, 1.0, total)
    # The first program tells of a row whose target is in no piece.
    if _is_own(target, piece) | ((piece[0] == 0) & (target < 0)):
        _tell(losses_M, state_M21, row, num_rows, logit, about, total, z_loss, target)
    factor, dtarget = _differentiate(logit, about, total, target, scale_1, z_loss)
    return about, factor, dtarget


@gluon.jit
def _tell(losses_M, state_M21, row, num_rows, logit, about, total, z_loss, target):
    """Store a row's loss, what its sum is about, and the sum."""
    log_total = gl.log(total)
    log_sum = about + log_total
    loss = log_total - (logit.to(gl.float32) - about) + z_loss * log_sum * log_sum
    gl.store(losses_M + row, gl.where(target == IGNORED, 0.0, loss))
    gl.store(state_M21 + row, about)
    gl.store(state_M21 + num_rows + row, total)


@gluon.jit
def _is_own(target, piece):
    """Tell whether a target is in this program's piece."""
    first, count, _, _ = piece
    return (target >= first) & (target < first + count * VECTOR)


@gluon.jit
def _own_logit(logits, row, target, piece):
    """Return the target's logit if it is in this program's piece, else NaN."""
    logits_MV, stride, _ = logits
    row_V = logits_MV + row.to(tl.int64) * stride
    return gl.load(row_V + target, _is_own(target, piece), other=float("nan"))


@gluon.jit
def _scale_of(divisor):
    """Return 1 / divisor in shared memory: a register for it would be one too many."""
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
