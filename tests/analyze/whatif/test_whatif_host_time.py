"""The host's time that goes with the operators that are removed."""

import pytest

from kprof.analyze.passes import analyze
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import REMOVED, Change, Target
from kprof.analyze.whatif.predict import predict
from kprof.trace import Recording
from tests.traces import trace_of

US = 1_000


def spent(name, start_us, end_us, kind="op", **row):
    times = {"start_ns": start_us * US, "duration_ns": (end_us - start_us) * US}
    return {"kind": kind, "name": name, **times, **row}


def removed(
    *names, norm_at_us=(100, 130), value_at_us=(140, 170), ranges=(), also_at_us=None, **meta
):
    """Return how much shorter a step becomes whose host launches a norm, fetches it, and adds.

    Each operator holds an inner one that launches a kernel of a µs, 10 µs after it began. The
    host is always late.
    """
    rows, kernels = [spent("0", 0, 900, kind="step"), *ranges], []
    operators = {"first": (0, 30), "norm": norm_at_us, "value": value_at_us, "add": (800, 830)}
    for i, (name, (begin, end)) in enumerate(operators.items()):
        rows.append(spent(f"aten::{name}", begin, end))
        rows.append(spent(f"aten::_{name}", begin + 5, end - 5))
        rows.append(spent("cudaLaunchKernel", begin + 10, begin + 15, "runtime", correlation=i))
        kernels.append({"start_ns": (begin + 17) * US, "duration_ns": US, "correlation": i})
    if also_at_us is not None:
        rows.append(spent("cudaLaunchKernel", also_at_us, also_at_us + 1, "runtime", correlation=9))
        begin = {"start_ns": (also_at_us + 7) * US, "duration_ns": US}
        kernels.insert(2, {**begin, "correlation": 9})
    baseline = find_baseline(analyze(trace_of(*kernels, ranges=rows, **meta)))
    changes = [Change(REMOVED, Target("op", f"aten::{name}")) for name in names]
    found = predict(changes, baseline)
    return (found.step_ns - found.predicted_step_ns) / US


def test_an_operator_that_holds_nothing_else_goes_with_what_is_removed_in_it():
    assert removed("_norm") == removed("norm") == 30


def test_an_operator_stays_that_launches_something_else_as_well():
    # Of the outer one only the inner one's time goes.
    assert removed("_norm", also_at_us=127) == 20


def test_python_between_two_removed_operators_goes_with_them():
    assert removed("norm", "value") == 30 + 10 + 30


def test_what_stands_between_two_removed_operators_stays():
    assert removed("norm", "value", ranges=[spent("aten::view", 134, 136)]) == 30 + 30


def test_python_that_computes_between_two_removed_operators_stays():
    assert removed("norm", "value", value_at_us=(181, 211)) == 30 + 30


def test_of_a_host_that_is_faster_unrecorded_as_much_less_goes():
    recording = Recording("steps", 9, (0,), "device", (900_000,), (765_000,))
    # What it does for 630 µs at one go takes as long unrecorded.
    assert removed("norm", "value", recording=recording) == pytest.approx(70 / 2, abs=1)


def without_norms(*lengths_us):
    """Return how much shorter a step becomes without its norms, whose host takes so long."""
    rows, kernels, at = [], [], 100
    for i, length_us in enumerate((20, *lengths_us, 20)):
        name = "add" if i in (0, len(lengths_us) + 1) else "norm"
        rows.append(spent(f"aten::{name}", at, at + length_us))
        launch = at + length_us - 10
        rows.append(spent("cudaLaunchKernel", launch, launch + 5, "runtime", correlation=i))
        kernels.append({"start_ns": (launch + 7) * US, "duration_ns": US, "correlation": i})
        at += length_us + 100
    rows.insert(0, spent("0", 0, at + 100, kind="step"))
    baseline = find_baseline(analyze(trace_of(*kernels, ranges=rows)))
    found = predict([Change(REMOVED, Target("op", "aten::norm"))], baseline)
    return (found.step_ns - found.predicted_step_ns) / US


def test_what_the_host_uses_for_the_first_time_stays_when_its_operator_goes():
    assert without_norms(20, 20, 20) == 3 * 20
    # Of the first only the launch goes.
    assert without_norms(5_000, 20, 20) == 2 * 20 + 5


def test_operators_that_always_take_long_go_whole():
    assert without_norms(5_000, 5_000, 5_000) == 3 * 5_000
