"""Each check of the audit fires on its sickness and stays silent on a near miss."""

from __future__ import annotations

import numpy as np
import pytest

from kprof.analyze.capture_quality.audit import NO_SAMPLES, audit
from kprof.report.section import Table, Text
from kprof.report.sections.data_quality import render
from kprof.trace import LightPass
from tests.analyze.capture_quality.audited import HOST_AND_GPU, check, names_of
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of, recorded

SECOND = 1_000_000_000
EDGES = "Edges of the window"


def launched(lost=(), number=1000):
    """Build a trace of so many launches, of which those at `lost` left no activity."""
    kept = [i for i in range(number) if i not in lost]
    return analyzed_trace_of(
        *({"start_ns": 100 * i, "correlation": i, "launch_row": i} for i in kept),
        ranges=[
            {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 100 * i, "correlation": i}
            for i in range(number)
        ],
    )


def stepped(*durations_ns, **kernel):
    """Build a trace of one kernel a step, each as long as its step."""
    starts = np.cumsum([0, *durations_ns])[:-1].tolist()
    rows = [
        {"step": i, "start_ns": start, "duration_ns": duration, **kernel}
        for i, (start, duration) in enumerate(zip(starts, durations_ns, strict=True))
    ]
    ranges = [{"kind": "step", "name": str(r["step"]), "start_ns": r["start_ns"]} for r in rows]
    return analyzed_trace_of(*rows, ranges=ranges)


def sampled(*readings, **meta):
    """Build a trace of a second, with samples given as (time in s, quantity, value)."""
    samples = [
        {"time_ns": int(time_s * SECOND), "quantity": quantity, "value": value}
        for time_s, quantity, value in readings
    ]
    return analyzed_trace_of({"duration_ns": SECOND}, samples=samples, **meta)


PLACES = ("First kernels", "Dropped records", "End of the window")


@pytest.mark.parametrize(("lost", "name"), [*zip((0, 500, 999), PLACES, strict=True)])
def test_a_launch_without_activity_limits_where_it_is_missing(lost, name):
    trace = launched({lost})
    verdicts = [check(trace, place).verdict for place in PLACES]
    assert verdicts == ["limited" if place == name else "good" for place in PLACES]
    assert quantities_in(check(trace, name).evidence) == ["1", "1,000"]


def test_many_launches_without_activity_are_bad():
    assert check(launched(set(range(500, 511))), "Dropped records").verdict == "bad"


def test_launches_that_all_left_an_activity_are_good():
    losses = {check(launched(), name).verdict for name in ("First kernels", "Dropped records")}
    assert losses == {"good"}


def test_without_launches_the_number_of_lost_activities_is_unknown():
    assert check(analyzed_trace_of({}), "Dropped records").verdict == "unknown"


def test_what_the_profiler_says_it_dropped_counts():
    trace = analyzed_trace_of({}, counts={"dropped_records": 12})
    found = check(trace, "Dropped records")
    assert found.verdict == "bad"
    assert "12 dropped records" in found.evidence


@pytest.mark.parametrize(("orphan_ns", "verdict"), [(1, "good"), (40, "limited"), (300, "bad")])
def test_time_without_a_launch_record_is_graded_by_its_share(orphan_ns, verdict):
    trace = analyzed_trace_of(
        {"duration_ns": 1000 - orphan_ns, "bucket": "attributed"},
        {"duration_ns": orphan_ns, "bucket": "orphan"},
    )
    assert check(trace, "Orphans").verdict == verdict


@pytest.mark.parametrize(
    ("ranges", "verdict"),
    [
        ([], "unknown"),
        ([{"kind": "runtime", "name": "cudaLaunchKernel"}], "unknown"),
        ([{"kind": "op", "name": "aten::mm"}], "bad"),
        ([{"kind": "range", "name": "solve"}], "bad"),
    ],
)
def test_a_program_without_operators_and_ranges_is_no_bad_recording(ranges, verdict):
    trace = analyzed_trace_of({"bucket": "unlinked"}, ranges=ranges)
    assert check(trace, "Attribution").verdict == verdict


@pytest.mark.parametrize(("unnamed_ns", "verdict"), [(10, "good"), (100, "limited"), (300, "bad")])
def test_time_without_an_operator_is_graded_by_its_share(unnamed_ns, verdict):
    trace = analyzed_trace_of(
        {"duration_ns": 1000 - unnamed_ns, "bucket": "attributed"},
        {"duration_ns": unnamed_ns, "bucket": "graph"},
    )
    assert check(trace, "Attribution").verdict == verdict


@pytest.mark.parametrize(("unknown_ns", "verdict"), [(50, "good"), (200, "limited"), (800, "bad")])
def test_time_of_unknown_work_is_graded_by_its_share(unknown_ns, verdict):
    trace = analyzed_trace_of(
        {"duration_ns": 1000 - unknown_ns, "bytes": 5}, {"duration_ns": unknown_ns}
    )
    assert check(trace, "Known work").verdict == verdict


@pytest.mark.parametrize(("step_ns", "verdict"), [(104, "good"), (115, "limited"), (130, "bad")])
def test_recording_overhead_is_graded_by_what_it_adds_to_a_step(step_ns, verdict):
    assert check(recorded((step_ns,), (100, 100)), "Recording overhead").verdict == verdict


def test_overhead_is_in_device_times_of_nothing_but_in_all_times_of_the_host():
    trace = recorded((130,), (100, 100))
    host = analyzed_trace_of({"activity": "host", "device": -1}, recording=trace.meta.recording)
    meanings = [check(each, "Recording overhead").meaning for each in (trace, host)]
    assert ["device times" in meaning for meaning in meanings] == [True, False]
    assert ["all times" in meaning for meaning in meanings] == [False, True]


def test_overhead_that_the_spread_of_steps_hides_is_unknown():
    trace = recorded((80, 90, 92), (20, 70, 75, 80, 85, 90, 93))
    found = check(trace, "Recording overhead")
    assert found.verdict == "unknown"
    assert quantities_in(found.evidence) == ["12.5 %", "25.0 %"]
    assert "longer" in found.evidence
    one_each = check(recorded((130,), (100,)), "Recording overhead")
    assert (one_each.verdict, "one recorded and" in one_each.evidence) == ("unknown", True)


def test_overhead_is_unknown_where_recorded_steps_are_much_shorter_than_the_others():
    found = check(recorded((10, 10, 10), (101, 101, 101)), "Recording overhead")
    assert (found.verdict, quantities_in(found.evidence)) == ("unknown", ["90.1 %"])
    assert "shorter" in found.evidence


def test_overhead_by_the_hosts_clock_of_a_gpus_steps_is_unknown():
    found = check(recorded((130,), (100,), clock="host"), "Recording overhead")
    assert (found.verdict, "runs ahead" in found.evidence) == ("unknown", True)


@pytest.mark.parametrize(
    ("device_ns", "verdict"), [(1009, "good"), (960, "limited"), (1100, "bad")]
)
def test_passes_are_graded_by_how_far_apart_the_sums_of_their_activities_are(device_ns, verdict):
    trace = analyzed_trace_of({}, light=LightPass(device_ns, 1000))
    assert check(trace, "Light pass").verdict == verdict


def test_without_a_light_pass_there_is_no_check_of_one():
    assert "Light pass" not in names_of(analyzed_trace_of({}))


def test_few_steps_are_limited_and_three_are_enough():
    assert check(stepped(100, 100), "Steps").verdict == "limited"
    assert check(stepped(100, 100, 100), "Steps").verdict == "good"


def test_steps_of_several_ranks_count_once():
    ranges = [{"kind": "step", "name": "0", "rank": rank} for rank in (0, 1, 2)]
    trace = analyzed_trace_of({"step": 0}, ranges=ranges)
    assert check(trace, "Steps").evidence == "1 recorded"


def test_without_steps_their_number_is_unknown():
    assert check(analyzed_trace_of({}), "Steps").verdict == "unknown"


@pytest.mark.parametrize(("last", "verdict"), [(109, "good"), (120, "limited"), (200, "bad")])
def test_steps_that_differ_are_graded_by_how_far(last, verdict):
    assert check(stepped(100, 100, last), "Steps alike").verdict == verdict


def test_the_steps_that_lie_apart_are_those_after_the_first():
    three = check(stepped(500, 100, 120), "Steps alike").evidence
    two = check(stepped(100, 120), "Steps alike").evidence
    assert quantities_in(three) == quantities_in(two) == ["2", "18.2 %"]
    assert ["after the first" in evidence for evidence in (three, two)] == [True, False]


def test_a_longer_first_step_is_a_check_of_its_own():
    trace = stepped(150, 100, 100)
    assert check(trace, "First step").verdict == "limited"
    assert quantities_in(check(trace, "First step").evidence) == ["50.0 %"]
    assert "longer" in check(trace, "First step").evidence
    assert check(trace, "Steps alike").verdict == "good"


def test_a_first_step_as_long_as_the_others_is_good():
    assert check(stepped(104, 100, 100), "First step").verdict == "good"


@pytest.mark.parametrize(("outside_ns", "verdict"), [(5, "good"), (20, "limited"), (100, "bad")])
def test_work_in_no_step_is_graded_by_its_share(outside_ns, verdict):
    ranges = [{"kind": "step", "name": "0"}]
    trace = analyzed_trace_of({"step": 0}, {"duration_ns": outside_ns}, ranges=ranges)
    assert check(trace, EDGES).verdict == verdict


def test_an_orphans_step_is_not_known_which_is_no_cut():
    ranges = [{"kind": "step", "name": "0"}]
    trace = analyzed_trace_of({"step": 0}, {"bucket": "orphan"}, ranges=ranges)
    assert check(trace, EDGES).verdict == "good"


POWER_CAP, GPU_IDLE = 4.0, 1.0


def test_a_clock_held_back_in_one_sample_is_limited_and_in_most_is_bad():
    once = sampled(*((t, "throttle_reasons", v) for t, v in ((0.2, 4.0), (0.5, 0.0), (0.8, 0.0))))
    assert check(once, "Throttling").verdict == "limited"
    often = sampled((0.2, "throttle_reasons", POWER_CAP), (0.8, "throttle_reasons", POWER_CAP))
    assert check(often, "Throttling").verdict == "bad"
    assert quantities_in(check(often, "Throttling").evidence) == ["100.0 %", "2"]
    assert "power cap" in check(often, "Throttling").evidence


def test_an_idle_gpus_low_clock_is_no_throttling():
    trace = sampled((0.2, "throttle_reasons", GPU_IDLE), (0.8, "throttle_reasons", GPU_IDLE))
    assert check(trace, "Throttling").verdict == "good"


def test_throttling_long_before_the_window_does_not_count():
    trace = sampled((-9.0, "throttle_reasons", POWER_CAP), (0.5, "throttle_reasons", 0.0))
    assert check(trace, "Throttling").verdict == "good"


def test_without_samples_near_the_window_throttling_is_unknown():
    trace = sampled((-9.0, "throttle_reasons", 0.0))
    found = check(trace, "Throttling")
    assert (found.verdict, found.evidence) == ("unknown", NO_SAMPLES)


@pytest.mark.parametrize(("low", "verdict"), [(1950, "good"), (1800, "limited"), (1200, "bad")])
def test_a_clock_that_changes_within_the_window_is_graded_by_how_much(low, verdict):
    trace = sampled((0.1, "sm_clock_mhz", 1980.0), (0.9, "sm_clock_mhz", float(low)))
    assert check(trace, "Clock").verdict == verdict


def test_one_sample_of_the_clock_shows_no_change():
    assert check(sampled((0.5, "sm_clock_mhz", 1980.0)), "Clock").verdict == "unknown"


def test_a_gpu_that_was_sampled_besides_those_used_leaves_the_clock_unknown():
    samples = [
        {"device": d, "time_ns": t, "quantity": "sm_clock_mhz", "value": v}
        for d, t, v in ((0, 0, 1980.0), (0, 50, 1980.0), (1, 0, 300.0), (1, 50, 1980.0))
    ]
    found = check(analyzed_trace_of({}, samples=samples), "Clock")
    assert found.verdict == "unknown"
    assert "CUDA_VISIBLE_DEVICES" in found.fix


def memory_and_use(*readings):
    """Build samples from (time in s, GiB in use, utilisation in percent)."""
    return sampled(
        *(
            reading
            for time_s, gib, percent in readings
            for reading in (
                (time_s, "memory_used_bytes", gib * 2.0**30),
                (time_s, "utilization_percent", percent),
            )
        )
    )


def test_a_gpu_busy_before_the_workload_took_memory_is_anothers():
    trace = memory_and_use((-3.0, 0.6, 80.0), (-2.0, 0.6, 75.0), (0.0, 20.0, 99.0))
    found = check(trace, "Other processes")
    assert (found.verdict, "80 % busy" in found.evidence) == ("bad", True)


def test_memory_of_another_process_that_does_nothing_is_limited():
    trace = memory_and_use((-3.0, 30.0, 0.0), (0.0, 50.0, 99.0))
    assert check(trace, "Other processes").verdict == "limited"


def test_what_the_driver_holds_and_the_workloads_own_use_is_no_other_process():
    trace = memory_and_use((-3.0, 0.6, 0.0), (-0.5, 20.0, 99.0), (0.5, 20.0, 99.0))
    found = check(trace, "Other processes")
    assert (found.verdict, quantities_in(found.evidence)) == ("good", ["0.6 GiB", "0 %"])


def test_memory_that_never_rises_may_be_the_workloads_own():
    assert (
        check(memory_and_use((-1.0, 20.0, 99.0), (1.0, 20.0, 99.0)), "Other processes").verdict
        == "unknown"
    )


def test_a_run_without_a_gpu_has_no_checks_of_one():
    trace = analyzed_trace_of({"activity": "host", "device": -1, "bucket": "attributed"}, gpus=())
    assert check(trace, "GPU activity").verdict == "limited"
    assert not names_of(trace) & {
        "Throttling",
        "Clock",
        "Other processes",
        "Orphans",
        HOST_AND_GPU,
    }


def test_an_empty_trace_has_nothing_to_audit():
    assert audit(analyzed_trace_of()) == []


def test_every_check_that_is_not_good_says_what_follows_and_how_to_do_better():
    traces = (analyzed_trace_of({"duration_ns": 10, "bucket": "orphan"}), launched({0, 5, 999}))
    found = [check for trace in traces for check in audit(trace) if check.verdict != "good"]
    assert len(found) > 10
    assert all(check.meaning and check.fix for check in found)


def test_the_section_tells_what_is_bad_and_lists_every_check():
    trace = analyzed_trace_of({"duration_ns": 10, "bucket": "orphan"})
    section = render(trace)
    texts = [part.text for part in section.parts if isinstance(part, Text)]
    (orphans,) = [text for text in texts if text.startswith("Orphans, bad: ")]
    assert quantities_in(orphans) == ["100.0 %", "1", "1"]
    table, passed = [part for part in section.parts if isinstance(part, Table)][:2]
    assert [row[0] for row in table.rows if row[1] == "bad"] == ["Orphans", "Known work"]
    assert len(table.rows) + len(passed.rows) == len(audit(trace))
    good = [check.name for check in audit(trace) if check.verdict == "good"]
    assert [row[0] for row in passed.rows] == good
    assert passed.folded and not table.folded
