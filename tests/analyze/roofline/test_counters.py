import numpy as np
import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.roofline.agreement import Agreement, compare_bounds, is_borderline, traffic_ratio
from kprof.analyze.roofline.bound import BOUNDS, add_roofline, bound_by_counters
from kprof.report.result import result_of
from kprof.report.sections import counters
from tests.quantities import quantities_in
from tests.traces import ROUND_DEVICE, analyzed_trace_of, trace_of


def counted(dram, sm, tensor=None, **columns):
    tensor = {} if tensor is None else {"tensor_percent": tensor}
    return {"dram_percent": dram, "sm_percent": sm, **tensor, **columns}


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        (counted(60, 59), "memory"),
        (counted(61, 62), "compute"),
        (counted(10, 60), "compute"),
        (counted(59.9, 59.9), "latency"),
        (counted(70, 20, 80), "compute"),
        (counted(80, 20, 70), "memory"),
    ],
)
def test_the_bound_by_counters_is_that_of_the_definitions(row, bound):
    (place,) = bound_by_counters(trace_of(row).kernels)
    assert BOUNDS[place] == bound


def test_without_the_sms_no_bound_is_told():
    (place,) = bound_by_counters(trace_of({"dram_percent": 90.0, "tensor_percent": 5.0}).kernels)
    assert place == -1


@pytest.mark.parametrize(
    ("dram", "sm", "is_near"),
    [(55, 10, True), (54.9, 10, False), (65, 10, True), (65.1, 10, False), (80, 75, True)],
)
def test_within_five_points_of_a_border_is_borderline(dram, sm, is_near):
    assert is_borderline(trace_of(counted(dram, sm)).kernels).tolist() == [is_near]


def test_below_the_threshold_memory_and_compute_need_not_differ():
    assert is_borderline(trace_of(counted(30, 30)).kernels).tolist() == [False]


def test_where_nothing_else_tells_counters_are_the_work_the_limit_and_the_bound():
    row = counted(80, 20, duration_ns=1000, dram_read_bytes=300, dram_written_bytes=100)
    trace = trace_of({**row, "kind": "norm"}, device=ROUND_DEVICE, passes=("attribute", "classify"))
    kernels = add_roofline(trace).kernels
    columns = ["bytes", "work_from", "limit_ns", "bound"]
    assert kernels[columns].to_numpy().tolist() == [[400, "counters", 800, "memory"]]
    assert kernels["flops"].isna().all()


def test_counters_need_no_ceilings_to_tell_a_bound():
    row = counted(80, 20, duration_ns=1000, dram_read_bytes=300, dram_written_bytes=100)
    trace = trace_of(row, passes=("attribute", "classify"))
    assert add_roofline(trace).kernels["bound"].tolist() == ["memory"]


def test_traffic_without_throughput_tells_no_limit():
    trace = trace_of(
        {"dram_read_bytes": 300, "dram_written_bytes": 0}, passes=("attribute", "classify")
    )
    kernels = add_roofline(trace).kernels
    assert kernels["bytes"].tolist() == [300]
    assert kernels[["limit_ns", "bound"]].isna().all(axis=None)


def test_half_of_the_traffic_is_no_traffic():
    trace = trace_of({"dram_read_bytes": 300}, passes=("attribute", "classify"))
    assert add_roofline(trace).kernels["bytes"].isna().all()


def test_counters_leave_what_the_work_tells_alone():
    row = {"activity": "memcpy", "name": "Memcpy DtoD", "copied_bytes": 50_000}
    row |= counted(90, 10, dram_read_bytes=900, dram_written_bytes=900, duration_ns=1000)
    trace = trace_of(row, device=ROUND_DEVICE, passes=("attribute", "classify"))
    kernels = add_roofline(trace).kernels
    columns = ["bytes", "work_from", "limit_ns", "bound"]
    assert kernels[columns].to_numpy().tolist() == [[100_000, "recorded", 100, "latency"]]


def test_verdicts_are_compared_off_the_borders():
    trace = analyzed_trace_of(
        counted(90, 10, work_from="shapes", bound="memory"),
        counted(90, 10, work_from="shapes", bound="latency"),
        counted(62, 10, work_from="shapes", bound="latency"),
        counted(90, 10, work_from="counters", bound="memory"),
        {"work_from": "shapes", "bound": "memory"},
    )
    found = compare_bounds(trace.kernels)
    assert found == Agreement(num_agreeing=1, num_differing=1, num_borderline=1)
    assert found.share == 0.5


def test_traffic_is_measured_over_the_least_bytes_of_the_work():
    traffic = {"dram_read_bytes": 150, "dram_written_bytes": 50}
    trace = analyzed_trace_of(
        {**traffic, "bytes": 100, "work_from": "shapes"},
        {**traffic, "bytes": 200, "work_from": "counters"},
        {"bytes": 100, "work_from": "shapes"},
    )
    assert np.array_equal(traffic_ratio(trace.kernels), [2.0, np.nan, np.nan], equal_nan=True)


def test_the_section_says_what_was_counted_and_how_far_verdicts_agree():
    row = counted(90, 10, work_from="shapes", bound="memory", grid="8,1,1", bytes=100)
    row |= {"dram_read_bytes": 150, "dram_written_bytes": 50}
    text, table = counters.render(analyzed_trace_of(row, row, {})).parts
    assert quantities_in(text.text)[:2] == ["2", "66.7 %"]
    assert "100.0 % of 2" in text.text
    assert table.rows == (
        (
            "kernel",
            "2",
            "100 ns",
            "200 B",
            "2.00",
            "90.0 %",
            "10.0 %",
            "—",
            "—",
            "memory",
            "memory",
        ),
    )


def test_the_section_without_counters_says_how_to_count():
    section = counters.render(analyzed_trace_of({}))
    assert "kprof ncu" in section.parts[0].text
    assert not section.in_terminal


def test_the_result_holds_what_was_counted():
    row = counted(90, 10, work_from="shapes", bound="memory", bytes=100)
    trace = analyzed_trace_of({**row, "dram_read_bytes": 150, "dram_written_bytes": 50})
    assert result_of(trace, balance(trace))["counters"] == {
        "launches": 1,
        "share_of_time": 1.0,
        "bounds": {
            "num_agreeing": 1,
            "num_differing": 0,
            "num_borderline": 0,
            "share_agreeing": 1.0,
        },
        "median_traffic_over_least": 2.0,
    }
