"""Attention of many queries on Hopper, on the host: schedules, and descriptors of memory.

Programs stay, one on each multiprocessor, and work one tile off after the other.

Attention of many queries on Hopper: which tile is whose, where programs stay.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.attention._triton import LOG2_E, Options, empty_results, run_tiled
from kprof.kernels.runtime.launcher import IS_INTERPRETED, MOST_CALLS, Launcher
from kprof.kernels.runtime.operator import define
from kprof.kernels.runtime.rows import num_sms

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


HOPPER = 9
ALIGNMENT = 16
# Of a warpgroup.
ROWS = 64
# Registers of a thread, by warpgroups that compute: as compiled for, and of those that compute. Two
# programs with one each fill a multiprocessor.
REGISTERS = {1: (128, 232), 2: (168, 240), 3: (128, 160)}
# Of L2, for the keys and values of heads that are worked off together (of gradients, for queries
# and theirs); of those with fewer queries than many, where what else there is takes as much; and of
# those where all tiles are as long.
KEPT_BYTES = 32 << 20
SHORT_KEPT_BYTES = 16 << 20
FEW_KEPT_BYTES = 4 << 20
# Queries from which on three warpgroups are faster for heads of 64: where later keys are not seen,
# and where all are, of those that were measured (of 197, say, tiles of 192 would be half empty).
# And, by columns of a head, those from which on it pays to look up whose a tile is.
MANY_QUERIES, SOME_QUERIES = 4_096, 512
DEALT_QUERIES = {64: 1_024, 128: 2_048, 256: 2_048}
# And those up to which queries of the next tile come early, by what an H100 measured: where later
# keys are not seen, and where all are. For heads of 256 there is no room.
AHEAD_QUERIES = {64: (512, 512), 128: (512, 1_024), 256: (0, 0)}
# Queries and keys of a sequence up to which, where later ones are not seen, heads of 64 have
# programs of one warpgroup: tiles have so few blocks that their ends need others beside them.
FEW_KEYS = 1_024


@dataclass(frozen=True)
class Ring:
    """Keys of a block, blocks in flight, whether warpgroups take turns, and room for results."""

    keys: int
    stages: int
    takes_turns: bool = True
    has_room: bool = True
    groups: int = 2
    """Warpgroups that compute."""
    holds: bool = True
    """Whether powers are computed before the wait for the values of the block before."""
    kept_bytes: int = KEPT_BYTES
    is_dealt: bool = False
    """Whether a table says which tiles are whose; else each takes every n-th, to and fro."""
    programs: int = 1
    """Of a multiprocessor."""
    looks_ahead: bool = False
    """Whether the queries of the next tile come while this one is worked off.

    Results have room then in any case.
    """


def ring_for(dim: int, num_queries: int, num_keys: int, sees_all: bool) -> Ring:
    """Return the schedule that was the fastest of those that were tried, on an H200 or an H100.

    Args:
        dim: Of a head.
        num_queries: Of a sequence.
        num_keys: Of a sequence.
        sees_all: Whether every query sees every key, so that all tiles are as long.
    """
    is_short = num_queries < MANY_QUERIES and not sees_all
    kept_bytes = SHORT_KEPT_BYTES if is_short else KEPT_BYTES
    is_dealt = deals(dim, num_queries, sees_all)
    ahead = num_queries <= AHEAD_QUERIES[dim][sees_all]
    if dim <= 64 and not sees_all and max(num_queries, num_keys) <= FEW_KEYS:
        few = Ring(64, 3, takes_turns=False, groups=1, programs=2, holds=False, looks_ahead=True)
        return replace(few, kept_bytes=kept_bytes, is_dealt=is_dealt)
    if dim <= 64:
        # With masks, three spill.
        if is_short or num_queries < SOME_QUERIES or (sees_all and num_keys % 128):
            return Ring(128, 4, kept_bytes=kept_bytes, is_dealt=is_dealt, looks_ahead=ahead)
        kept_bytes = SHORT_KEPT_BYTES if sees_all else kept_bytes
        return Ring(
            128,
            4,
            groups=3,
            holds=False,
            kept_bytes=kept_bytes,
            is_dealt=is_dealt,
            looks_ahead=ahead,
        )
    if dim <= 128 and sees_all:
        return Ring(128, 2, holds=False, kept_bytes=FEW_KEPT_BYTES, looks_ahead=ahead)
    if dim <= 128:
        return Ring(128, 2, kept_bytes=kept_bytes, is_dealt=is_dealt, looks_ahead=ahead)
    return Ring(64, 2, has_room=False, is_dealt=is_dealt)


def deals(dim: int, num_queries: int, sees_all: bool) -> bool:
    """Tell whether a table says whose a tile is: where they differ in length, and are many."""
    return num_queries >= DEALT_QUERIES[dim] and not sees_all


def why_not_here() -> str:
    """Return why this cannot run here; empty: it can, or may at least be compiled."""
    if IS_INTERPRETED:
        return "Gluon has no interpreter"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        return "written for Hopper"
    return ""


@cache
def _launcher() -> Launcher:
    from kprof.kernels.attention._hopper_kernel import attend

    return Launcher(attend)


def run_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend on Hopper; what a descriptor cannot say goes to plain Triton."""
    if q_starts is not None or not k.numel() or not q.numel():
        return run_tiled(q, k, v, q_starts, k_starts, options)
    y, lse = empty_results(q)
    sees_all = options.sees_all(q.shape[2], k.shape[2])
    ring = ring_for(q.shape[3], q.shape[2], k.shape[2], sees_all)
    attend_in_ring(q, k, v, None, y, lse, options, ring)
    return y, lse


def attend_in_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    largest: Tensor | None,
    y: Tensor,
    lse: Tensor,
    options: Options,
    ring: Ring,
) -> None:
    """Launch the kernel for Hopper.

    Args:
        q: (B, H, T, D), of 16 bits, or of 8 where there are `largest` numbers.
        k: (B, heads, N, D), as q.
        v: As k; of 8 bits as `_attention_narrow` lays them out.
        largest: Of each head, as `_attention_narrow` finds them.
        y: For results.
        lse: (B, H, T) in float32, for the log-sum-exp.
        options: Of the call.
        ring: The schedule.
    """
    batch, heads, num_queries, dim = q.shape
    left, right = options.bounds(num_queries, k.shape[2])
    group, num_heads = heads // k.shape[1], batch * heads
    registers, most_registers = REGISTERS[ring.groups]
    is_narrow = largest is not None
    # Results of 16 bits have no room where queries of 8 were.
    has_room = ring.has_room or is_narrow or ring.looks_ahead
    hides = (left, right) != (None, None) or k.shape[2] % ring.keys > 0
    grid, together, table = _shared_out(q, k, (left, right), ring)
    constants = (
        *(group, left is not None, right is not None),
        *(ring.keys, ring.stages, ring.groups, ring.takes_turns, has_room),
        *(ring.holds, hides, is_narrow, most_registers, ring.looks_ahead),
    )
    numbers = (num_queries, k.shape[2], left or 0, right or 0, num_heads)
    rows = (ROWS, ring.keys, dim if is_narrow else ring.keys, ROWS)
    descs = tuple(describe(x, n) for x, n in zip((q, k, v, y), rows, strict=True))
    scale = options.scale * LOG2_E
    arguments = (lse, largest, table, *descs, scale, *numbers, together, heads, *constants)
    key = (q.device, q.dtype, y.dtype, dim, table is None, constants)
    _launcher()(key, grid, arguments, {"num_warps": 4, "maxnreg": registers})


def _shared_out(
    q: Tensor, k: Tensor, bounds: tuple[int | None, int | None], ring: Ring
) -> tuple[int, int, Tensor | None]:
    """Return how many programs there are, how many heads come together, and a table of tiles."""
    num_heads, group = q.shape[0] * q.shape[1], q.shape[1] // k.shape[1]
    together = heads_together(k, group, num_heads, ring.kept_bytes)
    lengths = lengths_of(q.shape[2], k.shape[2], ROWS * ring.groups, ring.keys, *bounds)
    sms = num_sms(q.device) * ring.programs
    table = table_of(lengths, num_heads, together, sms, q.device) if ring.is_dealt else None
    programs = programs_for(lengths, num_heads, together, sms) if table is None else sms
    return programs, together, table


def describe(x: Tensor, rows: int, columns: int = 0, *, is_swizzled: bool = True) -> Any:
    """Return what the copying hardware is told of a tensor: blocks of so many rows; 0: all columns.

    Of one to be written to, rows begin at multiples of 16 bytes; of others there may be a copy.
    """
    from kprof.kernels.tiles.gluon import TensorDescriptor, gl

    x = x if _is_described(x) else x.contiguous()
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    dtypes[torch.float8_e4m3fn] = gl.float8e4nv
    block = [1, 1, rows, columns or x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtypes[x.dtype])
    if not is_swizzled:
        layout = replace(layout, swizzle_byte_width=0)
    # Where there is one, nothing is a step away; but a step has to be a multiple.
    sized = zip(x.shape, x.stride(), strict=True)
    steps = [step if length > 1 else ALIGNMENT for length, step in sized]
    return TensorDescriptor(x, list(x.shape), [*steps[:3], 1], block, layout)


def _is_described(x: Tensor) -> bool:
    """Tell whether rows begin at multiples of 16 bytes, and none is another."""
    sized = zip(x.shape[:3], x.stride()[:3], strict=True)
    steps = [step for length, step in sized if length > 1]
    numbers = (x.data_ptr(), *(step * x.element_size() for step in steps))
    return x.stride(3) == 1 and all(steps) and not any(one % ALIGNMENT for one in numbers)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    *given: float,
) -> tuple[Tensor, Tensor]:
    return run_ring(q, k, v, q_starts, k_starts, Options(*given))  # type: ignore[arg-type]


run_on_hopper = define(
    "attention_forward_on_hopper(Tensor q, Tensor k, Tensor v, Tensor? q_starts, "
    "Tensor? k_starts, float scale, bool is_causal, int window, int most_queries) "
    "-> (Tensor, Tensor)",
    _run,
    lambda q, *others: empty_results(q),
)
