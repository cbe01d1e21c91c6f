"""The roofline of each device activity: the resource that bounds it.

Work belongs to an operator and is split over its activities by their durations. A copy between
host and device or between GPUs, or a collective, is limited by its link and has no limit here.

The bound follows from how busy the memory and the SMs were at least and at most (busy_shares.py):

* memory: it is busy for `BOUND_SHARE` of the time at least, and no less than the SMs
* compute, issue: the SMs are, with useful FLOPs or with other instructions
* latency: neither can be busy for `CLEAR_SHARE`
* unknown: none of these is shown; or the FLOPs at their peak take more than 5 % longer than the
  launch, so that the assumed work, its type, the ceiling or the time is wrong

Where the data fits into the last-level cache, and the operator took at most the time of a copy
within that cache, over `BOUND_SHARE`, the cache is the ceiling.
Anything else that was faster than the memory got a part from the cache.

Where only counters are known, the throughputs that they measured decide, and what neither memory
nor SMs limit is latency. Against counters stands the bound of the run in which they
counted: over its durations, with cold caches at a launch's begin and its last writes still in
them at its end.

Instruction counts are lower bounds, of machine code for compute capability 9.0 made of PyTorch's
own headers (benchmarks/count_instructions.py, benchmarks/results/instructions_sm90_*.json). They
exclude the function's own work unless it divides, and dimensions that only the result's layout
keeps apart.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.roofline.busy_shares import Measured, find_busy_shares
from kprof.analyze.roofline.hardware_counters import counted_shares
from kprof.analyze.roofline.launch_work import (
    COUNTERS,
    FALLBACK_DTYPE,
    SOURCES,
    UNKNOWN,
    RowWork,
    crosses_link,
    find_row_work,
)
from kprof.analyze.roofline.operator_work import DTYPES, WORK_BOUNDS
from kprof.device import Device
from kprof.trace import Trace, once_per_table

_ELEMENT = 8
"""Instructions for its number, whether there is one, and branches."""

_OPERAND = 5
"""An address of 64 bits, and a load or a store."""

_DIMENSION = 10
"""A division by a magic number, a remainder, and the branch that leaves the loop."""

_CAST = 12
"""Finding an operand's type among those of PyTorch."""

_DIVISION = 10
"""A reciprocal, its refinement, and whether that was exact."""

_TO_FP8 = 21
"""From a float; one more makes that of 16 bits."""

_COUNTED_FOR = r"\b(H20|G?H200|H100|H800)\b"

_EACH_BY_ITSELF = re.compile(
    r"elementwise_kernel<(\d+), (\d+), at::native::gpu_kernel_impl(_nocast)?<"
)

_CONVERTS = "float8_copy_kernel_cuda"

_ARGUMENTS = re.compile(r"\{lambda\(([^()]+)\)#")

# Without dimensions; a number in Python is a "double" or a "long int" there.
_TYPES_OF_TENSORS = ("float", "c10::BFloat16", "c10::Half")

_TOLD = ("input_shapes", "input_strides", "input_dtypes")

LEFT_SHARE = 0.5
"""Of the cache, what one launch leaves in it for the next at most.

The second-level cache of recent NVIDIA GPUs stands in two halves, each before its own SMs, and a
line that both use stands in both.
"""

UNWRITTEN_SHARE, TOUCHED_SHARE = 0.42, 0.9
"""Of the cache, what can wait in it to be written, and what holds the lines touched last.

Fills left 22 of 52 MB (H100) and 27 of 63 MB (H200) unwritten as they ended; launches that read
twice as many bytes as they wrote 16 and 17 MB, launches that read as many 21 MB.
"""

BOUND_SHARE = 0.6
"""Share of a ceiling from which an operator counts as bound by it; within 0.05 it is borderline."""

BEATEN_SHARE = 1.05
"""Limit over duration above which the work or the ceiling cannot be right."""

CERTAIN_SHARE = 1.02
"""Limit over duration above which noise is no explanation: not all came from the memory."""

BOUNDS = ("memory", "compute", "latency", "issue")

_MEMORY, _COMPUTE, _LATENCY, _ISSUE = range(4)

FLOPS_SHARE = 0.3
"""Share of an SM's busy time that useful FLOPs at their peak take at least, where it computes."""

CLEAR_SHARE = 0.55
"""Share of a ceiling up to which an operator is not bound by it for sure."""


def add_roofline(trace: Trace) -> Trace:
    """Add flops, bytes, their source, the time at the roofline and the bound."""
    work = _count_repeated_once(trace, find_row_work(trace))
    is_known = work.source != UNKNOWN
    limit_ns, has_limit, bound = _limits(trace, work)
    counted_bound = _bound_when_counted(trace, work)
    _limit_by_counters(trace.kernels, work, limit_ns, has_limit, bound)
    index = trace.kernels.index
    return trace.with_kernels(
        flops=_nullable(work.flops, is_known & work.has_flops),
        bytes=_nullable(work.bytes, is_known & (work.bytes >= 0)),
        work_from=_named(work.source, SOURCES).set_axis(index),
        work_bound=_named(work.bound, WORK_BOUNDS).set_axis(index),
        limit_ns=_nullable(limit_ns, has_limit),
        bound=_named(bound, BOUNDS).set_axis(index),
        counted_bound=_named(counted_bound, BOUNDS).set_axis(index),
    )


def beaten_ceilings(trace: Trace) -> pd.DataFrame:
    """Return the rows of `kernels` whose limit is more than 5 % above their duration.

    Nothing runs faster than its ceiling: such a row's tensors were in a cache, its work is an
    upper bound, or the ceiling is not this device's.
    """
    beaten: pd.DataFrame = trace.kernels.iloc[np.flatnonzero(beats_ceiling(trace.kernels))]
    return beaten


@once_per_table
def beats_ceiling(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows of `kernels` have a limit that is more than 5 % above their duration."""
    limit_ns = kernels["limit_ns"].to_numpy(np.int64, na_value=0)
    return _exceeds(limit_ns, kernels["duration_ns"].to_numpy(np.int64))


def _exceeds(limit_ns: np.ndarray, duration_ns: np.ndarray) -> np.ndarray:
    return np.asarray(limit_ns > BEATEN_SHARE * duration_ns)


def _count_repeated_once(trace: Trace, work: RowWork) -> RowWork:
    """Count operands that look alike once where they cannot all be distinct.

    Had they been, the memory would have had to move more in the time than it can, whatever the
    cache held. Where the cache's size is not known that is not either.
    """
    device = trace.meta.device
    if device is None or device.cache_bytes is None:
        return work
    duration_ns = trace.kernels["duration_ns"].to_numpy(dtype=np.int64)
    calls = _calls(work, duration_ns, duration_ns, duration_ns)
    distinct = least_from_memory(device, calls.moved - calls.written, calls.moved)
    cannot_be = _is_beaten(distinct, calls.time_ns, device)
    return replace(work, bytes=work.bytes - np.where(cannot_be, work.may_repeat, 0))


def _is_beaten(from_memory: np.ndarray, time_ns: np.ndarray, device: Device) -> np.ndarray:
    """Tell where the memory cannot have moved so many bytes; of no time nothing is told."""
    least_ns = from_memory / device.memory_bytes_per_s * 1e9
    return np.asarray((time_ns > 0) & (least_ns > CERTAIN_SHARE * time_ns))


@dataclass(frozen=True)
class _Calls:
    """Work of whole operators: for each row of `kernels` its operator's sum."""

    moved: np.ndarray
    """Bytes."""
    written: np.ndarray
    arithmetic_ns: np.ndarray
    """At the peak of the arithmetic."""
    issue_ns: np.ndarray
    """Issuing the instructions that are known."""
    time_ns: np.ndarray


def _calls(
    work: RowWork, duration_ns: np.ndarray, arithmetic_ns: np.ndarray, issue: np.ndarray
) -> _Calls:
    member, _ = pd.factorize(work.group)
    parts = np.maximum(work.bytes, 0), work.written, arithmetic_ns, issue, duration_ns
    return _Calls(*(np.bincount(member, weights=part.astype(float))[member] for part in parts))


def _limits(trace: Trace, work: RowWork) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each row's time at the roofline, whether it has one, and its operator's bound."""
    num_rows = len(trace.kernels)
    device = trace.meta.device
    bound = np.full(num_rows, UNKNOWN, dtype=np.int8)
    has_limit = _has_limit(trace, work)
    if device is None:
        return np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=bool), bound
    duration_ns = trace.kernels["duration_ns"].to_numpy(dtype=np.int64)
    compute_ns = _compute_ns(trace, work, device)
    calls = _calls(work, duration_ns, compute_ns, issue_ns(trace, device))
    moving_ns, _ = _moving_ns(work, calls, device)
    limit_ns = np.rint(np.maximum(moving_ns, compute_ns))
    limit_ns[(limit_ns == 0) & ((work.bytes > 0) | (work.flops > 0))] = 1
    is_upper = work.bound == WORK_BOUNDS.index("at most")
    # The time that it took bounds the limit, too.
    limit_ns = np.where(is_upper, np.minimum(limit_ns, duration_ns), limit_ns)
    decided = _decide(trace, work, calls, duration_ns)
    # No cache explains arithmetic that is faster than its peak.
    measurable = (duration_ns > 0) & ~_exceeds(compute_ns, duration_ns)
    measurable &= ~crosses_link(trace.kernels) & (work.source != COUNTERS)
    bound[measurable] = decided[measurable]
    return limit_ns.astype(np.int64), has_limit, bound


def _moving_ns(work: RowWork, calls: _Calls, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum time to move each row's bytes, and the bytes that the cache served whole.

    A row faster than the memory had help from the cache: at most the cache's size, and no faster
    than a copy within it. Where no such copy was measured, the help is unknown.
    """
    read = calls.moved - calls.written
    is_exact = work.bound == UNKNOWN
    is_cached = is_exact & is_served(device, read, calls.moved, calls.time_ns, BOUND_SHARE)
    is_helped = is_exact & _is_beaten(calls.moved, calls.time_ns, device)
    is_helped &= bool(device.cached_copies)
    num_bytes = np.maximum(work.bytes, 0)
    memory_ns = num_bytes / device.memory_bytes_per_s * 1e9
    part = num_bytes / np.maximum(calls.moved, 1)
    cache_ns = part * copy_ns(device, calls.moved)
    rest = part * least_from_memory(device, read, calls.moved)
    rest_ns = rest / device.memory_bytes_per_s * 1e9
    served_ns, helped_ns = np.fmin(memory_ns, cache_ns), np.fmax(rest_ns, cache_ns)
    return np.select([is_cached, is_helped], [served_ns, helped_ns], memory_ns), is_cached


def _bound_when_counted(trace: Trace, work: RowWork) -> np.ndarray:
    """Return the bounds by work of launches that ran once more, alone, to be counted.

    Caches were flushed before each, so that all that is read came from the memory.
    """
    counted_ns = trace.kernels["counted_ns"].to_numpy(np.int64, na_value=UNKNOWN)
    device = trace.meta.device
    bound = np.full(len(counted_ns), UNKNOWN, dtype=np.int8)
    is_counted = counted_ns > 0
    if device is None or not is_counted.any():
        return bound
    duration_ns = trace.kernels["duration_ns"].to_numpy(dtype=np.int64)
    time_ns = np.where(counted_ns > 0, counted_ns, duration_ns)
    compute_ns, issue = _compute_ns(trace, work, device), issue_ns(trace, device)
    calls = _calls(work, time_ns, compute_ns, issue)
    decided = _decide(trace, work, calls, time_ns)
    is_counted &= ~crosses_link(trace.kernels) & (work.source != COUNTERS)
    bound[is_counted] = decided[is_counted]
    return bound


def _has_limit(trace: Trace, work: RowWork) -> np.ndarray:
    is_told = ~np.isin(work.source, (UNKNOWN, COUNTERS))
    return np.asarray(is_told & ~crosses_link(trace.kernels))


def _decide(trace: Trace, work: RowWork, calls: _Calls, own_ns: np.ndarray) -> np.ndarray:
    """Return the bound that the work and the kernel prove, `UNKNOWN` where they prove none."""
    device = trace.meta.device
    if device is None:
        return np.full(len(own_ns), UNKNOWN)
    from_memory = calls.moved - kept_bytes(device, calls.written, calls.moved)
    has_bytes = (work.bytes >= 0) & (work.source != UNKNOWN)
    told = Measured(
        time_ns=calls.time_ns,
        own_ns=own_ns,
        moved=calls.moved,
        traffic=np.where(has_bytes, from_memory, np.nan),
        is_least=work.bound == WORK_BOUNDS.index("at least"),
        arithmetic_ns=np.where(work.has_flops, calls.arithmetic_ns, np.nan),
        group=work.group,
        issue_ns=calls.issue_ns,
        element_ns=find_elements(trace) * _instruction_ns(device),
        instruction_ns=_instruction_ns(device),
    )
    shares = find_busy_shares(trace.kernels, device, told)
    memory, busy = shares.memory_least, shares.sm_least
    if trace.is_host_only:
        return decide_bound(memory, busy)
    is_memory = (memory >= BOUND_SHARE) & (memory >= busy)
    is_busy = busy >= BOUND_SHARE
    computes = is_busy & (calls.arithmetic_ns >= FLOPS_SHARE * busy * calls.time_ns)
    waits = np.maximum(shares.memory_most, shares.sm_most) < CLEAR_SHARE
    proven = [waits, is_memory, computes, is_busy]
    return np.asarray(np.select(proven, [_LATENCY, _MEMORY, _COMPUTE, _ISSUE], UNKNOWN))


def _instruction_ns(device: Device) -> float:
    """Return how long one instruction of one thread takes, all SMs issuing.

    NaN on GPUs for which instructions were not counted.
    """
    fp32 = device.flops_per_s.get("fp32")
    is_counted = fp32 is not None and re.search(_COUNTED_FOR, device.name)
    # A multiply-add on each of an SM's 128 lanes is one instruction of each of its schedulers.
    return 2e9 / fp32 if fp32 and is_counted else math.nan


def find_elements(trace: Trace) -> np.ndarray:
    """Return the elements of the largest operand of each row's operator, NaN without shapes."""
    shapes = trace.ranges["input_shapes"].astype("category").cat
    numbers = np.array([_most_elements(str(text)) for text in shapes.categories] + [np.nan])
    op_row = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)
    return np.asarray(numbers[np.append(shapes.codes.to_numpy(), -1)[op_row]])


def _most_elements(text: str) -> float:
    """Return the elements of recorded tensors, each stretched to the others where that fits.

    A list of tensors has those of all. NaN where no shape was recorded.
    """
    found = json.loads(text) if text.startswith("[") else []
    lists = [[size for size in one if _is_shape(size)] for one in found if isinstance(one, list)]
    numbers = [sum(math.prod(size) for size in of_list) for of_list in lists if of_list]
    shapes = [tuple(size) for size in found if size and _is_shape(size)]
    with suppress(ValueError):
        numbers.append(math.prod(np.broadcast_shapes(*shapes)) if shapes else 0)
    return float(max([*numbers, *map(math.prod, shapes)], default=0)) or math.nan


def _is_shape(size: object) -> bool:
    return isinstance(size, list) and all(isinstance(n, int) for n in size)


def decide_bound(memory_share: np.ndarray, compute_share: np.ndarray) -> np.ndarray:
    """Return places in `BOUNDS` from the shares of the two ceilings that operators reached."""
    is_memory = (memory_share >= BOUND_SHARE) & (memory_share >= compute_share)
    is_compute = compute_share >= BOUND_SHARE
    return np.asarray(np.select([is_memory, is_compute], [_MEMORY, _COMPUTE], _LATENCY))


def bound_by_counters(kernels: pd.DataFrame) -> np.ndarray:
    """Return places in `BOUNDS` by what counters measured, -1 where they did not."""
    memory, compute = counted_shares(kernels)
    is_counted = ~np.isnan(memory) & ~np.isnan(compute)
    return np.where(is_counted, decide_bound(memory, compute), UNKNOWN)


def _limit_by_counters(
    kernels: pd.DataFrame,
    work: RowWork,
    limit_ns: np.ndarray,
    has_limit: np.ndarray,
    bound: np.ndarray,
) -> None:
    """Fill in the limit and the bound of rows of which nothing but counters tells.

    Their limit is the time that the busiest part of the device would have needed at its peak.
    """
    found = bound_by_counters(kernels)
    rows = np.flatnonzero((work.source == COUNTERS) & (found != UNKNOWN))
    busiest = np.maximum(*counted_shares(kernels))[rows]
    duration_ns = kernels["duration_ns"].to_numpy(np.int64)[rows]
    limit_ns[rows] = np.rint(duration_ns * np.minimum(busiest, 1)).astype(np.int64)
    has_limit[rows], bound[rows] = True, found[rows]


def _compute_ns(trace: Trace, work: RowWork, device: Device) -> np.ndarray:
    """Return each row's time at the compute ceiling of its operands' type."""
    fallback = device.flops_per_s.get(FALLBACK_DTYPE, np.inf)
    peaks = np.array([device.flops_per_s.get(d, fallback) for d in DTYPES] + [fallback])
    dtype = work.dtype.copy()
    # Whether float operands were multiplied as TF32 is known from the kernels only.
    in_tf32 = (trace.kernels["dtype"] == "tf32").to_numpy(dtype=bool)
    shares_tf32 = np.isin(work.group, np.unique(work.group[in_tf32]))
    dtype[shares_tf32 & (dtype == DTYPES.index("fp32"))] = DTYPES.index("tf32")
    return np.asarray(np.where(work.has_flops, work.flops, 0) / peaks[dtype] * 1e9)


def _nullable(values: np.ndarray, is_known: np.ndarray) -> pd.arrays.IntegerArray:
    """Return integers that are missing where they are not known."""
    return pd.arrays.IntegerArray(values.astype(np.int64), ~is_known)


def _named(codes: np.ndarray, names: tuple[str, ...]) -> pd.Series[str]:
    """Return `names` at `codes` as categories, missing at -1."""
    dtype = pd.CategoricalDtype(pd.Index(names, dtype=object))
    named: pd.Series[str] = pd.Series(pd.Categorical.from_codes(codes, dtype=dtype))
    return named


def issue_ns(trace: Trace, device: Device) -> np.ndarray:
    """Return how long each row's least instructions take at one per scheduler and clock.

    0 where nothing is known, and on GPUs for which they were not counted.
    """
    kernels, ranges = trace.kernels, trace.ranges
    number = np.zeros(len(kernels))
    if math.isnan(_instruction_ns(device)):
        return number
    names = kernels["name"].cat
    is_told = [
        bool(_EACH_BY_ITSELF.search(n) or _CONVERTS in n) for n in map(str, names.categories)
    ]
    rows = np.flatnonzero(np.array([*is_told, False])[names.codes.to_numpy()])
    op_row = kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)[rows]
    told = {column: np.append(ranges[column].cat.codes, -1)[op_row] for column in _TOLD}
    calls = kernels.iloc[rows][["name", "grid"]].apply(lambda column: column.cat.codes)
    calls = calls.assign(**told)
    texts = [
        *([*kernels[column].cat.categories, "nan"] for column in ("name", "grid")),
        *([*ranges[column].cat.categories, "[]"] for column in _TOLD),
    ]
    group = calls.groupby([*calls.columns], sort=False).ngroup().to_numpy()
    _, first = np.unique(group, return_index=True)
    least = [
        least_instructions(*(str(of[code]) for of, code in zip(texts, call, strict=True)))
        for call in calls.iloc[first].itertuples(index=False)
    ]
    number[rows] = np.array(least, dtype=float)[group]
    return np.asarray(number * _instruction_ns(device))


def least_instructions(name: str, grid: str, shapes: str, strides: str, dtypes: str) -> int:
    """Return how many instructions all threads of a launch issue at least, 0 if not known."""
    sizes = _tensors(shapes)
    kernel = _EACH_BY_ITSELF.search(name)
    if kernel is None:
        is_fp8 = dtypes.startswith('["c10::Float8_e4m3fn"') and len(sizes) > 0
        each = _TO_FP8 + ("lambda(float)" not in name)
        return math.prod(sizes[0]) * each if is_fp8 else 0
    blocks = grid.partition(",")[0]
    threads, unrolled, is_uncast = kernel.groups()
    elements = (int(blocks) - 1) * int(threads) * int(unrolled) + 1 if blocks.isdigit() else 0
    each = instructions_each(
        operands=1 + _num_arguments(name),
        dimensions=num_dimensions(sizes, _tensors(strides)),
        # Older PyTorch has one name for both kernels; with one type there is nothing to cast.
        are_cast=not is_uncast and len(_types(sizes, json.loads(dtypes))) > 1,
        is_division="DivFunctor" in name,
    )
    return elements * each


def instructions_each(
    operands: int, dimensions: int, *, are_cast: bool = False, is_division: bool = False
) -> int:
    """Return how many instructions one element takes at least; the result is an operand, too."""
    # Constants of two operands are loaded together.
    of_dimension = _DIMENSION + operands + (operands - 1) // 2
    number = _ELEMENT + operands * _OPERAND + dimensions * of_dimension
    return number + are_cast * operands * _CAST + is_division * _DIVISION


def _tensors(text: str) -> list[list[int]]:
    """Return a recorded list of lists of integers, of which others are empty."""
    found = json.loads(text)
    given = found if isinstance(found, list) else []
    return [
        one if isinstance(one, list) and all(isinstance(n, int) for n in one) else []
        for one in given
    ]


def _types(sizes: list[list[int]], types: list[str]) -> set[str]:
    """Return the types of tensors; those of numbers, which Python made, are none."""
    named = zip(sizes, types, strict=False)
    return {name for size, name in named if size or name in _TYPES_OF_TENSORS}


def _num_arguments(name: str) -> int:
    """Return how many operands the function that a kernel applies reads, as its name tells."""
    if "FillFunctor" in name:
        return 0
    if re.search(r"BinaryFunctor|CUDAFunctor_add\b", name):
        return 2
    return max((len(found.split(",")) for found in _ARGUMENTS.findall(name)), default=1)


def num_dimensions(shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> int:
    """Return how many dimensions are left, at least, of those in which operands can be stepped.

    Two are one if in every operand a step in the outer is a walk through the inner.
    """
    both = [(s, t) for s, t in zip(shapes, strides, strict=False) if s and len(s) == len(t)]
    width = max((len(s) for s, _ in both), default=0)
    lengths = np.ones((len(both), width), dtype=np.int64)
    steps = np.zeros((len(both), width), dtype=np.int64)
    for row, (shape, stride) in enumerate(both):
        lengths[row, width - len(shape) :], steps[row, width - len(shape) :] = shape, stride
    steps[lengths == 1] = 0
    length = lengths.max(axis=0, initial=1)
    group = {place: place for place in np.flatnonzero(length > 1).tolist()}
    for inner, outer in permutations(group, 2):
        if (steps[:, outer] == steps[:, inner] * length[inner]).all():
            old, new = group[inner], group[outer]
            group = {place: new if its == old else its for place, its in group.items()}
    return max(len(set(group.values())), 1)


def copy_ns(device: Device, num_bytes: np.ndarray) -> np.ndarray:
    """Return the time of a copy that moves so many bytes and stays in the cache.

    Straight lines through the measured copies; NaN beyond the cache, or where none was measured.
    """
    copies = np.array(device.cached_copies, dtype=float).reshape(-1, 2)
    if len(copies) < 2 or device.cache_bytes is None:
        return np.full(len(num_bytes), np.nan)
    size, time_ns = copies.T
    piece = np.clip(np.searchsorted(size, num_bytes) - 1, 0, len(size) - 2)
    slope = np.diff(time_ns) / np.diff(size)
    found = time_ns[piece] + (num_bytes - size[piece]) * slope[piece]
    return np.where(num_bytes <= device.cache_bytes, found, np.nan)


def is_served(
    device: Device, read: np.ndarray, moved: np.ndarray, time_ns: np.ndarray, share: float
) -> np.ndarray:
    """Tell what came out of the cache: it fits, and reached `share` of a copy within the cache."""
    if device.cache_bytes is None:
        return np.zeros(len(moved), dtype=bool)
    fits = read <= LEFT_SHARE * device.cache_bytes
    return np.asarray(fits & (moved > 0) & (copy_ns(device, moved) >= share * time_ns))


def least_from_memory(device: Device, read: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return what of the bytes moved cannot have been in the cache when the launch began."""
    return np.asarray(moved - np.minimum(read, LEFT_SHARE * (device.cache_bytes or 0)))


def kept_bytes(device: Device, written: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return what a launch had not yet written to the memory when it ended, of what it wrote.

    The cache then holds what was touched last, read or written alike, and so much of it written.
    """
    cache = device.cache_bytes or 0
    touched_last = np.minimum(moved, TOUCHED_SHARE * cache) * written / np.maximum(moved, 1)
    return np.asarray(np.minimum(touched_last, UNWRITTEN_SHARE * cache))
