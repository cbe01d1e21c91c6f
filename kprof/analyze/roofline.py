"""Roofline: what work each device activity had to do, how fast it could be, and what bounds it.

Work belongs to an operator and is split over its activities by their durations. A copy's own
size is recorded; between host and device it is the link that limits it, so it has no limit here.

The bound follows from the shares of the two ceilings that the whole operator reached in its
measured time T:

* memory: least bytes / (bandwidth · T) reaches `BOUND_SHARE`, and the compute share is not above
* compute: FLOPs / (peak of their type · T) reaches it, and is above the memory share
* latency: both are below: too little work to fill the device, it waits, or does more than it needs

Counters see all traffic, the shares only least bytes: memory and compute are certain where they
are found, and some of latency may be an operator that reads its input twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.bounds import bound_list_kernel
from kprof.analyze.nesting import NO_ROW
from kprof.analyze.operator_work import DTYPES, find_work
from kprof.device import Device
from kprof.trace import Trace

BOUND_SHARE = 0.6
"""Share of a ceiling from which an operator counts as bound by it; within 0.05 it is borderline."""

BEATEN_SHARE = 1.05
"""Limit over duration above which the work or the ceiling cannot be right."""

SOURCES = ("shapes", "recorded", "bounds")
BOUNDS = ("memory", "compute", "latency")
_SHAPES, _RECORDED, _BOUNDS = range(3)
_MEMORY, _COMPUTE, _LATENCY = range(3)
_UNKNOWN = -1

# Types without a peak of their own run on the vector units: integers, bf16 before Ampere.
_FALLBACK_DTYPE = "fp32"


@dataclass(frozen=True)
class RowWork:
    """Work of each row of `kernels`."""

    flops: np.ndarray
    has_flops: np.ndarray
    bytes: np.ndarray
    source: np.ndarray
    """Place in `SOURCES`, `_UNKNOWN` where no work is known."""
    dtype: np.ndarray
    """Place in `DTYPES` of the type whose peak limits the FLOPs, -1 for none."""
    group: np.ndarray
    """Rows with the same number share one operator's work, and so one bound."""


def add_roofline(trace: Trace) -> Trace:
    """Add flops, bytes, their source, the time at the roofline and the bound."""
    work = _row_work(trace)
    is_known = work.source != _UNKNOWN
    limit_ns, has_limit, bound = _limits(trace, work)
    index = trace.kernels.index
    return trace.with_kernels(
        flops=_nullable(work.flops, is_known & work.has_flops),
        bytes=_nullable(work.bytes, is_known),
        work_from=_named(work.source, SOURCES).set_axis(index),
        limit_ns=_nullable(limit_ns, has_limit),
        bound=_named(bound, BOUNDS).set_axis(index),
    )


def beaten_ceilings(trace: Trace) -> pd.DataFrame:
    """Return the rows of `kernels` whose limit is more than 5 % above their duration.

    Nothing runs faster than its ceiling: such a row's tensors were in a cache, its work is an
    upper bound, or the ceiling is not this device's.
    """
    kernels = trace.kernels
    limit_ns = kernels["limit_ns"].fillna(0).to_numpy(dtype=np.int64)
    is_beaten = limit_ns > BEATEN_SHARE * kernels["duration_ns"].to_numpy(dtype=np.int64)
    beaten: pd.DataFrame = kernels.iloc[np.flatnonzero(is_beaten)]
    return beaten


def _row_work(trace: Trace) -> RowWork:
    """Return the work of every row from its best source: recorded, shapes, bounds."""
    kernels = trace.kernels
    operators = find_work(trace)
    recorded = _recorded_bytes(kernels)
    is_recorded = recorded >= 0
    group = np.where(is_recorded, NO_ROW, operators.carrier)
    is_shaped = group != NO_ROW
    duration = kernels["duration_ns"].to_numpy(dtype=np.int64)
    num_bytes = split_by_duration(operators.bytes, group, duration)
    num_bytes[is_recorded] = recorded[is_recorded]
    has_flops = is_recorded.copy()
    has_flops[is_shaped] = operators.has_flops[group[is_shaped]]
    dtype = np.full(len(kernels), -1, dtype=np.int8)
    dtype[is_shaped] = operators.dtype[group[is_shaped]]
    # Rows that share no operator are groups of their own, numbered after the ranges.
    alone = len(trace.ranges) + np.arange(len(kernels))
    work = RowWork(
        flops=split_by_duration(operators.flops, group, duration),
        has_flops=has_flops,
        bytes=num_bytes,
        source=np.select([is_shaped, is_recorded], [_SHAPES, _RECORDED], _UNKNOWN),
        dtype=dtype,
        group=np.where(is_shaped, group, alone),
    )
    _fill_bounds(trace, work)
    return work


def split_by_duration(total: np.ndarray, group: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """Split `total[g]` over the rows of each group g in proportion to their durations.

    Integers add up exactly: what rounding leaves goes to the group's longest row. Rows of group
    `NO_ROW` get 0. Where all of a group lasted 0 ns its first row gets everything.
    """
    result = np.zeros(len(group), dtype=np.int64)
    rows = np.flatnonzero(group != NO_ROW)
    if not len(rows):
        return result
    groups, member = np.unique(group[rows], return_inverse=True)
    wanted = total[groups]
    time = np.zeros(len(groups), dtype=np.int64)
    np.add.at(time, member, duration[rows])
    share = duration[rows] / np.maximum(time, 1)[member]
    part = np.minimum((wanted[member] * share).astype(np.int64), wanted[member])
    given = np.zeros(len(groups), dtype=np.int64)
    np.add.at(given, member, part)
    by_duration = np.lexsort([-rows, duration[rows], member])
    last = np.flatnonzero(np.append(np.diff(member[by_duration]) != 0, True))
    longest = by_duration[last]
    part[longest] += (wanted - given)[member[longest]]
    result[rows] = part
    return result


def _recorded_bytes(kernels: pd.DataFrame) -> np.ndarray:
    """Return what copies and sets moved through memory, -1 where that was not recorded.

    A copy within a device reads and writes each byte.
    """
    copied = kernels["copied_bytes"].fillna(-1).to_numpy(dtype=np.int64)
    is_copy = kernels["activity"].isin(["memcpy", "memset"]).to_numpy(dtype=bool)
    twice = _is_within_device(kernels) & (copied > 0)
    return np.asarray(np.where(is_copy, np.where(twice, 2 * copied, copied), -1))


def _is_within_device(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows are copies from a device to itself, as their names say."""
    is_copy = (kernels["activity"] == "memcpy").to_numpy(dtype=bool)
    return np.asarray(is_copy & _name_holds(kernels["name"], "DtoD|DeviceToDevice"))


def _fill_bounds(trace: Trace, work: RowWork) -> None:
    """Fill in bounds for launches over lists of tensors whose shapes were not recorded.

    An upper bound that the device could not even have moved in the time tells nothing.
    """
    kernels, device = trace.kernels, trace.meta.device
    most_bytes = np.full(len(kernels), np.inf)
    if device is not None:
        bytes_per_ns = device.memory_bytes_per_s / 1e9
        most_bytes = bytes_per_ns * kernels["duration_ns"].to_numpy(dtype=float)
    over_lists = _name_holds(kernels["name"], "multi_tensor_apply")
    rows = np.flatnonzero(over_lists & (work.source == _UNKNOWN))
    launches = kernels.iloc[rows].groupby(["name", "grid"], observed=True).indices
    for (name, grid), places in launches.items():
        bound = bound_list_kernel(str(name), str(grid))
        if bound is None:
            continue
        told = rows[places][most_bytes[rows[places]] >= bound.bytes]
        work.flops[told], work.bytes[told] = bound.flops, bound.bytes
        work.has_flops[told], work.source[told] = True, _BOUNDS
        work.dtype[told] = DTYPES.index(_FALLBACK_DTYPE)


def _limits(trace: Trace, work: RowWork) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each row's time at the roofline, whether it has one, and its operator's bound."""
    num_rows = len(trace.kernels)
    device = trace.meta.device
    bound = np.full(num_rows, _UNKNOWN, dtype=np.int8)
    has_limit = (work.source != _UNKNOWN) & ~_crosses_link(trace.kernels)
    if device is None or not has_limit.any():
        return np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=bool), bound
    memory_ns = work.bytes / device.memory_bytes_per_s * 1e9
    compute_ns = _compute_ns(trace, work, device)
    limit_ns = np.rint(np.maximum(memory_ns, compute_ns))
    limit_ns[(limit_ns == 0) & ((work.bytes > 0) | (work.flops > 0))] = 1

    member, _ = pd.factorize(work.group)
    time_ns = np.bincount(member, weights=trace.kernels["duration_ns"].to_numpy(dtype=float))
    measurable = has_limit & (time_ns[member] > 0)
    time_ns = np.maximum(time_ns, 1)
    memory_share = (np.bincount(member, weights=memory_ns) / time_ns)[member]
    compute_share = (np.bincount(member, weights=compute_ns) / time_ns)[member]
    decided = decide_bound(memory_share, compute_share)
    bound[measurable] = decided[measurable]
    return limit_ns.astype(np.int64), has_limit, bound


def decide_bound(memory_share: np.ndarray, compute_share: np.ndarray) -> np.ndarray:
    """Return places in `BOUNDS` from the shares of the two ceilings that operators reached."""
    is_memory = (memory_share >= BOUND_SHARE) & (memory_share >= compute_share)
    is_compute = compute_share >= BOUND_SHARE
    return np.asarray(np.select([is_memory, is_compute], [_MEMORY, _COMPUTE], _LATENCY))


def _compute_ns(trace: Trace, work: RowWork, device: Device) -> np.ndarray:
    """Return each row's time at the compute ceiling of its operands' type."""
    fallback = device.flops_per_s.get(_FALLBACK_DTYPE, np.inf)
    peaks = np.array([device.flops_per_s.get(d, fallback) for d in DTYPES] + [fallback])
    dtype = work.dtype.copy()
    # Whether float operands were multiplied as TF32 is known from the kernels only.
    in_tf32 = (trace.kernels["dtype"] == "tf32").to_numpy(dtype=bool)
    shares_tf32 = np.isin(work.group, np.unique(work.group[in_tf32]))
    dtype[shares_tf32 & (dtype == DTYPES.index("fp32"))] = DTYPES.index("tf32")
    return np.asarray(np.where(work.has_flops, work.flops, 0) / peaks[dtype] * 1e9)


def _crosses_link(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which copies go between memories, so that a link limits them."""
    is_copy = (kernels["activity"] == "memcpy").to_numpy(dtype=bool)
    return np.asarray(is_copy & ~_is_within_device(kernels))


def _name_holds(names: pd.Series[str], pattern: str) -> np.ndarray:
    """Tell which rows' names match, asking once per distinct name."""
    holds = [re.search(pattern, str(name)) is not None for name in names.cat.categories]
    return np.asarray(np.array([*holds, False])[names.cat.codes.to_numpy()])


def _nullable(values: np.ndarray, is_known: np.ndarray) -> pd.arrays.IntegerArray:
    """Return integers that are missing where they are not known."""
    return pd.arrays.IntegerArray(values.astype(np.int64), ~is_known)


def _named(codes: np.ndarray, names: tuple[str, ...]) -> pd.Series[str]:
    """Return `names` at `codes` as categories, missing at -1."""
    dtype = pd.CategoricalDtype(pd.Index(names, dtype=object))
    named: pd.Series[str] = pd.Series(pd.Categorical.from_codes(codes, dtype=dtype))
    return named
