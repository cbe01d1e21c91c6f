"""Pieces of rows of logits in shared memory: read once, summed, and turned into gradients.

A program's pieces go through a ring: one is written while the next is summed, and the one after is
on its way. L is lanes, one to a thread, T to a warp, W the warps, and V the columns that a lane
loads at once, of which `count` are a piece's; TILES of all lanes hold it.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels._gluon import async_copy, gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(3)
VECTOR = gl.constexpr(8)
HUGE = gl.constexpr(2.0**100)
TINY = gl.constexpr(2.0**-20)
# All bits of an integer but its sign.
REST = gl.constexpr((1 << 31) - 1)


@gluon.constexpr_function
def layout_of(lanes):
    """Return how a tile lies in registers."""
    return gl.BlockedLayout([1, 8], [32, 1], [lanes // 32, 1], [1, 0])


@gluon.jit
def empty_ring(DTYPE: gl.constexpr, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return shared memory for pieces of rows."""
    # What is copied at a time has to be a power of two.
    ROOM: gl.constexpr = LANES * (1 << (TILES - 1).bit_length())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(DTYPE, [STAGES, ROOM, VECTOR], PLAIN)


@gluon.jit
def request(ring, stage, pieces_M, row, stride, is_needed, count, LANES: gl.constexpr):
    """Begin to copy a row's piece, if it is needed; either way it counts as one more to wait for.

    `pieces_M` is where the first row's piece is.
    """
    if is_needed:
        columns_LV, is_in_L1 = _columns(0, count, ring.shape[1], LANES)
        piece_V = gl.multiple_of(pieces_M + row.to(tl.int64) * stride, 16)
        async_copy.async_copy_global_to_shared(ring.index(stage), piece_V + columns_LV, is_in_L1)
    async_copy.commit_group()


@gluon.jit
def wait_for_all_but(NUMBER: gl.constexpr):
    """Wait until of all requests only the last so many are left, and for all threads."""
    async_copy.wait_group(NUMBER)
    gl.thread_barrier()


@gluon.jit
def sums_of(ring, stage, count, LEAST: gl.constexpr, TILES: gl.constexpr, LANES: gl.constexpr):
    """Return each warp's maximum in a piece, and sum of exponentials about it (about 0 for -inf).

    No piece has fewer than LEAST vectors, and no warp waits for another.
    """
    highest_LV = _tile_in(ring, stage, 0, count, LEAST, LANES)
    for number in gl.static_range(1, TILES):
        highest_LV = _higher(highest_LV, _tile_in(ring, stage, number, count, LEAST, LANES))
    highest_L = gl.max(highest_LV.to(gl.float32), 1)
    scale_L, shift_L, correction_L = _exponent_about(finite(highest_L))
    sum_L = gl.zeros([LANES], gl.float32, gl.SliceLayout(1, layout_of(LANES)))
    for number in gl.static_range(TILES):
        x_LV = _wide(_tile_in(ring, stage, number, count, LEAST, LANES))
        sum_L += gl.sum(gl.exp2(gl.fma(x_LV, scale_L[:, None], shift_L[:, None])), 1)
    highest_WT = highest_L.reshape([LANES // 32, 32])
    highest_W = highest_of(highest_WT, 1)
    share_WT = gl.exp2((highest_WT - finite(highest_W)[:, None]) * LOG2_E)
    sum_WT = (sum_L * correction_L).reshape([LANES // 32, 32])
    return highest_W, gl.sum(sum_WT * share_WT, 1)


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
def write_gradient(
    ring, stage, dpiece_V, count, about, factor, TILES: gl.constexpr, LANES: gl.constexpr
):
    """Write exp(x - about) * factor."""
    dpiece_V = gl.multiple_of(dpiece_V, 16)
    scale, shift, correction = _exponent_about(about)
    factor *= correction
    for number in gl.static_range(TILES):
        columns_LV, is_in_L1 = _columns(number * LANES, count, LANES, LANES)
        x_LV = _wide(_tile(ring, stage, number, LANES))
        dx_LV = (gl.exp2(gl.fma(x_LV, scale, shift)) * factor).to(dpiece_V.dtype.element_ty)
        gl.store(dpiece_V + columns_LV, dx_LV, is_in_L1, eviction_policy="evict_first")


@gluon.jit
def write_zeros(dpiece_V, count, TILES: gl.constexpr, LANES: gl.constexpr):
    """Write zeros in the gradient's place."""
    dpiece_V = gl.multiple_of(dpiece_V, 16)
    zeros_LV = gl.zeros([LANES, VECTOR], dpiece_V.dtype.element_ty, layout_of(LANES))
    for number in gl.static_range(TILES):
        columns_LV, is_in_L1 = _columns(number * LANES, count, LANES, LANES)
        gl.store(dpiece_V + columns_LV, zeros_LV, is_in_L1, eviction_policy="evict_first")


@gluon.jit
def _columns(first, count, VECTORS: gl.constexpr, LANES: gl.constexpr):
    """Return the columns of vectors of a piece, and which of the vectors are in it."""
    vector_L1 = (first + gl.arange(0, VECTORS, gl.SliceLayout(1, layout_of(LANES))))[:, None]
    number_1V = gl.arange(0, VECTOR, gl.SliceLayout(0, layout_of(LANES)))[None, :]
    return vector_L1 * VECTOR + number_1V, vector_L1 < count


@gluon.jit
def _tile(ring, stage, number: gl.constexpr, LANES: gl.constexpr):
    return ring.index(stage).slice(number * LANES, LANES).load(layout_of(LANES))


@gluon.jit
def _tile_in(ring, stage, number: gl.constexpr, count, LEAST: gl.constexpr, LANES: gl.constexpr):
    """Return a tile, -inf behind the piece's end: what is not copied is zeros."""
    x_LV = _tile(ring, stage, number, LANES)
    if (number + 1) * LANES > LEAST:
        _, is_in_L1 = _columns(number * LANES, count, LANES, LANES)
        x_LV = gl.where(is_in_L1, x_LV, float("-inf"))
    return x_LV


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
