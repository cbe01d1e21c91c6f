"""The section on the run itself: its command, its steps, its end, and what recording cost."""

from dataclasses import replace

import pytest

from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.capture_quality.unanswered import why_no_cost
from kprof.report.section import Text
from kprof.report.sections.run import VARIES
from kprof.trace import Recording
from tests.quantities import quantities_in
from tests.section_traces import RICH, fact, section
from tests.traces import analyzed_trace_of


def test_recording_overhead_compares_median_steps_and_says_how_many():
    value, why = fact(section("Run"), "Recording overhead")
    assert value == "+10.0 %"
    assert quantities_in(why) == ["110 ms", "1", "100 ms", "3"]
    assert "device" in why


@pytest.mark.parametrize(
    ("recorded_ns", "unrecorded_ns", "most"),
    [((192,), (200, 200), "4.0 %"), ((202,), (199, 200, 201, 200, 203), "3.0 %")],
)
def test_an_overhead_that_the_spread_of_steps_explains_is_a_limit(recorded_ns, unrecorded_ns, most):
    recording = Recording(
        *("a rule", 9, (5,), "device"),
        recorded_step_ns=recorded_ns,
        unrecorded_step_ns=unrecorded_ns,
    )
    value, why = fact(
        section("Run", analyzed_trace_of({}, recording=recording)), "Recording overhead"
    )
    assert quantities_in(value) == [most]
    assert why.endswith(VARIES)
    assert VARIES not in fact(section("Run"), "Recording overhead")[1]


def test_an_overhead_far_below_zero_is_not_known():
    recording = Recording(
        "a rule", 9, (5,), "device", recorded_step_ns=(100,), unrecorded_step_ns=(200, 200)
    )
    trace = analyzed_trace_of({}, recording=recording)
    value, why = fact(section("Run", trace), "Recording overhead")
    assert value == "not known"
    assert not measure_cost(trace).is_of_like_steps
    assert why.endswith(why_no_cost(trace).reason)
    assert "--skip" in why and "--steps" in why


def test_overhead_of_a_foreign_trace_is_not_known():
    value, why = fact(section("Run", analyzed_trace_of({})), "Recording overhead")
    assert value == "not known"
    assert why == why_no_cost(analyzed_trace_of({})).reason
    assert why_no_cost(analyzed_trace_of({})).fix.endswith("`kprof run`")


def test_a_launch_without_an_activity_is_a_dropped_record():
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": i, "start_ns": i}
        for i in range(2)
    ]
    run = section("Run", analyzed_trace_of({"correlation": 1, "launch_row": 1}, ranges=calls))
    value, why = fact(run, "Dropped records")
    assert (value, quantities_in(why)) == ("1", ["1", "2"])


def test_without_recorded_launches_the_dropped_records_are_not_known():
    assert fact(section("Run", analyzed_trace_of({})), "Dropped records")[0] == "not known"


def test_the_profilers_own_count_of_dropped_records_stands_where_no_launch_was_recorded():
    run = section("Run", analyzed_trace_of({}, counts={"dropped_records": 7}))
    value, why = fact(run, "Dropped records")
    assert (value, quantities_in(why)) == ("7", ["7"])


def test_the_command_can_be_copied_into_a_shell():
    command = ("/usr/bin/python", "my train.py", "--name", "")
    run = section("Run", analyzed_trace_of({}, command=command))
    assert fact(run, "Command")[0] == "python 'my train.py' --name ''"


def test_the_run_says_which_rule_delimits_a_step():
    value, why = fact(section("Run"), "Steps")
    assert (value, quantities_in(why)) == ("1", ["10"])
    assert why.endswith(RICH.meta.recording.step_rule)


@pytest.mark.parametrize("exit_code", [0, None])
def test_a_workload_that_ended_well_or_is_not_known_to_have_ended_needs_no_line(exit_code):
    recording = Recording("a rule", 9, (5,), exit_code=exit_code)
    run = section("Run", analyzed_trace_of({}, recording=recording))
    assert not [part for part in run.parts if isinstance(part, Text) and part.tone == "warning"]


def test_the_run_says_that_its_workload_failed():
    recording = Recording("a rule", 9, (5,), exit_code=1)
    _, ended, *_ = section("Run", analyzed_trace_of({}, recording=recording)).parts
    assert ended.tone == "warning"
    assert quantities_in(ended.text) == ["1"]


def test_a_run_with_steps_of_which_none_was_recorded_says_both():
    recording = Recording("Training: by calls.", 20, ())
    value, why = fact(section("Run", analyzed_trace_of({}, recording=recording)), "Steps")
    assert (value, quantities_in(why)) == ("0", ["20"])
    assert why.endswith(recording.step_rule)


def test_a_process_that_was_killed_took_at_least_the_steps_that_were_seen():
    final = Recording("Training: by calls.", 8, (5,))
    killed = replace(final, is_count_final=False)
    value, why = fact(section("Run", analyzed_trace_of({}, recording=killed)), "Steps")
    assert (value, quantities_in(why)) == ("1", ["8"])
    assert why != fact(section("Run", analyzed_trace_of({}, recording=final)), "Steps")[1]
