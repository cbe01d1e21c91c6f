"""Attention of many queries on Hopper, warp-specialised: a producer warp loads, warpgroups compute.

Two or three warpgroups of a CTA take turns, or one of each of two CTAs share an SM: while one
weighs its scores, the tensor cores multiply for another. Within a warpgroup, scores of one block
are multiplied beside the values of the block before. Results go from registers through shared
memory, by TMA. Queries, keys and values are of 16 bits, or of 8 with one scale a head; values of 8
bits lie as the tensor cores want them: columns first, keys in the order of a thread's weights.

B batch, H heads, T queries of a sequence, D columns of a head, N keys of a block, M queries of a
tile, of which each warpgroup has 64. `sizes` are queries, keys, the window on the left and on the
right, all heads, those of one section, and heads of a sequence. `HOW` is N; whether there is a left
and a right bound; the number of warpgroups; whether powers are held before the wait for the values
of the block before; how many heads share keys; by what weights are raised (0, unless inputs are of
8 bits; then `largest_BH` holds the largest numbers of heads of queries, keys and values); whether a
table schedules the tiles; whether anything is masked (not where every query sees every key and keys
fill their blocks); and whether there is room for the queries of the next tile.
"""

from __future__ import annotations

from kprof.kernels.tiles.gluon import (
    fence_async_shared,
    gl,
    gluon,
    hold,
    mbarrier,
    pack,
    pack_narrow,
    tma,
    turn_over_to,
    unpack,
    unpack_narrow,
    wait_for_turn,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kprof.kernels.tiles.key_range import is_in_reach, reach_of, tile_at, turn_of, turns_of
from kprof.kernels.tiles.online_softmax import (
    finish,
    largest_of,
    parts_of,
    raise_largest,
    settle,
    weigh_scores,
)
from kprof.kernels.tiles.pipeline import load, loaded, ring_of, room_for

# Rows of a warpgroup, and threads of two.
ROWS = gl.constexpr(64)
THREADS = gl.constexpr(256)
# The first of the hardware's barriers that is the warpgroups' own; Triton counts from 0.
BARRIER = gl.constexpr(9)
# Weights of 8 bits come times two to the power of this: of 1 and less, many would be rounded to 0.
RAISED = gl.constexpr(8)
# Of 8 bits, the largest number, and what is taken for the largest of a head of zeros.
LARGEST = gl.constexpr(448.0)
LEAST = gl.constexpr(1e-12)


@gluon.jit
def turns(dealt, sizes, HOW: gl.constexpr):
    """Return how many tiles this program has, and where those begin that are dealt to it."""
    if HOW[7]:
        begin = gl.load(dealt + gl.program_id(0))
        return gl.load(dealt + gl.program_id(0) + 1) - begin, begin
    else:  # noqa: RET505
        num_tiles = gl.cdiv(sizes[0], ROWS * HOW[3]) * sizes[4]
        return turns_of(num_tiles, gl.program_id(0), gl.num_programs(0)), 0


@gluon.jit
def place_of(turn, begin, dealt, HOW: gl.constexpr):
    """Return the place of the tile of a turn; of one turn more than there are, any number."""
    if HOW[7]:
        return gl.load(dealt + begin + turn)
    else:  # noqa: RET505
        return turn_of(turn, gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_of(place, sizes, HOW: gl.constexpr):
    """Return batch, head and first row of a tile, and the blocks of keys between which masks end.

    There is one block at least, and the last one is always masked.
    """
    N: gl.constexpr = HOW[0]
    M: gl.constexpr = ROWS * HOW[3]
    block, head = tile_at(place, gl.cdiv(sizes[0], M), sizes[4], sizes[5], HOW[2])
    own = block * M + sizes[1] - sizes[0]
    begin, inner_begin, inner_end, end = reach_of(
        own, M, sizes[1], sizes[2], sizes[3], N, HOW[1], HOW[2]
    )
    first = begin // N
    last = gl.maximum(gl.cdiv(end, N) - 1, first)
    inner_last = gl.minimum(inner_end // N, last)
    inner_first = gl.minimum(inner_begin // N, inner_last)
    return head // sizes[6], head % sizes[6], block * M, first, inner_first, inner_last, last


@gluon.jit
def largest_at(largest_BH, batch, head, sizes, HOW: gl.constexpr):
    """Return where the largest numbers of a head's queries, keys and values are."""
    key_heads = sizes[6] // HOW[5]
    own = largest_BH + batch * (sizes[6] + 2 * key_heads)
    keys = own + sizes[6] + head // HOW[5]
    return own + head, keys, keys + key_heads


@gluon.jit
def score_scale(largest_BH, batch, head, scale, sizes, HOW: gl.constexpr):
    """Return by what to multiply scores: of 16 bits, what is given."""
    if HOW[6]:
        queries, keys, _ = largest_at(largest_BH, batch, head, sizes, HOW)
        q_most, k_most = gl.load(queries), gl.load(keys)
        # NaN stays NaN.
        scale *= gl.where(q_most < LEAST, LEAST, q_most) * (1 / LARGEST)
        scale *= gl.where(k_most < LEAST, LEAST, k_most) * (1 / LARGEST)
    return scale


@gluon.jit
def value_scale(largest_BH, batch, head, sizes, HOW: gl.constexpr):
    """Return by what to multiply sums of values of 8 bits."""
    v_most = gl.load(largest_at(largest_BH, batch, head, sizes, HOW)[2])
    return gl.where(v_most < LEAST, LEAST, v_most) * (1 / LARGEST)


@gluon.jit
def produce(descs, rings, dealt, sizes, HOW: gl.constexpr):
    """Load queries, keys and values in the order in which they are waited for."""
    if HOW[9]:
        _produce_ahead(descs, rings, dealt, sizes, HOW)
    else:
        _produce(descs, rings, dealt, sizes, HOW)


@gluon.jit
def _produce(descs, rings, dealt, sizes, HOW: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring = rings
    N: gl.constexpr = HOW[0]
    V: gl.constexpr = v_desc.block_type.shape[2]
    count = 0
    num_turns, begin = turns(dealt, sizes, HOW)
    place = place_of(0, begin, dealt, HOW)
    for turn in range(num_turns):
        batch, head, row, first, _, _, last = tile_of(place, sizes, HOW)
        place = place_of(turn + 1, begin, dealt, HOW)
        key_head = head // HOW[5]
        load(q_desc, q_ring, HOW[3] * turn, batch, head, row)
        load(k_desc, k_ring, count, batch, key_head, last * N)
        for who in gl.static_range(1, HOW[3]):
            load(q_desc, q_ring, HOW[3] * turn + who, batch, head, row + who * ROWS)
        for back in range(1, last - first + 1):
            load(k_desc, k_ring, count + back, batch, key_head, (last - back) * N)
            load(v_desc, v_ring, count + back - 1, batch, key_head, (last - back + 1) * V)
        count += last - first + 1
        load(v_desc, v_ring, count - 1, batch, key_head, first * V)


@gluon.jit
def _produce_ahead(descs, rings, dealt, sizes, HOW: gl.constexpr):
    """Load where there is room for the queries of the next tile.

    Its first keys come before the last values of the tile before, as the next keys always come
    before values; its queries come behind those, as they are waited for later.
    """
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring = rings
    N: gl.constexpr = HOW[0]
    V: gl.constexpr = v_desc.block_type.shape[2]
    count = 0
    num_turns, begin = turns(dealt, sizes, HOW)
    place = place_of(0, begin, dealt, HOW)
    last_batch, last_head, last_row = 0, 0, 0
    for turn in range(num_turns):
        batch, head, row, first, _, _, last = tile_of(place, sizes, HOW)
        place = place_of(turn + 1, begin, dealt, HOW)
        key_head = head // HOW[5]
        load(k_desc, k_ring, count, batch, key_head, last * N)
        if turn > 0:
            load(v_desc, v_ring, count - 1, last_batch, last_head, last_row)
        for who in gl.static_range(HOW[3]):
            load(q_desc, q_ring, HOW[3] * turn + who, batch, head, row + who * ROWS)
        for back in range(1, last - first + 1):
            load(k_desc, k_ring, count + back, batch, key_head, (last - back) * N)
            load(v_desc, v_ring, count + back - 1, batch, key_head, (last - back + 1) * V)
        count += last - first + 1
        last_batch, last_head, last_row = batch, key_head, first * V
    if num_turns > 0:
        load(v_desc, v_ring, count - 1, last_batch, last_head, last_row)


@gluon.constexpr_function
def product_layout(columns, HOW):
    """Return how a warpgroup holds what its product of so many columns becomes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if HOW[6] else 16])


@gluon.jit
def score(q, k, WHO: gl.constexpr, TAKES_TURNS: gl.constexpr, HOW: gl.constexpr):
    """Begin to multiply queries and keys, when it is this warpgroup's turn."""
    N: gl.constexpr = k.shape[0]
    S: gl.constexpr = product_layout(N, HOW)
    if TAKES_TURNS:
        wait_for_turn(BARRIER + WHO, THREADS)
    nothing = gl.zeros([ROWS, N], gl.float32, S)
    return warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def hide(score_MN, block, own_M, sizes, HOW: gl.constexpr):
    """Return scores that are -inf where a row does not see a key."""
    N: gl.constexpr = HOW[0]
    key_N = block * N + gl.arange(0, N, gl.SliceLayout(0, score_MN.type.layout))
    is_seen_MN = is_in_reach(own_M, key_N, sizes[1], sizes[2], sizes[3], HOW[1], HOW[2])
    return gl.where(is_seen_MN, score_MN, float("-inf"))


@gluon.jit
def largest(score_MN, largest_M, scale):
    """Return how sums so far shrink, and the largest scores, these among them."""
    top_M = gl.convert_layout(largest_of(score_MN), gl.SliceLayout(1, score_MN.type.layout))
    return raise_largest(top_M, largest_M, scale)


@gluon.jit
def packed(weight_MN, DTYPE: gl.constexpr, IS_NARROW: gl.constexpr):
    """Return weights as they wait to be multiplied."""
    if IS_NARROW:
        return pack_narrow(weight_MN)
    else:  # noqa: RET505
        return pack(weight_MN, DTYPE)


@gluon.jit
def add_values(weight_MN, v, sum_MD, DTYPE: gl.constexpr, IS_NARROW: gl.constexpr):
    """Begin to add the weighted values; of 8 bits, to nothing.

    The tensor cores keep about 14 bits of a sum of products of 8; adding up what comes of all
    blocks is for whoever waits for this.
    """
    D: gl.constexpr = sum_MD.shape[1]
    L: gl.constexpr = sum_MD.type.layout
    if IS_NARROW:
        weight = unpack_narrow(weight_MN, gl.DotOperandLayout(0, L, 4))
        nothing = gl.zeros([ROWS, D], gl.float32, L)
        return warpgroup_mma(weight, v.permute([1, 0]), nothing, use_acc=False, is_async=True)
    else:  # noqa: RET505
        weight = unpack(weight_MN, DTYPE, gl.DotOperandLayout(0, L, 2))
        return warpgroup_mma(weight, v, sum_MD, is_async=True)


@gluon.jit
def each_row(x_M, like_MN):
    """Return a number of each row as a column beside another tile."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, like_MN.type.layout))[:, None]


# The log-sum-exp comes in powers of 2.
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store(sum_MD, largest_M, total_M, y, y_desc, lse_BHT, sizes, batch, head, row):
    """Store the results of these rows, by way of shared memory."""
    R: gl.constexpr = gl.SliceLayout(1, sum_MD.type.layout)
    largest_M, total_M = gl.convert_layout(largest_M, R), gl.convert_layout(total_M, R)
    mean_MD, lse_M = finish(sum_MD, largest_M, total_M)
    tma.store_wait(0)
    y.reshape([sum_MD.shape[0], sum_MD.shape[1]]).store(mean_MD.to(y.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [batch, head, row, 0], y)
    row_M = row + gl.arange(0, sum_MD.shape[0], R)
    lse_at_M = (batch * sizes[6] + head).to(gl.int64) * sizes[0] + row_M
    gl.store(lse_BHT + lse_at_M, lse_M * LN_2, row_M < sizes[0])


@gluon.jit
def _steps(
    state,
    given,
    HOW: gl.constexpr,
    start,
    end,
    WHO: gl.constexpr,
    TAKES: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Take the blocks of keys from before `end` down to `start` in, and return the state."""
    q, k_ring, v_ring, own_M, sizes, scale = given
    sum_MD, largest_M, total_M4, weight_MN, shrink_M, count = state
    IS_NARROW: gl.constexpr = HOW[6] != 0
    for back in range(end - start):
        count += 1
        k, k_free = loaded(k_ring, count)
        score_MN = score(q, k, WHO, TAKES, HOW)
        v, v_free = loaded(v_ring, count - 1)
        added_MD = add_values(weight_MN, v, sum_MD, q.dtype, IS_NARROW)
        if TAKES:
            turn_over_to(BARRIER + (WHO + 1) % HOW[3], THREADS)
        score_MN = warpgroup_mma_wait(1, [score_MN])
        mbarrier.arrive(k_free, count=1)
        if IS_MASKED:
            score_MN = hide(score_MN, end - 1 - back, own_M, sizes, HOW)
        next_M, largest_M = largest(score_MN, largest_M, scale)
        total_M4 *= each_row(next_M, total_M4)
        if not HOW[4]:
            added_MD = warpgroup_mma_wait(0, [added_MD])
            mbarrier.arrive(v_free, count=1)
        weight_MN = weigh_scores(score_MN, largest_M, scale, HOW[6])
        total_M4 += parts_of(weight_MN)
        weight_MN = packed(weight_MN, q.dtype, IS_NARROW)
        if HOW[4]:
            hold(total_M4)
            added_MD = warpgroup_mma_wait(0, [added_MD])
            mbarrier.arrive(v_free, count=1)
        if IS_NARROW:
            sum_MD = sum_MD * each_row(shrink_M, sum_MD) + added_MD
        else:
            sum_MD = added_MD * each_row(next_M, added_MD)
        shrink_M = next_M
    return sum_MD, largest_M, total_M4, weight_MN, shrink_M, count


@gluon.jit
def _all_steps(state, given, HOW: gl.constexpr, blocks, WHO: gl.constexpr, TAKES: gl.constexpr):
    """Take all blocks of keys before the last in; masks are where they can hide something."""
    first, inner_first, inner_last, last = blocks
    if HOW[8]:
        state = _steps(state, given, HOW, inner_last, last, WHO, TAKES, True)
        state = _steps(state, given, HOW, inner_first, inner_last, WHO, TAKES, False)
    else:
        state = _steps(state, given, HOW, first, last, WHO, TAKES, False)
    if HOW[1]:
        state = _steps(state, given, HOW, first, inner_first, WHO, TAKES, True)
    return state


@gluon.jit
def _begin(given, HOW: gl.constexpr, block, count, WHO: gl.constexpr, TAKES: gl.constexpr):
    """Return the state after the last block of keys, without its values."""
    q, k_ring, own_M, sizes, scale = given[0], given[1], given[3], given[4], given[5]
    k, k_free = loaded(k_ring, count)
    score_MN = score(q, k, WHO, TAKES, HOW)
    if TAKES:
        turn_over_to(BARRIER + (WHO + 1) % HOW[3], THREADS)
    score_MN = warpgroup_mma_wait(0, [score_MN])
    mbarrier.arrive(k_free, count=1)
    if HOW[8]:
        score_MN = hide(score_MN, block, own_M, sizes, HOW)
    nothing_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_MN.type.layout))
    shrink_M, largest_M = largest(score_MN, nothing_M, scale)
    weight_MN = weigh_scores(score_MN, largest_M, scale, HOW[6])
    D: gl.constexpr = q.shape[1]
    sum_MD = gl.zeros([ROWS, D], gl.float32, product_layout(D, HOW))
    weight = packed(weight_MN, q.dtype, HOW[6] != 0)
    return sum_MD, largest_M, parts_of(weight_MN), weight, shrink_M, count


@gluon.jit
def _last_values(state, v_ring, scale, DTYPE: gl.constexpr, HOW: gl.constexpr):
    """Add the values that are left; return sums, largest scores, totals and the count of blocks.

    Those scores are scaled.
    """
    sum_MD, largest_M, total_M4, weight_MN, shrink_M, count = state
    v, v_free = loaded(v_ring, count)
    added_MD = add_values(weight_MN, v, sum_MD, DTYPE, HOW[6] != 0)
    added_MD = warpgroup_mma_wait(0, [added_MD])
    mbarrier.arrive(v_free, count=1)
    total_M = gl.convert_layout(gl.sum(total_M4, 1), largest_M.type.layout)
    if HOW[6]:
        added_MD += sum_MD * each_row(shrink_M, sum_MD)
    else:
        total_M = settle(total_M, largest_M, scale, DTYPE)
    return added_MD, largest_M * scale, total_M, count + 1


@gluon.jit
def _consume(
    WHO: gl.constexpr,
    common,
    HOW: gl.constexpr,
    TAKES: gl.constexpr,
    HAS_ROOM: gl.constexpr,
):
    """Attend with 64 rows of each tile."""
    y_desc, lse_BHT, largest_BH, dealt, rings, y_smem, sizes, given_scale = common
    q_ring, k_ring, v_ring = rings
    N: gl.constexpr = HOW[0]
    S: gl.constexpr = product_layout(N, HOW)
    count = 0
    if TAKES and HOW[3] - 1 == WHO:
        turn_over_to(BARRIER, THREADS)
    num_turns, begin = turns(dealt, sizes, HOW)
    place = place_of(0, begin, dealt, HOW)
    for turn in range(num_turns):
        batch, head, row, first, inner_first, inner_last, last = tile_of(place, sizes, HOW)
        # On its way while this tile is worked off.
        place = place_of(turn + 1, begin, dealt, HOW)
        scale = score_scale(largest_BH, batch, head, given_scale, sizes, HOW)
        row += WHO * ROWS
        own_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, S)) + (sizes[1] - sizes[0])
        q, q_free = loaded(q_ring, HOW[3] * turn + WHO)
        given = (q, k_ring, v_ring, own_M, sizes, scale)
        state = _begin(given, HOW, last, count, WHO, TAKES)
        state = _all_steps(state, given, HOW, (first, inner_first, inner_last, last), WHO, TAKES)
        if HAS_ROOM:
            mbarrier.arrive(q_free, count=1)
        sum_MD, largest_M, total_M, count = _last_values(state, v_ring, scale, q.dtype, HOW)
        if HOW[6]:
            sum_MD *= value_scale(largest_BH, batch, head, sizes, HOW)
            largest_M -= HOW[6]
        y = y_smem.index(WHO)
        store(sum_MD, largest_M, total_M, y, y_desc, lse_BHT, sizes, batch, head, row)
        if not HAS_ROOM:
            # The result lies where the queries did.
            tma.store_wait(0)
            mbarrier.arrive(q_free, count=1)
    tma.store_wait(0)
    if TAKES and WHO == 0:
        # As often as the other one passed by.
        wait_for_turn(BARRIER, THREADS)


@gluon.jit(
    do_not_specialize=["num_queries", "num_keys", "left", "right", "num_heads", "together", "heads"]
)
def attend(
    lse_BHT, largest_BH, dealt, q_desc, k_desc, v_desc, y_desc, scale,
    num_queries, num_keys, left, right, num_heads, together, heads,
    GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, TAKES_TURNS: gl.constexpr, HAS_ROOM: gl.constexpr,
    HOLDS: gl.constexpr, HIDES: gl.constexpr, IS_NARROW: gl.constexpr, REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:  # fmt: skip
    """Attend with every tile that is this program's."""
    q_ring = ring_of(q_desc, 2 * GROUPS if AHEAD else GROUPS, 1)
    y_smem = room_for(y_desc, GROUPS) if HAS_ROOM else q_ring[0]
    filled = (q_ring, ring_of(k_desc, STAGES, GROUPS), ring_of(v_desc, STAGES, GROUPS))
    sizes = (num_queries, num_keys, left, right, num_heads, together, heads)
    RAISE: gl.constexpr = RAISED if IS_NARROW else 0
    DEALT: gl.constexpr = dealt is not None
    HOW: gl.constexpr = (N, HAS_LEFT, HAS_RIGHT, GROUPS, HOLDS, GROUP, RAISE, DEALT, HIDES, AHEAD)
    given = (y_desc, lse_BHT, largest_BH, dealt, filled, y_smem, sizes, scale)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, given, HOW, False, HAS_ROOM)),
                (produce, ((q_desc, k_desc, v_desc), filled, dealt, sizes, HOW)),
            ],
            [1],
            [24],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (_consume, (1, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (produce, ((q_desc, k_desc, v_desc), filled, dealt, sizes, HOW)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (_consume, (1, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (_consume, (2, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (produce, ((q_desc, k_desc, v_desc), filled, dealt, sizes, HOW)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
