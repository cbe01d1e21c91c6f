"""A pipeline of blocks in shared memory: TMA fills it, consumer warps empty it.

Each stage has a barrier for the arrival of its block, and one for the end of all reads. The phase
follows from a count that both sides keep. Blocks are of four dimensions, (1, 1, rows, columns), so
that rows beyond the end are zeros, in each of the others.
"""

from __future__ import annotations

from kprof.kernels.tiles.gluon import gl, gluon, mbarrier, tma


@gluon.jit
def room_for(desc, PLACES: gl.constexpr):
    """Return shared memory for so many blocks."""
    # Gluon knows no starred lists.
    return gl.allocate_shared_memory(
        desc.dtype,
        [PLACES] + desc.block_type.shape,  # noqa: RUF005
        desc.layout,
    )


@gluon.jit
def pipeline_of(desc, PLACES: gl.constexpr, READERS: gl.constexpr):
    """Return shared memory for so many blocks, and barriers that say when one is full or free."""
    smem = room_for(desc, PLACES)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=READERS)
    return smem, full, free


@gluon.jit
def producer_load(desc, ring, count, batch, head, row):
    """Begin to load a block into the next place of a ring, once that is free."""
    smem, full, free = ring
    place = count % smem.shape[0]
    mbarrier.wait(free.index(place), (count // smem.shape[0] & 1) ^ 1)
    mbarrier.expect(full.index(place), desc.block_type.nbytes)
    at = [batch, head, row, 0]
    tma.async_copy_global_to_shared(desc, at, full.index(place), smem.index(place))


@gluon.jit
def consumer_wait(ring, count):
    """Return the block that lies in a ring at this count, once it is there, and who frees it."""
    smem, full, free = ring
    place = count % smem.shape[0]
    mbarrier.wait(full.index(place), count // smem.shape[0] & 1)
    return smem.index(place).reshape([smem.shape[3], smem.shape[4]]), free.index(place)
