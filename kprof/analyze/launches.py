"""Launches that left no activity: what the profiler lost, as far as the calls of the host tell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kprof.trace import Trace

# Copies and sets are not counted: of no bytes, or between host buffers, they leave no activity.
LAUNCH = r"Launch(?:Cooperative)?Kernel|KernelLaunch|GraphLaunch"
# While a stream is captured, launches only become nodes of a graph.
CAPTURE_BEGINS = r"StreamBeginCapture"
CAPTURE_ENDS = r"StreamEndCapture"


@dataclass(frozen=True)
class Launches:
    """The launches of kernels and graphs on one rank, and those that left no activity."""

    rank: int
    number: int
    lost_at_start: int
    """Before the first that left an activity; all where none did."""
    lost_in_between: int
    lost_at_end: int
    """After the last that left one: perhaps not finished when the recording stopped."""

    @property
    def num_lost(self) -> int:
        """How many left no activity, wherever they were made."""
        return self.lost_at_start + self.lost_in_between + self.lost_at_end


def count_launches(trace: Trace) -> list[Launches]:
    """Count every rank's launches in an attributed trace, and what was lost of them.

    Launches into a graph that is being captured run nothing and are left out. So is a rank of
    which no launch was recorded, or whose activities do not tell which launch they belong to.
    """
    ranges = trace.ranges
    start, rank = ranges["start_ns"].to_numpy(np.int64), ranges["rank"].to_numpy()
    is_launch = _is_call(trace, LAUNCH) & ranges["correlation"].notna().to_numpy()
    begins, ends = _is_call(trace, CAPTURE_BEGINS), _is_call(trace, CAPTURE_ENDS)
    has_activity = np.zeros(len(ranges), dtype=bool)
    has_activity[trace.kernels["launch_row"].dropna().to_numpy(np.int64)] = True
    on_device = trace.kernels["rank"][(trace.kernels["activity"] != "host").to_numpy()]
    untold = set(on_device.unique()) - set(rank[is_launch & has_activity].tolist())
    found = []
    for one in sorted(set(rank[is_launch].tolist()) - untold):
        mine = rank == one
        rows = np.flatnonzero(mine & is_launch)
        rows = rows[np.argsort(start[rows], kind="stable")]
        is_captured = _is_within(start[rows], start[mine & begins], start[mine & ends])
        found.append(_counted(one, has_activity[rows[has_activity[rows] | ~is_captured]]))
    return found


def _counted(rank: int, has_activity: np.ndarray) -> Launches:
    """Count a rank's launches by whether they left an activity, in the order they were made."""
    number = len(has_activity)
    if not has_activity.any():
        return Launches(rank, number, number, 0, 0)
    at_start, at_end = int(has_activity.argmax()), int(has_activity[::-1].argmax())
    num_lost = number - int(has_activity.sum())
    return Launches(rank, number, at_start, num_lost - at_start - at_end, at_end)


def _is_within(moment: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Tell which moments lie in a capture, on whatever thread.

    One that began before the recording, or ends after it, is known by its other end alone.
    """
    moments = np.sort(begins), np.sort(ends)
    num_begun, num_ended = (np.searchsorted(of, moment, side="right") for of in moments)
    # Captures that were open when the recording began: ends that no begin precedes.
    edges = np.concatenate([begins, ends])
    steps = np.repeat([1, -1], [len(begins), len(ends)])[np.argsort(edges, kind="stable")]
    num_open_before = -min(int(np.cumsum(steps).min(initial=0)), 0)
    return np.asarray(num_open_before + num_begun - num_ended > 0)


def _is_call(trace: Trace, pattern: str) -> np.ndarray:
    """Tell which rows are runtime calls of such a name."""
    name = trace.ranges["name"].cat
    # A row without a name has the code -1, which reads the last.
    matches = np.append(np.asarray(name.categories.str.contains(pattern), dtype=bool), False)
    is_runtime = (trace.ranges["kind"] == "runtime").to_numpy(bool)
    return np.asarray(matches[name.codes.to_numpy()] & is_runtime)
