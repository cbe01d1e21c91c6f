"""The Hopper kernel of attention of many queries, backward: warp-specialised, in Gluon.

dq, dk and dv for D = 64 and 128, launched by `_hopper_backward`. A CTA owns 128 keys, 64 for each
of two consumer warpgroups; their keys and values stay in shared memory. A producer warp loads
blocks of queries with dy by TMA. Scores are transposed (keys by queries), so weights and gradients
of scores are register operands of the GEMMs for dv and dk. For dq, gradients of scores of both
warpgroups meet in shared memory: each warpgroup multiplies for 64 queries and 64 columns, and a
reduction warp adds the product to the sums of other CTAs in global memory.

With `CONFIG.IS_ORDERED`, CTAs add in the order of their tiles, so sums have the same bits in every
run. A semaphore a block counts the tiles that have added. A CTA waits for the tile before its own,
which has a lower CTA index and has therefore begun. All tiles of a head begin with their last
block, so those before have little to do first. dq columns lie as `store_permuted` leaves them.

Order: configuration, tile scheduler, reduction warp, producer, consumer, kernel.

B batch, H heads, T queries of a sequence, D columns of a head, N 64 keys of a warpgroup, M queries
of a block.
"""

from __future__ import annotations

from typing import NamedTuple

from kprof.kernels.tiles.gluon import (
    add_shared_to_global,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    semaphore_release,
    semaphore_wait,
    store_permuted,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kprof.kernels.tiles.key_range import is_visible, key_ranges, tile_at
from kprof.kernels.tiles.pipeline import consumer_wait, pipeline_of, producer_load, room_for

# Keys of a warpgroup; queries and columns of its part of dq.
ROWS = gl.constexpr(64)
# Named barriers, of those that Triton leaves free, and the threads that meet there: both
# warpgroups, or one of them and the reduction warp.
BARRIER, THREADS = gl.constexpr(9), gl.constexpr(256)
DQ_FULL, DQ_EMPTY, WARPGROUP_AND_WARP = gl.constexpr(10), gl.constexpr(12), gl.constexpr(160)
LOG2_E = gl.constexpr(1.4426950408889634)


class Config(NamedTuple):
    """Constants of the kernel."""

    HAS_LEFT: gl.constexpr
    """Whether a window bounds the keys before a query's own."""
    HAS_RIGHT: gl.constexpr
    """Whether causality or a window bounds those after it."""
    GROUP: gl.constexpr
    """Query heads that share a key head."""
    M: gl.constexpr
    """Queries of a block: 64 for heads of 128, 128 for heads of 64."""
    IS_ORDERED: gl.constexpr
    """Whether CTAs add to dq in one order."""


class Sizes(NamedTuple):
    """Lengths, the window, and key heads."""

    num_queries: gl.tensor
    num_keys: gl.tensor
    left: gl.tensor
    right: gl.tensor
    heads: gl.tensor
    """Of a sequence."""
    num_heads: gl.tensor
    """Of all sequences."""
    section: gl.tensor
    """Heads whose queries share L2."""


@gluon.jit
def _blocks_of(key, sizes, CONFIG: gl.constexpr):
    """Return four blocks of queries for the tile that begins at a key.

    They are the first, the first without a mask, the first masked one behind, and the end. A key
    is seen by the queries of the mirrored window.
    """
    M: gl.constexpr = CONFIG.M
    own = key + sizes.num_queries - sizes.num_keys
    begin, inner_begin, inner_end, end = key_ranges(
        own,
        2 * ROWS,
        sizes.num_queries,
        sizes.right,
        sizes.left,
        M,
        CONFIG.HAS_RIGHT,
        CONFIG.HAS_LEFT,
    )
    # Keys behind the last one are 0, but their weights are unbounded: infinite in 16 bits, and NaN
    # times 0. A tile that has such keys is masked in every block.
    inner_end = gl.where(key + 2 * ROWS > sizes.num_keys, inner_begin, inner_end)
    return begin // M, inner_begin // M, inner_end // M, gl.cdiv(end, M)


@gluon.jit
def tile_of(sizes, CONFIG: gl.constexpr):
    """Return batch, head and first key of this CTA's tile, and its blocks of queries."""
    num_tiles = gl.cdiv(sizes.num_keys, 2 * ROWS)
    block, head = tile_at(gl.program_id(0), num_tiles, sizes.num_heads, sizes.section, False)
    key = block * 2 * ROWS
    return head // sizes.heads, head % sizes.heads, key, _blocks_of(key, sizes, CONFIG)


@gluon.jit
def block_at(place, blocks, CONFIG: gl.constexpr):
    """Return the block at a position of the loop: the last one first, where sums are ordered."""
    if CONFIG.IS_ORDERED:
        place = blocks[0] + blocks[3] - 1 - place
    return place


@gluon.jit
def _begin_reduction(smem, desc, batch, query_head, block, CONFIG: gl.constexpr, WG: gl.constexpr):
    """Begin to add a warpgroup's part of dq: half of the columns, or of the queries, of a block."""
    OF_ROWS: gl.constexpr = WG * (CONFIG.M - ROWS)
    at = [batch, query_head, block * CONFIG.M + OF_ROWS, WG * ROWS - OF_ROWS]
    add_shared_to_global(desc, at, smem.index(WG))


@gluon.jit
def hand_over_dq(sum_MD, smem, WG: gl.constexpr):
    """Pass a warpgroup's part of dq to the reduction warp, once its buffer is empty."""
    named_barrier_sync(DQ_EMPTY + WG, WARPGROUP_AND_WARP)
    store_permuted(smem.index(WG), sum_MD)
    fence_async_shared()
    named_barrier_arrive(DQ_FULL + WG, WARPGROUP_AND_WARP)


@gluon.jit
def _release_dq_buffers():
    """Release the buffer of each warpgroup, once its part has been read."""
    for wg in gl.static_range(2):
        tma.store_wait(1 - wg)
        named_barrier_arrive(DQ_EMPTY + wg, WARPGROUP_AND_WARP)


@gluon.jit
def reduce_dq(smem, desc, semaphore, sizes, CONFIG: gl.constexpr):
    """Add both warpgroups' parts of dq to global memory, block by block; with order, by turns."""
    batch, head, key, blocks = tile_of(sizes, CONFIG)
    tile, num_blocks = key // (2 * ROWS), gl.cdiv(sizes.num_queries, CONFIG.M)
    # The first tile waits for 0, which is the semaphore's initial value.
    end_before = _blocks_of(key - 2 * ROWS, sizes, CONFIG)[3]
    _release_dq_buffers()
    for member in range(CONFIG.GROUP):
        query_head = head * CONFIG.GROUP + member
        first = (batch * sizes.heads * CONFIG.GROUP + query_head).to(gl.int64) * num_blocks
        for place in range(blocks[0], blocks[3]):
            block = block_at(place, blocks, CONFIG)
            if CONFIG.IS_ORDERED:
                at = semaphore + (first + block)
                # The tile before has this block if its range ends behind it.
                if block < end_before:
                    semaphore_wait(at, tile)
            for wg in gl.static_range(2):
                named_barrier_sync(DQ_FULL + wg, WARPGROUP_AND_WARP)
                _begin_reduction(smem, desc, batch, query_head, block, CONFIG, wg)
            _release_dq_buffers()
            if CONFIG.IS_ORDERED:
                semaphore_release(at, tile + 1)


@gluon.jit
def _load_block(descs, pipe, count, batch, head, block):
    """Begin to load a block of queries, dy and row statistics, once a stage is free."""
    q_desc, dy_desc, statistics_desc = descs
    queries, dy_smem, statistics_smem = pipe
    q_smem, full, free = queries
    place = count % q_smem.shape[0]
    mbarrier.wait(free.index(place), (count // q_smem.shape[0] & 1) ^ 1)
    NBYTES: gl.constexpr = q_desc.block_type.nbytes + dy_desc.block_type.nbytes
    mbarrier.expect(full.index(place), NBYTES + statistics_desc.block_type.nbytes)
    at = [batch, head, block * q_smem.shape[3], 0]
    tma.async_copy_global_to_shared(q_desc, at, full.index(place), q_smem.index(place))
    tma.async_copy_global_to_shared(dy_desc, at, full.index(place), dy_smem.index(place))
    at = [batch, head, block, 0]
    tma.async_copy_global_to_shared(
        statistics_desc, at, full.index(place), statistics_smem.index(place)
    )


@gluon.jit
def _produce(descs, pipes, sizes, CONFIG: gl.constexpr):
    """Load keys and values, then the blocks of queries in the order of their use."""
    pipe, k_pipe, v_pipe = pipes
    block_descs, k_desc, v_desc = descs
    batch, head, key, blocks = tile_of(sizes, CONFIG)
    for wg in gl.static_range(2):
        producer_load(k_desc, k_pipe, wg, batch, head, key + wg * ROWS)
        producer_load(v_desc, v_pipe, wg, batch, head, key + wg * ROWS)
    count = 0
    for member in range(CONFIG.GROUP):
        query_head = head * CONFIG.GROUP + member
        for place in range(blocks[0], blocks[3]):
            _load_block(
                block_descs, pipe, count, batch, query_head, block_at(place, blocks, CONFIG)
            )
            count += 1
    # One block more: the consumer begins its scores before it leaves the loop.
    _load_block(block_descs, pipe, count, batch, head * CONFIG.GROUP, 0)


@gluon.jit
def _as_operand(x_MN, like_MD, DTYPE: gl.constexpr):
    """Return a GEMM result as the register operand of another GEMM."""
    return gl.convert_layout(x_MN.to(DTYPE), gl.DotOperandLayout(0, like_MD.type.layout, 2))


@gluon.jit
def _multiply_for_dq(shared_ds, first, k, WG: gl.constexpr):
    """Begin the GEMM for this warpgroup's part of dq: gradients of scores by all 128 keys."""
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dq_MD = gl.zeros([ROWS, ROWS], gl.float32, H)
    for half in gl.static_range(2):
        keys = k.index(half).reshape([ROWS, k.shape[4]])
        of_keys = shared_ds.index(first + half)
        if k.shape[4] > ROWS:
            keys = keys.slice(WG * ROWS, ROWS, 1)
        else:
            of_keys = of_keys.slice(WG * ROWS, ROWS, 1)
        product = of_keys.permute([1, 0])
        dq_MD = warpgroup_mma(product, keys, dq_MD, use_acc=half > 0, is_async=True)
    return dq_MD


@gluon.jit
def _begin(pipe, k_smem, count, WG: gl.constexpr):
    """Begin the scores of the next block of queries, once it is loaded."""
    q, _ = consumer_wait(pipe[0], count)
    M: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    # Adds 0, which the compiler cannot know: the descriptor of the keys is recomputed in every step
    # instead of taking 16 registers of a thread.
    k = k_smem.index(WG + (count >> 30)).reshape([ROWS, D])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    zeros_NM = gl.zeros([ROWS, M], gl.float32, S)
    return warpgroup_mma(k, q.permute([1, 0]), zeros_NM, use_acc=False, is_async=True)


@gluon.jit
def _step(state, given, block, masks, CONFIG: gl.constexpr, WG: gl.constexpr):
    """Process one block of queries, and return the state."""
    dk_ND, dv_ND, weight_NM, count = state
    pipe, keys, shared_ds, dq_smem, sizes, scale = given
    M: gl.constexpr = CONFIG.M
    D: gl.constexpr = pipe[0][0].shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    C: gl.constexpr = gl.SliceLayout(0, S)
    at = count % pipe[1].shape[0]
    q, dy = pipe[0][0].index(at).reshape([M, D]), pipe[1].index(at).reshape([M, D])
    line = pipe[2].index(at).reshape([2 * M])
    # The GEMM accumulates onto -delta, which therefore needs no registers of its own.
    score_NM = gl.zeros([ROWS, M], gl.float32, S) + line.slice(M, M).load(C)[None, :]
    score_NM = warpgroup_mma(keys[0], dy.permute([1, 0]), score_NM, is_async=True)
    minus_lse_M = line.slice(0, M).load(C)
    weight_NM = gl.exp2(weight_NM * (scale * LOG2_E) + minus_lse_M[None, :])
    if masks:
        row_M = block * M + gl.arange(0, M, C)
        is_seen_NM = is_visible(
            keys[1],
            row_M,
            sizes.num_queries,
            sizes.right,
            sizes.left,
            CONFIG.HAS_RIGHT,
            CONFIG.HAS_LEFT,
        )
        # Keys behind the last one, which no bound masks.
        is_seen_NM &= (keys[1] < sizes.num_queries)[:, None]
        weight_NM = gl.where(is_seen_NM, weight_NM, 0.0)
    dv_ND = warpgroup_mma(_as_operand(weight_NM, dv_ND, q.dtype), dy, dv_ND, is_async=True)
    score_NM = weight_NM * warpgroup_mma_wait(1, [score_NM])
    dk_ND = warpgroup_mma(_as_operand(score_NM, dk_ND, q.dtype), q, dk_ND, is_async=True)
    # Double-buffered: both warpgroups have met at the barrier since this buffer was read.
    first = count % 2 * 2
    shared_ds.index(first + WG).store(score_NM.to(q.dtype))
    fence_async_shared()
    named_barrier_sync(BARRIER, THREADS)
    dv_ND = warpgroup_mma_wait(1, [dv_ND])
    dq_MD = _multiply_for_dq(shared_ds, first, keys[2], WG)
    dk_ND = warpgroup_mma_wait(2, [dk_ND])
    mbarrier.arrive(pipe[0][2].index(at), count=1)
    # Keeps the tensor cores busy while dq is stored.
    next_NM = _begin(pipe, keys[2], count + 1, WG)
    dq_MD = warpgroup_mma_wait(1, [dq_MD])
    hand_over_dq(dq_MD, dq_smem, WG)
    return dk_ND, dv_ND, warpgroup_mma_wait(0, [next_NM]), count + 1


@gluon.jit
def _consume(WG: gl.constexpr, common, CONFIG: gl.constexpr):
    """Compute dk and dv of 64 keys, and their part of dq."""
    pipes, shared_ds, dq_smem, results, sizes, scale = common
    pipe, k_pipe, v_pipe = pipes
    batch, head, key, blocks = tile_of(sizes, CONFIG)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.M, 16])
    own_N = (
        key
        + WG * ROWS
        + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        + (sizes.num_queries - sizes.num_keys)
    )
    consumer_wait(k_pipe, 1 - WG)
    consumer_wait(k_pipe, WG)
    v, _ = consumer_wait(v_pipe, WG)
    given = (pipe, (v, own_N, k_pipe[0]), shared_ds, dq_smem, sizes, scale)
    D: gl.constexpr = v.shape[1]
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zeros_ND = gl.zeros([ROWS, D], gl.float32, R)
    state = (zeros_ND, zeros_ND, warpgroup_mma_wait(0, [_begin(pipe, k_pipe[0], 0, WG)]), 0)
    for _ in range(CONFIG.GROUP):
        for place in range(blocks[0], blocks[3]):
            block = block_at(place, blocks, CONFIG)
            masks = (block < blocks[1]) | (block >= blocks[2])
            state = _step(state, given, block, masks, CONFIG, WG)
    dk_ND, dv_ND, _, _ = state
    # The other warpgroup no longer reads these keys, whose buffers take the results.
    named_barrier_sync(BARRIER, THREADS)
    for which in gl.static_range(2):
        x_ND = dk_ND * scale if which == 0 else dv_ND
        smem = pipes[1 + which][0].index(WG)
        smem.reshape([ROWS, D]).store(x_ND.to(smem.dtype))
        fence_async_shared()
        at = [batch, head, key + WG * ROWS, 0]
        tma.async_copy_shared_to_global(results[which], at, smem)
    tma.store_wait(0)
    # Each arrival of the reduction warp needs its sync.
    named_barrier_sync(DQ_EMPTY + WG, WARPGROUP_AND_WARP)


@gluon.jit(
    do_not_specialize=[
        *("num_queries", "num_keys", "left", "right", "heads", "num_heads", "section")
    ]
)
def attention_backward_hopper_kernel(
    semaphore_BHT,
    statistics_desc,
    q_desc,
    dy_desc,
    k_desc,
    v_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    scale,
    num_queries,
    num_keys,
    left,
    right,
    heads,
    num_heads,
    section,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    IS_ORDERED: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """Store dk and dv of one tile of keys, and add to dq."""
    pipe = (
        pipeline_of(q_desc, STAGES, 2),
        room_for(dy_desc, STAGES),
        room_for(statistics_desc, STAGES),
    )
    pipes = (pipe, pipeline_of(k_desc, 2, 1), pipeline_of(v_desc, 2, 1))
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, M], q_desc.dtype)
    shared_ds = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, M], DS_LAYOUT)
    dq_smem = room_for(dq_desc, 2)
    sizes = Sizes(num_queries, num_keys, left, right, heads, num_heads, section)
    CONFIG: gl.constexpr = Config(HAS_LEFT, HAS_RIGHT, GROUP, M, IS_ORDERED)
    given = (pipes, shared_ds, dq_smem, (dk_desc, dv_desc), sizes, scale)
    descs = ((q_desc, dy_desc, statistics_desc), k_desc, v_desc)
    gl.warp_specialize(
        [
            (_consume, (0, given, CONFIG)),
            (_consume, (1, given, CONFIG)),
            (_produce, (descs, pipes, sizes, CONFIG)),
            (reduce_dq, (dq_smem, dq_desc, semaphore_BHT, sizes, CONFIG)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
