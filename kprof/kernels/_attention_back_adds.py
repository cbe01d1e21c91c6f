"""Adding up the queries' gradient on Hopper: which tile a program has, in which order, and by whom.

A warp of its own adds, so that nobody who computes waits for it. Where `HOW[4]` asks for it, that
is in the order of programs, tile after tile, so that sums have the same bits in every run. A tile
then waits only for the one before it, which a program with a lower number has, and which has begun
before. It begins with its last block, the other tiles of its head with theirs: so those before it
have hardly anything to do first. Columns of sums lie as `store_spread` leaves them.
"""

from __future__ import annotations

from kprof.kernels._gluon import (
    add_shared_to_global,
    fence_async_shared,
    gl,
    gluon,
    store_spread,
    tell_when_added,
    tma,
    turn_over_to,
    wait_for_turn,
    wait_until_told,
)
from kprof.kernels._tile_order import tile_at
from kprof.kernels._tile_reach import reach_of

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
