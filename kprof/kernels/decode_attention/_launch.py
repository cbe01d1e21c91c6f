"""Decode attention on the host: how the work is cut, and the operator that launches it.

How decode attention reads a cache: as measured on an H200, and so that no register spills.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kprof.kernels.decode_attention._kernel import decode
from kprof.kernels.decode_attention._limits import FP8, refusal, why_refused
from kprof.kernels.runtime.launcher import (
    IS_INTERPRETED,
    MOST_CALLS,
    Launcher,
    alignments,
    kind_of,
    next_power_of_two,
)
from kprof.kernels.runtime.operator import define
from kprof.kernels.tiles.splits import counters

# Of keys in one tile: bounded by what registers hold.
TILE_ELEMENTS = 8_192
# Rows times keys of a tile, for each byte of a key: bounded by registers, of which e4m3 takes more.
SCORES_OF_BYTE = 2_048
# Of a thread, where the compiler would rather spill than use as many.
REGISTERS_OF_TWO_WARPS, REGISTERS_OF_WIDE = 240, 168
# What an SM reads of a short cache, of one that is not long, and of a long one.
LITTLE_BYTES, MANY_BYTES, MOST_BYTES = 1 << 15, 1 << 18, 3 << 19
# Triton's least tile of a product.
LEAST_ROWS = 16
# Columns of the heads for which schedules were measured.
MOST_SMALL_DIM = 128
# Rows times columns of a sum that four warps hold.
ELEMENTS_OF_FOUR_WARPS = 4_096


@dataclass(frozen=True)
class Schedule:
    """How a cache is read: keys of a tile, tiles in flight, warps, and programs on an SM."""

    block: int
    stages: int
    warps: int
    programs: int = 2
    registers: int | None = None
    """Of a thread; None: as many as the compiler likes."""


def schedule_of(
    dim: int,
    rows: int,
    key_bytes: int,
    is_paged: bool,
    bytes_of_sm: int | None = None,
    is_crowded: bool = False,
) -> Schedule:
    """Return the schedule for heads of this dimension, such rows and such keys.

    What each SM reads decides, where that is known, and whether it is crowded: with more than half
    as many heads of keys as there are SMs, by two programs on each. As measured on an H200.
    """
    is_small = rows <= LEAST_ROWS and dim <= MOST_SMALL_DIM
    block = TILE_ELEMENTS // (dim * key_bytes)
    if bytes_of_sm is None or is_paged or not is_small:
        warps = 4 if rows * dim <= ELEMENTS_OF_FOUR_WARPS else 8
        most = SCORES_OF_BYTE * key_bytes // max(LEAST_ROWS, next_power_of_two(rows))
        is_wide = key_bytes > 1 and (dim > 128 or (is_paged and dim > 64))
        return Schedule(
            max(LEAST_ROWS, min(2 * block, most)),
            # The table's entries are on their way for two more tiles before the keys are.
            5 if is_paged else 3,
            warps,
            registers=REGISTERS_OF_WIDE if is_wide else None,
        )
    if key_bytes == 1:
        return _schedule_of_bytes(block, bytes_of_sm)
    if is_crowded:
        return Schedule(2 * block, 3, 4)
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(2 * block, 2, 4, 1)
    if MANY_BYTES < bytes_of_sm <= MOST_BYTES:
        return Schedule(4 * block, 3, 4, 1)
    return Schedule(2 * block, 4, 4, 1)


def _schedule_of_bytes(block: int, bytes_of_sm: int) -> Schedule:
    """Return the schedule for keys in e4m3, which instructions hold up more than memory."""
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(block, 2, 4, 1)
    if bytes_of_sm <= MANY_BYTES // 2:
        return Schedule(block, 3, 4, 1)
    return Schedule(block, 4, 2, registers=REGISTERS_OF_TWO_WARPS)


LOG2_E = 1.4426950408889634
# Of parts that are merged at a time: bounded by what registers hold.
MERGED_ELEMENTS = 8_192
# What a tile's addresses may be apart, to be known when it is compiled.
MOST_STEP = 1 << 20
# Batch-invariant: a sequence has so many parts, whatever else is in the batch.
INVARIANT_PARTS = 32
# Of an H200, where there is no GPU to ask.
SMS = 132


class Options(NamedTuple):
    """What a call is given beside its tensors."""

    scale: float
    is_causal: bool
    window: int
    is_invariant: bool


class Cut(NamedTuple):
    """How the work of a call is cut."""

    schedule: Schedule
    places: int
    """Heads of keys in all sequences."""
    parts: int
    """Of a sequence, as many programs as there are for it."""
    most_parts: int
    """What decides how long a part is."""


def cut_of(q: Tensor, k: Tensor, table: Tensor | None, is_invariant: bool) -> Cut:
    """Return how a call is cut: to fill the GPU, or the same way for a sequence in every batch."""
    batch, query_heads, tokens, dim = q.shape
    heads, key_bytes = k.shape[1], k.element_size()
    rows = query_heads // heads * tokens
    places, most_keys = batch * heads, _most_keys(k, table)
    sms = sms_of(q.device)
    read = None if is_invariant else 2 * places * most_keys * dim * key_bytes // max(sms, 1)
    schedule = schedule_of(dim, rows, key_bytes, table is not None, read, 2 * places > sms)
    most = INVARIANT_PARTS if is_invariant else max(1, schedule.programs * sms // places)
    parts = max(1, min(most, -(-most_keys // schedule.block)))
    return Cut(schedule, places, parts, most)


def _most_keys(k: Tensor, table: Tensor | None) -> int:
    return k.shape[2] if table is None else table.shape[1] * k.shape[2]


@cache
def sms_of(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    if device.type != "cuda":
        return SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_launch = Launcher(decode)
_cuts: dict[Hashable, Cut] = {}


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *given: float,
) -> tuple[Tensor, Tensor]:
    options = Options(*given)  # type: ignore[arg-type]
    if q.dim() != 4 or k.dim() != 4:
        raise refusal(why_refused(q, k, v))
    y, lse = _empty_results(q)
    if not y.numel():
        return y, lse
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    lengths = None if lengths is None else lengths.contiguous()
    table = table if table is None or table.stride(1) == 1 else table.contiguous()
    if k.dtype == FP8:
        k, v = (one if _is_in_pairs(one) else one.clone() for one in (k, v))
        k_scale, v_scale = (_of_every_head(one, q, k) for one in (k_scale, v_scale))
    call = kind_of(q, k, v, lengths, table, k_scale, v_scale), options
    cut = _cuts.get(call)
    if cut is None:
        # What comes again was asked before.
        has_scale = not (k_scale is None and v_scale is None)
        why = why_refused(q, k, v, lengths, table, has_scale)
        if why is not None:
            raise refusal(why)
        cut = _cut_first(call, q, k, table)
    partial = lse
    if cut.parts > 1:
        rows = y.numel() // (cut.places * y.shape[-1])
        size = cut.places * cut.parts * rows * (y.shape[-1] + 1)
        partial = torch.empty(size, dtype=torch.float32, device=q.device)
    counter = counters(cut.places, q.device)
    tensors = (q, k, v, y, lse, partial, counter, lengths, table, k_scale, v_scale)
    if not _launch.again(call, tensors):
        _launch_first(call, tensors, options, cut)
    return y, lse


def _cut_first(call: tuple[Hashable, Options], q: Tensor, k: Tensor, table: Tensor | None) -> Cut:
    """Cut what was not cut before, and remember it as long as launches are."""
    cut = cut_of(q, k, table, call[1].is_invariant)
    if not IS_INTERPRETED:
        if len(_cuts) >= MOST_CALLS:
            _cuts.clear()
        _cuts[call] = cut
    return cut


def _launch_first(
    call: Hashable, tensors: tuple[Tensor | None, ...], options: Options, cut: Cut
) -> None:
    """Launch what was not launched for such tensors before."""
    q, k, v, *_, lengths, table, k_scale, v_scale = tensors
    assert q is not None and k is not None and v is not None
    heads, tokens, dim = k.shape[1], q.shape[2], q.shape[3]
    group = q.shape[1] // heads
    rows = next_power_of_two(group * tokens)
    table_step = q.shape[3] if table is None else table.stride(0)
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], table_step)
    is_known = table is None and max(k.stride(2), v.stride(2)) <= MOST_STEP
    constants = (
        *(tokens, group, dim, max(LEAST_ROWS, rows), lengths is not None),
        # One token is the last, and sees everything.
        *(options.is_causal and tokens > 1, options.window > 0, k.dtype == FP8),
        0 if table is None else k.shape[2],
        *((k.stride(2), v.stride(2)) if is_known else (0, 0)),
        *(cut.schedule.block, cut.schedule.stages),
        *(rows, max(1, MERGED_ELEMENTS // (rows * dim)), IS_INTERPRETED),
    )
    types = tuple(None if one is None else one.dtype for one in tensors)
    inputs = (q, k, v, lengths, table, k_scale, v_scale)
    launching = _launching(cut.schedule)
    key = (q.device, types, constants, *launching.values(), alignments(inputs, *steps))
    most_keys = _most_keys(k, table)
    each = _part_length(most_keys, cut)
    numbers = (most_keys, cut.most_parts, each, max(1, -(-most_keys // each)), options.window, 0)
    arguments = (*tensors, *steps, options.scale * LOG2_E, *numbers, *constants)
    grid = (cut.parts, heads, q.shape[0])
    _launch(key, grid, arguments, launching, call=call, tensors=tensors)


def _launching(schedule: Schedule) -> dict[str, int]:
    """Return what Triton compiles with."""
    registers = {} if schedule.registers is None else {"maxnreg": schedule.registers}
    return {"num_warps": schedule.warps} | registers


def _part_length(most_keys: int, cut: Cut) -> int:
    """Return how many keys a part has, as the kernel would count them."""
    block = cut.schedule.block
    of_part = -(-most_keys // cut.most_parts)
    return block * max(1, -(-of_part // block))


def _is_in_pairs(cache: Tensor) -> bool:
    """Tell whether a cache of bytes can be read two at a time."""
    return not any(one % 2 for one in (cache.data_ptr(), *cache.stride()[:-1]))


def _of_every_head(scale: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Return a scale for each head of each sequence, 1 where there is none."""
    shape = q.shape[0], k.shape[1]
    if scale is None:
        return torch.ones(shape, dtype=torch.float32, device=q.device)
    return scale.float().expand(shape).contiguous()


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return places for the results: tokens before heads in memory, as what comes next wants."""
    batch, heads, tokens, dim = q.shape
    if tokens == 1:
        y = q.new_empty(batch, heads, 1, dim)
    else:
        y = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return y, q.new_empty((batch, heads, tokens), dtype=torch.float32)


attend = define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? table, "
    "Tensor? k_scale, Tensor? v_scale, float scale, bool is_causal, int window, "
    "bool is_invariant) -> (Tensor, Tensor)",
    _run,
    lambda q, *others: _empty_results(q),
)
