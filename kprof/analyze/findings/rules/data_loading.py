"""data_loading: the GPU waits for the next batch."""

from __future__ import annotations

from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.findings.claims import idle_places, in_words, percent
from kprof.analyze.findings.queries import idle_of, per_step, share_of_whole, whole_of
from kprof.analyze.idle.causes import DATA_LOADING
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_timeline,)

# A loader that costs less is not what holds a step up.
LEAST_SHARE = 0.02


def check(trace: Trace) -> list[Finding]:
    """Find idle time in which the host waited for data; a loader that keeps up is silent."""
    idle_rows, lost_ns = idle_of(trace, DATA_LOADING)
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    who = "The operators wait" if trace.is_host_only else "The GPU waits"
    claim = (
        f"{who} {in_words(per_step(trace, lost_ns))} of {whole_of(trace)} ({percent(share)} of "
        "it) for the next batch: loading a batch takes longer than processing it"
    )
    return [
        Finding(
            rule="data_loading",
            claim=claim,
            confidence="high",
            effort="low",
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(idle_cause=DATA_LOADING),
        )
    ]
