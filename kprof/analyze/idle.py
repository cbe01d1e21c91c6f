"""Idle time: the gap before each activity, and what the host was doing meanwhile."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.trace import Trace

SYNCHRONIZATION = r"(?:Synchronize|cudaMemcpy$|hipMemcpy$|cuMemcpy[A-Za-z]*_v2$)"
ALLOCATION = r"(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostRegister)|cuMem(?:Create|Map|Alloc|Free)"

# A host activity explains a gap when it covers at least half of it.
SHARE_THAT_EXPLAINS = 0.5

# A host that waited until the device had nothing left to do needs a moment to launch again.
# Longer than this, it was busy with something else.
RESUME_NS = 500_000


def add_idle(trace: Trace) -> Trace:
    """Add the idle time before each activity of a rank, and its cause.

    Causes: "queued" (in the device's queue before it went idle: nothing on the host was late),
    "synchronization", "allocation" or "data" (a blocking call, a memory call or data loading
    covered most of the gap; also where the device went idle during a blocking call, soon after
    which the host launched again), "host" (the host had not launched it yet). Missing where no
    launch is known. The gaps of a rank add up to its idle time.
    """
    kernels = trace.kernels
    start = kernels["start_ns"].to_numpy()
    end = start + kernels["duration_ns"].to_numpy()
    rank = kernels["rank"].to_numpy()
    gap = np.zeros(len(kernels), dtype=np.int64)
    is_first = np.zeros(len(kernels), dtype=bool)
    for one in np.unique(rank):
        rows = np.flatnonzero(rank == one)
        rows = rows[np.argsort(start[rows], kind="stable")]
        covered_to = np.maximum.accumulate(end[rows])
        gap[rows[1:]] = np.maximum(start[rows[1:]] - covered_to[:-1], 0)
        is_first[rows[0]] = True
    return trace.with_kernels(
        gap_before_ns=pd.arrays.IntegerArray(gap, is_first),
        gap_cause=_causes(trace, gap),
    )


def _causes(trace: Trace, gap: np.ndarray) -> pd.Categorical:
    ranges = trace.ranges
    launch = trace.kernels["launch_row"].fillna(-1).to_numpy(dtype=np.int64)
    rows = np.flatnonzero((gap > 0) & (launch >= 0))
    causes = np.full(len(gap), None, dtype=object)
    if len(rows) and not trace.is_host_only:
        gap_end = trace.kernels["start_ns"].to_numpy()[rows]
        gap_start = gap_end - gap[rows]
        begun = ranges["start_ns"].to_numpy()[launch[rows]]
        rank = trace.kernels["rank"].to_numpy()[rows]
        suspects = {
            "synchronization": _calls(ranges, SYNCHRONIZATION),
            "allocation": _calls(ranges, ALLOCATION),
            "data": _data_loading(ranges),
        }
        late = _queued_ns(trace, launch)[rows] > gap_start
        found = np.where(late, "host", "queued").astype(object)
        waited_until = _running_until(ranges, suspects["synchronization"], rank, gap_start)
        resumed = late & (waited_until > gap_start) & (begun - waited_until <= RESUME_NS)
        found[resumed] = "synchronization"
        best = np.full(len(rows), SHARE_THAT_EXPLAINS) * gap[rows]
        until = np.clip(begun, gap_start, gap_end)
        for cause, suspect in suspects.items():
            covered = _covered_ns(ranges, suspect, rank, gap_start, until)
            explains = late & (covered >= best)
            found[explains] = cause
            best = np.where(explains, covered, best)
        causes[rows] = found
    return pd.Categorical(
        causes, categories=["queued", "synchronization", "allocation", "data", "host"]
    )


def _queued_ns(trace: Trace, launch: np.ndarray) -> np.ndarray:
    """Return when each activity was in the device's queue: at the end of the call that launched it.

    Where the call launched several (a graph), they were once the first of them ran.
    """
    ranges, start = trace.ranges, trace.kernels["start_ns"].to_numpy()
    queued = (ranges["start_ns"] + ranges["duration_ns"]).to_numpy(dtype=np.int64, copy=True)
    known = launch >= 0
    np.minimum.at(queued, launch[known], start[known])
    return np.where(known, queued[launch], start)


def _running_until(
    ranges: pd.DataFrame, rows: np.ndarray, rank: np.ndarray, moment: np.ndarray
) -> np.ndarray:
    """Return when those of `rows` ended that had begun by each moment in its rank, -1 for none."""
    result = np.full(len(moment), -1, dtype=np.int64)
    start = ranges["start_ns"].to_numpy()[rows]
    end = start + ranges["duration_ns"].to_numpy()[rows]
    for one in np.unique(rank):
        mine = np.flatnonzero(ranges["rank"].to_numpy()[rows] == one)
        mine = mine[np.argsort(start[mine], kind="stable")]
        asked = rank == one
        at = np.searchsorted(start[mine], moment[asked], side="right") - 1
        ends = np.append(np.maximum.accumulate(end[mine]), -1)
        result[asked] = ends[at]
    return result


def _calls(ranges: pd.DataFrame, pattern: str) -> np.ndarray:
    """Return the rows of the runtime calls whose name matches."""
    name = ranges["name"].cat
    matches = np.asarray(name.categories.str.contains(pattern, regex=True), dtype=bool)
    is_call = (ranges["kind"] == "runtime").to_numpy()
    return np.flatnonzero(is_call & matches[name.codes.to_numpy()])


def _data_loading(ranges: pd.DataFrame) -> np.ndarray:
    name = ranges["name"].cat
    loads = np.asarray(name.categories.str.startswith("enumerate(DataLoader)#"), dtype=bool)
    is_phase = (ranges["kind"] == "phase").to_numpy() & (ranges["name"] == "data").to_numpy()
    is_loader = (ranges["kind"] == "range").to_numpy() & loads[name.codes.to_numpy()]
    return np.flatnonzero(is_phase | is_loader)


def _covered_ns(
    ranges: pd.DataFrame, rows: np.ndarray, rank: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return how much of each interval [begin, end] the `rows` of its rank cover, in ns."""
    covered = np.zeros(len(begin), dtype=np.int64)
    for one in np.unique(rank):
        mine = rows[ranges["rank"].to_numpy()[rows] == one]
        asked = rank == one
        if len(mine):
            start = ranges["start_ns"].to_numpy()[mine]
            stop = start + ranges["duration_ns"].to_numpy()[mine]
            up_to_end = _covered_before(start, stop, end[asked])
            covered[asked] = up_to_end - _covered_before(start, stop, begin[asked])
    return covered


def _covered_before(start: np.ndarray, end: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Return the length of the intervals' union before each moment."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.maximum(start, np.concatenate([start[:1], end[:-1]]))
    lengths = np.maximum(end - begins, 0)
    before = np.concatenate([[0], np.cumsum(lengths)])
    at = np.searchsorted(begins, moment, side="right") - 1
    inside = np.clip(moment - begins[at], 0, lengths[at])
    return np.where(at < 0, 0, before[np.maximum(at, 0)] + inside)
