"""power_cap: large GEMMs reach the GPU's power limit, which lowers its clock."""

from __future__ import annotations

from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.findings.claims import percent
from kprof.analyze.findings.patterns import at_full_clock, computing_rows, held_back, why_no_clock
from kprof.analyze.findings.queries import share_of_device, why_no_device
from kprof.device import THROTTLE_REASONS
from kprof.findings import Finding
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_timeline, why_no_clock)

# Good training runs touch the cap now and then: a loss of clock is what counts.
LEAST_SHARE = 0.2
LEAST_SLOWDOWN = 0.05
CAP = next(bit for bit, name in THROTTLE_REASONS.items() if name == "power cap")


def check(trace: Trace) -> list[Finding]:
    """Find a power cap that costs clock; one that is touched at full clock is not mentioned."""
    held = held_back(trace, CAP)
    if held is None or held.share < LEAST_SHARE or held.slowdown < LEAST_SLOWDOWN:
        return []
    rows = computing_rows(trace)
    claim = (
        f"The power cap lowered the GPU's clock in {percent(held.share)} of the samples around "
        f"the window{held.words}; kernels whose speed follows the clock take "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )
    return [
        Finding(
            rule="power_cap",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(rows.tolist()),
            fix=at_full_clock(trace, rows, held),
        )
    ]
