"""The Hopper kernel of attention of many queries, forward: warp-specialised, in Gluon.

y = softmax(scale * q k') v and the log-sum-exp, launched by `_hopper`. CTAs are persistent. A
producer warp loads queries, keys and values by TMA; one to three consumer warpgroups have 64
queries of a tile each. With ping-pong, one warpgroup computes its softmax while the tensor cores
multiply for another; else a second CTA on the SM fills them. Within a warpgroup, the scores of one
block overlap with the values of the block before. Results go from registers through shared memory,
by TMA.

q, k and v are of 16 bits, or FP8 with one scale a head. FP8 values lie as the tensor cores want
them: columns first, keys in the order of a thread's weights (`pack_fp8`).

Order: configuration, tile scheduler, FP8 scales, producer, consumer, kernel.

B batch, H heads, T queries of a sequence, D columns of a head, N keys of a block, M queries of a
tile.
"""

from __future__ import annotations

from typing import NamedTuple

from kprof.kernels.tiles.gluon import (
    fence_async_shared,
    gl,
    gluon,
    hold,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    pack,
    pack_fp8,
    tma,
    unpack,
    unpack_fp8,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kprof.kernels.tiles.key_range import (
    is_visible,
    key_ranges,
    num_snake_tiles,
    snake_tile,
    tile_at,
)
from kprof.kernels.tiles.online_softmax import (
    finish,
    partial_sums,
    raise_max,
    row_max,
    settle,
    weigh_scores,
)
from kprof.kernels.tiles.pipeline import consumer_wait, pipeline_of, producer_load, room_for

# Queries of a warpgroup, and threads of two warpgroups.
ROWS = gl.constexpr(64)
THREADS = gl.constexpr(256)
# The first named barrier of the warpgroups; Triton uses those from 0.
BARRIER = gl.constexpr(9)
# FP8 weights are multiplied by two to this power: at most 1, many would be rounded to 0.
FP8_EXPONENT = gl.constexpr(8)
# The largest e4m3 number, and the least magnitude that a head is scaled by.
FP8_MAX = gl.constexpr(448.0)
MIN_AMAX = gl.constexpr(1e-12)


class Config(NamedTuple):
    """Constants of the kernel."""

    N: gl.constexpr
    """Keys of a block."""
    HAS_LEFT: gl.constexpr
    """Whether a window bounds the keys before a query's own."""
    HAS_RIGHT: gl.constexpr
    """Whether causality or a window bounds those after it."""
    WARPGROUPS: gl.constexpr
    """Consumers; each has 64 queries of the tile."""
    EXP_BEFORE_WAIT: gl.constexpr
    """Whether powers are computed before the wait for the previous block's values."""
    GROUP: gl.constexpr
    """Query heads that share a key head."""
    EXPONENT: gl.constexpr
    """Weights are multiplied by two to this power; 0 unless inputs are FP8."""
    HAS_TABLE: gl.constexpr
    """Whether a table assigns the tiles to CTAs."""
    IS_MASKED: gl.constexpr
    """Whether any block needs a mask: bounds, or keys that don't fill their last block."""
    PREFETCHES_Q: gl.constexpr
    """Whether there is room for the queries of the next tile."""


class Sizes(NamedTuple):
    """Lengths, the window, and heads."""

    num_queries: gl.tensor
    num_keys: gl.tensor
    left: gl.tensor
    right: gl.tensor
    num_heads: gl.tensor
    """Of all sequences."""
    section: gl.tensor
    """Heads whose keys share L2."""
    heads: gl.tensor
    """Of a sequence."""


@gluon.jit
def tiles_of_cta(table, sizes, CONFIG: gl.constexpr):
    """Return how many tiles this CTA has, and where its entries of the table begin."""
    if CONFIG.HAS_TABLE:
        begin = gl.load(table + gl.program_id(0))
        return gl.load(table + gl.program_id(0) + 1) - begin, begin
    else:  # noqa: RET505
        num_tiles = gl.cdiv(sizes.num_queries, ROWS * CONFIG.WARPGROUPS) * sizes.num_heads
        return num_snake_tiles(num_tiles, gl.program_id(0), gl.num_programs(0)), 0


@gluon.jit
def tile_index(tile, begin, table, CONFIG: gl.constexpr):
    """Return the index of this CTA's n-th tile; behind its last one, any number."""
    if CONFIG.HAS_TABLE:
        return gl.load(table + begin + tile)
    else:  # noqa: RET505
        return snake_tile(tile, gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_of(place, sizes, CONFIG: gl.constexpr):
    """Return batch, head and first row of a tile, then four blocks of keys.

    They are the first, the first and the last without a mask, and the last. There is at least one
    block, and the last one is always masked.
    """
    N: gl.constexpr = CONFIG.N
    M: gl.constexpr = ROWS * CONFIG.WARPGROUPS
    block, head = tile_at(
        place, gl.cdiv(sizes.num_queries, M), sizes.num_heads, sizes.section, CONFIG.HAS_RIGHT
    )
    own = block * M + sizes.num_keys - sizes.num_queries
    begin, inner_begin, inner_end, end = key_ranges(
        own, M, sizes.num_keys, sizes.left, sizes.right, N, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT
    )
    first = begin // N
    last = gl.maximum(gl.cdiv(end, N) - 1, first)
    inner_last = gl.minimum(inner_end // N, last)
    inner_first = gl.minimum(inner_begin // N, inner_last)
    return head // sizes.heads, head % sizes.heads, block * M, first, inner_first, inner_last, last


@gluon.jit
def amax_at(amax_BH, batch, head, sizes, CONFIG: gl.constexpr):
    """Return the addresses of the largest magnitudes of a head's queries, keys and values."""
    key_heads = sizes.heads // CONFIG.GROUP
    own = amax_BH + batch * (sizes.heads + 2 * key_heads)
    keys = own + sizes.heads + head // CONFIG.GROUP
    return own + head, keys, keys + key_heads


@gluon.jit
def score_scale(amax_BH, batch, head, scale, sizes, CONFIG: gl.constexpr):
    """Return the scale of the scores; for FP8, times those of queries and keys."""
    if CONFIG.EXPONENT:
        queries, keys, _ = amax_at(amax_BH, batch, head, sizes, CONFIG)
        q_most, k_most = gl.load(queries), gl.load(keys)
        # NaN stays NaN.
        scale *= gl.where(q_most < MIN_AMAX, MIN_AMAX, q_most) * (1 / FP8_MAX)
        scale *= gl.where(k_most < MIN_AMAX, MIN_AMAX, k_most) * (1 / FP8_MAX)
    return scale


@gluon.jit
def value_scale(amax_BH, batch, head, sizes, CONFIG: gl.constexpr):
    """Return the scale of FP8 values."""
    v_most = gl.load(amax_at(amax_BH, batch, head, sizes, CONFIG)[2])
    return gl.where(v_most < MIN_AMAX, MIN_AMAX, v_most) * (1 / FP8_MAX)


@gluon.jit
def produce(descs, pipes, table, sizes, CONFIG: gl.constexpr):
    """Load queries, keys and values in the order in which consumers wait for them."""
    if CONFIG.PREFETCHES_Q:
        _produce_ahead(descs, pipes, table, sizes, CONFIG)
    else:
        _produce(descs, pipes, table, sizes, CONFIG)


@gluon.jit
def _produce(descs, pipes, table, sizes, CONFIG: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    q_pipe, k_pipe, v_pipe = pipes
    N: gl.constexpr = CONFIG.N
    V: gl.constexpr = v_desc.block_type.shape[2]
    count = 0
    num_tiles, begin = tiles_of_cta(table, sizes, CONFIG)
    place = tile_index(0, begin, table, CONFIG)
    for tile in range(num_tiles):
        batch, head, row, first, _, _, last = tile_of(place, sizes, CONFIG)
        place = tile_index(tile + 1, begin, table, CONFIG)
        key_head = head // CONFIG.GROUP
        producer_load(q_desc, q_pipe, CONFIG.WARPGROUPS * tile, batch, head, row)
        producer_load(k_desc, k_pipe, count, batch, key_head, last * N)
        for wg in gl.static_range(1, CONFIG.WARPGROUPS):
            producer_load(
                q_desc, q_pipe, CONFIG.WARPGROUPS * tile + wg, batch, head, row + wg * ROWS
            )
        for back in range(1, last - first + 1):
            producer_load(k_desc, k_pipe, count + back, batch, key_head, (last - back) * N)
            producer_load(v_desc, v_pipe, count + back - 1, batch, key_head, (last - back + 1) * V)
        count += last - first + 1
        producer_load(v_desc, v_pipe, count - 1, batch, key_head, first * V)


@gluon.jit
def _produce_ahead(descs, pipes, table, sizes, CONFIG: gl.constexpr):
    """Load likewise, with room for the queries of the next tile.

    The next tile's first keys come before the last values of this one, as keys always come before
    the values of the block before. Its queries come after those values.
    """
    q_desc, k_desc, v_desc = descs
    q_pipe, k_pipe, v_pipe = pipes
    N: gl.constexpr = CONFIG.N
    V: gl.constexpr = v_desc.block_type.shape[2]
    count = 0
    num_tiles, begin = tiles_of_cta(table, sizes, CONFIG)
    place = tile_index(0, begin, table, CONFIG)
    last_batch, last_head, last_row = 0, 0, 0
    for tile in range(num_tiles):
        batch, head, row, first, _, _, last = tile_of(place, sizes, CONFIG)
        place = tile_index(tile + 1, begin, table, CONFIG)
        key_head = head // CONFIG.GROUP
        producer_load(k_desc, k_pipe, count, batch, key_head, last * N)
        if tile > 0:
            producer_load(v_desc, v_pipe, count - 1, last_batch, last_head, last_row)
        for wg in gl.static_range(CONFIG.WARPGROUPS):
            producer_load(
                q_desc, q_pipe, CONFIG.WARPGROUPS * tile + wg, batch, head, row + wg * ROWS
            )
        for back in range(1, last - first + 1):
            producer_load(k_desc, k_pipe, count + back, batch, key_head, (last - back) * N)
            producer_load(v_desc, v_pipe, count + back - 1, batch, key_head, (last - back + 1) * V)
        count += last - first + 1
        last_batch, last_head, last_row = batch, key_head, first * V
    if num_tiles > 0:
        producer_load(v_desc, v_pipe, count - 1, last_batch, last_head, last_row)


@gluon.constexpr_function
def product_layout(columns, CONFIG):
    """Return the register layout of a warpgroup's GEMM result of so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if CONFIG.EXPONENT else 16])


@gluon.jit
def score(q, k, WG: gl.constexpr, IS_PINGPONG: gl.constexpr, CONFIG: gl.constexpr):
    """Begin to multiply queries and keys; with ping-pong, in this warpgroup's turn."""
    N: gl.constexpr = k.shape[0]
    S: gl.constexpr = product_layout(N, CONFIG)
    if IS_PINGPONG:
        named_barrier_sync(BARRIER + WG, THREADS)
    zeros = gl.zeros([ROWS, N], gl.float32, S)
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def mask_scores(score_MN, block, own_M, sizes, CONFIG: gl.constexpr):
    """Return the scores, -inf where a row does not see a key."""
    N: gl.constexpr = CONFIG.N
    key_N = block * N + gl.arange(0, N, gl.SliceLayout(0, score_MN.type.layout))
    is_seen_MN = is_visible(
        own_M, key_N, sizes.num_keys, sizes.left, sizes.right, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT
    )
    return gl.where(is_seen_MN, score_MN, float("-inf"))


@gluon.jit
def raise_row_max(score_MN, largest_M, scale):
    """Return the factor for sums so far, and the row maxima with these scores."""
    top_M = gl.convert_layout(row_max(score_MN), gl.SliceLayout(1, score_MN.type.layout))
    return raise_max(top_M, largest_M, scale)


@gluon.jit
def pack_weights(weight_MN, DTYPE: gl.constexpr, IS_FP8: gl.constexpr):
    """Return weights in the packed form that a loop carries."""
    if IS_FP8:
        return pack_fp8(weight_MN)
    else:  # noqa: RET505
        return pack(weight_MN, DTYPE)


@gluon.jit
def add_values(weight_MN, v, sum_MD, DTYPE: gl.constexpr, IS_FP8: gl.constexpr):
    """Begin to add the weighted values to the sums; in FP8, to zeros.

    The tensor cores keep about 14 bits of a sum of FP8 products, so the caller adds the blocks up
    in float32.
    """
    D: gl.constexpr = sum_MD.shape[1]
    L: gl.constexpr = sum_MD.type.layout
    if IS_FP8:
        weight = unpack_fp8(weight_MN, gl.DotOperandLayout(0, L, 4))
        zeros = gl.zeros([ROWS, D], gl.float32, L)
        return warpgroup_mma(weight, v.permute([1, 0]), zeros, use_acc=False, is_async=True)
    else:  # noqa: RET505
        weight = unpack(weight_MN, DTYPE, gl.DotOperandLayout(0, L, 2))
        return warpgroup_mma(weight, v, sum_MD, is_async=True)


@gluon.jit
def as_column(x_M, like_MN):
    """Return a number per row as a column in the layout of another tile."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, like_MN.type.layout))[:, None]


# Converts a log-sum-exp of base 2 to the natural one.
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store_output(sum_MD, largest_M, total_M, y, y_desc, lse_BHT, sizes, batch, head, row):
    """Store the results of these rows through shared memory."""
    R: gl.constexpr = gl.SliceLayout(1, sum_MD.type.layout)
    largest_M, total_M = gl.convert_layout(largest_M, R), gl.convert_layout(total_M, R)
    mean_MD, lse_M = finish(sum_MD, largest_M, total_M)
    tma.store_wait(0)
    y.reshape([sum_MD.shape[0], sum_MD.shape[1]]).store(mean_MD.to(y.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [batch, head, row, 0], y)
    row_M = row + gl.arange(0, sum_MD.shape[0], R)
    lse_at_M = (batch * sizes.heads + head).to(gl.int64) * sizes.num_queries + row_M
    gl.store(lse_BHT + lse_at_M, lse_M * LN_2, row_M < sizes.num_queries)


@gluon.jit
def _attend_blocks(
    state,
    given,
    CONFIG: gl.constexpr,
    start,
    end,
    WG: gl.constexpr,
    IS_PINGPONG: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Process the blocks of keys from `end` - 1 down to `start`, and return the state."""
    q, k_pipe, v_pipe, own_M, sizes, scale = given
    sum_MD, largest_M, total_M4, weight_MN, shrink_M, count = state
    IS_FP8: gl.constexpr = CONFIG.EXPONENT != 0
    for back in range(end - start):
        count += 1
        k, k_free = consumer_wait(k_pipe, count)
        score_MN = score(q, k, WG, IS_PINGPONG, CONFIG)
        v, v_free = consumer_wait(v_pipe, count - 1)
        added_MD = add_values(weight_MN, v, sum_MD, q.dtype, IS_FP8)
        if IS_PINGPONG:
            named_barrier_arrive(BARRIER + (WG + 1) % CONFIG.WARPGROUPS, THREADS)
        score_MN = warpgroup_mma_wait(1, [score_MN])
        mbarrier.arrive(k_free, count=1)
        if IS_MASKED:
            score_MN = mask_scores(score_MN, end - 1 - back, own_M, sizes, CONFIG)
        next_M, largest_M = raise_row_max(score_MN, largest_M, scale)
        total_M4 *= as_column(next_M, total_M4)
        if not CONFIG.EXP_BEFORE_WAIT:
            added_MD = warpgroup_mma_wait(0, [added_MD])
            mbarrier.arrive(v_free, count=1)
        weight_MN = weigh_scores(score_MN, largest_M, scale, CONFIG.EXPONENT)
        total_M4 += partial_sums(weight_MN)
        weight_MN = pack_weights(weight_MN, q.dtype, IS_FP8)
        if CONFIG.EXP_BEFORE_WAIT:
            hold(total_M4)
            added_MD = warpgroup_mma_wait(0, [added_MD])
            mbarrier.arrive(v_free, count=1)
        if IS_FP8:
            sum_MD = sum_MD * as_column(shrink_M, sum_MD) + added_MD
        else:
            sum_MD = added_MD * as_column(next_M, added_MD)
        shrink_M = next_M
    return sum_MD, largest_M, total_M4, weight_MN, shrink_M, count


@gluon.jit
def _attend_all_blocks(
    state, given, CONFIG: gl.constexpr, blocks, WG: gl.constexpr, IS_PINGPONG: gl.constexpr
):
    """Process all blocks but the last one, masked where that is needed."""
    first, inner_first, inner_last, last = blocks
    if CONFIG.IS_MASKED:
        state = _attend_blocks(state, given, CONFIG, inner_last, last, WG, IS_PINGPONG, True)
        state = _attend_blocks(
            state, given, CONFIG, inner_first, inner_last, WG, IS_PINGPONG, False
        )
    else:
        state = _attend_blocks(state, given, CONFIG, first, last, WG, IS_PINGPONG, False)
    if CONFIG.HAS_LEFT:
        state = _attend_blocks(state, given, CONFIG, first, inner_first, WG, IS_PINGPONG, True)
    return state


@gluon.jit
def _first_block(
    given, CONFIG: gl.constexpr, block, count, WG: gl.constexpr, IS_PINGPONG: gl.constexpr
):
    """Return the state after the scores of the last block, whose values are still to be added."""
    q, k_pipe, own_M, sizes, scale = given[0], given[1], given[3], given[4], given[5]
    k, k_free = consumer_wait(k_pipe, count)
    score_MN = score(q, k, WG, IS_PINGPONG, CONFIG)
    if IS_PINGPONG:
        named_barrier_arrive(BARRIER + (WG + 1) % CONFIG.WARPGROUPS, THREADS)
    score_MN = warpgroup_mma_wait(0, [score_MN])
    mbarrier.arrive(k_free, count=1)
    if CONFIG.IS_MASKED:
        score_MN = mask_scores(score_MN, block, own_M, sizes, CONFIG)
    empty_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_MN.type.layout))
    shrink_M, largest_M = raise_row_max(score_MN, empty_M, scale)
    weight_MN = weigh_scores(score_MN, largest_M, scale, CONFIG.EXPONENT)
    D: gl.constexpr = q.shape[1]
    sum_MD = gl.zeros([ROWS, D], gl.float32, product_layout(D, CONFIG))
    weight = pack_weights(weight_MN, q.dtype, CONFIG.EXPONENT != 0)
    return sum_MD, largest_M, partial_sums(weight_MN), weight, shrink_M, count


@gluon.jit
def _last_values(state, v_pipe, scale, DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    """Add the values that are left; return sums, scaled row maxima, totals and the block count."""
    sum_MD, largest_M, total_M4, weight_MN, shrink_M, count = state
    v, v_free = consumer_wait(v_pipe, count)
    added_MD = add_values(weight_MN, v, sum_MD, DTYPE, CONFIG.EXPONENT != 0)
    added_MD = warpgroup_mma_wait(0, [added_MD])
    mbarrier.arrive(v_free, count=1)
    total_M = gl.convert_layout(gl.sum(total_M4, 1), largest_M.type.layout)
    if CONFIG.EXPONENT:
        added_MD += sum_MD * as_column(shrink_M, sum_MD)
    else:
        total_M = settle(total_M, largest_M, scale, DTYPE)
    return added_MD, largest_M * scale, total_M, count + 1


@gluon.jit
def _consume(
    WG: gl.constexpr,
    common,
    CONFIG: gl.constexpr,
    IS_PINGPONG: gl.constexpr,
    HAS_OUTPUT_BUFFER: gl.constexpr,
):
    """Compute 64 rows of each tile of this CTA."""
    y_desc, lse_BHT, amax_BH, table, pipes, y_smem, sizes, given_scale = common
    q_pipe, k_pipe, v_pipe = pipes
    N: gl.constexpr = CONFIG.N
    S: gl.constexpr = product_layout(N, CONFIG)
    count = 0
    if IS_PINGPONG and CONFIG.WARPGROUPS - 1 == WG:
        named_barrier_arrive(BARRIER, THREADS)
    num_tiles, begin = tiles_of_cta(table, sizes, CONFIG)
    place = tile_index(0, begin, table, CONFIG)
    for tile in range(num_tiles):
        batch, head, row, first, inner_first, inner_last, last = tile_of(place, sizes, CONFIG)
        # Its load overlaps with this tile.
        place = tile_index(tile + 1, begin, table, CONFIG)
        scale = score_scale(amax_BH, batch, head, given_scale, sizes, CONFIG)
        row += WG * ROWS
        own_M = (
            row + gl.arange(0, ROWS, gl.SliceLayout(1, S)) + (sizes.num_keys - sizes.num_queries)
        )
        q, q_free = consumer_wait(q_pipe, CONFIG.WARPGROUPS * tile + WG)
        given = (q, k_pipe, v_pipe, own_M, sizes, scale)
        state = _first_block(given, CONFIG, last, count, WG, IS_PINGPONG)
        state = _attend_all_blocks(
            state, given, CONFIG, (first, inner_first, inner_last, last), WG, IS_PINGPONG
        )
        if HAS_OUTPUT_BUFFER:
            mbarrier.arrive(q_free, count=1)
        sum_MD, largest_M, total_M, count = _last_values(state, v_pipe, scale, q.dtype, CONFIG)
        if CONFIG.EXPONENT:
            sum_MD *= value_scale(amax_BH, batch, head, sizes, CONFIG)
            largest_M -= CONFIG.EXPONENT
        y = y_smem.index(WG)
        store_output(sum_MD, largest_M, total_M, y, y_desc, lse_BHT, sizes, batch, head, row)
        if not HAS_OUTPUT_BUFFER:
            # The result is in the buffer of the queries.
            tma.store_wait(0)
            mbarrier.arrive(q_free, count=1)
    tma.store_wait(0)
    if IS_PINGPONG and WG == 0:
        # Each arrival needs its sync.
        named_barrier_sync(BARRIER, THREADS)


@gluon.jit(
    do_not_specialize=["num_queries", "num_keys", "left", "right", "num_heads", "section", "heads"]
)
def attention_forward_hopper_kernel(
    lse_BHT, amax_BH, table, q_desc, k_desc, v_desc, y_desc, scale,
    num_queries, num_keys, left, right, num_heads, section, heads,
    GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, IS_PINGPONG: gl.constexpr,
    HAS_OUTPUT_BUFFER: gl.constexpr, EXP_BEFORE_WAIT: gl.constexpr, IS_MASKED: gl.constexpr,
    IS_FP8: gl.constexpr, REGISTERS: gl.constexpr, PREFETCHES_Q: gl.constexpr,
) -> None:  # fmt: skip
    """Compute every tile of this CTA."""
    q_pipe = pipeline_of(q_desc, 2 * WARPGROUPS if PREFETCHES_Q else WARPGROUPS, 1)
    y_smem = room_for(y_desc, WARPGROUPS) if HAS_OUTPUT_BUFFER else q_pipe[0]
    pipes = (
        q_pipe,
        pipeline_of(k_desc, STAGES, WARPGROUPS),
        pipeline_of(v_desc, STAGES, WARPGROUPS),
    )
    sizes = Sizes(num_queries, num_keys, left, right, num_heads, section, heads)
    CONFIG: gl.constexpr = Config(
        N,
        HAS_LEFT,
        HAS_RIGHT,
        WARPGROUPS,
        EXP_BEFORE_WAIT,
        GROUP,
        FP8_EXPONENT if IS_FP8 else 0,
        table is not None,
        IS_MASKED,
        PREFETCHES_Q,
    )
    given = (y_desc, lse_BHT, amax_BH, table, pipes, y_smem, sizes, scale)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, given, CONFIG, False, HAS_OUTPUT_BUFFER)),
                (produce, ((q_desc, k_desc, v_desc), pipes, table, sizes, CONFIG)),
            ],
            [1],
            [24],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, given, CONFIG, IS_PINGPONG, HAS_OUTPUT_BUFFER)),
                (_consume, (1, given, CONFIG, IS_PINGPONG, HAS_OUTPUT_BUFFER)),
                (produce, ((q_desc, k_desc, v_desc), pipes, table, sizes, CONFIG)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, given, CONFIG, IS_PINGPONG, HAS_OUTPUT_BUFFER)),
                (_consume, (1, given, CONFIG, IS_PINGPONG, HAS_OUTPUT_BUFFER)),
                (_consume, (2, given, CONFIG, IS_PINGPONG, HAS_OUTPUT_BUFFER)),
                (produce, ((q_desc, k_desc, v_desc), pipes, table, sizes, CONFIG)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
