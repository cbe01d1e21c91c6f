"""launch_bound_host: the GPU waits because the host launches its kernels too slowly."""

from __future__ import annotations

import numpy as np

from kprof.analyze.attribution.steps import step_rows
from kprof.analyze.findings.claims import idle_places, in_words, percent, proof_by_copy
from kprof.analyze.findings.one_offs import SILENCE_NS
from kprof.analyze.findings.patterns import is_decoding
from kprof.analyze.findings.queries import (
    count_host_steps,
    durations,
    idle_of,
    per_step,
    share_of_whole,
    whole_of,
)
from kprof.analyze.idle.causes import LAUNCH_BOUND
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Recording itself slows the host by some percent: idle time below a tenth may be its doing.
LEAST_SHARE = 0.10
# Without steps, with fewer kernels the ends of the window weigh more than its middle.
FEW = 50
# One step may be the first.
ENOUGH_STEPS = 2


def check(trace: Trace) -> list[Finding]:
    """Find idle time that goes away when launches cost the host less; decoding has its own rule."""
    idle_rows, lost_ns = idle_of(trace, LAUNCH_BOUND, most_ns=SILENCE_NS)
    share = share_of_whole(trace, lost_ns)
    is_kernel = (trace.kernels["activity"] == "kernel").to_numpy(bool)
    num_steps = len(step_rows(trace.ranges))
    is_short = is_kernel.sum() < FEW and not num_steps
    if share < LEAST_SHARE or is_short or is_decoding(trace):
        return []
    median_ns = float(np.median(durations(trace)[is_kernel])) if is_kernel.any() else 0.0
    number = is_kernel.sum() / count_host_steps(trace)
    claim = (
        f"The GPU waits {in_words(per_step(trace, lost_ns))} of {whole_of(trace)} ({percent(share)}"
        f" of it) for the host to launch: {number:,.0f} kernels of {in_words(median_ns)} in "
        "the median end faster than new ones arrive"
    )
    return [
        Finding(
            rule="launch_bound_host",
            claim=claim,
            # A single step, or none marked, may be a first use: the host then loads what it calls.
            confidence="high" if num_steps >= ENOUGH_STEPS else "medium",
            effort="medium",
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(graphs=True),
            command=proof_by_copy(trace, "compiled"),
        )
    ]
