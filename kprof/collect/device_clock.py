"""Correction of a GPU's clock against its host's: nothing begins before the call that launched it.

The driver's reading of one clock may be earlier or slower than of the other: on an H200 kernels
were seen to begin 85 µs before their launch, and 331 µs before it 0.7 s later. Times of the host
and of the device then contradict each other by more than an idle gap. A few early activities among
others that fit are not the clock's fault: they are joined to a wrong launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kprof.collect.lost_records import launch_rows
from kprof.errors import counted
from kprof.trace import Caveat, Trace

# The resolution to which traces round their times.
TOLERANCE_NS = 1_000
# No clock drifts by more than this, as a share of the time.
MOST_DRIFT = 1e-3
# Nor is any off by more: launches are then another process's, with the same numbers.
MOST_OFF_NS = 1_000_000_000
# An activity on an idle GPU begins this soon after its launch began: mostly 4 to 15 µs.
AT_ONCE_NS = 20_000
# A launch is another's where, with it left out, so many more begin at once.
MORE_WITHOUT = 10
# Through two points there is always a line.
LEAST_ON_A_DRIFT = 3
# Number of time segments; in each, the activity that contradicts its launch most decides.
STRETCHES = 4_096
# Times farther apart are damaged, and their differences may overflow.
FARTHEST_NS = 2**62


@dataclass(frozen=True)
class _Line:
    """The offset to add to a device's times; it may grow or shrink with time."""

    from_ns: int
    at_first_ns: float
    drift: float

    def at(self, time_ns: np.ndarray) -> np.ndarray:
        """Return what to add at these times."""
        added_ns = self.at_first_ns + self.drift * (time_ns - self.from_ns)
        return np.array(np.ceil(np.maximum(added_ns, 0)), dtype=np.int64)


NOT_OFF = _Line(0, 0.0, 0.0)


def on_the_hosts_clock(trace: Trace) -> Trace:
    """Move the activities of a GPU of which some begin before they are launched; a caveat says so.

    They move later by a line in time: of those that leave none before its launch the lowest, over
    all launches. A launch takes some µs to arrive, so by a few more they may still be early.
    Counters that were sampled beside them move along. A launch that few others bear out, with an
    activity that begins before it, is another's: the activity loses its number, and moves nothing.
    """
    lateness = _lateness_of_launches(trace)
    for (rank, device), rows in lateness.groupby(["rank", "device"], observed=True):
        if not _num_early(rows):
            continue
        whose = f"GPU {device}" + (f" of rank {rank}" if trace.meta.num_ranks > 1 else "")
        is_borne_out = _borne_out(*_times(rows))
        trace = _without_launches(trace, rows[~is_borne_out], len(rows), whose)
        rows = rows[is_borne_out]
        num_early = _num_early(rows)
        if not num_early:
            continue
        told = (
            f"By the clocks {num_early:,} of {counted(len(rows), 'activity', 'activities')} of "
            f"{whose} began before they were launched, by up to "
            f"{rows['late_ns'].max() / 1e3:,.0f} µs"
        )
        if rows["late_ns"].max() > MOST_OFF_NS:
            off = f"{told}: more than a clock is off, so nothing was moved."
            trace = _noted(trace, Caveat("device_clock_off", off))
        else:
            moved = _moved(trace, rank, device, _lowest_line(*_times(rows)), told)
            trace = _counted(moved, "early_activities", num_early)
    return trace


def _lateness_of_launches(trace: Trace) -> pd.DataFrame:
    """Return rank, device, row and begin of GPUs' activities, and how much later their launch."""
    kernels, ranges = trace.kernels, trace.ranges
    launch = launch_rows(kernels, ranges)
    rows = np.flatnonzero((launch >= 0) & (kernels["activity"] != "host").to_numpy(bool))
    start_ns = kernels["start_ns"].to_numpy(np.int64)[rows]
    launch_ns = ranges["start_ns"].to_numpy(np.int64)[launch[rows]]
    begins = np.append(start_ns, launch_ns)
    is_too_far = len(rows) and int(begins.max()) - int(begins.min()) > FARTHEST_NS
    found: pd.DataFrame = kernels[["rank", "device"]].iloc[rows]
    found = found.assign(kernel=rows, start_ns=start_ns, late_ns=launch_ns - start_ns)
    return found.iloc[:0] if is_too_far else found


def _num_early(rows: pd.DataFrame) -> int:
    return int((rows["late_ns"] > TOLERANCE_NS).sum())


def _borne_out(start_ns: np.ndarray, late_ns: np.ndarray) -> np.ndarray:
    """Tell which launches others bear out.

    The earliest are left out, more and more of them; by the line of the rest most have to begin
    at once, and for each that is left out `MORE_WITHOUT` more. Without all early ones the clock is
    right.
    """
    num_early = int((late_ns > TOLERANCE_NS).sum())
    order = np.argsort(-late_ns, kind="stable")
    best, most = NOT_OFF, -np.inf
    for num_out in _doubling(num_early):
        rest = order[num_out:]
        line = NOT_OFF if num_out == num_early else _lowest_line(start_ns[rest], late_ns[rest])
        number = _num_at_once(line, start_ns, late_ns) - MORE_WITHOUT * num_out
        if number > most:
            best, most = line, number
        if number + MORE_WITHOUT >= len(late_ns):
            break
    above_ns = late_ns - best.at(start_ns)
    return np.asarray(above_ns <= (TOLERANCE_NS if best is NOT_OFF else AT_ONCE_NS))


def _doubling(number: int) -> Iterator[int]:
    """Yield 0, 1, 2, 4, … below a number, and the number."""
    yield 0
    yield from itertools.takewhile(lambda some: some < number, (2**n for n in itertools.count()))
    yield number


def _lowest_line(start_ns: np.ndarray, late_ns: np.ndarray) -> _Line:
    """Return the lowest line, on average, that is nowhere below `late_ns`.

    That is the edge of their upper hull above the mean time. It drifts only where then no fewer
    begin at once than without, and `LEAST_ON_A_DRIFT`.
    """
    first_ns = int(start_ns.min())
    x, y = (start_ns - first_ns).astype(float), late_ns.astype(float)
    middle, drift = float(x.mean()), 0.0
    for (x1, y1), (x2, y2) in _edges(_highest_of_stretches(x, y)):
        if x1 <= middle <= x2:
            drift = float(np.clip((y2 - y1) / (x2 - x1), -MOST_DRIFT, MOST_DRIFT))
    flat = _Line(first_ns, float(y.max()), 0.0)
    drifting = _Line(first_ns, float((y - drift * x).max()), drift)
    least = max(LEAST_ON_A_DRIFT, _num_at_once(flat, start_ns, late_ns))
    return drifting if _num_at_once(drifting, start_ns, late_ns) >= least else flat


def _edges(
    points: list[tuple[float, float]],
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yield the edges of the upper hull of points in the order of time."""
    hull: list[tuple[float, float]] = []
    for point in points:
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    yield from itertools.pairwise(hull)


def _is_below(
    first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]
) -> bool:
    """Tell whether the middle point is not above the line between the others."""
    (x1, y1), (x2, y2), (x3, y3) = first, middle, last
    return (y2 - y1) * (x3 - x1) <= (y3 - y1) * (x2 - x1)


def _highest_of_stretches(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """Return the highest point of each stretch of time, in their order; no two at one time."""
    stretch = np.minimum(x * (STRETCHES / max(float(x.max()), 1.0)), STRETCHES - 1).astype(int)
    points = pd.DataFrame({"x": x, "y": y, "stretch": stretch})
    highest = points.loc[points.groupby("stretch")["y"].idxmax()].sort_values("x")
    return list(zip(highest["x"], highest["y"], strict=True))


def _num_at_once(line: _Line, start_ns: np.ndarray, late_ns: np.ndarray) -> int:
    """Return how many activities begin right after their launch once a line is added."""
    waited_ns = line.at(start_ns) - late_ns
    return int(((waited_ns >= -TOLERANCE_NS) & (waited_ns <= AT_ONCE_NS)).sum())


def _times(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    return rows["start_ns"].to_numpy(np.int64), rows["late_ns"].to_numpy(np.int64)


def _without_launches(trace: Trace, rows: pd.DataFrame, num_all: int, whose: str) -> Trace:
    """Take the numbers off activities whose launches are others', and say so."""
    if rows.empty:
        return trace
    correlation = trace.kernels["correlation"].copy()
    correlation.loc[rows["kernel"]] = pd.NA
    told = (
        f"By their numbers {len(rows):,} of {counted(num_all, 'activity', 'activities')} of "
        f"{whose} began before they were launched, by up to "
        f"{rows['late_ns'].max() / 1e3:,.0f} µs, where the others fit: the numbers "
        "were given twice, or are damaged. Who launched them counts as unknown, and no "
        "clock was moved for them."
    )
    trace = trace.with_kernels(correlation=correlation)
    trace = _noted(trace, Caveat("disbelieved_launches", told))
    return _counted(trace, "disbelieved_launches", len(rows))


def _noted(trace: Trace, caveat: Caveat) -> Trace:
    return replace(trace, meta=replace(trace.meta, caveats=(*trace.meta.caveats, caveat)))


def _counted(trace: Trace, what: str, number: int) -> Trace:
    """Count what the times and numbers no longer tell."""
    counts = {**trace.meta.counts, what: trace.meta.counts.get(what, 0) + number}
    return replace(trace, meta=replace(trace.meta, counts=counts))


def _moved(trace: Trace, rank: object, device: object, line: _Line, told: str) -> Trace:
    kernels, samples = trace.kernels, trace.samples
    is_activity = (kernels["rank"] == rank) & (kernels["device"] == device)
    is_activity &= kernels["activity"] != "host"
    is_counted = (samples["rank"] == rank) & (samples["device"] == device)
    is_counted &= samples["source"] == "counters"
    start_ns, added_ns = _later(kernels["start_ns"], is_activity, line)
    time_ns, _ = _later(samples["time_ns"], is_counted, line)
    moved = replace(trace.with_kernels(start_ns=start_ns), samples=samples.assign(time_ns=time_ns))
    moved_by = (
        f"{told}. All of its activities count as {added_ns.min() / 1e3:,.0f} to "
        f"{added_ns.max() / 1e3:,.0f} µs later, so that none does; between host and GPU times may "
        "be off by some µs more."
    )
    return _noted(moved, Caveat("device_clock_moved", moved_by))


def _later(
    times: pd.Series[int], is_moved: pd.Series[bool], line: _Line
) -> tuple[np.ndarray, np.ndarray]:
    """Return the times, some of them moved, and what was added to those."""
    found, is_there = times.to_numpy(np.int64, copy=True), is_moved.to_numpy(bool)
    added_ns = line.at(found[is_there])
    found[is_there] += added_ns
    return found, added_ns
