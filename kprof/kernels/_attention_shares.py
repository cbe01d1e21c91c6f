"""Attention of many queries on Hopper: which tile is whose, where programs stay."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain

import torch
from torch import Tensor

from kprof.kernels._launch import MOST_CALLS

# What a tile takes beside its blocks of keys, in such blocks: an estimate.
TILE_COST = 1.2
# With more tiles, what is uneven at the end does not matter.
MOST_DEALT = 1 << 14


def heads_together(k: Tensor, group: int, num_heads: int, kept_bytes: int) -> int:
    """Return how many heads are worked off together, so that L2 holds what they read."""
    bytes_of_head = 2 * k.shape[2] * k.shape[3] * k.element_size()
    return min(num_heads, group * max(1, kept_bytes // bytes_of_head))


@lru_cache(MOST_CALLS)
def lengths_of(
    num_queries: int, num_keys: int, rows: int, block: int, left: int | None, right: int | None
) -> tuple[int, ...]:
    """Return how many blocks of keys each tile of queries sees; the kernel counts the same way."""
    found = []
    for first in range(0, num_queries, rows):
        own = first + num_keys - num_queries
        begin = 0 if left is None else max(own - left, 0) // block
        end = num_keys if right is None else min(max(own + rows + right, 0), num_keys)
        found.append(max(-(-end // block) - begin, 1))
    return tuple(found)


@lru_cache(MOST_CALLS)
def programs_for(lengths: tuple[int, ...], num_heads: int, together: int, sms: int) -> int:
    """Return how many programs end soonest, where each takes every n-th tile to and fro.

    That is not always as many as there are multiprocessors: sections of heads, and turns of all
    programs, may fall out of step, and some programs then get the longest tile of each.
    """
    tiles = []
    for first in range(0, num_heads, together):
        width = min(together, num_heads - first)
        tiles += [length + TILE_COST for length in reversed(lengths) for _ in range(width)]
    if len(tiles) <= sms or len(set(tiles)) == 1:
        return min(len(tiles), sms)
    return min(range(sms, sms * 7 // 8, -1), key=lambda count: _longest(tiles, count))


def dealt(
    lengths: tuple[int, ...], num_heads: int, together: int, programs: int
) -> list[list[int]]:
    """Return the places of each program's tiles, dealt to whoever will be free first.

    Sections of heads come one after the other, and in each the longest tiles first.
    """
    free = [(0.0, program) for program in range(programs)]
    found: list[list[int]] = [[] for _ in range(programs)]
    place = 0
    for first in range(0, num_heads, together):
        width = min(together, num_heads - first)
        for length in (one for one in reversed(lengths) for _ in range(width)):
            ends, program = heappop(free)
            found[program].append(place)
            heappush(free, (ends + length + TILE_COST, program))
            place += 1
    return found


# By tiles and device. A captured graph reads from these: none is ever given up.
_tables: dict[Hashable, Tensor] = {}


def table_of(
    lengths: tuple[int, ...], num_heads: int, together: int, programs: int, device: torch.device
) -> Tensor | None:
    """Return where each program's places begin, and the places; None: they are not dealt out.

    Nothing is copied from the host while a graph is captured.
    """
    key, count = (lengths, num_heads, together, programs, device), len(lengths) * num_heads
    if key in _tables or not programs < count <= MOST_DEALT or len(set(lengths)) == 1:
        return _tables.get(key)
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or len(_tables) >= MOST_CALLS:
        return None
    each = dealt(lengths, num_heads, together, programs)
    begins = accumulate(map(len, each), initial=programs + 1)
    # One more: the place of the turn behind the last is asked for, too.
    table = [*begins, *chain(*each), 0]
    _tables[key] = found = torch.tensor(table, dtype=torch.int32, device=device)
    return found


def _longest(tiles: list[float], count: int) -> float:
    """Return how long the program works that works longest."""
    totals = [0.0] * count
    for turn, first in enumerate(range(0, len(tiles), count)):
        places = range(count - 1, -1, -1) if turn % 2 else range(count)
        for place, length in zip(places, tiles[first : first + count], strict=False):
            totals[place] += length
    return max(totals)
