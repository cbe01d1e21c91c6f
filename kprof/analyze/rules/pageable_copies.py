"""pageable_copies: batches go to the GPU from memory that is not pinned, and the host waits."""

from __future__ import annotations

import numpy as np

from kprof.analyze.claims import idle_places, in_words, percent, size_in_words
from kprof.analyze.evidence import (
    count_steps,
    matches,
    per_step,
    recoverable_idle,
    share_of_window,
    total_ns,
    whole_of,
)
from kprof.analyze.idle.causes import PAGEABLE_COPY, PAGEABLE_UPLOAD
from kprof.finding import Finding, Remedy
from kprof.trace import Trace

# A copy that costs less than a hundredth of the step is not worth an edit.
LEAST_SHARE = 0.01


def check(trace: Trace) -> list[Finding]:
    """Find idle time behind copies from pageable memory; pinned ones, and free ones, are silent."""
    idle_rows, lost_ns = recoverable_idle(trace, PAGEABLE_COPY)
    share = share_of_window(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    rows = np.flatnonzero(matches(trace.kernels["name"], PAGEABLE_UPLOAD))
    moved = int(trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)[rows].sum())
    steps = count_steps(trace)
    size = f", {size_in_words(moved / steps)} in all," if moved else ""
    claim = (
        f"{len(rows) / steps:,.0f} copies{size} in {whole_of(trace)} come from memory that is not "
        f"pinned: they take {in_words(per_step(trace, total_ns(trace, rows)))}, the host waits for "
        f"them, and the GPU idles for {in_words(per_step(trace, lost_ns))} "
        f"({percent(share)} of the time)"
    )
    return [
        Finding(
            rule="pageable_copies",
            claim=claim,
            confidence="high",
            effort="low",
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            remedy=Remedy(idle_cause=PAGEABLE_COPY),
        )
    ]
