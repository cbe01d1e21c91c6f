"""What CUDA graphs hold: the recordings of their captures, beside a process's window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from kprof.collect.merge import concatenated, shifted
from kprof.collect.readers import kineto
from kprof.trace import Trace


def add_captures(trace: Trace, part: Path) -> Trace:
    """Add the host's ranges of every capture to the process's own, on its clock.

    Ids that Kineto counts anew in every recording are left out of them.
    """
    captures = [kineto.read(path) for path in sorted(part.glob("graph-*.json*"))]
    if not captures:
        return trace
    base_time_ns = trace.meta.base_time_ns
    traces = [trace]
    for capture in captures:
        capture_base_ns = capture.meta.base_time_ns
        if base_time_ns is None or capture_base_ns is None:
            continue
        moved = shifted(capture, capture_base_ns - base_time_ns)
        missing = pd.array([pd.NA] * len(moved.ranges), dtype="Int64")
        traces.append(moved.with_ranges(external_id=missing))
    return replace(trace, ranges=concatenated(traces, "ranges"))
