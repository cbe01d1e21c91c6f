"""The clock of a GPU against its host's: nothing begins before the call that launched it.

Both clocks are read through the driver, which may take one for earlier than the other, and for
slower: on an H200 kernels were seen to begin 85 µs before their launch, and 331 µs before it 0.7 s
later. Times of the host and of the device then contradict each other, by more than an idle gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kprof.trace import Trace

# What traces round their times to.
TOLERANCE_NS = 1_000
# No clock drifts by more than this, as a share of the time.
MOST_DRIFT = 1e-3
# Nor is any off by more: launches are then another process's, with the same numbers.
MOST_OFF_NS = 1_000_000_000
# Of so many stretches of time the activity that contradicts its launch most decides.
STRETCHES = 4_096
# Times farther apart are damaged, and their differences may overflow.
FARTHEST_NS = 2**62


@dataclass(frozen=True)
class _Line:
    """What to add to a device's times: more, or less, the later it is."""

    from_ns: int
    at_first_ns: float
    drift: float

    def at(self, time_ns: np.ndarray) -> np.ndarray:
        """Return what to add at these times."""
        added_ns = self.at_first_ns + self.drift * (time_ns - self.from_ns)
        return np.array(np.ceil(np.maximum(added_ns, 0)), dtype=np.int64)


def on_the_hosts_clock(trace: Trace) -> Trace:
    """Move the activities of a GPU of which some begin before they are launched; a caveat says so.

    They move later by a line in time: of those that leave none before its launch the lowest, over
    all launches. A launch takes some µs to arrive, so by a few more they may still be early.
    Counters that were sampled beside them move along.
    """
    lateness = _lateness_of_launches(trace)
    for (rank, device), rows in lateness.groupby(["rank", "device"], observed=True):
        num_early = int((rows["late_ns"] > TOLERANCE_NS).sum())
        if not num_early:
            continue
        whose = f"GPU {device}" + (f" of rank {rank}" if trace.meta.num_ranks > 1 else "")
        told = (
            f"By the clocks {num_early:,} of {len(rows):,} activities of {whose} began before they "
            f"were launched, by up to {rows['late_ns'].max() / 1e3:,.0f} µs"
        )
        if rows["late_ns"].max() > MOST_OFF_NS:
            trace = _noted(trace, f"{told}: more than a clock is off, so nothing was moved.")
        else:
            trace = _counted(_moved(trace, rank, device, rows, told), num_early)
    return trace


def _noted(trace: Trace, caveat: str) -> Trace:
    return replace(trace, meta=replace(trace.meta, caveats=(*trace.meta.caveats, caveat)))


def _counted(trace: Trace, num_early: int) -> Trace:
    """Count what began before its launch, which the times no longer tell."""
    number = trace.meta.counts.get("early_activities", 0) + num_early
    counts = {**trace.meta.counts, "early_activities": number}
    return replace(trace, meta=replace(trace.meta, counts=counts))


def _moved(trace: Trace, rank: object, device: object, rows: pd.DataFrame, told: str) -> Trace:
    kernels, samples = trace.kernels, trace.samples
    line = _lowest_line(rows["start_ns"].to_numpy(), rows["late_ns"].to_numpy())
    is_activity = (kernels["rank"] == rank) & (kernels["device"] == device)
    is_activity &= kernels["activity"] != "host"
    is_counted = (samples["rank"] == rank) & (samples["device"] == device)
    is_counted &= samples["source"] == "counters"
    start_ns, added_ns = _later(kernels["start_ns"], is_activity, line)
    time_ns, _ = _later(samples["time_ns"], is_counted, line)
    moved = replace(trace.with_kernels(start_ns=start_ns), samples=samples.assign(time_ns=time_ns))
    return _noted(
        moved,
        f"{told}. All of its activities count as {added_ns.min() / 1e3:,.0f} to "
        f"{added_ns.max() / 1e3:,.0f} µs later, so that none does; between host and GPU times may "
        "be off by some µs more.",
    )


def _later(
    times: pd.Series[int], is_moved: pd.Series[bool], line: _Line
) -> tuple[np.ndarray, np.ndarray]:
    """Return the times, some of them moved, and what was added to those."""
    found, is_there = times.to_numpy(np.int64, copy=True), is_moved.to_numpy(bool)
    added_ns = line.at(found[is_there])
    found[is_there] += added_ns
    return found, added_ns


def _lateness_of_launches(trace: Trace) -> pd.DataFrame:
    """Return rank, device and begin of all activities on GPUs, and how much later their launch."""
    kernels, ranges = trace.kernels, trace.ranges
    keys = ["rank", "correlation"]
    is_launch = (ranges["kind"] == "runtime") & ranges["correlation"].notna()
    # Of two launches with one number nobody can tell whose an activity is.
    launches = ranges.loc[is_launch, [*keys, "start_ns"]].drop_duplicates(keys, keep=False)
    is_launched = (kernels["activity"] != "host") & kernels["correlation"].notna()
    activities = kernels.loc[is_launched, [*keys, "device", "start_ns"]]
    both: pd.DataFrame = activities.merge(launches, on=keys, suffixes=("", "_of_launch"))
    begins = both[["start_ns", "start_ns_of_launch"]].to_numpy()
    if begins.size and int(begins.max()) - int(begins.min()) > FARTHEST_NS:
        both = both.iloc[:0].copy()
    both["late_ns"] = both["start_ns_of_launch"] - both["start_ns"]
    return both


def _lowest_line(start_ns: np.ndarray, late_ns: np.ndarray) -> _Line:
    """Return the lowest line, on average, that is nowhere below `late_ns`, or 0.

    That is the edge of their upper hull above the mean time.
    """
    first_ns = int(start_ns.min())
    x, y = (start_ns - first_ns).astype(float), np.maximum(late_ns, 0).astype(float)
    middle, drift = float(x.mean()), 0.0
    for (x1, y1), (x2, y2) in _edges(_highest_of_stretches(x, y)):
        if x1 <= middle <= x2:
            drift = float(np.clip((y2 - y1) / (x2 - x1), -MOST_DRIFT, MOST_DRIFT))
    return _Line(first_ns, float((y - drift * x).max()), drift)


def _highest_of_stretches(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """Return the highest point of each stretch of time, in their order; no two at one time."""
    stretch = np.minimum(x * (STRETCHES / max(float(x.max()), 1.0)), STRETCHES - 1).astype(int)
    points = pd.DataFrame({"x": x, "y": y, "stretch": stretch})
    highest = points.loc[points.groupby("stretch")["y"].idxmax()].sort_values("x")
    return list(zip(highest["x"], highest["y"], strict=True))


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
