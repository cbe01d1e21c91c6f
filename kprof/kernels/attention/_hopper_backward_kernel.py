"""Gradients of attention on Hopper: a producer warp loads, two warpgroups own 64 keys each.

Keys and values stay in shared memory while blocks of queries pass by with the gradients of their
results. Scores lie keys first, so weights and gradients of scores are register operands. For the
gradient of the queries, the latter meet in shared memory: each warpgroup multiplies for 64 queries
and 64 columns, and a reduction warp adds the product to the sums of other CTAs.

With `HOW[4]`, sums are added in the order of the CTAs, tile after tile, so they have the same bits
in every run. A tile then waits only for the one before it, which belongs to a CTA of a lower index
that has begun before. It begins with its last block, the other tiles of its head with theirs, so
those before it have little to do first. Columns of sums lie as `store_spread` leaves them.

B, H, T, D, M and N as in `_portable`. `sizes` are queries, keys, the window on the left and on the
right, key heads of a sequence, those of all sequences, and those of one section. `HOW` is whether
there is a left and a right bound, how many query heads share a key head, M (64 queries of a block
for 128 columns, 128 for 64), and whether sums are added in one order.
"""

from __future__ import annotations

from kprof.kernels.tiles.gluon import (
    add_shared_to_global,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_spread,
    tell_when_added,
    tma,
    turn_over_to,
    wait_for_turn,
    wait_until_told,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kprof.kernels.tiles.key_range import is_in_reach, reach_of, tile_at
from kprof.kernels.tiles.pipeline import load, loaded, ring_of, room_for

# Keys of a warpgroup, and queries and columns for which it multiplies.
ROWS = gl.constexpr(64)
# The hardware's barriers of either warpgroup with the warp that adds, and whose they are.
SUMS_ARE_THERE = gl.constexpr(10)
SUMS_ARE_READ = gl.constexpr(12)
WITH_THE_WARP = gl.constexpr(160)


@gluon.jit
def _blocks_of(key, sizes, HOW: gl.constexpr):
    """Return where masked blocks of queries of the tile that begins at a key begin and end.

    What a key is seen by is what a query sees, the other way round.
    """
    M: gl.constexpr = HOW[3]
    own = key + sizes[0] - sizes[1]
    begin, inner_begin, inner_end, end = reach_of(
        own, 2 * ROWS, sizes[0], sizes[3], sizes[2], M, HOW[1], HOW[0]
    )
    # Keys that are not there are 0 but weigh without bound: in 16 bits that may be infinite, and
    # times 0 no number. So where there are such, masks are everywhere.
    inner_end = gl.where(key + 2 * ROWS > sizes[1], inner_begin, inner_end)
    return begin // M, inner_begin // M, inner_end // M, gl.cdiv(end, M)


@gluon.jit
def tile_of(sizes, HOW: gl.constexpr):
    """Return batch, head and first key of a tile, and where masked blocks begin and end."""
    num_tiles = gl.cdiv(sizes[1], 2 * ROWS)
    block, head = tile_at(gl.program_id(0), num_tiles, sizes[5], sizes[6], False)
    key = block * 2 * ROWS
    return head // sizes[4], head % sizes[4], key, _blocks_of(key, sizes, HOW)


@gluon.jit
def block_at(place, blocks, HOW: gl.constexpr):
    """Return which block of a tile comes at a place of its range."""
    if HOW[4]:
        place = blocks[0] + blocks[3] - 1 - place
    return place


@gluon.jit
def _begin_to_add(smem, desc, batch, query_head, block, HOW: gl.constexpr, WHO: gl.constexpr):
    """Begin to add what a warpgroup has of a block: half of the columns, or of the queries."""
    OF_ROWS: gl.constexpr = WHO * (HOW[3] - ROWS)
    at = [batch, query_head, block * HOW[3] + OF_ROWS, WHO * ROWS - OF_ROWS]
    add_shared_to_global(desc, at, smem.index(WHO))


@gluon.jit
def pass_on(sum_MD, smem, WHO: gl.constexpr):
    """Leave what a warpgroup has of a block to the warp that adds, once the last has been read."""
    wait_for_turn(SUMS_ARE_READ + WHO, WITH_THE_WARP)
    store_spread(smem.index(WHO), sum_MD)
    fence_async_shared()
    turn_over_to(SUMS_ARE_THERE + WHO, WITH_THE_WARP)


@gluon.jit
def _room_again():
    """Tell each warpgroup, once its sums have been read, that it may store the next ones."""
    for who in gl.static_range(2):
        tma.store_wait(1 - who)
        turn_over_to(SUMS_ARE_READ + who, WITH_THE_WARP)


@gluon.jit
def add_for_others(smem, desc, told, sizes, HOW: gl.constexpr):
    """Add what both warpgroups leave of each block, where asked for after the tile before."""
    batch, head, key, blocks = tile_of(sizes, HOW)
    tile, num_blocks = key // (2 * ROWS), gl.cdiv(sizes[0], HOW[3])
    # Before the first tile there is none, and what it waits for is 0, as it was from the beginning.
    end_before = _blocks_of(key - 2 * ROWS, sizes, HOW)[3]
    _room_again()
    for member in range(HOW[2]):
        query_head = head * HOW[2] + member
        first = (batch * sizes[4] * HOW[2] + query_head).to(gl.int64) * num_blocks
        for place in range(blocks[0], blocks[3]):
            block = block_at(place, blocks, HOW)
            if HOW[4]:
                at = told + (first + block)
                # A tile that begins before has this block if it ends behind it.
                if block < end_before:
                    wait_until_told(at, tile)
            for who in gl.static_range(2):
                wait_for_turn(SUMS_ARE_THERE + who, WITH_THE_WARP)
                _begin_to_add(smem, desc, batch, query_head, block, HOW, who)
            _room_again()
            if HOW[4]:
                tell_when_added(at, tile + 1)


# Keys of a warpgroup, and queries and columns for which it multiplies.
KEYS_PER_WARPGROUP = gl.constexpr(64)
# Of both warpgroups, and the hardware's barrier that is theirs; Triton counts from 0.
THREADS = gl.constexpr(256)
BARRIER = gl.constexpr(9)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_block(descs, ring, count, batch, head, block):
    """Begin to load a block of queries, and what goes with it, once there is room."""
    q_desc, dy_desc, numbers_desc = descs
    queries, dy_smem, numbers_smem = ring
    q_smem, full, free = queries
    place = count % q_smem.shape[0]
    mbarrier.wait(free.index(place), (count // q_smem.shape[0] & 1) ^ 1)
    NBYTES: gl.constexpr = q_desc.block_type.nbytes + dy_desc.block_type.nbytes
    mbarrier.expect(full.index(place), NBYTES + numbers_desc.block_type.nbytes)
    at = [batch, head, block * q_smem.shape[3], 0]
    tma.async_copy_global_to_shared(q_desc, at, full.index(place), q_smem.index(place))
    tma.async_copy_global_to_shared(dy_desc, at, full.index(place), dy_smem.index(place))
    at = [batch, head, block, 0]
    tma.async_copy_global_to_shared(numbers_desc, at, full.index(place), numbers_smem.index(place))


@gluon.jit
def _produce(descs, rings, sizes, HOW: gl.constexpr):
    """Load keys and values, then all that passes by in the order of its use."""
    ring, k_ring, v_ring = rings
    passing, k_desc, v_desc = descs
    batch, head, key, blocks = tile_of(sizes, HOW)
    for who in gl.static_range(2):
        load(k_desc, k_ring, who, batch, head, key + who * KEYS_PER_WARPGROUP)
        load(v_desc, v_ring, who, batch, head, key + who * KEYS_PER_WARPGROUP)
    count = 0
    for member in range(HOW[2]):
        query_head = head * HOW[2] + member
        for place in range(blocks[0], blocks[3]):
            _load_block(passing, ring, count, batch, query_head, block_at(place, blocks, HOW))
            count += 1
    # Of which scores are begun, and nothing becomes.
    _load_block(passing, ring, count, batch, head * HOW[2], 0)


@gluon.jit
def _as_operand(x_MN, like_MD, DTYPE: gl.constexpr):
    """Return a tile of products as the first operand of further ones."""
    return gl.convert_layout(x_MN.to(DTYPE), gl.DotOperandLayout(0, like_MD.type.layout, 2))


@gluon.jit
def _scores_by_keys(met, first, k, WHO: gl.constexpr):
    """Begin to multiply what has met of the scores' gradients with all keys, for 64 of each side.

    Those are half of the columns, or half of the queries.
    """
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS_PER_WARPGROUP, 16])
    dq_MD = gl.zeros([KEYS_PER_WARPGROUP, KEYS_PER_WARPGROUP], gl.float32, H)
    for half in gl.static_range(2):
        keys = k.index(half).reshape([KEYS_PER_WARPGROUP, k.shape[4]])
        of_keys = met.index(first + half)
        if k.shape[4] > KEYS_PER_WARPGROUP:
            keys = keys.slice(WHO * KEYS_PER_WARPGROUP, KEYS_PER_WARPGROUP, 1)
        else:
            of_keys = of_keys.slice(WHO * KEYS_PER_WARPGROUP, KEYS_PER_WARPGROUP, 1)
        product = of_keys.permute([1, 0])
        dq_MD = warpgroup_mma(product, keys, dq_MD, use_acc=half > 0, is_async=True)
    return dq_MD


@gluon.jit
def _begin(ring, k_smem, count, WHO: gl.constexpr):
    """Begin to multiply keys and the next block of queries, once that is there."""
    q, _ = loaded(ring[0], count)
    M: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    # Where keys lie is the same in every step; kept in registers, it takes 16 of a thread. What is
    # added is 0, which the compiler cannot know, so it is found anew.
    k = k_smem.index(WHO + (count >> 30)).reshape([KEYS_PER_WARPGROUP, D])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    nothing_NM = gl.zeros([KEYS_PER_WARPGROUP, M], gl.float32, S)
    return warpgroup_mma(k, q.permute([1, 0]), nothing_NM, use_acc=False, is_async=True)


@gluon.jit
def _step(state, given, block, masks, HOW: gl.constexpr, WHO: gl.constexpr):
    """Take one block of queries in, and return the state."""
    dk_ND, dv_ND, weight_NM, count = state
    ring, keys, met, sums, sizes, scale = given
    M: gl.constexpr = HOW[3]
    D: gl.constexpr = ring[0][0].shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    C: gl.constexpr = gl.SliceLayout(0, S)
    at = count % ring[1].shape[0]
    q, dy = ring[0][0].index(at).reshape([M, D]), ring[1].index(at).reshape([M, D])
    line = ring[2].index(at).reshape([2 * M])
    # What is taken off of a product is where it begins: it needs no registers beside it.
    score_NM = gl.zeros([KEYS_PER_WARPGROUP, M], gl.float32, S) + line.slice(M, M).load(C)[None, :]
    score_NM = warpgroup_mma(keys[0], dy.permute([1, 0]), score_NM, is_async=True)
    less_M = line.slice(0, M).load(C)
    weight_NM = gl.exp2(weight_NM * (scale * LOG2_E) + less_M[None, :])
    if masks:
        row_M = block * M + gl.arange(0, M, C)
        is_seen_NM = is_in_reach(keys[1], row_M, sizes[0], sizes[3], sizes[2], HOW[1], HOW[0])
        # Where no mask depends on them, keys behind the last one would be seen.
        is_seen_NM &= (keys[1] < sizes[0])[:, None]
        weight_NM = gl.where(is_seen_NM, weight_NM, 0.0)
    dv_ND = warpgroup_mma(_as_operand(weight_NM, dv_ND, q.dtype), dy, dv_ND, is_async=True)
    score_NM = weight_NM * warpgroup_mma_wait(1, [score_NM])
    dk_ND = warpgroup_mma(_as_operand(score_NM, dk_ND, q.dtype), q, dk_ND, is_async=True)
    # What was there two blocks before has been read: all have met since.
    first = count % 2 * 2
    met.index(first + WHO).store(score_NM.to(q.dtype))
    fence_async_shared()
    wait_for_turn(BARRIER, THREADS)
    dv_ND = warpgroup_mma_wait(1, [dv_ND])
    dq_MD = _scores_by_keys(met, first, keys[2], WHO)
    dk_ND = warpgroup_mma_wait(2, [dk_ND])
    mbarrier.arrive(ring[0][2].index(at), count=1)
    # So that the tensor cores have something to do while what they have done is stored.
    next_NM = _begin(ring, keys[2], count + 1, WHO)
    dq_MD = warpgroup_mma_wait(1, [dq_MD])
    pass_on(dq_MD, sums, WHO)
    return dk_ND, dv_ND, warpgroup_mma_wait(0, [next_NM]), count + 1


@gluon.jit
def _consume(WHO: gl.constexpr, common, HOW: gl.constexpr):
    """Compute what 64 keys give and get."""
    rings, met, sums, results, sizes, scale = common
    ring, k_ring, v_ring = rings
    batch, head, key, blocks = tile_of(sizes, HOW)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HOW[3], 16])
    own_N = (
        key
        + WHO * KEYS_PER_WARPGROUP
        + gl.arange(0, KEYS_PER_WARPGROUP, gl.SliceLayout(1, S))
        + (sizes[0] - sizes[1])
    )
    loaded(k_ring, 1 - WHO)
    loaded(k_ring, WHO)
    v, _ = loaded(v_ring, WHO)
    given = (ring, (v, own_N, k_ring[0]), met, sums, sizes, scale)
    D: gl.constexpr = v.shape[1]
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    nothing_ND = gl.zeros([KEYS_PER_WARPGROUP, D], gl.float32, R)
    state = (nothing_ND, nothing_ND, warpgroup_mma_wait(0, [_begin(ring, k_ring[0], 0, WHO)]), 0)
    for _ in range(HOW[2]):
        for place in range(blocks[0], blocks[3]):
            block = block_at(place, blocks, HOW)
            masks = (block < blocks[1]) | (block >= blocks[2])
            state = _step(state, given, block, masks, HOW, WHO)
    dk_ND, dv_ND, _, _ = state
    # The other warpgroup has multiplied with these keys for the last time.
    wait_for_turn(BARRIER, THREADS)
    for which in gl.static_range(2):
        x_ND = dk_ND * scale if which == 0 else dv_ND
        smem = rings[1 + which][0].index(WHO)
        smem.reshape([KEYS_PER_WARPGROUP, D]).store(x_ND.to(smem.dtype))
        fence_async_shared()
        at = [batch, head, key + WHO * KEYS_PER_WARPGROUP, 0]
        tma.async_copy_shared_to_global(results[which], at, smem)
    tma.store_wait(0)
    # As often as the warp that adds has passed by.
    wait_for_turn(SUMS_ARE_READ + WHO, WITH_THE_WARP)


@gluon.jit(
    do_not_specialize=[
        *("num_queries", "num_keys", "left", "right", "heads", "num_heads", "together")
    ]
)
def attend_back(
    told_BHT,
    numbers_desc,
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
    together,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    IS_ORDERED: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """Store the gradients of one tile of keys and values, and add to those of the queries."""
    ring = (ring_of(q_desc, STAGES, 2), room_for(dy_desc, STAGES), room_for(numbers_desc, STAGES))
    rings = (ring, ring_of(k_desc, 2, 1), ring_of(v_desc, 2, 1))
    MET: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS_PER_WARPGROUP, M], q_desc.dtype)
    met = gl.allocate_shared_memory(q_desc.dtype, [4, KEYS_PER_WARPGROUP, M], MET)
    sums = room_for(dq_desc, 2)
    sizes = (num_queries, num_keys, left, right, heads, num_heads, together)
    HOW: gl.constexpr = (HAS_LEFT, HAS_RIGHT, GROUP, M, IS_ORDERED)
    given = (rings, met, sums, (dk_desc, dv_desc), sizes, scale)
    descs = ((q_desc, dy_desc, numbers_desc), k_desc, v_desc)
    gl.warp_specialize(
        [
            (_consume, (0, given, HOW)),
            (_consume, (1, given, HOW)),
            (_produce, (descs, rings, sizes, HOW)),
            (add_for_others, (sums, dq_desc, told_BHT, sizes, HOW)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
