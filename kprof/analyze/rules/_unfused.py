"""Operators for which the library has one kernel: from where on it matters, and their finding."""

from __future__ import annotations

from kprof.analyze.claims import proof, work_places
from kprof.analyze.evidence import Int64s, share_of_device
from kprof.finding import Finding, Remedy
from kprof.trace import Trace

# Below this share of the device time even a perfect kernel saves less than a run varies.
LEAST_SHARE = 0.01


def matter(trace: Trace, rows: Int64s) -> bool:
    """Tell whether a kernel in the place of these rows could be felt."""
    return share_of_device(trace, rows) >= LEAST_SHARE


def finding_of(
    trace: Trace, rule: str, claim: str, rows: Int64s, remedy: Remedy, swap: str
) -> Finding:
    """Return a rule's finding that the library's kernel `swap` would do what these rows do."""
    return Finding(
        rule=rule,
        claim=claim,
        confidence="high",
        effort="low",
        rows=tuple(rows.tolist()),
        details=work_places(trace, rows),
        remedy=remedy,
        swap=swap,
        command=proof(trace, "--swap", swap),
    )
