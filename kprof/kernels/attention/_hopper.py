"""Attention of many queries on Hopper, forward, on the host: schedule, tiles, launch, operator.

The kernel is in `_hopper_kernel`. Its CTAs are persistent, and a tile is 64 queries of one head for
each consumer warpgroup. Heads come in sections whose keys and values fit L2. Tiles go to
CTAs in snake order, or by a table where their lengths differ and there are many.
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

from kprof.kernels.attention._triton import (
    LOG2_E,
    Options,
    empty_results,
    forward_operator,
    run_forward,
)
from kprof.kernels.runtime import IS_INTERPRETED, MOST_CALLS, Launcher, num_sms

HOPPER = 9
ALIGNMENT = 16
# Queries of a warpgroup.
ROWS = 64
# Registers of a thread, by consumer warpgroups: as compiled for, and of a consumer. With one
# warpgroup, two CTAs fill an SM.
REGISTERS = {1: (128, 232), 2: (168, 240), 3: (128, 160)}
# L2 for the keys and values of a section of heads (backward: for queries and their gradients); with
# fewer than MANY_QUERIES, where other data takes as much; and where all tiles have one length.
L2_BYTES = 32 << 20
L2_BYTES_SHORT = 16 << 20
L2_BYTES_UNIFORM = 4 << 20
# Least queries for which three warpgroups are faster for heads of 64: causal, and where every query
# sees every key (of 197 queries, tiles of 192 would be half empty). And, by columns of a head, the
# least queries for which a tile table pays.
MANY_QUERIES, SOME_QUERIES = 4_096, 512
TABLE_MIN_QUERIES = {64: 1_024, 128: 2_048, 256: 2_048}
# Most queries for which those of the next tile are prefetched, measured on an H100: causal, and
# where every query sees every key. For heads of 256 there is no room.
PREFETCH_MAX_QUERIES = {64: (512, 512), 128: (512, 1_024), 256: (0, 0)}
# Most queries and keys for which causal heads of 64 have CTAs of one warpgroup: tiles have so few
# blocks that another CTA has to fill the time of their ends.
FEW_KEYS = 1_024


@dataclass(frozen=True)
class HopperSchedule:
    """Tile, pipeline and tile order of the kernel."""

    keys: int
    """Of a block."""
    stages: int
    """Blocks of keys, and of values, in flight."""
    is_pingpong: bool = True
    """Whether one warpgroup computes its softmax while another one multiplies."""
    has_output_buffer: bool = True
    """Whether results have shared memory of their own, not that of the queries."""
    warpgroups: int = 2
    """Consumers."""
    exp_before_wait: bool = True
    """Whether powers are computed before the wait for the previous block's values."""
    l2_bytes: int = L2_BYTES
    """Of a section's keys and values."""
    uses_table: bool = False
    """Whether a table assigns tiles to CTAs, not snake order."""
    ctas_per_sm: int = 1
    prefetches_q: bool = False
    """Whether the next tile's queries load during this one; implies an output buffer."""


def schedule_for(dim: int, num_queries: int, num_keys: int, sees_all: bool) -> HopperSchedule:
    """Return the fastest schedule of those measured on an H200 or an H100.

    Args:
        dim: Of a head.
        num_queries: Of a sequence.
        num_keys: Of a sequence.
        sees_all: Whether every query sees every key, so that all tiles have one length.
    """
    is_short = num_queries < MANY_QUERIES and not sees_all
    l2_bytes = L2_BYTES_SHORT if is_short else L2_BYTES
    uses_table = uses_tile_table(dim, num_queries, sees_all)
    ahead = num_queries <= PREFETCH_MAX_QUERIES[dim][sees_all]
    if dim <= 64 and not sees_all and max(num_queries, num_keys) <= FEW_KEYS:
        few = HopperSchedule(
            64,
            3,
            is_pingpong=False,
            warpgroups=1,
            ctas_per_sm=2,
            exp_before_wait=False,
            prefetches_q=True,
        )
        return replace(few, l2_bytes=l2_bytes, uses_table=uses_table)
    if dim <= 64:
        # With masks, three warpgroups spill.
        if is_short or num_queries < SOME_QUERIES or (sees_all and num_keys % 128):
            return HopperSchedule(
                128, 4, l2_bytes=l2_bytes, uses_table=uses_table, prefetches_q=ahead
            )
        l2_bytes = L2_BYTES_SHORT if sees_all else l2_bytes
        return HopperSchedule(
            128,
            4,
            warpgroups=3,
            exp_before_wait=False,
            l2_bytes=l2_bytes,
            uses_table=uses_table,
            prefetches_q=ahead,
        )
    if dim <= 128 and sees_all:
        return HopperSchedule(
            128, 2, exp_before_wait=False, l2_bytes=L2_BYTES_UNIFORM, prefetches_q=ahead
        )
    if dim <= 128:
        return HopperSchedule(128, 2, l2_bytes=l2_bytes, uses_table=uses_table, prefetches_q=ahead)
    return HopperSchedule(64, 2, has_output_buffer=False, uses_table=uses_table)


def uses_tile_table(dim: int, num_queries: int, sees_all: bool) -> bool:
    """Tell whether a table assigns tiles to CTAs: where lengths differ, and tiles are many."""
    return num_queries >= TABLE_MIN_QUERIES[dim] and not sees_all


# Fixed cost of a tile in blocks of keys; an estimate.
TILE_COST = 1.2
# With more tiles, the imbalance at the end does not matter.
MAX_TABLE_TILES = 1 << 14


def heads_of_section(k: Tensor, group: int, num_heads: int, l2_bytes: int) -> int:
    """Return how many heads make a section, whose keys and values L2 holds."""
    bytes_of_head = 2 * k.shape[2] * k.shape[3] * k.element_size()
    return min(num_heads, group * max(1, l2_bytes // bytes_of_head))


@lru_cache(MOST_CALLS)
def tile_lengths(
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
def num_ctas_for(lengths: tuple[int, ...], num_heads: int, section: int, sms: int) -> int:
    """Return how many CTAs end soonest in snake order.

    That may be fewer than there are SMs: sections of heads and rounds of all CTAs can fall out of
    step, and some CTAs then get the longest tile of each round.
    """
    tiles = []
    for first in range(0, num_heads, section):
        width = min(section, num_heads - first)
        tiles += [length + TILE_COST for length in reversed(lengths) for _ in range(width)]
    if len(tiles) <= sms or len(set(tiles)) == 1:
        return min(len(tiles), sms)
    return min(range(sms, sms * 7 // 8, -1), key=lambda count: _makespan(tiles, count))


def assign_tiles(
    lengths: tuple[int, ...], num_heads: int, section: int, num_ctas: int
) -> list[list[int]]:
    """Return each CTA's tiles: the next tile goes to the CTA that is free first.

    Sections of heads come one after the other, and in each the longest tiles first.
    """
    free = [(0.0, cta) for cta in range(num_ctas)]
    found: list[list[int]] = [[] for _ in range(num_ctas)]
    place = 0
    for first in range(0, num_heads, section):
        width = min(section, num_heads - first)
        for length in (one for one in reversed(lengths) for _ in range(width)):
            ends, cta = heappop(free)
            found[cta].append(place)
            heappush(free, (ends + length + TILE_COST, cta))
            place += 1
    return found


# By tiles and device. Captured graphs read them, so none is ever freed.
_tables: dict[Hashable, Tensor] = {}


def tile_table(
    lengths: tuple[int, ...], num_heads: int, section: int, num_ctas: int, device: torch.device
) -> Tensor | None:
    """Return where each CTA's tiles begin in the table, then the tiles; None: snake order.

    Nothing is copied from the host while a graph is captured.
    """
    key, count = (lengths, num_heads, section, num_ctas, device), len(lengths) * num_heads
    if key in _tables or not num_ctas < count <= MAX_TABLE_TILES or len(set(lengths)) == 1:
        return _tables.get(key)
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or len(_tables) >= MOST_CALLS:
        return None
    each = assign_tiles(lengths, num_heads, section, num_ctas)
    begins = accumulate(map(len, each), initial=num_ctas + 1)
    # One entry more: the kernel also reads the tile behind the last one.
    table = [*begins, *chain(*each), 0]
    _tables[key] = found = torch.tensor(table, dtype=torch.int32, device=device)
    return found


def _makespan(tiles: list[float], count: int) -> float:
    """Return the time of the CTA that ends last, in blocks of keys."""
    totals = [0.0] * count
    for turn, first in enumerate(range(0, len(tiles), count)):
        places = range(count - 1, -1, -1) if turn % 2 else range(count)
        for place, length in zip(places, tiles[first : first + count], strict=False):
            totals[place] += length
    return max(totals)


def why_unavailable() -> str:
    """Return why this cannot run here; empty: it can, or may at least be compiled."""
    if IS_INTERPRETED:
        return "Gluon has no interpreter"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        return "written for Hopper"
    return ""


@cache
def _launcher() -> Launcher:
    from kprof.kernels.attention._hopper_kernel import attention_forward_hopper_kernel

    return Launcher(attention_forward_hopper_kernel)


def run_on_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return y and the log-sum-exp; packed or empty sequences go to the Triton kernel."""
    if cu_seqlens_q is not None or not k.numel() or not q.numel():
        return run_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    y, lse = empty_results(q)
    sees_all = options.sees_all(q.shape[2], k.shape[2])
    schedule = schedule_for(q.shape[3], q.shape[2], k.shape[2], sees_all)
    launch_forward(q, k, v, None, y, lse, options, schedule)
    return y, lse


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    amax: Tensor | None,
    y: Tensor,
    lse: Tensor,
    options: Options,
    schedule: HopperSchedule,
) -> None:
    """Launch the kernel.

    Args:
        q: (B, H, T, D), of 16 bits, or FP8 with `amax`.
        k: (B, heads, N, D), as q.
        v: As k; FP8 values as `attention_fp8.quantize_heads` lays them out.
        amax: Largest magnitude of each head of q, k and v; None for 16 bits.
        y: (B, H, T, D), written.
        lse: (B, H, T) in float32, written.
        options: Of the call.
        schedule: Of the kernel.
    """
    batch, heads, num_queries, dim = q.shape
    left, right = options.bounds(num_queries, k.shape[2])
    group, num_heads = heads // k.shape[1], batch * heads
    registers, consumer_registers = REGISTERS[schedule.warpgroups]
    is_fp8 = amax is not None
    # The buffer of FP8 queries has no room for 16-bit results.
    has_output_buffer = schedule.has_output_buffer or is_fp8 or schedule.prefetches_q
    is_masked = (left, right) != (None, None) or k.shape[2] % schedule.keys > 0
    grid, section, table = _partition(q, k, (left, right), schedule)
    constants = (
        *(group, left is not None, right is not None),
        *(
            schedule.keys,
            schedule.stages,
            schedule.warpgroups,
            schedule.is_pingpong,
            has_output_buffer,
        ),
        *(schedule.exp_before_wait, is_masked, is_fp8, consumer_registers, schedule.prefetches_q),
    )
    numbers = (num_queries, k.shape[2], left or 0, right or 0, num_heads)
    rows = (ROWS, schedule.keys, dim if is_fp8 else schedule.keys, ROWS)
    descs = tuple(tensor_descriptor(x, n) for x, n in zip((q, k, v, y), rows, strict=True))
    scale = options.scale * LOG2_E
    arguments = (lse, amax, table, *descs, scale, *numbers, section, heads, *constants)
    key = (q.device, q.dtype, y.dtype, dim, table is None, constants)
    _launcher()(key, grid, arguments, {"num_warps": 4, "maxnreg": registers})


def _partition(
    q: Tensor, k: Tensor, bounds: tuple[int | None, int | None], schedule: HopperSchedule
) -> tuple[int, int, Tensor | None]:
    """Return the number of CTAs, the heads of a section, and the tile table."""
    num_heads, group = q.shape[0] * q.shape[1], q.shape[1] // k.shape[1]
    section = heads_of_section(k, group, num_heads, schedule.l2_bytes)
    lengths = tile_lengths(
        q.shape[2], k.shape[2], ROWS * schedule.warpgroups, schedule.keys, *bounds
    )
    sms = num_sms(q.device) * schedule.ctas_per_sm
    table = tile_table(lengths, num_heads, section, sms, q.device) if schedule.uses_table else None
    num_ctas = num_ctas_for(lengths, num_heads, section, sms) if table is None else sms
    return num_ctas, section, table


def tensor_descriptor(x: Tensor, rows: int, columns: int = 0, *, is_swizzled: bool = True) -> Any:
    """Return the TMA descriptor of a 4-D tensor for blocks of so many rows; 0: all columns.

    An input that TMA cannot read is copied. Rows of an output have to begin at 16 bytes.
    """
    from kprof.kernels.tiles.gluon import describe

    shape, size = tuple(x.shape), x.element_size()
    steps = None if x.data_ptr() % ALIGNMENT else _tma_strides(shape, x.stride(), size)
    if steps is None:
        x = x.clone(memory_format=torch.contiguous_format)
        steps = _tma_strides(shape, x.stride(), size)
        assert steps is not None
    return describe(x, shape, steps, (1, 1, rows, columns or shape[3]), is_swizzled=is_swizzled)


@lru_cache(MOST_CALLS)
def _tma_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int
) -> tuple[int, ...] | None:
    """Return the strides that TMA gets; None: rows overlap, or begin between 16 bytes."""
    # A dimension of one element has any stride, but TMA wants a multiple of 16 bytes.
    sized = zip(shape, strides, strict=True)
    steps = [step if length > 1 else ALIGNMENT for length, step in sized][:3]
    is_aligned = all(steps) and not any(one * element_bytes % ALIGNMENT for one in steps)
    return (*steps, 1) if is_aligned and strides[3] == 1 else None


forward_hopper = forward_operator("attention_forward_on_hopper", run_on_hopper)
