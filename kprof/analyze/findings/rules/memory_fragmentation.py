"""memory_fragmentation: steps ask the driver for memory, as the allocator has none that fits."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import idle_places, in_words, percent, proof
from kprof.analyze.findings.queries import (
    count_host_steps,
    idle_of,
    per_step,
    share_of_whole,
    whole_of,
)
from kprof.analyze.idle.causes import ALLOCATOR
from kprof.errors import three_digits
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# After a warm-up the caching allocator asks for nothing; a hundredth of the step is a habit.
LEAST_SHARE = 0.01
SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def check(trace: Trace) -> list[Finding]:
    """Find idle time behind allocations; those that the GPU does not notice are not mentioned."""
    idle_rows, lost_ns = idle_of(trace, ALLOCATOR)
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    calls = np.unique(trace.idle["evidence_row"].iloc[idle_rows].dropna().to_numpy(np.int64))
    names = trace.ranges["name"].iloc[calls].astype(str).value_counts()
    steps = count_host_steps(trace)
    said = ", ".join(f"{three_digits(n / steps)} {name}" for name, n in names.head(3).items())
    claim = (
        f"In {whole_of(trace)} the driver is asked for memory ({said}), and the GPU idles for "
        f"{in_words(per_step(trace, lost_ns))} ({percent(share)} of {whole_of(trace)})"
    )
    return [
        Finding(
            rule="memory_fragmentation",
            claim=claim,
            confidence="high",
            effort="low",
            idle_rows=tuple(idle_rows.tolist()),
            range_rows=tuple(calls.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(idle_cause=ALLOCATOR),
            command=proof(trace, "--env", SETTING),
        )
    ]
