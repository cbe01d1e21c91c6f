"""exposed_collectives: the GPU communicates while it computes nothing."""

from __future__ import annotations

import numpy as np

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.attribution.steps import measure_communication, outside_steps
from kprof.analyze.findings.claims import clipped, in_words, percent
from kprof.analyze.findings.queries import is_one_of, per_step, share_of_whole, total_ns, whole_of
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Frameworks hide all but the last bucket of gradients: a few percent remain in a good run.
LEAST_SHARE = 0.05


def check(trace: Trace) -> list[Finding]:
    """Find collectives beside which nothing is computed; those behind computation are hidden."""
    is_collective = is_one_of(trace.kernels["kind"], "collective") & ~outside_steps(trace)
    rows = np.flatnonzero(is_collective)
    if not len(rows):
        return []
    exposed = allotted_time(trace)[is_collective]
    share = share_of_whole(trace, int(exposed.sum()))
    if share < LEAST_SHARE:
        return []
    took_ns, exposed_in_all = total_ns(trace, rows), int(exposed.sum())
    total = measure_communication(trace).total_ns
    names = trace.kernels["name"].iloc[rows].astype(str)
    sums = trace.kernels["duration_ns"].iloc[rows].groupby(names).sum().nlargest(3)
    claim = (
        f"Collectives run for {in_words(per_step(trace, total))} of {whole_of(trace)}, and no "
        f"computation overlaps {in_words(per_step(trace, exposed_in_all))} of that "
        f"({percent(share)} of {whole_of(trace)})"
    )
    return [
        Finding(
            rule="exposed_collectives",
            claim=claim,
            confidence="high",
            effort="medium",
            rows=tuple(rows.tolist()),
            details=tuple(
                f"{clipped(str(n))}: {in_words(per_step(trace, ns))}" for n, ns in sums.items()
            ),
            fix=Fix(best_ns=took_ns - exposed_in_all, modest_ns=took_ns - exposed_in_all // 2),
        )
    ]
