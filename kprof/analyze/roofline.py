"""Roofline: what work each device activity had to do, how fast it could be, and what bounds it.

Work belongs to an operator and is split over its activities by their durations. A copy's own
size is recorded. Between host and device, and between GPUs, it is the link that limits a copy or a
collective, so those have no limit here.

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

from kprof.analyze.alike import find_alike
from kprof.analyze.bounds import bound_kernel
from kprof.analyze.nesting import NO_ROW
from kprof.analyze.operator_work import DTYPES, WORK_BOUNDS, find_work
from kprof.device import Device
from kprof.trace import Trace

BOUND_SHARE = 0.6
"""Share of a ceiling from which an operator counts as bound by it; within 0.05 it is borderline."""

BEATEN_SHARE = 1.05
"""Limit over duration above which the work or the ceiling cannot be right."""

SOURCES = ("shapes", "recorded", "bounds", "alike")
BOUNDS = ("memory", "compute", "latency")
_SHAPES, _RECORDED, _BOUNDS, _ALIKE = range(4)
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
    bound: np.ndarray
    """Place in `WORK_BOUNDS`, `_UNKNOWN` where the work is no bound."""
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
        work_bound=_named(work.bound, WORK_BOUNDS).set_axis(index),
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
    carrier = np.where(is_recorded, NO_ROW, operators.carrier)
    is_shaped = carrier != NO_ROW
    group, carrier_of = _calls(kernels, carrier)
    duration = kernels["duration_ns"].to_numpy(dtype=np.int64)
    num_bytes = split_by_duration(operators.bytes[carrier_of], group, duration)
    num_bytes[is_recorded] = recorded[is_recorded]
    has_flops = is_recorded.copy()
    has_flops[is_shaped] = operators.has_flops[carrier[is_shaped]]
    dtype = np.full(len(kernels), -1, dtype=np.int8)
    dtype[is_shaped] = operators.dtype[carrier[is_shaped]]
    bound = np.full(len(kernels), _UNKNOWN, dtype=np.int8)
    bound[is_shaped] = operators.bound[carrier[is_shaped]]
    is_bounded = is_shaped & (bound != _UNKNOWN)
    # Rows that share no operator are groups of their own, numbered after the calls.
    alone = len(carrier_of) + np.arange(len(kernels))
    work = RowWork(
        flops=split_by_duration(operators.flops[carrier_of], group, duration),
        has_flops=has_flops,
        bytes=num_bytes,
        source=np.select(
            [is_bounded, is_shaped, is_recorded], [_BOUNDS, _SHAPES, _RECORDED], _UNKNOWN
        ),
        dtype=dtype,
        bound=bound,
        group=np.where(is_shaped, group, alone),
    )
    _fill_alike(kernels, work)
    _fill_bounds(trace, work)
    return work


def _calls(kernels: pd.DataFrame, carrier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the number of the call whose work it shares, and each call's operator.

    A call of an operator is that operator's row, but what a CUDA graph replays is another call
    of it with every replay.
    """
    group = np.full(len(kernels), NO_ROW, dtype=np.int64)
    rows = np.flatnonzero(carrier != NO_ROW)
    launch = kernels["launch_row"].to_numpy(np.int64, na_value=NO_ROW)
    is_replayed = kernels["graph_node"].notna().to_numpy()
    replay = np.where(is_replayed, launch, NO_ROW)[rows]
    calls = pd.DataFrame({"carrier": carrier[rows], "replay": replay})
    group[rows] = calls.groupby(["carrier", "replay"], sort=False).ngroup().to_numpy()
    _, first = np.unique(group[rows], return_index=True)
    return group, carrier[rows][first]


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
    """Fill in bounds for launches whose work their kernel's name and blocks bound.

    An upper bound that the device could not even have moved in the time tells nothing.
    """
    kernels, device = trace.kernels, trace.meta.device
    most_bytes = np.full(len(kernels), np.inf)
    if device is not None:
        bytes_per_ns = device.memory_bytes_per_s / 1e9
        most_bytes = bytes_per_ns * kernels["duration_ns"].to_numpy(dtype=float)
    is_bounded = _name_holds(kernels["name"], "multi_tensor_apply|elementwise_kernel")
    rows = np.flatnonzero(is_bounded & (work.source == _UNKNOWN))
    launches = kernels.iloc[rows].astype({"block": object}).fillna({"block": ""})
    groups = launches.groupby(["name", "grid", "block"], observed=True).indices
    for (name, grid, block), places in groups.items():
        bound = bound_kernel(str(name), str(grid), str(block))
        if bound is None:
            continue
        told = rows[places]
        if bound.bound == "at most":
            told = told[most_bytes[told] >= bound.bytes]
        work.flops[told], work.bytes[told] = bound.flops or 0, bound.bytes
        work.has_flops[told], work.source[told] = bound.flops is not None, _BOUNDS
        work.bound[told] = WORK_BOUNDS.index(bound.bound or "at least")
        work.dtype[told] = DTYPES.index(_FALLBACK_DTYPE)


def _fill_alike(kernels: pd.DataFrame, work: RowWork) -> None:
    """Fill in the work of launches that are alike to one whose work is known."""
    like = find_alike(kernels, work.source == _SHAPES, work.bytes)
    like[work.source != _UNKNOWN] = NO_ROW
    rows = np.flatnonzero(like != NO_ROW)
    for values in (work.flops, work.bytes, work.has_flops, work.dtype):
        values[rows] = values[like[rows]]
    work.source[rows] = _ALIKE


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
    is_upper = work.bound == WORK_BOUNDS.index("at most")
    duration_ns = trace.kernels["duration_ns"].to_numpy(dtype=np.int64)
    # The time that it took bounds the limit, too.
    limit_ns = np.where(is_upper, np.minimum(limit_ns, duration_ns), limit_ns)

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
    """Tell which copies and collectives go between memories, so that a link limits them."""
    is_copy = (kernels["activity"] == "memcpy").to_numpy(dtype=bool)
    is_collective = (kernels["kind"] == "collective").to_numpy(dtype=bool)
    return np.asarray((is_copy & ~_is_within_device(kernels)) | is_collective)


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
