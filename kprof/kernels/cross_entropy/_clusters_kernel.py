"""Cross-entropy on Hopper with rows in shared memory: the CTAs of a cluster share a row.

Each CTA has a part of every row of its cluster. TMA copies the parts into a pipeline in shared
memory: the next rows arrive while one is summed. The exponentials stay in registers and become the
gradient, which TMA copies from other boxes. The last part may be shorter. Each warp writes maximum
and sum of its share to shared memory.

CTAs of a cluster wait for one another, so all of them run at once. Each writes one aligned word per
row to a cross-CTA mailbox in global memory, and sums the next row before it polls for the words of
the others (`volatile`, in L2). Zero is no message. A word carries all its data, so no memory order
is needed. A CTA writes its word for a row before it waits for that row; both are in one array, so
no compiler moves the write behind the read.

In names of tensors M is rows, V the vocabulary or the columns of a vector, G the CTAs of a cluster
(they take the same rows, `step` apart), W the warps of a CTA, L its lanes (threads), T the lanes of
a warp. `count` is the vectors of a part; TILES times all lanes hold them.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels.tiles.gluon import fence_async_shared, gl, gluon, mbarrier, product, tma, warp
from kprof.kernels.tiles.pipeline import room_for

LOG2_E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)
VECTOR = gl.constexpr(8)
# Columns of a row of a TMA box: 128 bytes.
WIDTH = gl.constexpr(64)
HUGE = gl.constexpr(2.0**100)
TINY = gl.constexpr(2.0**-20)
# All bits of an integer but its sign.
REST = gl.constexpr((1 << 31) - 1)


@gluon.constexpr_function
def layout_of(lanes):
    """Return the layout of a tile in registers."""
    return gl.BlockedLayout([1, 8], [32, 1], [lanes // 32, 1], [1, 0])


@gluon.constexpr_function
def _layout_of_box(lanes):
    """Return the same layout for a box (1, 1, lanes // 8, 64)."""
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, 4, 8], [1, 1, lanes // 32, 1], [3, 2, 1, 0])


@gluon.jit
def empty_pipeline(logits_desc):
    """Return shared memory for the stages, and a barrier for each."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    return room_for(logits_desc, STAGES), ready


@gluon.jit
def empty_boxes(dlogits_desc, NUMBER: gl.constexpr):
    """Return shared memory for so many boxes of a gradient."""
    boxes = ()
    for _ in gl.static_range(NUMBER):
        boxes += (room_for(dlogits_desc, 1).index(0),)  # type: ignore[assignment]
    return boxes


@gluon.jit
def request(pipeline, stage, logits_desc, row, part, is_needed):
    """Start the copy of this CTA's part of a row, if it is needed."""
    smem, ready = pipeline
    if is_needed:
        mbarrier.expect(ready.index(stage), logits_desc.block_type.nbytes)
        at = [row, part[2], part[3], 0]
        tma.async_copy_global_to_shared(logits_desc, at, ready.index(stage), smem.index(stage))


@gluon.jit
def sums_of(pipeline, stage, count, LEAST: gl.constexpr, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return each warp's maximum of a part, its sum of exponentials, and the exponentials.

    The last are each lane's maximum, and the exponentials relative to it, rounded to the logits'
    dtype; relative to 0 if it is -inf. No part has fewer than LEAST vectors. Warps do not wait.
    """
    tiles = _tiles_in(pipeline, stage, count, LEAST, TILES, LANES)
    highest_LV = tiles[0]
    for number in gl.static_range(1, TILES):
        highest_LV = _higher(highest_LV, tiles[number])
    highest_L = gl.max(highest_LV.to(gl.float32), 1)
    scale_L, shift_L, correction_L = _exponent_about(finite(highest_L))
    sum_L = gl.zeros([LANES], gl.float32, gl.SliceLayout(1, layout_of(LANES)))
    exponentials = (highest_L,)
    for number in gl.static_range(TILES):
        x_LV = _wide(tiles[number])
        exponential_LV = gl.exp2(gl.fma(x_LV, scale_L[:, None], shift_L[:, None]))
        sum_L += gl.sum(exponential_LV, 1)
        exponentials += (exponential_LV.to(pipeline[0].dtype),)  # type: ignore[assignment]
    highest_WT = highest_L.reshape([LANES // 32, 32])
    highest_W = highest_of(highest_WT, 1)
    factor_WT = gl.exp2((highest_WT - finite(highest_W)[:, None]) * LOG2_E)
    sum_WT = (sum_L * correction_L).reshape([LANES // 32, 32])
    return highest_W, gl.sum(product(sum_WT, factor_WT), 1), exponentials


@gluon.jit
def zeros_of_row(pipeline, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return the exponentials of a row that does not count: zeros, for a gradient of zeros."""
    exponentials = (gl.zeros([LANES], gl.float32, gl.SliceLayout(1, layout_of(LANES))),)
    for _ in gl.static_range(TILES):
        exponentials += (gl.zeros([LANES, VECTOR], pipeline[0].dtype, layout_of(LANES)),)  # type: ignore[assignment]
    return exponentials


@gluon.jit
def highest_of(x, AXIS: gl.constexpr):
    """Return the maximum of float32 values as integers of the same order: one warp instruction.

    NaN is the highest, or the lowest.
    """
    bits = x.to(gl.int32, bitcast=True)
    highest = gl.max(bits ^ ((bits >> 31) & REST), AXIS)
    return (highest ^ ((highest >> 31) & REST)).to(gl.float32, bitcast=True)


@gluon.jit
def finite(maximum):
    """Return the reference of exponentials: 0 for -inf, as -inf - -inf would be NaN."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def write_gradient(boxes, exponentials, gradient, row, part, column, by, TILES: gl.constexpr):
    """Write the exponentials times a factor, and `dtarget` in the target's column, as gradient."""
    LANES: gl.constexpr = exponentials[0].shape[0]
    about, factor, dtarget = by
    dpart_V = gl.multiple_of(gradient[0] + row.to(tl.int64) * gradient[1] + part[0], 16)
    highest_L = exponentials[0]
    _, _, correction_L = _exponent_about(finite(highest_L))
    factor_L = gl.exp2((highest_L - about) * LOG2_E) * correction_L * factor
    for number in gl.static_range(len(boxes)):
        dx_LV = _gradient(exponentials[1 + number], factor_L, number, column, dtarget)
        dx = dx_LV.reshape(boxes[number].shape)
        boxes[number].store(gl.convert_layout(dx, _layout_of_box(LANES)))
    fence_async_shared()
    for number in gl.static_range(len(boxes), TILES):
        columns_LV, is_in_L1 = _columns(number * LANES, part[1], LANES, LANES)
        dx_LV = _gradient(exponentials[1 + number], factor_L, number, column, dtarget)
        gl.store(dpart_V + columns_LV, dx_LV, is_in_L1, eviction_policy="evict_first")


@gluon.jit
def _gradient(exponential_LV, factor_L, number: gl.constexpr, column, dtarget):
    """Return the gradient of a tile. Few threads have the target, all know whether it is here."""
    LANES: gl.constexpr = factor_L.shape[0]
    dx_LV = _times(exponential_LV, factor_L)
    if column // (LANES * VECTOR) == number:
        columns_LV, _ = _columns(number * LANES, 0, LANES, LANES)
        dx_LV = gl.where(columns_LV == column, dtarget.to(dx_LV.dtype), dx_LV)
    return dx_LV


@gluon.jit
def send_boxes(boxes, dlogits_desc, row, part):
    """Start the copy of the boxes of a gradient to this CTA's part of a row."""
    if warp() == 0:
        for number in gl.static_range(len(boxes)):
            at = [row, part[2], part[3] + number * boxes[number].shape[2], 0]
            tma.async_copy_shared_to_global(dlogits_desc, at, boxes[number])


@gluon.jit
def _times(x_LV, factor_L):
    """Return the product, rounded once; for bfloat16, two at a time and a factor in two parts."""
    if gl.bfloat16 == x_LV.dtype:
        high_L = factor_L.to(gl.bfloat16)
        low_L = (factor_L - high_L.to(gl.float32)).to(gl.bfloat16)
        x_LV, high_LV = gl.broadcast(x_LV, high_L[:, None])
        x_LV, low_LV = gl.broadcast(x_LV, low_L[:, None])
        code: gl.constexpr = "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}"
        return gl.inline_asm_elementwise(
            code, "=r,r,r,r", [x_LV, high_LV, low_LV], dtype=x_LV.dtype, is_pure=True, pack=2
        )
    return (x_LV.to(gl.float32) * factor_L[:, None]).to(x_LV.dtype)


@gluon.jit
def _columns(first, count, VECTORS: gl.constexpr, LANES: gl.constexpr):
    """Return the columns of vectors of a part, and which of the vectors are in it."""
    vector_L1 = (first + gl.arange(0, VECTORS, gl.SliceLayout(1, layout_of(LANES))))[:, None]
    number_1V = gl.arange(0, VECTOR, gl.SliceLayout(0, layout_of(LANES)))[None, :]
    return vector_L1 * VECTOR + number_1V, vector_L1 < count


@gluon.jit
def _tiles_in(
    pipeline, stage, count, LEAST: gl.constexpr, TILES: gl.constexpr, LANES: gl.constexpr
):
    """Return the tiles of a part, with -inf after its end."""
    ROWS: gl.constexpr = LANES * VECTOR // WIDTH
    tiles = ()
    for number in gl.static_range(TILES):
        x_LV = pipeline[0].index(stage).slice(number * ROWS, ROWS, 2).load(_layout_of_box(LANES))
        x_LV = gl.convert_layout(x_LV.reshape([LANES, VECTOR]), layout_of(LANES))
        if (number + 1) * LANES > LEAST:
            _, is_in_L1 = _columns(number * LANES, count, LANES, LANES)
            x_LV = gl.where(is_in_L1, x_LV, float("-inf"))
        tiles += (x_LV,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def _higher(x, y):
    """Return the maximum of 16-bit numbers, two at a time; NaN is not larger."""
    kind: gl.constexpr = "bf16" if gl.bfloat16 == x.dtype else "f16"
    code: gl.constexpr = "max." + kind + "x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def _wide(x):
    """Return 16-bit numbers as float32; of two bfloat16, one is shifted, the other masked."""
    if gl.bfloat16 == x.dtype:
        code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(
            code, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    return x.to(gl.float32)


@gluon.jit
def _exponent_about(about):
    """Return a, b, c with exp2(x * a + b) * c = exp(x - about), for x <= about.

    One FMA then computes an exponent; c corrects for the rounding of its constant b.
    """
    # Where log2(e) * about overflows float32, x is either `about` or too small to count.
    scale = gl.where(gl.abs(about) < HUGE, LOG2_E, TINY)
    shift = -about * scale
    return scale, shift, gl.exp2(-gl.fma(about, scale, shift))


# The word of a CTA that does not exist: a maximum of -inf, and a sum of -0.
NO_MESSAGE = gl.constexpr(-(1 << 55) + (1 << 31))
MINUS = gl.constexpr(1 << 31)
# Stands for a target that does not count; less than all others.
IGNORED = gl.constexpr(-2)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def alike(num_warps):
    """Return a layout of at most 32 values, one per lane, replicated in all warps."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def begin_mailbox(
    pipeline,
    mailbox_MG,
    row,
    target,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """If CTAs share rows, sum this CTA's part of the first row, and post its word.

    Returns shared memory for partial sums, and the exponentials of the part.
    """
    partials_W = gl.allocate_shared_memory(gl.int64, [gl.num_warps()], FLAT)
    exponentials, phases = zeros_of_row(pipeline, TILES, LANES), 0
    if GROUP > 1:
        highest, total, exponentials, phases = _sum(
            pipeline, 0, phases, partials_W, target, count, LEAST, TILES, LANES
        )
        _send(mailbox_MG, row, target, highest, total, GROUP)
        # The partial sums may be overwritten from here on.
        gl.thread_barrier()
    return partials_W, exponentials, phases


@gluon.jit
def sums_of_row(
    pipeline,
    stage,
    phases,
    partials_W,
    mailbox_MG,
    rows,
    targets,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return a row's maximum, its sum, and the exponentials of the part that was summed.

    That part is of this row; if CTAs share rows, of the next row, which is summed while the words
    arrive. `rows` and `targets` are those of this row and of the next one.
    """
    if GROUP > 1:
        words_G = _receive(mailbox_MG, rows[0], targets[0] != IGNORED, GROUP)
        highest, total, exponentials, phases = _sum(
            pipeline, stage, phases, partials_W, targets[1], count, LEAST, TILES, LANES
        )
        _send(mailbox_MG, rows[1], targets[1], highest, total, GROUP)
        # A reduction over lanes: the assembler would move a test of single lanes, and its wait, to
        # before the sum of the next row.
        while gl.min(words_G.to(gl.uint32), 0) == 0:
            words_G = _receive(mailbox_MG, rows[0], True, GROUP)
        highest, total = _merge(words_G)
    else:
        highest, total, exponentials, phases = _sum(
            pipeline, stage, phases, partials_W, targets[0], count, LEAST, TILES, LANES
        )
    return highest, total, exponentials, phases


@gluon.jit
def _sum(
    pipeline,
    stage,
    phases,
    partials_W,
    target,
    count,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return the maximum of this CTA's part, its sum, and the exponentials, if the row counts.

    Warps wait for one another once, after each has stored its partial sum.
    """
    exponentials = zeros_of_row(pipeline, TILES, LANES)
    if target != IGNORED:
        mbarrier.wait(pipeline[1].index(stage), phases >> stage & 1)
        phases ^= 1 << stage
        highest_W, total_W, exponentials = sums_of(pipeline, stage, count, LEAST, TILES, LANES)
        partials_W.store(_word(highest_W, total_W))
    # After the barrier the boxes may be overwritten.
    tma.store_wait(0)
    gl.thread_barrier()
    # Each warp reads the partial sums of all, one per lane.
    highest, total = _merge(partials_W.load(alike(gl.num_warps())))
    return highest, total, exponentials, phases


@gluon.jit
def _word(highest, total):
    """Return both in a word; the sum is negated, so that no word is zero."""
    word = highest.to(gl.int32, bitcast=True).to(gl.int64) << 32
    return word | (total.to(gl.uint32, bitcast=True) | MINUS).to(gl.int64)


@gluon.jit
def _merge(words):
    """Return the maximum of all parts, and their sum relative to it (to 0 for -inf)."""
    highest = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    minus = words.to(gl.int32).to(gl.float32, bitcast=True)
    whole = highest_of(highest, 0)
    factor = gl.exp2((highest - finite(whole)) * LOG2_E)
    return whole, -1.0 * gl.sum(product(minus, factor), 0)


@gluon.jit
def _send(mailbox_MG, row, target, highest, total, GROUP: gl.constexpr):
    """Post the word of this CTA's part of a row to the mailbox, if the row counts."""
    place = row.to(tl.int64) * GROUP + gl.program_id(0) % GROUP
    gl.store(mailbox_MG + place, _word(highest, total), target != IGNORED)


@gluon.jit
def _receive(mailbox_MG, row, is_needed, GROUP: gl.constexpr):
    """Return the words of a row, one per lane; zero: it has not arrived."""
    PADDED: gl.constexpr = 1 << (GROUP - 1).bit_length()
    member_G = gl.arange(0, PADDED, alike(gl.num_warps()))
    mailbox_G = mailbox_MG + row.to(tl.int64) * GROUP + member_G
    return gl.load(mailbox_G, (member_G < GROUP) & is_needed, other=NO_MESSAGE, volatile=True)


# Targets that a CTA counts at a time: enough that it seldom waits for memory.
TARGETS = gl.constexpr(4_096)
# Stands for a target outside of the vocabulary.
NOWHERE = gl.constexpr(-1)


@gluon.jit(do_not_specialize=["num_rows", "step", "ignore_index"])
def losses_cluster_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    mailbox_MG,
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

    `logits_desc` and `dlogits_desc` are boxes of (M, P, V // P // WIDTH, WIDTH), where P is the
    number of parts if they are equal, else 1.
    """
    VECTORS: gl.constexpr = _vectors_of(COLUMNS, GROUP)
    LEAST: gl.constexpr = COLUMNS // VECTOR - (GROUP - 1) * VECTORS
    member = gl.program_id(0) % GROUP
    count = gl.minimum(VECTORS, COLUMNS // VECTOR - member * VECTORS)
    first = member * VECTORS * VECTOR
    # First column, vectors, and the position in the boxes: part, and row of a box.
    IS_EVEN: gl.constexpr = COLUMNS % (GROUP * WIDTH) == 0
    part = (first, count, member, 0) if IS_EVEN else (first, count, 0, first // WIDTH)
    logits = (logits_MV, stride, logits_desc)
    gradient = (dlogits_MV, dstride, dlogits_desc)
    given = (targets_M, num_rows, step, ignore_index, z_loss)
    pipeline = empty_pipeline(logits_desc)
    targets = _request_first(pipeline, logits_desc, given, part, COLUMNS, GROUP)
    divisor = _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN)
    results = (losses_M, state_M21, _scale_of(divisor))
    _walk(
        pipeline,
        mailbox_MG,
        logits,
        gradient,
        given,
        results,
        part,
        targets,
        COLUMNS,
        GROUP,
        LEAST,
    )


@gluon.jit
def _walk(
    pipeline,
    mailbox_MG,
    logits,
    gradient,
    given,
    results,
    part,
    targets,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
):
    """Sum this CTA's part of every row and write it; the first copies have been started."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    TILES: gl.constexpr = (_vectors_of(COLUMNS, GROUP) + LANES - 1) // LANES
    # Rows that are summed before the one that is written.
    AHEAD: gl.constexpr = 1 if GROUP > 1 else 0
    _, num_rows, step, ignore_index, _ = given
    row, count = gl.program_id(0) // GROUP, part[1]
    # Half of a gradient is stored from registers: both paths together are the fastest.
    boxes = empty_boxes(gradient[2], _least(TILES // 2, LEAST // LANES))
    logit = _own_logit(logits, row, targets[0], part)
    partials_W, exponentials, phases = begin_mailbox(
        pipeline, mailbox_MG, row, targets[0], count, GROUP, LEAST, TILES, LANES
    )
    if AHEAD:
        targets += (_place(_target(given, row + STAGES * step), ignore_index, COLUMNS),)
        request(pipeline, 0, logits[2], row + STAGES * step, part, targets[STAGES] != IGNORED)
    # Otherwise the compiler puts a barrier into the loop, where it is not needed.
    gl.thread_barrier()
    stage = AHEAD
    while row < num_rows:
        following, coming = row + step, row + (STAGES + AHEAD) * step
        # These loads complete while a row is summed.
        coming_target = _target(given, coming)
        following_logit = _own_logit(logits, following, targets[1], part)
        highest, total, following_exponentials, phases = sums_of_row(
            *(pipeline, stage, phases, partials_W, mailbox_MG, (row, following), targets),
            *(count, GROUP, LEAST, TILES, LANES),
        )
        # All warps have read the stage: another row may take it.
        targets += (_place(coming_target, ignore_index, COLUMNS),)
        request(pipeline, stage, logits[2], coming, part, targets[STAGES + AHEAD] != IGNORED)
        if not AHEAD:
            exponentials = following_exponentials
        sums = logit, highest, total
        _finish(results, boxes, exponentials, gradient, row, given, targets[0], part, sums, TILES)
        row, stage = following, (stage + 1) % STAGES
        logit, exponentials, targets = following_logit, following_exponentials, targets[1:]
    tma.store_wait(0)


@gluon.constexpr_function
def _least(a, b):
    return min(a, b)


@gluon.constexpr_function
def _vectors_of(columns, group):
    """Return the vectors of a part, in whole rows of boxes; the last part may be shorter."""
    each = WIDTH // VECTOR
    return -(-columns // (VECTOR * group * each)) * each


@gluon.jit
def _target(given, row):
    """Return a row's target; after the last row, one that does not count."""
    targets_M, num_rows, _, ignore_index, _ = given
    return gl.load(targets_M + row, row < num_rows, other=ignore_index)


@gluon.jit
def _place(target, ignore_index, COLUMNS: gl.constexpr):
    """Return the index of a target in the vocabulary, or IGNORED or NOWHERE."""
    is_inside = (target >= 0) & (target < COLUMNS)
    place = gl.where(is_inside, target.to(gl.int32), NOWHERE)
    return gl.where(target == ignore_index, IGNORED, place)


@gluon.jit
def _request_first(pipeline, logits_desc, given, part, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """Start the copies of the first rows; return their targets."""
    targets = ()
    for stage in gl.static_range(STAGES):
        row = gl.program_id(0) // GROUP + stage * given[2]
        targets += (_place(_target(given, row), given[3], COLUMNS),)  # type: ignore[assignment]
        request(pipeline, stage, logits_desc, row, part, targets[stage] != IGNORED)
    return targets


@gluon.jit
def _finish(
    results, boxes, exponentials, gradient, row, given, target, part, sums, TILES: gl.constexpr
):
    """Store the results of a row, and start to write its gradient."""
    logit, highest, total = sums
    by = _conclude(results, row, given, target, part, logit, highest, total)
    write_gradient(boxes, exponentials, gradient, row, part, target - part[0], by, TILES)
    gl.thread_barrier()
    send_boxes(boxes, gradient[2], row, part)


@gluon.jit
def _conclude(results, row, given, target, part, logit, highest, total):
    """Store the results of a row; return the reference of its exponentials, and two derivatives.

    A row that does not count was not summed: its exponentials are 0, their sum counts as 1.
    """
    losses_M, state_M21, scale_1 = results
    _, num_rows, _, _, z_loss = given
    about = gl.where(target == IGNORED, 0.0, finite(highest))
    total = gl.where(target == IGNORED, 1.0, total)
    # The first CTA stores the results of a row whose target is in no part.
    if _is_own(target, part) | ((part[0] == 0) & (target < 0)):
        _store_results(losses_M, state_M21, row, num_rows, logit, about, total, z_loss, target)
    factor, dtarget = _differentiate(logit, about, total, target, scale_1, z_loss)
    return about, factor, dtarget


@gluon.jit
def _store_results(losses_M, state_M21, row, num_rows, logit, about, total, z_loss, target):
    """Store a row's loss, the reference of its exponentials, and their sum."""
    log_total = gl.log(total)
    log_sum = about + log_total
    loss = log_total - (logit.to(gl.float32) - about) + z_loss * log_sum * log_sum
    gl.store(losses_M + row, gl.where(target == IGNORED, 0.0, loss))
    gl.store(state_M21 + row, about)
    gl.store(state_M21 + num_rows + row, total)


@gluon.jit
def _is_own(target, part):
    """Return whether a target is in this CTA's part."""
    first, count, _, _ = part
    return (target >= first) & (target < first + count * VECTOR)


@gluon.jit
def _own_logit(logits, row, target, part):
    """Return the target's logit if it is in this CTA's part, else NaN."""
    logits_MV, stride, _ = logits
    row_V = logits_MV + row.to(tl.int64) * stride
    return gl.load(row_V + target, _is_own(target, part), other=float("nan"))


@gluon.jit
def _scale_of(divisor):
    """Return 1 / divisor in shared memory: registers are scarce."""
    scale_1 = gl.allocate_shared_memory(gl.float32, [1], FLAT)
    scale_1.store(gl.full([1], 1.0 / divisor, gl.float32, alike(gl.num_warps())))
    return scale_1


@gluon.jit
def _divisor_of(divisor_1, targets_M, state_M21, num_rows, ignore_index, IS_MEAN: gl.constexpr):
    """Return and store the given divisor, else for a mean the number of targets that count."""
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
    """Return the factor of a row's exponentials, and its target's gradient."""
    scale = gl.sum(scale_1.load(alike(gl.num_warps())), 0)
    scale = gl.where(target == NOWHERE, float("nan"), scale)
    factor = scale / total
    if z_loss != 0:
        factor *= 1 + 2 * z_loss * (about + gl.log(total))
    return factor, gl.exp2((logit.to(gl.float32) - about) * LOG2_E) * factor - scale
