"""From a kernel to the operator, module, phase and step that launched it."""

import pandas as pd

from kprof.analyze.attribution.attribute import add_attribution
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


def node(**row):
    return {"name": "MulBackward0", "start_ns": 100, "duration_ns": 50, "thread": 9, **row}


LAUNCH_IN_NODE = {**LAUNCH, "start_ns": 110, "duration_ns": 5, "thread": 9}


def test_equal_sequence_numbers_of_two_forward_threads_do_not_mix():
    rows = []
    for thread, module in ((1, "left"), (2, "right")):
        module_row = {"kind": "module", "name": module, "duration_ns": 50, "thread": thread}
        maker = {"name": "aten::mul", "start_ns": 10 + thread, "duration_ns": 5, "sequence": 7}
        rows += [module_row, {**maker, "thread": thread}]
    rows.append({"name": "aten::mul", "start_ns": 30, "duration_ns": 5, "sequence": 8, "thread": 1})
    left = attributed(*rows, node(sequence=7, forward_thread=1), LAUNCH_IN_NODE)
    other = node(sequence=8, forward_thread=1, start_ns=90, duration_ns=5)
    both = attributed(*rows, other, node(sequence=7, forward_thread=1), LAUNCH_IN_NODE)
    second = attributed(*rows, other, node(sequence=7, forward_thread=2), LAUNCH_IN_NODE)
    assert (left["module"], both["module"], second["module"]) == ("left", "left", "right")


def test_a_node_is_never_made_by_an_operator_that_began_after_it():
    row = attributed(
        {"kind": "module", "name": "late", "start_ns": 200, "duration_ns": 50},
        {"name": "aten::mul", "start_ns": 210, "duration_ns": 5, "sequence": 7},
        node(sequence=7, forward_thread=1),
        LAUNCH_IN_NODE,
    )
    assert pd.isna(row["module"])


def test_a_gradient_taken_inside_a_module_belongs_to_the_module_of_its_forward():
    row = attributed(
        {"kind": "module", "name": "forces", "start_ns": 0, "duration_ns": 500, "thread": 9},
        {"kind": "module", "name": "forces.energy", "start_ns": 5, "duration_ns": 50, "thread": 9},
        {"name": "aten::mul", "start_ns": 10, "duration_ns": 5, "sequence": 7, "thread": 9},
        node(sequence=7, forward_thread=1),
        LAUNCH_IN_NODE,
    )
    assert (row["module"], row["phase"]) == ("forces.energy", "backward")


def test_the_gradient_of_a_gradient_reaches_the_module_of_the_first_forward():
    row = attributed(
        {"kind": "module", "name": "critic", "start_ns": 5, "duration_ns": 50, "thread": 9},
        {"name": "aten::mul", "start_ns": 10, "duration_ns": 5, "sequence": 7, "thread": 9},
        node(sequence=7, forward_thread=1),
        {"name": "aten::mul", "start_ns": 105, "duration_ns": 5, "sequence": 8, "thread": 9},
        node(sequence=8, forward_thread=1, start_ns=200),
        {**LAUNCH_IN_NODE, "start_ns": 210},
    )
    assert row["module"] == "critic"


def test_what_a_module_runs_again_inside_the_backward_pass_is_recomputed():
    again = [
        {"kind": "module", "name": "block", "start_ns": 5, "duration_ns": 50},
        {"name": "aten::mul", "start_ns": 10, "duration_ns": 5, "sequence": 7},
        node(sequence=7, forward_thread=1),
        {"kind": "module", "name": "block.mlp", "start_ns": 105, "duration_ns": 20, "thread": 9},
    ]
    recomputed = attributed(*again, LAUNCH_IN_NODE)
    gradient = attributed(*again, {**LAUNCH_IN_NODE, "start_ns": 130})
    columns = ["module", "phase", "recomputed"]
    assert recomputed[columns].tolist() == ["block.mlp", "backward", True]
    assert gradient[columns].tolist() == ["block", "backward", False]


def test_a_function_between_modules_that_run_again_is_recomputed_too():
    rows = [
        {"kind": "module", "name": "block", "start_ns": 5, "duration_ns": 50},
        {"name": "aten::mul", "start_ns": 10, "duration_ns": 5, "sequence": 7},
        node(sequence=7, forward_thread=1),
        {"kind": "module", "name": "block.mlp", "start_ns": 102, "duration_ns": 3, "thread": 9},
    ]
    operator = {"name": "aten::silu", "start_ns": 108, "duration_ns": 9, "thread": 9}
    forward = attributed(*rows, {**operator, "sequence": 9}, LAUNCH_IN_NODE)
    backward = attributed(*rows, operator, LAUNCH_IN_NODE)
    of_gradient = attributed(*rows[:3], {**operator, "sequence": 9}, LAUNCH_IN_NODE)
    found = [row["recomputed"] for row in (forward, backward, of_gradient)]
    assert found == [True, False, False]


def test_what_accumulates_or_reduces_gradients_is_backward_although_it_has_no_number():
    names = (
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        "torch.distributed.ddp.reducer::copy_bucket_to_grad",
    )
    for name in names:
        row = attributed(node(name=name, forward_thread=0), LAUNCH_IN_NODE)
        assert row["phase"] == "backward"


def test_another_threads_launch_during_the_backward_pass_is_backward():
    backward = {"kind": "phase", "name": "backward", "start_ns": 0, "duration_ns": 200, "thread": 1}
    nested = {**backward, "start_ns": 20, "duration_ns": 10}
    hook = {"name": "aten::mul", "start_ns": 100, "duration_ns": 50, "thread": 9}
    assert attributed(backward, nested, hook, LAUNCH_IN_NODE)["phase"] == "backward"
    after = {**LAUNCH_IN_NODE, "start_ns": 210}
    assert pd.isna(attributed(backward, {**hook, "start_ns": 205}, after)["phase"])


def test_without_recorded_phases_modules_and_makers_of_nodes_are_forward():
    launch = {**LAUNCH, "start_ns": 20, "duration_ns": 5}
    operator = {"name": "aten::mul", "start_ns": 10, "duration_ns": 50}
    module = {"kind": "module", "name": "head", "start_ns": 0, "duration_ns": 90}
    gradient = node(sequence=7, forward_thread=1)
    assert attributed(module, operator, launch)["phase"] == "forward"
    assert attributed({**operator, "sequence": 7}, gradient, launch)["phase"] == "forward"
    assert pd.isna(attributed({**operator, "sequence": 8}, gradient, launch)["phase"])


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


def test_a_range_whose_name_only_looks_like_a_number_is_no_step():
    row = attributed(
        {"kind": "step", "name": "²", "start_ns": 0, "duration_ns": 40},
        {"kind": "step", "name": "9" * 30, "start_ns": 40, "duration_ns": 50},
        {"name": "aten::mm", "start_ns": 50, "duration_ns": 20},
        {**LAUNCH, "start_ns": 60, "duration_ns": 5},
    )
    assert pd.isna(row["step"])
