"""The passes in their order: each adds columns to the trace; the last, what they foretell."""

from __future__ import annotations

from kprof.analyze.attribute import add_attribution
from kprof.analyze.classify import add_kind
from kprof.analyze.diagnose import add_diagnosis
from kprof.analyze.host import add_host_activity
from kprof.analyze.idle.assign import add_idle
from kprof.analyze.roofline import add_roofline
from kprof.analyze.what_if.baseline import find_baseline
from kprof.analyze.what_if.predict import add_predictions
from kprof.trace import Trace

PASSES = (
    add_host_activity,
    add_attribution,
    add_kind,
    add_roofline,
    add_idle,
)


def analyze(trace: Trace) -> Trace:
    """Run every pass; the result has the same rows and all declared columns."""
    for add in PASSES:
        trace = add(trace)
    baseline = find_baseline(trace) if len(trace.kernels) and trace.has_timeline else None
    return add_diagnosis(add_predictions(trace, baseline), baseline)
