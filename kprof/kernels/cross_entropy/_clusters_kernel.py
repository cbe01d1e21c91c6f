"""Cross-entropy with rows in shared memory on Hopper: logits are read once, by several CTAs a row.

TMA moves tiles of a row, a vector of each lane to a box, so no thread waits for memory. The tiles
of a CTA pass through a pipeline: the next ones arrive while one is summed. The rest of a tile, in
registers, becomes its gradient, which leaves from boxes of its own. The last tile may reach into
the next. Warps leave the maximum and the sum of their part in shared memory.

CTAs that share a row run at once, as they wait for one another. Each leaves one aligned word in a
cross-CTA mailbox in global memory, read whole (`volatile`, in L2), and sums the next row before it
looks for the others'. Zero is no message. Nothing else has to be visible before the word, so it
needs no order, only to arrive; a CTA's word for a row leaves before it waits for that row, and as
all are in one array, no compiler moves a write behind a later read.

M is rows, V the vocabulary, or the columns of a vector; G the CTAs of a group, which take the same
rows, `step` apart; W the warps of each; L is lanes, one to a thread, T to a warp; `count` the
vectors of a tile, and TILES of all lanes hold it.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels.tiles.gluon import fence_async_shared, gl, gluon, mbarrier, product, tma, warp
from kprof.kernels.tiles.pipeline import room_for

LOG2_E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)
VECTOR = gl.constexpr(8)
# Columns of a row of a box: 128 bytes.
WIDTH = gl.constexpr(64)
HUGE = gl.constexpr(2.0**100)
TINY = gl.constexpr(2.0**-20)
# All bits of an integer but its sign.
REST = gl.constexpr((1 << 31) - 1)


@gluon.constexpr_function
def layout_of(lanes):
    """Return how a tile lies in registers."""
    return gl.BlockedLayout([1, 8], [32, 1], [lanes // 32, 1], [1, 0])


@gluon.constexpr_function
def _layout_of_box(lanes):
    """Return the same of a box: (1, 1, lanes // 8, 64)."""
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, 4, 8], [1, 1, lanes // 32, 1], [3, 2, 1, 0])


@gluon.jit
def empty_ring(logits_desc):
    """Return shared memory for pieces of rows, and a barrier for each."""
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
def request(ring, stage, logits_desc, row, piece, is_needed):
    """Begin to copy a row's piece, if it is needed."""
    smem, ready = ring
    if is_needed:
        mbarrier.expect(ready.index(stage), logits_desc.block_type.nbytes)
        at = [row, piece[2], piece[3], 0]
        tma.async_copy_global_to_shared(logits_desc, at, ready.index(stage), smem.index(stage))


@gluon.jit
def sums_of(ring, stage, count, LEAST: gl.constexpr, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return each warp's maximum in a piece, the sum of exponentials about it, and what is left.

    That is each lane's maximum, and exponentials about it, rounded to the logits' dtype. About -inf
    is about 0. No piece has fewer than LEAST vectors, and no warp waits for another.
    """
    tiles = _tiles_in(ring, stage, count, LEAST, TILES, LANES)
    highest_LV = tiles[0]
    for number in gl.static_range(1, TILES):
        highest_LV = _higher(highest_LV, tiles[number])
    highest_L = gl.max(highest_LV.to(gl.float32), 1)
    scale_L, shift_L, correction_L = _exponent_about(finite(highest_L))
    sum_L = gl.zeros([LANES], gl.float32, gl.SliceLayout(1, layout_of(LANES)))
    left = (highest_L,)
    for number in gl.static_range(TILES):
        x_LV = _wide(tiles[number])
        exponential_LV = gl.exp2(gl.fma(x_LV, scale_L[:, None], shift_L[:, None]))
        sum_L += gl.sum(exponential_LV, 1)
        left += (exponential_LV.to(ring[0].dtype),)  # type: ignore[assignment]
    highest_WT = highest_L.reshape([LANES // 32, 32])
    highest_W = highest_of(highest_WT, 1)
    share_WT = gl.exp2((highest_WT - finite(highest_W)[:, None]) * LOG2_E)
    sum_WT = (sum_L * correction_L).reshape([LANES // 32, 32])
    return highest_W, gl.sum(product(sum_WT, share_WT), 1), left


@gluon.jit
def nothing_left(ring, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return what is left of a row that does not count: a gradient of zeros."""
    left = (gl.zeros([LANES], gl.float32, gl.SliceLayout(1, layout_of(LANES))),)
    for _ in gl.static_range(TILES):
        left += (gl.zeros([LANES, VECTOR], ring[0].dtype, layout_of(LANES)),)  # type: ignore[assignment]
    return left


@gluon.jit
def highest_of(x, AXIS: gl.constexpr):
    """Return the maximum of float32: as integers in the same order, which a warp asks for at once.

    NaN is the highest, or the lowest.
    """
    bits = x.to(gl.int32, bitcast=True)
    highest = gl.max(bits ^ ((bits >> 31) & REST), AXIS)
    return (highest ^ ((highest >> 31) & REST)).to(gl.float32, bitcast=True)


@gluon.jit
def finite(maximum):
    """Return what exponentials are taken about: -inf less -inf would be NaN."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def write_gradient(boxes, left, gradient, row, piece, column, by, TILES: gl.constexpr):
    """Write exp(x - about) * factor, of what `sums_of` left, and `dtarget` in a piece's column."""
    LANES: gl.constexpr = left[0].shape[0]
    about, factor, dtarget = by
    dpiece_V = gl.multiple_of(gradient[0] + row.to(tl.int64) * gradient[1] + piece[0], 16)
    highest_L = left[0]
    _, _, correction_L = _exponent_about(finite(highest_L))
    factor_L = gl.exp2((highest_L - about) * LOG2_E) * correction_L * factor
    for number in gl.static_range(len(boxes)):
        dx_LV = _gradient(left[1 + number], factor_L, number, column, dtarget)
        dx = dx_LV.reshape(boxes[number].shape)
        boxes[number].store(gl.convert_layout(dx, _layout_of_box(LANES)))
    fence_async_shared()
    for number in gl.static_range(len(boxes), TILES):
        columns_LV, is_in_L1 = _columns(number * LANES, piece[1], LANES, LANES)
        dx_LV = _gradient(left[1 + number], factor_L, number, column, dtarget)
        gl.store(dpiece_V + columns_LV, dx_LV, is_in_L1, eviction_policy="evict_first")


@gluon.jit
def _gradient(exponential_LV, factor_L, number: gl.constexpr, column, dtarget):
    """Return the gradient of a tile; few threads have the target, but all know if it is here."""
    LANES: gl.constexpr = factor_L.shape[0]
    dx_LV = _times(exponential_LV, factor_L)
    if column // (LANES * VECTOR) == number:
        columns_LV, _ = _columns(number * LANES, 0, LANES, LANES)
        dx_LV = gl.where(columns_LV == column, dtarget.to(dx_LV.dtype), dx_LV)
    return dx_LV


@gluon.jit
def send_boxes(boxes, dlogits_desc, row, piece):
    """Begin to copy a gradient's boxes to where a piece of this row begins."""
    if warp() == 0:
        for number in gl.static_range(len(boxes)):
            at = [row, piece[2], piece[3] + number * boxes[number].shape[2], 0]
            tma.async_copy_shared_to_global(dlogits_desc, at, boxes[number])


@gluon.jit
def _times(x_LV, factor_L):
    """Return the product, rounded once; bfloat16 two at a time, by a factor of two parts."""
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
    """Return the columns of vectors of a piece, and which of the vectors are in it."""
    vector_L1 = (first + gl.arange(0, VECTORS, gl.SliceLayout(1, layout_of(LANES))))[:, None]
    number_1V = gl.arange(0, VECTOR, gl.SliceLayout(0, layout_of(LANES)))[None, :]
    return vector_L1 * VECTOR + number_1V, vector_L1 < count


@gluon.jit
def _tiles_in(ring, stage, count, LEAST: gl.constexpr, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return a piece's tiles, -inf behind its end, where zeros are or another piece."""
    ROWS: gl.constexpr = LANES * VECTOR // WIDTH
    tiles = ()
    for number in gl.static_range(TILES):
        x_LV = ring[0].index(stage).slice(number * ROWS, ROWS, 2).load(_layout_of_box(LANES))
        x_LV = gl.convert_layout(x_LV.reshape([LANES, VECTOR]), layout_of(LANES))
        if (number + 1) * LANES > LEAST:
            _, is_in_L1 = _columns(number * LANES, count, LANES, LANES)
            x_LV = gl.where(is_in_L1, x_LV, float("-inf"))
        tiles += (x_LV,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def _higher(x, y):
    """Return the larger of two numbers of 16 bits each, two at a time; NaN is not larger."""
    kind: gl.constexpr = "bf16" if gl.bfloat16 == x.dtype else "f16"
    code: gl.constexpr = "max." + kind + "x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def _wide(x):
    """Return numbers of 16 bits as float32; of two bfloat16, one is shifted, the other masked."""
    if gl.bfloat16 == x.dtype:
        code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(
            code, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    return x.to(gl.float32)


@gluon.jit
def _exponent_about(about):
    """Return numbers of which exp2(x * first + second) * third is exp(x - about), for x <= about.

    One instruction then makes an exponent. Its constant is rounded; the third makes up for that.
    """
    # Where log2(e) times it would leave float32, x is either `about` or too small to count.
    scale = gl.where(gl.abs(about) < HUGE, LOG2_E, TINY)
    shift = -about * scale
    return scale, shift, gl.exp2(-gl.fma(about, scale, shift))


# A letter from nobody: a maximum of -inf, and a sum of -0.
NOBODY = gl.constexpr(-(1 << 55) + (1 << 31))
MINUS = gl.constexpr(1 << 31)
# In the place of a target that does not count; less than all others.
IGNORED = gl.constexpr(-2)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def alike(num_warps):
    """Return a layout of at most 32 values, one to a lane, in which all warps hold them all."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def begin_letters(
    ring,
    letters_MG,
    row,
    target,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Where rows are shared, sum the first one's piece, and leave a letter.

    Returns where shares lie, and what is left of the piece.
    """
    shares_W = gl.allocate_shared_memory(gl.int64, [gl.num_warps()], FLAT)
    left, phases = nothing_left(ring, TILES, LANES), 0
    if GROUP > 1:
        highest, total, left, phases = _sum(
            ring, 0, phases, shares_W, target, count, LEAST, TILES, LANES
        )
        _send(letters_MG, row, target, highest, total, GROUP)
        # What was read of the shares may be written over.
        gl.thread_barrier()
    return shares_W, left, phases


@gluon.jit
def sums_of_row(
    ring,
    stage,
    phases,
    shares_W,
    letters_MG,
    rows,
    targets,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return a row's maximum, the sum about it, and what is left of the piece that is summed.

    That is this row's; where rows are shared, the next one's, summed while letters arrive. Of
    `rows` and `targets` the first is this row's, the second the next one's.
    """
    if GROUP > 1:
        words_G = _receive(letters_MG, rows[0], targets[0] != IGNORED, GROUP)
        highest, total, left, phases = _sum(
            ring, stage, phases, shares_W, targets[1], count, LEAST, TILES, LANES
        )
        _send(letters_MG, rows[1], targets[1], highest, total, GROUP)
        # Over the lanes: what a lane does alone, the assembler would do, and wait for the words,
        # before the next row is summed.
        while gl.min(words_G.to(gl.uint32), 0) == 0:
            words_G = _receive(letters_MG, rows[0], True, GROUP)
        highest, total = _merge(words_G)
    else:
        highest, total, left, phases = _sum(
            ring, stage, phases, shares_W, targets[0], count, LEAST, TILES, LANES
        )
    return highest, total, left, phases


@gluon.jit
def _sum(
    ring,
    stage,
    phases,
    shares_W,
    target,
    count,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return the maximum of a row's piece, the sum about it, and what is left, if the row counts.

    No warp waits for another but once, when each has left its share.
    """
    left = nothing_left(ring, TILES, LANES)
    if target != IGNORED:
        mbarrier.wait(ring[1].index(stage), phases >> stage & 1)
        phases ^= 1 << stage
        highest_W, total_W, left = sums_of(ring, stage, count, LEAST, TILES, LANES)
        shares_W.store(_word(highest_W, total_W))
    # Behind the barrier the boxes may be written again.
    tma.store_wait(0)
    gl.thread_barrier()
    # Each warp reads all, one of each in a lane.
    highest, total = _merge(shares_W.load(alike(gl.num_warps())))
    return highest, total, left, phases


@gluon.jit
def _word(highest, total):
    """Return both in a word; the sum with a minus, so that none is all zeros."""
    word = highest.to(gl.int32, bitcast=True).to(gl.int64) << 32
    return word | (total.to(gl.uint32, bitcast=True) | MINUS).to(gl.int64)


@gluon.jit
def _merge(words):
    """Return the maximum of all parts, and the sum of exponentials about it (about 0 for -inf)."""
    highest = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    minus = words.to(gl.int32).to(gl.float32, bitcast=True)
    whole = highest_of(highest, 0)
    share = gl.exp2((highest - finite(whole)) * LOG2_E)
    return whole, -1.0 * gl.sum(product(minus, share), 0)


@gluon.jit
def _send(letters_MG, row, target, highest, total, GROUP: gl.constexpr):
    """Leave a letter about a row's piece for the other programs, if the row counts."""
    place = row.to(tl.int64) * GROUP + gl.program_id(0) % GROUP
    gl.store(letters_MG + place, _word(highest, total), target != IGNORED)


@gluon.jit
def _receive(letters_MG, row, is_needed, GROUP: gl.constexpr):
    """Return the letters of a row, zeros where they are not there yet, one in a lane."""
    PADDED: gl.constexpr = 1 << (GROUP - 1).bit_length()
    member_G = gl.arange(0, PADDED, alike(gl.num_warps()))
    letters_G = letters_MG + row.to(tl.int64) * GROUP + member_G
    return gl.load(letters_G, (member_G < GROUP) & is_needed, other=NOBODY, volatile=True)


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
