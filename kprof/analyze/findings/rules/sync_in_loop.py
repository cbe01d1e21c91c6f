"""sync_in_loop: the host waits for the GPU within a step, and then launches too late."""

from __future__ import annotations

from kprof.analyze.findings.claims import idle_places, in_words, percent, times_in_words
from kprof.analyze.findings.queries import (
    count_host_steps,
    idle_of,
    per_step,
    share_of_whole,
    whole_of,
)
from kprof.analyze.idle.causes import SYNCHRONIZATION
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# A wait that costs less than a hundredth of the step is not worth an edit.
LEAST_SHARE = 0.01


def check(trace: Trace) -> list[Finding]:
    """Find waits for the device that leave it idle; one that costs nothing is not mentioned."""
    idle_rows, lost_ns = idle_of(trace, SYNCHRONIZATION)
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    calls = trace.idle["evidence_row"].iloc[idle_rows].nunique() / count_host_steps(trace)
    claim = (
        f"The host stops to wait for the GPU {times_in_words(calls)} in {whole_of(trace)}; the "
        f"queue runs empty, and the GPU idles for {in_words(per_step(trace, lost_ns))} "
        f"({percent(share)} of {whole_of(trace)})"
    )
    return [
        Finding(
            rule="sync_in_loop",
            claim=claim,
            confidence="high",
            effort="medium",
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(idle_cause=SYNCHRONIZATION),
        )
    ]
