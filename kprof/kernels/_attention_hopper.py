"""Attention of many queries on Hopper: a warp loads, two or three warpgroups take turns.

While one warpgroup weighs its scores, the tensor cores multiply for another. Within each, scores
of one block are multiplied beside the values of the block before. B, H, T, D, M and N as in
`_attention_device`; of the M queries of a tile, each warpgroup has 64. Of what is passed on,
`sizes` are queries, keys, what is seen on the left and on the right, all heads, those worked off
together, and heads of a sequence; `HOW` is N, whether there is a left and a right bound, the number
of warpgroups, and whether powers are held before the wait for the values before them.
"""

from __future__ import annotations

from kprof.kernels._attention_results import store
from kprof.kernels._gluon import (
    gl,
    gluon,
    hold,
    mbarrier,
    pack,
    tma,
    turn_over_to,
    unpack,
    wait_for_turn,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kprof.kernels._tile_order import tile_at, turn_of, turns_of
from kprof.kernels._tile_reach import is_in_reach, reach_of
from kprof.kernels._tile_ring import load, loaded, ring_of, room_for
from kprof.kernels._tile_scores import largest_of, parts_of, weigh_scores

# Rows of a warpgroup, and threads of two.
ROWS = gl.constexpr(64)
THREADS = gl.constexpr(256)
# The first of the hardware's barriers that is the warpgroups' own; Triton counts from 0.
BARRIER = gl.constexpr(9)


@gluon.jit
def _turns(sizes, HOW: gl.constexpr):
    """Return how many tiles this program has."""
    num_tiles = gl.cdiv(sizes[0], ROWS * HOW[3]) * sizes[4]
    return turns_of(num_tiles, gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _tile(turn, sizes, HOW: gl.constexpr):
    """Return batch, head and first row of a tile, and the blocks of keys between which masks end.

    There is one block at least, and the last one is always masked.
    """
    N: gl.constexpr = HOW[0]
    M: gl.constexpr = ROWS * HOW[3]
    place = turn_of(turn, gl.program_id(0), gl.num_programs(0))
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
def _produce(descs, rings, sizes, HOW: gl.constexpr, GROUP: gl.constexpr):
    """Load queries, keys and values in the order in which they are waited for."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring = rings
    N: gl.constexpr = HOW[0]
    count = 0
    for turn in range(_turns(sizes, HOW)):
        batch, head, row, first, _, _, last = _tile(turn, sizes, HOW)
        key_head = head // GROUP
        load(q_desc, q_ring, HOW[3] * turn, batch, head, row)
        load(k_desc, k_ring, count, batch, key_head, last * N)
        for who in gl.static_range(1, HOW[3]):
            load(q_desc, q_ring, HOW[3] * turn + who, batch, head, row + who * ROWS)
        for back in range(1, last - first + 1):
            load(k_desc, k_ring, count + back, batch, key_head, (last - back) * N)
            load(v_desc, v_ring, count + back - 1, batch, key_head, (last - back + 1) * N)
        count += last - first + 1
        load(v_desc, v_ring, count - 1, batch, key_head, first * N)


@gluon.jit
def _score(q, k, WHO: gl.constexpr, TAKES_TURNS: gl.constexpr):
    """Begin to multiply queries and keys, when it is this warpgroup's turn."""
    N: gl.constexpr = k.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    if TAKES_TURNS:
        wait_for_turn(BARRIER + WHO, THREADS)
    nothing = gl.zeros([ROWS, N], gl.float32, S)
    return warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _hide(score_MN, block, own_M, sizes, HOW: gl.constexpr):
    """Return scores that are -inf where a row does not see a key."""
    N: gl.constexpr = HOW[0]
    key_N = block * N + gl.arange(0, N, gl.SliceLayout(0, score_MN.type.layout))
    is_seen_MN = is_in_reach(own_M, key_N, sizes[1], sizes[2], sizes[3], HOW[1], HOW[2])
    return gl.where(is_seen_MN, score_MN, float("-inf"))


@gluon.jit
def _add_values(weight_MN, v, sum_MD, DTYPE: gl.constexpr):
    """Begin to add the weighted values."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sum_MD.type.layout, 2)
    weight = unpack(weight_MN, DTYPE, OPERAND)
    return warpgroup_mma(weight, v, sum_MD, is_async=True)


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
    sum_MD, largest_M, total_M4, weight_MN, count = state
    for back in range(end - start):
        count += 1
        k, k_free = loaded(k_ring, count)
        score_MN = _score(q, k, WHO, TAKES)
        v, v_free = loaded(v_ring, count - 1)
        sum_MD = _add_values(weight_MN, v, sum_MD, q.dtype)
        if TAKES:
            turn_over_to(BARRIER + (WHO + 1) % HOW[3], THREADS)
        score_MN = warpgroup_mma_wait(1, [score_MN])
        mbarrier.arrive(k_free, count=1)
        if IS_MASKED:
            score_MN = _hide(score_MN, end - 1 - back, own_M, sizes, HOW)
        weight_MN, shrink_M, largest_M = _weigh(score_MN, largest_M, scale)
        part_M4 = parts_of(weight_MN)
        total_M4 = total_M4 * _each_row(shrink_M, part_M4) + part_M4
        weight_MN = pack(weight_MN, q.dtype)
        if HOW[4]:
            hold(total_M4)
        sum_MD = warpgroup_mma_wait(0, [sum_MD])
        mbarrier.arrive(v_free, count=1)
        sum_MD *= _each_row(shrink_M, sum_MD)
    return sum_MD, largest_M, total_M4, weight_MN, count


@gluon.jit
def _weigh(score_MN, largest_M, scale):
    """Return the weights of scores, how sums so far shrink, and the largest scores."""
    top_M = gl.convert_layout(largest_of(score_MN), gl.SliceLayout(1, score_MN.type.layout))
    return weigh_scores(score_MN, top_M, largest_M, scale)


@gluon.jit
def _each_row(x_M, like_MN):
    """Return a number of each row as a column beside another tile."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, like_MN.type.layout))[:, None]


@gluon.jit
def _begin(given, HOW: gl.constexpr, block, count, WHO: gl.constexpr, TAKES: gl.constexpr):
    """Return the state after the last block of keys, without its values."""
    q, k_ring, own_M, sizes, scale = given[0], given[1], given[3], given[4], given[5]
    k, k_free = loaded(k_ring, count)
    score_MN = _score(q, k, WHO, TAKES)
    if TAKES:
        turn_over_to(BARRIER + (WHO + 1) % HOW[3], THREADS)
    score_MN = warpgroup_mma_wait(0, [score_MN])
    mbarrier.arrive(k_free, count=1)
    score_MN = _hide(score_MN, block, own_M, sizes, HOW)
    nothing_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_MN.type.layout))
    weight_MN, _, largest_M = _weigh(score_MN, nothing_M, scale)
    D: gl.constexpr = q.shape[1]
    sum_MD = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    return sum_MD, largest_M, parts_of(weight_MN), pack(weight_MN, q.dtype), count


@gluon.jit
def _consume(
    WHO: gl.constexpr,
    common,
    HOW: gl.constexpr,
    TAKES: gl.constexpr,
    HAS_ROOM: gl.constexpr,
):
    """Attend with 64 rows of each tile."""
    y_desc, lse_BHT, rings, sizes, scale = common
    q_ring, k_ring, v_ring, y_smem = rings
    N: gl.constexpr = HOW[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    count = 0
    if TAKES and HOW[3] - 1 == WHO:
        turn_over_to(BARRIER, THREADS)
    for turn in range(_turns(sizes, HOW)):
        batch, head, row, first, inner_first, inner_last, last = _tile(turn, sizes, HOW)
        row += WHO * ROWS
        own_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, S)) + (sizes[1] - sizes[0])
        q, q_free = loaded(q_ring, HOW[3] * turn + WHO)
        given = (q, k_ring, v_ring, own_M, sizes, scale)
        state = _begin(given, HOW, last, count, WHO, TAKES)
        state = _steps(state, given, HOW, inner_last, last, WHO, TAKES, True)
        state = _steps(state, given, HOW, inner_first, inner_last, WHO, TAKES, False)
        if HOW[1]:
            state = _steps(state, given, HOW, first, inner_first, WHO, TAKES, True)
        sum_MD, largest_M, total_M4, weight_MN, count = state
        if HAS_ROOM:
            mbarrier.arrive(q_free, count=1)
        v, v_free = loaded(v_ring, count)
        sum_MD = warpgroup_mma_wait(0, [_add_values(weight_MN, v, sum_MD, q.dtype)])
        mbarrier.arrive(v_free, count=1)
        count += 1
        y = y_smem.index(WHO)
        total_M = gl.sum(total_M4, 1)
        store(sum_MD, largest_M * scale, total_M, y, y_desc, lse_BHT, sizes, batch, head, row)
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
    lse_BHT,
    q_desc,
    k_desc,
    v_desc,
    y_desc,
    scale,
    num_queries,
    num_keys,
    left,
    right,
    num_heads,
    together,
    heads,
    GROUP: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
    HAS_ROOM: gl.constexpr,
    HOLDS: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """Attend with every tile that is this program's."""
    q_ring = ring_of(q_desc, GROUPS, 1)
    y_smem = q_ring[0]
    if HAS_ROOM:
        y_smem = room_for(y_desc, GROUPS)
    filled = (q_ring, ring_of(k_desc, STAGES, GROUPS), ring_of(v_desc, STAGES, GROUPS))
    rings = (filled[0], filled[1], filled[2], y_smem)
    sizes = (num_queries, num_keys, left, right, num_heads, together, heads)
    HOW: gl.constexpr = (N, HAS_LEFT, HAS_RIGHT, GROUPS, HOLDS)
    given = (y_desc, lse_BHT, rings, sizes, scale)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (_consume, (1, given, HOW, TAKES_TURNS, HAS_ROOM)),
                (_produce, ((q_desc, k_desc, v_desc), filled, sizes, HOW, GROUP)),
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
                (_produce, ((q_desc, k_desc, v_desc), filled, sizes, HOW, GROUP)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
