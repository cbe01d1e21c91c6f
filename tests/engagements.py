"""Engagements for tests: runs with findings, comparisons of given gains, and commands on them."""

from dataclasses import replace

from kprof.comparison import Claim, Comparison, Interval, Metric, Pair, Plan
from kprof.comparison import save as save_comparison
from kprof.findings import Diagnosis, Finding, Saving
from kprof.storage import save as save_run
from tests.traces import analyzed_trace_of

STEP = Metric("step time", "ns")
RATE = Metric("rate", "tokens/s", "higher")
# Far ahead, so that every prediction of these tests was written down before it.
LATER_NS = 4_000_000_000_000_000_000
STEP_NS = 10_000_000


def finding(rule="unfused_norm", low_ns=1_000_000, high_ns=2_000_000, **more):
    """Return a finding that saves 10 to 20 % of a step of 10 ms."""
    saving = Saving(STEP_NS, low_ns, high_ns, "replayed")
    return Finding(rule, "It is slow", "high", "low", rows=(0,), saving=saving, **more)


def write_run(folder, *findings, command=("python", "/home/ada/train.py"), **diagnosis):
    """Write a run with these findings, as kprof run leaves it."""
    folder.mkdir()
    trace = analyzed_trace_of({})
    meta = replace(trace.meta, command=command, source=folder.name)
    save_run(replace(trace, meta=meta, diagnosis=Diagnosis(findings, **diagnosis)), folder)
    return folder


def comparison_of(ratio=0.85, width=0.01, verdict="FASTER", **changes):
    """Return a comparison whose B takes `ratio` of A's step of 10 ms, give or take `width`."""
    interval = Interval(ratio, ratio - width, ratio + width, 0.95, "fixed")
    metric = changes.pop("metric", STEP)
    start_ns = changes.pop("start_ns", LATER_NS)
    pair = Pair((float(STEP_NS),), (ratio * STEP_NS,), True, start_ns)
    claim = Claim(metric, verdict, 1, interval, 0.01, why="Why.")
    fields = {"name": "train.py", "a": "as it is", "b": "--swap rmsnorm"}
    fields |= {"plan": Plan((metric,), seed=0), "pairs": (pair,), "claims": (claim,)}
    fields |= {"protocol": "In one process.", "facts": {"command of A": "python train.py"}}
    return Comparison(**(fields | changes))


def write_comparison(folder, ratio=0.85, width=0.01, verdict="FASTER", **changes):
    """Write such a comparison, as kprof ab leaves it."""
    folder.mkdir()
    save_comparison(comparison_of(ratio, width, verdict, **changes), folder)
    return folder
