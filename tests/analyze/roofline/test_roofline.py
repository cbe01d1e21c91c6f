"""The least time a launch can take, and what bounds it."""

import numpy as np
import pytest

from kprof.analyze.roofline.bound import BOUNDS, add_roofline, beaten_ceilings, decide_bound
from kprof.device import Device
from kprof.trace import columns_of
from tests.analyze.calls import recorded, tensor
from tests.analyze.roofline.roofline_rows import COPY, PRODUCT, SQUARE, columns, measured
from tests.traces import trace_of


def test_the_pass_adds_exactly_its_columns():
    before = trace_of({"op_row": 0}, ranges=[PRODUCT], passes=("attribute", "classify"))
    added = set(add_roofline(before).kernels) - set(before.kernels)
    assert added == {c.name for c in columns_of("kernels", "roofline")}


def test_a_copy_from_the_host_is_not_limited_by_the_devices_memory():
    name = "Memcpy HtoD (Pinned -> Device)"
    trace = measured({"name": name, "activity": "memcpy", "copied_bytes": 1_000_000})
    assert columns(trace, "bytes", "limit_ns", "bound") == [(1_000_000, None, None)]


def test_a_collective_has_work_but_no_limit_because_links_limit_it():
    ranges = [{"name": "record_param_comms", "message": '["allreduce", 100, 100, "Float", 2]'}]
    trace = measured({"op_row": 0, "kind": "collective"}, ranges=ranges)
    assert columns(trace, "flops", "bytes", "limit_ns", "bound") == [(50, 800, None, None)]


def test_the_limit_is_the_slower_of_memory_and_compute():
    vector = {"name": "aten::mv", **recorded(SQUARE, tensor("bf16", 1000))}
    trace = measured({"op_row": 0}, ranges=[vector])
    assert columns(trace, "limit_ns") == [(2_004,)]


def test_float_products_on_tensor_cores_have_their_own_ceiling():
    device = Device("d", 1e12, {"fp32": 10e12, "tf32": 50e12}, "made up")
    square = tensor("fp32", 1000, 1000)
    ranges = [{"name": "aten::mm", **recorded(square, square)}]
    kernel = {"op_row": 0, "duration_ns": 200_000}
    tensor_cores = measured({**kernel, "dtype": "tf32"}, ranges=ranges, device=device)
    vector_units = measured({**kernel, "dtype": "fp32"}, ranges=ranges, device=device)
    assert columns(tensor_cores, "limit_ns") == [(40_000,)]
    assert columns(vector_units, "limit_ns") == [(200_000,)]


def test_a_type_without_a_peak_is_computed_on_the_vector_units():
    device = Device("d", 1e12, {"fp32": 10e12}, "made up")
    trace = measured({"op_row": 0}, ranges=[PRODUCT], device=device)
    assert columns(trace, "limit_ns") == [(200_000,)]


def test_the_least_work_takes_at_least_a_nanosecond():
    tiny = {"name": "aten::fill_", **recorded(tensor("bool", 1), 0)}
    assert columns(measured({"op_row": 0}, ranges=[tiny]), "bytes", "limit_ns") == [(1, 1)]


def test_no_work_takes_no_time():
    nothing = {"name": "aten::fill_", **recorded(tensor("fp32", 0), 0)}
    trace = measured({"op_row": 0}, ranges=[nothing])
    assert columns(trace, "bytes", "limit_ns", "bound") == [(0, 0, "latency")]


def bound_after(duration_ns, ranges):
    return columns(measured({"op_row": 0, "duration_ns": duration_ns}, ranges=ranges), "bound")


def test_a_product_near_its_peak_is_bound_by_compute():
    assert bound_after(25_000, [PRODUCT]) == [("compute",)]


# 100 MB read, 100 MB written: 200 us at 1 TB/s, 333 us at 60 % of it.
LARGE_COPY = {
    "name": "aten::copy_",
    **recorded(tensor("bf16", 5000, 10_000), tensor("bf16", 5000, 10_000), False),
}


def test_a_copy_near_the_bandwidth_is_bound_by_memory():
    assert bound_after(250_000, [LARGE_COPY]) == [("memory",)]


def test_a_launch_far_from_both_ceilings_without_evidence_has_no_known_bound():
    assert bound_after(333_000, [LARGE_COPY]) == [("memory",)]
    assert bound_after(340_000, [LARGE_COPY]) == [(None,)]


def test_a_short_launch_waits_whatever_else_its_operator_does():
    kernels = [{"op_row": 0, "duration_ns": 20_000}, {"op_row": 0, "duration_ns": 10}]
    assert columns(measured(*kernels, ranges=[PRODUCT]), "bound") == [("compute",), ("latency",)]


def test_an_operator_that_took_no_time_has_no_bound():
    trace = measured({"op_row": 0, "duration_ns": 0}, ranges=[COPY])
    assert columns(trace, "bytes", "bound") == [(2_000_000, None)]


@pytest.mark.parametrize(
    ("memory", "compute", "bound"),
    [
        (0.6, 0.0, "memory"),
        (0.0, 0.6, "compute"),
        (0.59, 0.59, "latency"),
        (0.7, 0.7, "memory"),
        (0.7, 0.71, "compute"),
        (0.71, 0.7, "memory"),
    ],
)
def test_the_greater_share_at_the_threshold_decides(memory, compute, bound):
    decided = decide_bound(np.array([memory]), np.array([compute]))
    assert BOUNDS[decided[0]] == bound


def test_what_runs_faster_than_its_ceiling_is_listed():
    kernels = [{"op_row": 0, "duration_ns": 1_800}, {"op_row": 1, "duration_ns": 1_950}]
    trace = measured(*kernels, {"duration_ns": 1}, ranges=[COPY, COPY])
    beaten = beaten_ceilings(trace)
    assert beaten["duration_ns"].tolist() == [1_800]


def test_a_trace_without_activities_gets_empty_columns():
    trace = measured(ranges=[PRODUCT])
    assert len(trace.kernels) == 0
    assert "limit_ns" in trace.kernels


@pytest.mark.parametrize(("duration_ns", "bound"), [(195_000, "compute"), (180_000, None)])
def test_arithmetic_that_beats_its_peak_has_no_bound(duration_ns, bound):
    wide, tall = tensor("fp32", 1000, 100), tensor("fp32", 100, 1000)
    ranges = [{"name": "aten::mm", **recorded(wide, tall)}]
    device = Device("d", 1e15, {"fp32": 1e12}, "made up")
    trace = measured({"op_row": 0, "duration_ns": duration_ns}, ranges=ranges, device=device)
    assert columns(trace, "limit_ns", "bound") == [(200_000, bound)]
