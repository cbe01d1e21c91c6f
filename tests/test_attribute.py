"""From a kernel to the operator, module, phase and step that launched it."""

import pandas as pd

from kprof.analyze.attribute import add_attribution
from tests.traces import trace_of

LAUNCH = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1}


def attributed(*ranges, kernel=None):
    trace = trace_of({"correlation": 1, **(kernel or {})}, ranges=ranges)
    return add_attribution(trace).kernels.iloc[0]


def test_a_kernel_belongs_to_the_innermost_operator_around_its_launch():
    row = attributed(
        {"name": "aten::linear", "start_ns": 0, "duration_ns": 90},
        {"name": "aten::addmm", "start_ns": 10, "duration_ns": 50},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5},
    )
    assert (row["op"], row["op_row"], row["launch_row"]) == ("aten::addmm", 1, 2)


def test_an_operator_that_ended_before_the_launch_did_not_launch_it():
    row = attributed(
        {"name": "aten::linear", "start_ns": 0, "duration_ns": 90},
        {"name": "aten::addmm", "start_ns": 10, "duration_ns": 5},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5},
    )
    assert row["op"] == "aten::linear"


def test_an_operator_of_another_thread_did_not_launch_it():
    row = attributed(
        {"name": "aten::mm", "start_ns": 0, "duration_ns": 90, "thread": 2},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5, "thread": 1},
    )
    assert row["bucket"] == "unlinked"
    assert pd.isna(row["op"])


def test_the_external_id_names_the_operator_where_no_range_is_open():
    row = attributed(
        {"name": "aten::mm", "start_ns": 0, "duration_ns": 10, "external_id": 9},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5, "external_id": 9},
    )
    assert (row["op"], row["attributed_by"]) == ("aten::mm", "external id")


def test_a_kernel_belongs_to_the_module_around_its_operator():
    row = attributed(
        {"kind": "module", "name": "layers.0.mlp", "start_ns": 0, "duration_ns": 90},
        {"name": "aten::mm", "start_ns": 10, "duration_ns": 50},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5},
    )
    assert row["module"] == "layers.0.mlp"


def test_a_backward_kernel_belongs_to_the_module_of_its_forward_operator():
    row = attributed(
        {"kind": "module", "name": "head", "start_ns": 0, "duration_ns": 50},
        {"name": "aten::addmm", "start_ns": 10, "duration_ns": 20, "sequence": 7},
        {
            "name": "autograd::engine::evaluate_function: AddmmBackward0",
            "start_ns": 100,
            "duration_ns": 50,
            "thread": 2,
            "sequence": 7,
            "forward_thread": 1,
        },
        {**LAUNCH, "start_ns": 110, "duration_ns": 5, "thread": 2},
    )
    assert (row["module"], row["phase"]) == ("head", "backward")


def test_of_operators_that_share_a_sequence_number_the_latest_made_the_node():
    row = attributed(
        {"kind": "module", "name": "first", "start_ns": 0, "duration_ns": 20},
        {"name": "aten::empty", "start_ns": 10, "duration_ns": 5, "sequence": 7},
        {"kind": "module", "name": "second", "start_ns": 20, "duration_ns": 20},
        {"name": "aten::mul", "start_ns": 25, "duration_ns": 5, "sequence": 7},
        {
            "name": "MulBackward0",
            "start_ns": 100,
            "duration_ns": 50,
            "thread": 2,
            "sequence": 7,
            "forward_thread": 1,
        },
        {**LAUNCH, "start_ns": 110, "duration_ns": 5, "thread": 2},
    )
    assert row["module"] == "second"


def test_a_recorded_phase_wins_and_an_optimizer_range_tells_its_phase():
    recorded = attributed(
        {"kind": "phase", "name": "forward", "start_ns": 0, "duration_ns": 90},
        {"name": "aten::mm", "start_ns": 10, "duration_ns": 50},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5},
    )
    told = attributed(
        {"kind": "range", "name": "Optimizer.step#AdamW.step", "start_ns": 0, "duration_ns": 90},
        {"name": "aten::_fused_adamw_", "start_ns": 10, "duration_ns": 50},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5},
    )
    assert (recorded["phase"], told["phase"]) == ("forward", "optimizer")


def test_the_step_is_the_one_running_when_the_kernel_was_launched_on_any_thread():
    row = attributed(
        {"kind": "step", "name": "6", "start_ns": 0, "duration_ns": 50},
        {"kind": "step", "name": "7", "start_ns": 50, "duration_ns": 50},
        {"name": "aten::mm", "start_ns": 60, "duration_ns": 20, "thread": 2},
        {**LAUNCH, "start_ns": 65, "duration_ns": 5, "thread": 2},
        kernel={"start_ns": 500},
    )
    assert row["step"] == 7


def test_correlation_ids_of_two_ranks_do_not_mix():
    trace = trace_of(
        {"correlation": 1, "rank": 1},
        ranges=[{"name": "aten::mm", "rank": 0}, {**LAUNCH, "rank": 0, "duration_ns": 5}],
    )
    assert add_attribution(trace).kernels["bucket"].tolist() == ["orphan"]


def test_a_launch_inside_a_step_alone_is_not_attributed():
    row = attributed(
        {"kind": "step", "name": "0", "start_ns": 0, "duration_ns": 90},
        {**LAUNCH, "start_ns": 20, "duration_ns": 5},
    )
    assert (row["bucket"], row["step"]) == ("unlinked", 0)


def test_a_trace_without_host_rows_is_all_orphans():
    kernels = add_attribution(trace_of({}, {"start_ns": 200})).kernels
    assert kernels["bucket"].tolist() == ["orphan", "orphan"]


def test_parents_are_the_innermost_open_ranges_even_where_ranges_cross():
    trace = trace_of(
        {},
        ranges=[
            {"kind": "range", "name": "a", "start_ns": 0, "duration_ns": 100},
            {"name": "b", "start_ns": 50, "duration_ns": 60},
            {"name": "c", "start_ns": 105, "duration_ns": 2},
            {"name": "d", "start_ns": 200, "duration_ns": 1},
        ],
    )
    parent = add_attribution(trace).ranges["parent"]
    assert parent.tolist() == [pd.NA, 0, 1, pd.NA]
