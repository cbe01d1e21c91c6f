"""Pieces of rows of logits in shared memory: read once, summed, and turned into gradients.

The copying hardware (TMA) moves them, a vector of each lane to a box, so that no thread waits until
memory has answered or taken something. A program's pieces go through a ring: the next ones arrive
while one is summed; what is left of it, in registers, becomes its gradient, which leaves from boxes
of its own. L is lanes, one to a thread, T to a warp, W the warps, V the columns of a vector, and
`count` the vectors of a piece; TILES of all lanes hold it. The last may reach into the next piece.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels._gluon import fence_async_shared, gl, gluon, mbarrier, product, tma, warp
from kprof.kernels._tile_ring import room_for

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
