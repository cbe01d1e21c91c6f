"""What the warps of attention for Hopper do: which tile is whose, loading, and single products.

Words and letters as in `_attention_hopper`. Queries, keys and values are of 16 bits, or of 8, with
one scale for each head. Of 8 bits, values lie as the tensor cores want them: columns first, and
keys in the order in which a thread holds their weights.
"""

from __future__ import annotations

from kprof.kernels._gluon import (
    gl,
    gluon,
    pack,
    pack_narrow,
    unpack,
    unpack_narrow,
    wait_for_turn,
    warpgroup_mma,
)
from kprof.kernels._tile_order import tile_at, turn_of, turns_of
from kprof.kernels._tile_reach import is_in_reach, reach_of
from kprof.kernels._tile_ring import load
from kprof.kernels._tile_scores import largest_of, raise_largest

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
