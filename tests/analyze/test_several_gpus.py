"""One process that drives several GPUs: every page tells of each GPU's time, and all agree."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.steps import count_gpu_steps
from kprof.analyze.diff.alignment import find_differences
from kprof.analyze.findings.queries import count_host_steps, count_steps, per_step, share_of_whole
from kprof.analyze.groupings import split_window
from kprof.analyze.idle.causes import group_idle, inside_window
from kprof.analyze.roofline.utilisation import measure_utilisation
from kprof.findings import Diagnosis, Finding, Saving
from kprof.report.result import result_of
from kprof.report.sections.findings import ON_WHICH
from kprof.report.units import of_all
from tests.quantities import quantities_in
from tests.section_traces import fact, section, texts
from tests.traces import ROUND_DEVICE, analyzed_trace_of, measured, trace_of

MS = 1_000_000
TIME = "Where the time goes"


def pipeline(num_steps=3):
    """Analyze steps of 2 ms in which the first GPU works for 0.98 ms, and then the second one."""
    kernels = [
        {"start_ns": (2 * step + gpu) * MS, "duration_ns": 980_000, "device": gpu}
        for step in range(num_steps)
        for gpu in (0, 1)
    ]
    marks = [
        {"kind": "step", "name": str(step), "start_ns": 2 * step * MS, "duration_ns": 2 * MS}
        for step in range(num_steps)
    ]
    return measured(trace_of(*kernels, ranges=marks, device=ROUND_DEVICE))


# Three steps, less the 20 µs after the last kernel, on two GPUs.
WINDOW_NS = 2 * (6 * MS - 20_000)
BUSY_NS = 6 * 980_000
IDLE_NS = WINDOW_NS - BUSY_NS


def test_causes_ledger_and_split_tell_the_same_idle_time():
    trace = pipeline()
    ledger, split = balance(trace), split_window(trace)
    assert (ledger.window_ns, ledger.busy_ns, ledger.idle_ns) == (WINDOW_NS, BUSY_NS, IDLE_NS)
    assert group_idle(inside_window(trace.idle))["time_ns"].sum() == IDLE_NS
    assert split["time_ns"][split["is_idle"].astype(bool)].sum() == IDLE_NS
    result = result_of(trace, ledger)
    assert result["ledger"]["idle_ns"] == IDLE_NS
    # The steps end 20 µs after the last kernel, on both GPUs.
    assert result["idle"]["time_ns"] == IDLE_NS + 40_000


def test_busy_is_the_mean_over_the_gpus():
    assert measure_utilisation(pipeline()).busy.value == pytest.approx(BUSY_NS / (12 * MS))


def test_times_of_a_step_are_those_of_one_gpu():
    trace = pipeline()
    assert count_gpu_steps(trace) == count_steps(trace) == 6
    assert count_host_steps(trace) == 3
    assert per_step(trace, BUSY_NS) == 980_000
    # A step lasts 2 ms, from the host's entry into it: the first 20 µs are in no window.
    assert share_of_whole(trace, IDLE_NS) == pytest.approx(IDLE_NS / 6 / (2 * MS))


def test_without_marks_the_windows_of_the_gpus_are_counted():
    trace = pipeline()
    unmarked = measured(trace_of(*trace.kernels[["start_ns", "device"]].to_dict("records")))
    assert (count_gpu_steps(unmarked), count_steps(unmarked)) == (0, 2)


def test_a_step_takes_as_long_in_a_comparison_as_on_the_clock():
    found = find_differences(pipeline(2), pipeline(3))
    assert (found.a.num_steps, found.a.num_gpu_steps, found.a.step_ns) == (2, 4, 2_000_000)
    assert found.b.step_ns == 2_000_000
    assert sum(row.b.step_ns for row in found.layouts["part"]) == found.b.step_ns


def test_the_report_says_whose_times_are_added_up():
    trace = pipeline()
    together = of_all(trace)
    assert f"12 ms{together}" in fact(section("Run", trace), "Window")[1]
    idle = texts(section("Idle time", trace))
    assert quantities_in(idle)[:2] == ["6.12 ms", "51.0 %"]
    assert f"steps{together}" in idle
    assert "several GPUs" in texts(section("Ledger", trace))
    assert f"6 steps{together}" in str(section(TIME, trace))


def test_the_cost_of_a_finding_is_of_the_gpu_with_most_of_it():
    found = Finding("sync_in_loop", "It waits", "high", "low", cause_ns=2 * MS)
    saving = Saving(4 * MS, 0, MS, "")
    diagnosis = Diagnosis((replace(found, saving=saving),), whole_ns=4 * MS)
    one, two = (analyzed_trace_of(*kernels) for kernels in ([{}], [{}, {"rank": 1}]))
    said = [str(section("Findings", replace(x, diagnosis=diagnosis))) for x in (one, two)]
    costs = re.compile(r"2 ms of a step \(50\.0 %\)(.*?)\.")
    assert [costs.findall(text) for text in said] == [[""], [ON_WHICH]]


def test_what_is_not_recorded_of_a_rank_with_shorter_steps_is_not_called_idle():
    marks = [
        {"kind": "step", "name": "0", "start_ns": 0, "duration_ns": took, "rank": rank}
        for rank, took in ((0, 3 * MS), (1, 4 * MS))
    ]
    kernels = [{"start_ns": 0, "duration_ns": 3 * MS, "rank": rank} for rank in (0, 1)]
    trace = measured(trace_of(*kernels, ranges=marks, num_ranks=2))
    said = str(section(TIME, trace))
    # Of twice 4 ms the second rank is idle for 1; of another nothing is recorded.
    assert "'load imbalance', '12.5 %', '1 ms'" in said
    assert quantities_in(texts(section(TIME, trace)))[-1] == "12.5 %"
    run = texts(section("Run", trace))
    assert quantities_in(run) == ["2", "1", "2", "2", "4 ms"]
