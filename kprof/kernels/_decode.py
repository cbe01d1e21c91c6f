"""Decode attention on the host: how the work is cut, and the operator that launches it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kprof.kernels._decode_device import decode
from kprof.kernels._launch import (
    IS_INTERPRETED,
    MOST_CALLS,
    Launcher,
    alignments,
    kind_of,
    next_power_of_two,
)
from kprof.kernels._operator import define
from kprof.kernels._tile_splits import counters

FP8 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
# Of keys in one tile, and of parts that are merged at a time: bounded by what registers hold.
TILE_ELEMENTS, MERGED_ELEMENTS = 8_192, 8_192
# What an SM reads of a short cache, and of one that is not long.
LITTLE_BYTES, MANY_BYTES = 1 << 15, 1 << 18
# Triton's least tile of a product.
LEAST_ROWS = 16
# Rows times columns of a sum that so many warps hold.
ELEMENTS_OF_TWO_WARPS, ELEMENTS_OF_FOUR_WARPS = 2_048, 4_096
# Batch-invariant: a sequence has so many parts, whatever else is in the batch.
INVARIANT_PARTS = 32
# Of an H200, where there is no GPU to ask.
SMS = 132


@dataclass(frozen=True)
class Schedule:
    """How a cache is read: keys of a tile, tiles in flight, warps, and programs on an SM."""

    block: int
    stages: int
    warps: int
    programs: int = 2


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


def schedule_of(
    dim: int, rows: int, key_bytes: int, is_paged: bool, bytes_of_sm: int | None = None
) -> Schedule:
    """Return the schedule for heads of this dimension, such rows and such keys.

    What each SM reads decides, where that is known: little is best in few parts, more with as much
    in flight as there is, and a lot in large tiles. As measured on an H200.
    """
    is_small = max(rows, LEAST_ROWS) * dim <= ELEMENTS_OF_TWO_WARPS
    if bytes_of_sm is None or is_paged or key_bytes == 1 or not is_small:
        block = max(LEAST_ROWS, 2 * TILE_ELEMENTS // (dim * key_bytes))
        warps = 4 if rows * dim <= ELEMENTS_OF_FOUR_WARPS else 8
        # The table's entries are on their way for two more tiles before the keys are.
        return Schedule(block, 5 if is_paged else 3, warps)
    block = TILE_ELEMENTS // (dim * key_bytes)
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(2 * block, 2, 4, 1)
    if bytes_of_sm <= MANY_BYTES:
        return Schedule(block, 4, 2)
    return Schedule(4 * block, 3, 4, 1)


def cut_of(q: Tensor, k: Tensor, table: Tensor | None, is_invariant: bool) -> Cut:
    """Return how a call is cut: to fill the GPU, or the same way for a sequence in every batch."""
    batch, query_heads, tokens, dim = q.shape
    heads, key_bytes = k.shape[1], k.element_size()
    rows = query_heads // heads * tokens
    places, sms, most_keys = batch * heads, sms_of(q.device), _most_keys(k, table)
    read = None if is_invariant else 2 * places * most_keys * dim * key_bytes // max(sms, 1)
    if read is not None and 2 * places > sms:
        # Large tiles are for those that are cut in parts.
        read = min(read, MANY_BYTES)
    schedule = schedule_of(dim, rows, key_bytes, table is not None, read)
    most = INVARIANT_PARTS if is_invariant else max(1, schedule.programs * sms // places)
    blocks = -(-most_keys // schedule.block)
    return Cut(schedule, places, max(1, min(most, blocks)), most)


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
    y, lse = _empty_results(q)
    if not y.numel():
        return y, lse
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    lengths = None if lengths is None else lengths.contiguous()
    table = table if table is None or table.stride(1) == 1 else table.contiguous()
    if k.dtype == FP8:
        k_scale, v_scale = (_of_every_head(one, q, k) for one in (k_scale, v_scale))
    call = kind_of(q, k, v, lengths, table, k_scale, v_scale), options
    cut = _cuts.get(call) or _cut_first(call, q, k, table)
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
    most_rows = next_power_of_two(group * tokens)
    table_step = q.shape[3] if table is None else table.stride(0)
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], table_step)
    constants = (
        *(tokens, group, dim, max(LEAST_ROWS, most_rows), lengths is not None),
        # One token is the last, and sees everything.
        *(options.is_causal and tokens > 1, options.window > 0, k.dtype == FP8),
        *(0 if table is None else k.shape[2], cut.schedule.block, cut.schedule.stages),
        *(most_rows, max(1, MERGED_ELEMENTS // (most_rows * dim))),
    )
    types = tuple(None if one is None else one.dtype for one in tensors)
    warps = cut.schedule.warps
    inputs = (q, k, v, lengths, table, k_scale, v_scale)
    key = (q.device, types, constants, warps, alignments(inputs, *steps))
    numbers = (_most_keys(k, table), cut.parts, cut.most_parts, options.window, heads)
    arguments = (*tensors, *steps, options.scale * LOG2_E, *numbers, *constants)
    grid = cut.places * cut.parts
    _launch(key, grid, arguments, {"num_warps": warps}, call=call, tensors=tensors)


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
