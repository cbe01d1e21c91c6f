"""Attention of many queries on Hopper: warpgroups compute side by side, and a warp loads for them.

Two or three of a program take turns, or one of each of two programs share a multiprocessor. While
one warpgroup weighs its scores, the tensor cores multiply for another. Within each, scores of one
block are multiplied beside the values of the block before. B, H, T, D, M and N as in
`_attention_device`; of the M queries of a tile, each warpgroup has 64. Of what is passed on,
`sizes` are queries, keys, what is seen on the left and on the right, all heads, those worked off
together, and heads of a sequence; `HOW` is N, whether there is a left and a right bound, the number
of warpgroups, whether powers are held before the wait for the values of the block before, how many
heads share keys, by what weights are raised (0, unless queries, keys and values are of 8 bits; then
`largest_BH` holds, of each sequence, the largest numbers of heads of queries, of keys, of values),
whether tiles are dealt out by a table, whether anything is hidden: not where every query sees every
key, and keys fill their blocks; and whether there is room for the queries of the next tile.
"""

from __future__ import annotations

from kprof.kernels._attention_results import store
from kprof.kernels._attention_roles import (
    BARRIER,
    RAISED,
    ROWS,
    THREADS,
    add_values,
    each_row,
    hide,
    largest,
    packed,
    place_of,
    produce,
    product_layout,
    score,
    score_scale,
    tile_of,
    turns,
    value_scale,
)
from kprof.kernels._gluon import (
    gl,
    gluon,
    hold,
    mbarrier,
    tma,
    turn_over_to,
    wait_for_turn,
    warpgroup_mma_wait,
)
from kprof.kernels._tile_ring import loaded, ring_of, room_for
from kprof.kernels._tile_scores import parts_of, settle, weigh_scores


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
