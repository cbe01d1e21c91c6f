"""throttling: heat or the power supply slows the GPU down."""

from __future__ import annotations

from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.findings.claims import percent
from kprof.analyze.findings.patterns import at_full_clock, computing_rows, held_back, why_no_clock
from kprof.analyze.findings.queries import why_no_device
from kprof.device import BRAKES
from kprof.findings import Finding
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_timeline, why_no_clock)

# One sample may be a peak; what shows in a tenth of them is a state.
LEAST_SHARE = 0.1


def check(trace: Trace) -> list[Finding]:
    """Find samples with a brake on: hardware slowdown, heat, or power; the power cap is apart."""
    held = held_back(trace, BRAKES)
    if held is None or held.share < LEAST_SHARE:
        return []
    rows = computing_rows(trace)
    claim = (
        f"Heat or the power supply lowered the GPU's clock in {percent(held.share)} of the "
        f"samples around the window{held.words}"
    )
    return [
        Finding(
            rule="throttling",
            claim=claim,
            confidence="high",
            effort="medium",
            rows=tuple(rows.tolist()),
            fix=at_full_clock(trace, rows, held),
        )
    ]
