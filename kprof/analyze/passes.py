"""The passes in their order: each adds columns to the trace; the last, what they foretell."""

from __future__ import annotations

from kprof.analyze.attribute import add_attribution
from kprof.analyze.classify import add_kind
from kprof.analyze.diagnose import add_diagnosis
from kprof.analyze.host import add_host_activity
from kprof.analyze.idle.assign import add_idle
from kprof.analyze.roofline import add_roofline
from kprof.analyze.what_if.predict import add_predictions
from kprof.trace import Trace

PASSES = (
    add_host_activity,
    add_attribution,
    add_kind,
    add_roofline,
    add_idle,
    add_predictions,
    add_diagnosis,
)


def analyze(trace: Trace) -> Trace:
    """Run every pass; the result has the same rows and all declared columns."""
    for add in PASSES:
        trace = add(trace)
    return trace
