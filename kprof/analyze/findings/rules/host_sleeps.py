"""host_sleeps: the host sleeps, or waits for something of its own, while there is work to do."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import idle_places, in_words, percent
from kprof.analyze.findings.queries import per_step, share_of_whole, whole_of
from kprof.analyze.findings.recoverable import sleeps
from kprof.analyze.idle.causes import NO_WORK
from kprof.findings import Finding, Fix
from kprof.trace import Trace

LEAST_SHARE = 0.02


def check(trace: Trace) -> list[Finding]:
    """Find sleep and waiting in training or amid a model's pass; a waiting service is silent."""
    rows = sleeps(trace)
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
            fix=Fix(idle_cause=NO_WORK),
        )
    ]
