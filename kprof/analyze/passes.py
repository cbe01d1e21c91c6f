"""The passes that analyze a trace, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kprof.analyze.attribution.attribute import add_attribution, add_host_activity
from kprof.analyze.attribution.kinds import add_kind
from kprof.analyze.findings.diagnose import diagnose
from kprof.analyze.idle.assign import add_idle
from kprof.analyze.roofline.bound import add_roofline
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.predict import find_predictions
from kprof.trace import Trace

PASSES = (
    add_host_activity,
    add_attribution,
    add_kind,
    add_roofline,
    add_idle,
)


def attributed(trace: Trace) -> Trace:
    """Run the passes that tell where time goes, without the roofline."""
    return _passed(trace, [add for add in PASSES if add is not add_roofline])


def analyze(trace: Trace) -> Trace:
    """Run every pass; the result has the same rows and all declared columns."""
    trace = _passed(trace, PASSES)
    baseline = find_baseline(trace) if len(trace.kernels) and trace.has_timeline else None
    found = tuple(find_predictions(trace, baseline))
    return trace.with_conclusions(found, diagnose(trace, baseline))


def _passed(trace: Trace, passes: Sequence[Callable[[Trace], Trace]]) -> Trace:
    for add in passes:
        trace = add(trace)
    return trace
