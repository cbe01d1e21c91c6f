"""host_sleeps: the host sleeps, or waits for something of its own, while there is work to do."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import idle_places, in_words, percent
from kprof.analyze.findings.queries import (
    Int64s,
    idle_of,
    is_one_of,
    per_step,
    share_of_whole,
    whole_of,
)
from kprof.analyze.idle.causes import NO_WORK
from kprof.analyze.intervals import Intervals, disjoint, length_in
from kprof.findings import Finding, Remedy
from kprof.trace import Trace

LEAST_SHARE = 0.02
# Share of a gap that has to lie within a pass of the model.
AMID = 0.5


def check(trace: Trace) -> list[Finding]:
    """Find sleep and waiting in training, or amid a model's pass; a service that waits is silent.

    Where stacks tell of it: without, it looks like Python that computes; and a host that shows
    nothing at all, outside every step, may do anything.
    """
    rows, _ = idle_of(trace, NO_WORK)
    rows = rows[trace.idle["evidence_row"].notna().to_numpy(bool)[rows]]
    is_training = is_one_of(trace.kernels["phase"], "backward").any()
    rows = rows if is_training else _amid_passes(trace, rows)
    lost_ns = int(trace.idle["duration_ns"].to_numpy(np.int64)[rows].sum())
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    claim = (
        f"The host sleeps, or waits for a lock, a socket or a queue, while the GPU has nothing to "
        f"do: {in_words(per_step(trace, lost_ns))} of {whole_of(trace)} ({percent(share)} of it)"
    )
    return [
        Finding(
            rule="host_sleeps",
            claim=claim,
            confidence="medium",
            effort="low",
            idle_rows=tuple(rows.tolist()),
            details=idle_places(trace, rows),
            remedy=Remedy(idle_cause=NO_WORK),
        )
    ]


def _amid_passes(trace: Trace, rows: Int64s) -> Int64s:
    """Return the pieces of idle time that lie within a pass of a model of their rank."""
    ranges, idle = trace.ranges, trace.idle.iloc[rows]
    is_pass = is_one_of(ranges["kind"], "phase") & ~is_one_of(ranges["name"], "data")
    begins = ranges["start_ns"].to_numpy(np.int64)
    ends = begins + ranges["duration_ns"].to_numpy(np.int64)
    start, took = (idle[name].to_numpy(np.int64) for name in ("start_ns", "duration_ns"))
    is_amid = np.zeros(len(rows), dtype=bool)
    for rank in np.unique(idle["rank"].to_numpy()):
        of = np.flatnonzero(is_pass & (ranges["rank"] == rank).to_numpy(bool))
        union = disjoint(Intervals(begins[of], ends[of], of))
        mine = (idle["rank"] == rank).to_numpy(bool)
        inside = length_in(union, start[mine], start[mine] + took[mine])
        is_amid[mine] = inside >= AMID * took[mine]
    return np.asarray(rows[is_amid])
