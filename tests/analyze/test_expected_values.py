"""Small traces of one peculiarity each, beside which the right values are written."""

import json
from pathlib import Path

import pandas as pd
import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.predict import predict
from kprof.commands.whatif import parse_change
from kprof.opened import open_trace
from kprof.report.result import result_of

FOLDER = Path(__file__).parents[3] / "shared" / "cases" / "traces"
SUFFIX = ".expected.json"
EXPECTED = sorted(FOLDER.glob("*" + SUFFIX))
# Traces without a file of values hold a record that is damaged, but for the scaled ones.
SCALED = ("fp32_1s.json", "fp32_10s.json")
DAMAGED = [
    path
    for path in sorted(FOLDER.glob("*.json"))
    if not path.name.endswith(SUFFIX)
    and path.name not in SCALED
    and not path.with_suffix("").with_suffix(SUFFIX).is_file()
]
TEXTS = {"note", "source", "what", "must be the same with and without step marks"}
WITHOUT_LOADS = "idle:data loading=removed"
DAMAGE = {"cut_off", "invalid_json", "damaged_records", "repaired_events"}
US, MS = 1_000, 1_000_000

pytestmark = pytest.mark.skipif(not EXPECTED, reason="the small inputs are not here")


def document(trace):
    return result_of(trace, balance(trace))


def ledger(trace, name):
    return document(trace)["ledger"][name]


def busy_ns(trace, part):
    return sum(row["time_ns"] for row in document(trace)["time"] if row["part"] == part)


def operators(trace):
    return set(trace.kernels["op"])


def predicted_ns(trace, question):
    baseline = find_baseline(trace)
    told = predict([parse_change(question, trace)], baseline)
    assert told.shortest_step_ns <= told.predicted_step_ns <= told.longest_step_ns
    return told.predicted_step_ns


def whole_window_ns(trace, question):
    return predicted_ns(trace, question) * max(document(trace)["denominator"]["num_gpu_steps"], 1)


def highest_saving_ns(trace):
    savings = [one["saving"] for one in document(trace)["findings"]["findings"]]
    return max(one["high_ns"] for one in savings if one and one["high_ns"] is not None)


def near(right):
    return pytest.approx(right, rel=1e-3)


# For each key the value that kprof finds, and the one that is right.
CHECKS = {
    "orphans": lambda trace, right: (ledger(trace, "orphan_gpu_events"), right),
    "launches_without_activity": lambda trace, right: (
        ledger(trace, "launches_without_activity"),
        right,
    ),
    "gpu_events": lambda trace, right: (ledger(trace, "gpu_events"), right),
    "gpu_sum_us": lambda trace, right: (ledger(trace, "gpu_sum_ns"), right * US),
    "gpu_sum_us_right": lambda trace, right: (ledger(trace, "gpu_sum_ns"), right * US),
    "gpu_span_us": lambda trace, right: (ledger(trace, "gpu_span_ns"), right * US),
    "window_us_at_most": lambda trace, right: (ledger(trace, "window_ns") <= right * US, True),
    "attributed_us": lambda trace, right: (ledger(trace, "attributed_ns"), right * US),
    # A record that is left out is in no busy time, either.
    "busy_us_if_clipped": lambda trace, right: (ledger(trace, "busy_ns") <= right * US, True),
    "gemm_busy_ms": lambda trace, right: (busy_ns(trace, "gemm"), round(right * MS)),
    "exposed_collective_ms": lambda trace, right: (
        [busy_ns(trace, "collective"), document(trace)["communication"]["exposed_ns"]],
        [round(right * MS)] * 2,
    ),
    "operator": lambda trace, right: (operators(trace), {right}),
    "operator_of_kernels": lambda trace, right: (operators(trace), {right}),
    "saving_high_ns_below": lambda trace, right: (highest_saving_ns(trace) < right, True),
    "idle:data loading gone: predicted whole window (ms)": lambda trace, right: (
        whole_window_ns(trace, WITHOUT_LOADS),
        near(right * MS),
    ),
    "or per step (ms)": lambda trace, right: (
        predicted_ns(trace, WITHOUT_LOADS),
        near(right * MS),
    ),
}


def check_of(key):
    """Return the check of a key; kernels' names stand for their FLOPs."""
    if key in CHECKS:
        return CHECKS[key]
    return lambda trace, right: (flops(trace)[key], right)


def flops(trace):
    known = trace.kernels[["name", "flops"]].astype(object)
    names, numbers = known["name"].tolist(), known["flops"].tolist()
    return {
        name: None if pd.isna(value) else int(value)
        for name, value in zip(names, numbers, strict=True)
    }


@pytest.mark.parametrize("path", EXPECTED, ids=lambda path: path.name.removesuffix(SUFFIX))
def test_every_value_is_the_one_beside_the_trace(path, capfd):
    right = json.loads(path.read_text())
    source = path.with_name(path.name.removesuffix(SUFFIX) + ".json")
    trace = open_trace(source)
    assert balance(trace).balances
    for key in right.keys() - TEXTS:
        found, wanted = check_of(key)(trace, right[key])
        assert found == wanted, key
    assert_pairs_are_ranges(trace, json.loads(source.read_text())["traceEvents"])
    assert capfd.readouterr() == ("", "")


def assert_pairs_are_ranges(trace, events):
    begun = {one["name"] for one in events if one["ph"] == "B"}
    assert begun <= set(trace.ranges["name"][trace.ranges["kind"] == "range"])


def test_a_change_gives_the_same_step_whatever_marks_it(tmp_path):
    source = FOLDER / "loader_autograd_nostep.json"
    content = json.loads(source.read_text())
    events = content["traceEvents"]
    loads = [one for one in events if "DataLoader" in one["name"]]
    begins = [one["ts"] for one in loads]
    ends = [*begins[1:], max(one["ts"] + one["dur"] for one in events if one["pid"] == 100)]
    marks = [
        {**loads[0], "name": f"ProfilerStep#{at}", "ts": begin, "dur": end - begin}
        for at, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    steps = {
        "optimizer": events,
        "profiler": [*events, *marks],
        "none": [one for one in events if not one["name"].startswith("Optimizer.step")],
    }
    times = {}
    for name, those in steps.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**content, "traceEvents": those}))
        times[name] = whole_window_ns(open_trace(path), WITHOUT_LOADS)
    assert times == dict.fromkeys(steps, near(400 * MS))


@pytest.mark.parametrize("path", DAMAGED, ids=lambda path: path.name)
def test_a_damaged_file_is_read_on_and_says_so(path):
    trace = open_trace(path)
    found = document(trace)
    assert found["ledger"]["gpu_events"] > 0
    assert balance(trace).balances
    assert DAMAGE & {one["id"] for one in found["caveats"]}


def test_a_trace_ten_times_as_long_has_the_same_shares(capfd):
    shares, rules = [], []
    for name in SCALED:
        found = document(open_trace(FOLDER / name))
        whole_ns = found["denominator"]["time_ns"]
        shares.append({row["part"]: row["time_ns"] / whole_ns for row in found["time"]})
        rules.append([one["rule"] for one in found["findings"]["findings"]])
    # The pauses between its kernels are as long in both.
    assert shares[0] == pytest.approx(shares[1], abs=1e-3)
    assert rules[0] == rules[1]
    assert capfd.readouterr().err == ""
