"""What CUDA graphs hold: the recordings of their captures, beside a process's window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from kprof.collect.merge import concatenated, shifted
from kprof.collect.readers import kineto
from kprof.trace import Trace

BEGIN = "cudaStreamBeginCapture"


def add_captures(trace: Trace, part: Path) -> Trace:
    """Add the host's ranges of every capture to the process's own, on its clock.

    Ids that Kineto counts anew in every recording are left out of them, and those of activities:
    what is captured runs nothing, so that a step among them is none either.
    """
    captures = [_timed(kineto.read(path)) for path in sorted(part.glob("graph-*.json*"))]
    if not captures:
        return trace
    base_time_ns = trace.meta.base_time_ns
    traces = [trace]
    for capture in captures:
        capture_base_ns = capture.meta.base_time_ns
        if base_time_ns is None or capture_base_ns is None:
            continue
        moved = shifted(capture, capture_base_ns - base_time_ns)
        is_step = (moved.ranges["kind"] == "step").to_numpy(bool)
        moved = replace(moved, ranges=moved.ranges[~is_step].reset_index(drop=True))
        missing = pd.array([pd.NA] * len(moved.ranges), dtype="Int64")
        traces.append(moved.with_ranges(external_id=missing, correlation=missing))
    return replace(trace, ranges=concatenated(traces, "ranges"))


def _timed(capture: Trace) -> Trace:
    """Give calls into CUDA a time, where the profiler gave them none (torch 2.11 in a capture).

    A call's operator is recorded, and so is the order of calls. A call gets the earliest moment
    that fits both: inside its operator but in none inside that, and behind the call before. What
    else it did there is not told.
    """
    ranges = capture.ranges
    is_call = (ranges["kind"] == "runtime").to_numpy(bool)
    start = ranges["start_ns"].to_numpy().copy()
    is_operator = (ranges["kind"] == "op").to_numpy(bool)
    is_lost = is_call & (start < start[is_operator].min(initial=np.iinfo(np.int64).max))
    operators = ranges.index[is_operator & ranges["external_id"].notna().to_numpy()]
    row_of = dict(zip(ranges["external_id"].loc[operators], operators, strict=True))
    lost = ranges[is_lost & ranges["external_id"].isin(row_of.keys()).to_numpy(bool)]
    # What was launched just before is in the recording, but not in the graph.
    begins = ranges.loc[(ranges["name"] == BEGIN).to_numpy(bool), "correlation"]
    if begins.notna().any():
        lost = lost[(lost["correlation"] > begins.min()).to_numpy(bool)]
    if lost.empty:
        return capture
    end = start + ranges["duration_ns"].to_numpy()
    thread = ranges["thread"].to_numpy().copy()
    rows = np.flatnonzero(is_operator)
    now = 0
    for call, identity in lost.sort_values("correlation")["external_id"].items():
        operator = row_of[identity]
        within = rows[
            (thread[rows] == thread[operator])
            & (start[rows] >= start[operator])
            & (end[rows] <= end[operator])
            & (end[rows] - start[rows] < end[operator] - start[operator])
        ]
        now = _outside(max(now + 1, start[operator]), start[within], end[within])
        start[call], thread[call] = now, thread[operator]
    return capture.with_ranges(start_ns=start, thread=thread)


def _outside(moment: int, start: np.ndarray, end: np.ndarray) -> int:
    """Return the first moment from this one on that lies in no range from `start` to `end`."""
    while (is_around := (start <= moment) & (moment < end)).any():
        moment = int(end[is_around].max())
    return moment
