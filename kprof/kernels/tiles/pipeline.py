"""A pipeline of blocks in shared memory: TMA fills it, consumer warps empty it.

Each stage has a barrier for the arrival of its block, and one for the end of all reads. The phase
follows from a count that both sides keep. Blocks are of four dimensions, (1, 1, rows, columns), so
that rows beyond the end are zeros, in each of the others.
"""

from __future__ import annotations

from kprof.kernels.tiles.gluon import gl, gluon, mbarrier, tma


@gluon.jit
def room_for(desc, STAGES: gl.constexpr):
    """Allocate shared memory for so many blocks."""
    # Gluon knows no starred lists.
    return gl.allocate_shared_memory(
        desc.dtype,
        [STAGES] + desc.block_type.shape,  # noqa: RUF005
        desc.layout,
    )


@gluon.jit
def pipeline_of(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return a pipeline: shared memory for its stages, and their barriers for full and free."""
    smem = room_for(desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return smem, full, free


@gluon.jit
def producer_load(desc, pipeline, count, batch, head, row):
    """Begin to load a block into the next stage, once that is free."""
    smem, full, free = pipeline
    stage = count % smem.shape[0]
    mbarrier.wait(free.index(stage), (count // smem.shape[0] & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    at = [batch, head, row, 0]
    tma.async_copy_global_to_shared(desc, at, full.index(stage), smem.index(stage))


@gluon.jit
def consumer_wait(pipeline, count):
    """Wait for the block of this count, and return it with the barrier that frees its stage."""
    smem, full, free = pipeline
    stage = count % smem.shape[0]
    mbarrier.wait(full.index(stage), count // smem.shape[0] & 1)
    return smem.index(stage).reshape([smem.shape[3], smem.shape[4]]), free.index(stage)
