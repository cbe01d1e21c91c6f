"""Recordings that begin or end amid other work: what is in no step."""

from __future__ import annotations

import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.steps import (
    after_launches,
    before_launches,
    time_steps,
    whole_ns,
)
from kprof.analyze.diff.alignment import find_differences
from kprof.analyze.diff.comparability import find_doubts
from kprof.analyze.findings.diagnose import diagnose
from kprof.analyze.findings.one_offs import (
    find_once,
    idle_in_steps_ns,
    without_start_up,
    work_once,
)
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import FASTER, Change, Target
from kprof.analyze.whatif.predict import predict
from kprof.report.sections import idle as idle_section
from kprof.report.sections import time as time_section
from tests.section_traces import tables
from tests.traces import measured, trace_of

MS = 1_000_000
STEPS, PERIOD_MS = 4, 10
PARTS = (("ampere_sgemm_128x64_nn", 0, 6), ("reduce_kernel", 6, 3))


def late(lead_ms, other_stream=False):
    """Return four steps of 10 ms that the device begins so long after the host.

    It spends the time before on what was launched before the recording began. Of each step the
    device multiplies for 6 ms, reduces for 3 and is idle for 1.
    """
    kernels, ranges = [], []

    def ran(name, start_ms, duration_ms, correlation, stream=7):
        times = {"start_ns": int(start_ms * MS), "duration_ns": int(duration_ms * MS)}
        kernels.append({"name": name, "correlation": correlation, "stream": stream, **times})

    for step in range(STEPS):
        mark = {"kind": "step", "name": f"ProfilerStep#{step}", "start_ns": step * PERIOD_MS * MS}
        ranges.append({**mark, "duration_ns": PERIOD_MS * MS})
        for part, (name, at, took) in enumerate(PARTS):
            number = 10 * step + part
            call = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": number}
            start_ns = (step * PERIOD_MS + part) * MS
            ranges.append({**call, "start_ns": start_ns, "duration_ns": 1_000})
            ran(name, step * PERIOD_MS + 1 + lead_ms + at, took, number)
    if lead_ms:
        ran("ampere_sgemm_128x64_nn", 0, 0.6 * lead_ms, 900)
        ran("reduce_kernel", 0.7 * lead_ms, 0.3 * lead_ms + 1, 901)
    if other_stream:
        ran("Memcpy DtoD", 0, 1, 902, stream=9)
    return measured(trace_of(*kernels, ranges=ranges))


def clipped(first, number, *more):
    """Return the steps from `first` on, of ten, with launches and no mark of those before it."""
    kernels, ranges = [], [*more]
    for step in range(number):
        begin_ns = step * PERIOD_MS * MS
        if step >= first:
            mark = {"kind": "step", "name": f"ProfilerStep#{step}", "start_ns": begin_ns}
            ranges.append({**mark, "duration_ns": PERIOD_MS * MS})
        for part, (name, at, took) in enumerate(PARTS):
            correlation = 10 * step + part
            call = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": correlation}
            ranges.append({**call, "start_ns": begin_ns + part * MS, "duration_ns": 1_000})
            start_ns = begin_ns + (1 + at) * MS
            times = {"start_ns": start_ns, "duration_ns": took * MS, "correlation": correlation}
            kernels.append({"name": name, "stream": 7, **times})
    return measured(trace_of(*kernels, ranges=ranges))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_launches_in_the_recording_before_its_first_step_are_in_no_step(first):
    trace, plain = clipped(first, 5), clipped(0, 5)
    assert before_launches(trace)[0].tolist() == [True] * 2 * first + [False] * 2 * (5 - first)
    assert time_steps(trace).recorded_ns[1:] == time_steps(plain).recorded_ns[first + 1 :]
    assert whole_ns(plain) == whole_ns(trace) == 10 * MS
    (parts, *_) = tables(time_section.render(trace))
    per_step = {row[0]: row[3] for row in parts.rows if not row[0].startswith("idle")}
    assert per_step["gemm"] == "6 ms"
    assert per_step["reduction"] == "3 ms"
    assert find_differences(trace, clipped(first, 5)).difference_ns == 0
    found = {one.cause_ns for one in diagnose(trace).findings if one.rows}
    assert found == {6 * MS, 3 * MS}
    balanced = balance(trace)
    assert balanced.balances
    assert balanced.sum_ns == 5 * 9 * MS


LEADS = pytest.mark.parametrize("lead_ms", [5, 10, 25])


@LEADS
def test_what_was_launched_before_the_recording_is_told_by_the_order_of_its_stream(lead_ms):
    rows, ends = before_launches(late(lead_ms, other_stream=True))
    assert rows.tolist() == [False] * 2 * STEPS + [True] * 3
    assert ends == {(0, 0): (lead_ms + 1) * MS}
    assert not before_launches(late(0))[0].any()


@LEADS
def test_a_steps_time_does_not_depend_on_how_far_the_device_lags(lead_ms):
    trace, prompt = late(lead_ms), late(0)
    assert time_steps(trace).recorded_ns[1:] == time_steps(prompt).recorded_ns[1:] == (10 * MS,) * 3
    # Without a lag the first step waits a millisecond for its first launch.
    assert time_steps(trace).recorded_ns[0] == 9 * MS
    assert whole_ns(trace) == 39 * MS // 4
    assert find_baseline(trace).step_ns == 39 * MS // 4


@LEADS
def test_parts_of_a_step_do_not_depend_on_how_far_the_device_lags(lead_ms):
    (parts, *_) = tables(time_section.render(late(lead_ms)))
    per_step = {row[0]: row[3] for row in parts.rows if not row[0].startswith("idle")}
    assert per_step == {"gemm": "6 ms", "reduction": "3 ms", "all": "9.75 ms"}
    assert "first step" in parts.caption


@LEADS
def test_findings_count_what_is_in_steps(lead_ms):
    prompt, lagging = (
        {one.rows: one.cause_ns for one in diagnose(trace).findings if one.rows}
        for trace in (late(0), late(lead_ms))
    )
    assert lagging == prompt == {(0, 2, 4, 6): 6 * MS, (1, 3, 5, 7): 3 * MS}


@LEADS
def test_recordings_that_lag_differently_do_not_differ(lead_ms):
    found = find_differences(late(25), late(lead_ms))
    assert found.difference_ns == 0
    assert found.a.step_ns == 39 * MS // 4
    assert all(not found.changes(layout) for layout in found.layouts)


@LEADS
def test_what_is_in_no_step_is_in_no_window_of_a_comparison(lead_ms):
    told = find_doubts(late(0), late(lead_ms))
    assert "tables_and_steps" not in {one.id for one in told}


@LEADS
def test_a_change_saves_of_a_step_what_it_saves_in_its_steps(lead_ms):
    change = Change(FASTER, Target("kind", "reduction"), factor=3.0)
    found = predict([change], find_baseline(late(lead_ms)))
    assert found.step_ns - found.amdahl_step_ns == 2 * MS


def test_start_up_before_the_first_step_is_in_no_count_of_start_up():
    # While the device is idle before the second period, and before the first step's.
    load = {"kind": "runtime", "name": "cuModuleLoadData", "start_ns": 10 * MS}
    trace = clipped(2, 4, {**load, "duration_ns": MS})
    assert find_once(trace).ns.tolist() == [MS, 0, 0]
    assert idle_in_steps_ns(trace).tolist() == [0, MS, MS]
    assert without_start_up(trace)[1] == ()
    assert "start-up" not in str(idle_section.render(trace).parts[0])
    (both,) = without_start_up(clipped(0, 2, {**load, "duration_ns": MS}))[1]
    assert both.time_ns == MS


def goes_on(after, *, is_between=False):
    """Return three steps, and behind the last one these activities: names and times in ms.

    With `is_between` the same activities lie behind every step.
    """
    kernels, ranges, now_ms = [], [], 0

    def launch(name, took):
        correlation = len(kernels) + 1
        call = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": correlation}
        ranges.append({**call, "start_ns": now_ms * MS, "duration_ns": 1_000})
        times = {"start_ns": (now_ms + 1) * MS, "duration_ns": took * MS}
        kernels.append({"name": name, "stream": 7, "correlation": correlation, **times})
        return now_ms + 1 + took

    for step in range(3):
        mark = {"kind": "step", "name": f"ProfilerStep#{step}", "start_ns": now_ms * MS}
        for name, _, took in PARTS:
            now_ms = launch(name, took)
        ranges.append({**mark, "duration_ns": now_ms * MS - mark["start_ns"]})
        for name, took in after if is_between or step == 2 else ():
            now_ms = launch(name, took)
    return measured(trace_of(*kernels, ranges=ranges))


BEYOND = [[("Memcpy DtoH (Device -> Pageable)", 500)], [(PARTS[0][0], PARTS[0][2])]]


@pytest.mark.parametrize("after", BEYOND, ids=["a final copy", "a part of a step"])
def test_what_is_launched_after_the_last_step_is_in_no_step(after):
    trace, plain = goes_on(after), goes_on([])
    assert after_launches(trace).tolist() == [False] * 6 + [True]
    assert whole_ns(trace) == whole_ns(plain) == 11 * MS
    assert balance(trace).balances
    for found in (trace, plain):
        (parts, *_) = tables(time_section.render(found))
        per_step = {row[0]: row[3] for row in parts.rows if not row[0].startswith("idle")}
        assert per_step == {"gemm": "6 ms", "reduction": "3 ms", "all": "11 ms"}
    told = [
        {one.rule: one.cause_ns for one in diagnose(found).findings} for found in (trace, plain)
    ]
    assert told[0] == told[1]
    assert find_differences(plain, trace).difference_ns == 0
    change = Change(FASTER, Target("kind", "reduction"), factor=3.0)
    saved = [predict([change], find_baseline(found)).predicted_step_ns for found in (trace, plain)]
    assert saved[0] == saved[1]


def test_launches_behind_every_step_are_a_part_of_it():
    trace = goes_on(BEYOND[1], is_between=True)
    assert not after_launches(trace).any()
    assert whole_ns(trace) == 18 * MS


@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize(
    "name", ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)", "autotuned"]
)
def test_work_of_one_step_alone_is_in_no_saving(step, name):
    kernels, ranges, now_ms = [], [], 0
    for at in range(5):
        mark = {"kind": "step", "name": f"ProfilerStep#{at}", "start_ns": now_ms * MS}
        for kernel, took in ((PARTS[0][0], 6), *(((name, 500),) if at == step else ())):
            number = len(kernels)
            call = {"kind": "runtime", "name": "cudaMemcpyAsync", "correlation": number}
            took_ns = {"start_ns": now_ms * MS, "duration_ns": took * MS}
            ranges.append({**call, **took_ns})
            activity = "memcpy" if kernel.startswith("Memcpy") else "kernel"
            row = {"name": kernel, "activity": activity, "copied_bytes": 5_000_000_000}
            kernels.append({**row, **took_ns, "stream": 7, "correlation": number})
            now_ms += took
        ranges.append({**mark, "duration_ns": now_ms * MS - mark["start_ns"]})
    trace = measured(trace_of(*kernels, ranges=ranges))
    assert work_once(trace).tolist() == [one["name"] == name for one in kernels]
    found = diagnose(trace).findings
    once = [one for one in found if step + 1 in one.rows]
    assert [one.saving.high_ns for one in once] == [None]
    assert all((one.saving.high_ns or 0) <= 6 * MS for one in found)


def test_work_that_differs_from_step_to_step_is_not_done_once():
    kernels, ranges = [], []
    for at in range(5):
        span = {"start_ns": 10 * at * MS, "duration_ns": 10 * MS}
        ranges.append({"kind": "step", "name": f"ProfilerStep#{at}", **span})
        call = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": at}
        ranges.append({**call, **span, "duration_ns": MS})
        took = {"start_ns": (10 * at + 1) * MS, "duration_ns": (3 + at) * MS}
        kernels.append({"name": f"triton_of_length_{at}", **took, "correlation": at})
    assert not work_once(measured(trace_of(*kernels, ranges=ranges))).any()
