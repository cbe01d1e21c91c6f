"""The work of a launch: its operator's, whose parts add up to the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.roofline.launch_work import shares_by_duration
from tests.analyze.calls import recorded, tensor, tensors
from tests.analyze.roofline.roofline_rows import (
    COPY,
    GPU_COPY,
    LIST_KERNEL,
    PRODUCT,
    SQUARE,
    columns,
    measured,
)

MODULE = {"kind": "module", "name": "layers.0"}


def test_a_kernel_has_the_work_of_its_operator_and_a_limit():
    trace = measured({"op_row": 0, "duration_ns": 40_000}, ranges=[PRODUCT])
    found = columns(trace, "flops", "bytes", "work_from", "limit_ns")
    assert found == [(2_000_000_000, 6_000_000, "shapes", 20_000)]


def test_an_operators_work_is_split_over_its_kernels_by_duration():
    trace = measured(
        {"op_row": 0, "duration_ns": 30_000}, {"op_row": 0, "duration_ns": 10_000}, ranges=[PRODUCT]
    )
    assert columns(trace, "flops", "bytes") == [
        (1_500_000_000, 4_500_000),
        (500_000_000, 1_500_000),
    ]


def test_two_calls_of_one_operator_have_their_own_work():
    trace = measured({"op_row": 0}, {"op_row": 1}, ranges=[COPY, COPY])
    assert columns(trace, "bytes") == [(2_000_000,), (2_000_000,)]


def test_an_operator_without_a_model_takes_part_in_the_work_around_it():
    inner = {"name": "mylib::kernel", "parent": 0}
    trace = measured({"op_row": 1}, {"op_row": 0}, ranges=[PRODUCT, inner])
    assert columns(trace, "flops") == [(1_000_000_000,), (1_000_000_000,)]


def test_two_operators_inside_one_share_its_work():
    inner = {"name": "mylib::kernel", "parent": 0}
    trace = measured({"op_row": 1}, {"op_row": 2}, ranges=[PRODUCT, inner, inner])
    assert columns(trace, "flops") == [(1_000_000_000,), (1_000_000_000,)]


def test_work_is_not_sought_beyond_a_module():
    ranges = [PRODUCT, {**MODULE, "parent": 0}, {"name": "mylib::kernel", "parent": 1}]
    assert columns(
        measured({"op_row": 2, "duration_ns": 9_000}, ranges=ranges), "flops", "bound"
    ) == [(None, None)]


def test_a_product_inside_a_product_carries_the_work_alone():
    linear = {"name": "aten::linear", **recorded(SQUARE, SQUARE, None)}
    ranges = [linear, {**PRODUCT, "parent": 0}]
    trace = measured({"op_row": 0}, {"op_row": 1}, ranges=ranges)
    assert columns(trace, "flops") == [(None,), (2_000_000_000,)]


def test_a_copy_inside_a_product_does_not_carry_its_work():
    trace = measured({"op_row": 0}, {"op_row": 1}, ranges=[PRODUCT, {**COPY, "parent": 0}])
    assert columns(trace, "flops", "bytes") == [(2_000_000_000, 6_000_000), (0, 2_000_000)]


def test_a_sum_inside_a_mean_carries_the_work_alone():
    reduction = recorded(tensor("fp32", 1000), [0], False, None)
    ranges = [{"name": "aten::mean", **reduction}, {"name": "aten::sum", "parent": 0, **reduction}]
    trace = measured({"op_row": 0}, {"op_row": 1}, ranges=ranges)
    assert columns(trace, "bytes") == [(None,), (4_004,)]


def test_a_product_of_elements_inside_the_backward_of_a_softmax_is_one_more_kernels_work():
    x = tensor("fp32", 100, 100)
    backward = {"name": "aten::_softmax_backward_data", **recorded(x, x, -1, 6)}
    inside = {"name": "aten::mul", "parent": 0, **recorded(x, x)}
    trace = measured({"op_row": 1}, {"op_row": 0}, ranges=[backward, inside])
    assert columns(trace, "flops", "bytes") == [(10_000, 120_000), (40_000, 120_000)]


def test_what_stands_around_a_softmax_has_its_own_work_inside_one_that_only_calls_it():
    x = tensor("fp32", 100, 100)
    safe = {"name": "aten::_safe_softmax", **recorded(x, -1, None)}
    inside = [
        {"name": "aten::_softmax", "parent": 0, **recorded(x, -1, False)},
        {"name": "aten::isneginf", "parent": 0, **recorded(x)},
    ]
    trace = measured({"op_row": 1}, {"op_row": 2}, {"op_row": 0}, ranges=[safe, *inside])
    assert columns(trace, "bytes") == [(80_000,), (50_000,), (None,)]


def test_without_shapes_the_work_is_missing():
    trace = measured({"op_row": 0, "duration_ns": 9_000}, ranges=[{"name": "aten::mm"}])
    found = columns(trace, "flops", "bytes", "work_from", "limit_ns", "bound")
    assert found == [(None, None, None, None, None)]


@pytest.mark.parametrize("shapes", ["[[2, 3], [4, 5]]", "[[2], 7]", "[]", "7", '[["a"], [2, 3]]'])
def test_shapes_that_fit_no_product_give_no_work(shapes):
    row = {"name": "aten::mm", "input_shapes": shapes, "input_dtypes": '["float", "float"]'}
    assert columns(measured({"op_row": 0}, ranges=[row]), "flops") == [(None,)]


def test_an_operator_without_a_device_still_has_its_work():
    trace = measured({"op_row": 0}, ranges=[PRODUCT], device=None)
    assert columns(trace, "flops", "limit_ns", "bound") == [(2_000_000_000, None, None)]


def test_a_copy_within_a_device_reads_and_writes_what_was_recorded():
    trace = measured({"name": GPU_COPY, "activity": "memcpy", "copied_bytes": 1_000_000})
    found = columns(trace, "flops", "bytes", "work_from", "limit_ns")
    assert found == [(0, 2_000_000, "recorded", 2_000)]


def test_a_set_only_writes():
    trace = measured({"name": "Memset (Device)", "activity": "memset", "copied_bytes": 1_000_000})
    assert columns(trace, "bytes", "limit_ns") == [(1_000_000, 1_000)]


def test_a_recorded_copy_takes_none_of_its_operators_work():
    memset = {"name": "Memset (Device)", "activity": "memset", "copied_bytes": 64, "op_row": 0}
    trace = measured(memset, {"op_row": 0}, ranges=[PRODUCT])
    assert columns(trace, "bytes") == [(64,), (6_000_000,)]


def test_a_copy_of_unknown_size_takes_its_operators_work():
    trace = measured(
        {"name": GPU_COPY, "activity": "memcpy", "op_row": 0}, ranges=[COPY], device=None
    )
    assert columns(trace, "bytes", "work_from") == [(2_000_000, "shapes")]


def test_a_list_of_tensors_gets_its_type_from_the_kernel():
    cat = {"name": "aten::cat", **recorded(tensors((10, 10), (20, 10)), 0)}
    name = "void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>"
    trace = measured({"name": name, "op_row": 0}, ranges=[cat])
    assert columns(trace, "flops", "bytes") == [(0, 1_200)]


def test_an_old_collective_is_described_by_the_annotation_inside_it():
    ranges = [
        {"name": "record_param_comms"},
        {"kind": "range", "name": "nccl:all_reduce", "parent": 0, **recorded(tensor("bf16", 100))},
    ]
    trace = measured({"op_row": 0}, ranges=ranges)
    assert columns(trace, "bytes", "work_from") == [(400, "shapes")]


@pytest.mark.parametrize("graph_node", [5, None])
def test_every_replay_of_an_operator_does_its_work_again(graph_node):
    replayed = {"op_row": 0, "graph_node": graph_node}
    ranges = [PRODUCT, *({"kind": "runtime", "name": "cudaGraphLaunch"} for _ in range(2))]
    trace = measured({**replayed, "launch_row": 1}, {**replayed, "launch_row": 2}, ranges=ranges)
    assert columns(trace, "flops") == [(2_000_000_000,), (2_000_000_000,)]


def test_a_launch_of_unknown_operator_has_the_work_of_one_that_is_alike():
    launch = {"name": "gemm", "grid": "8,1,1", "block": "128,1,1", "duration_ns": 40_000}
    trace = measured({**launch, "op_row": 0}, launch, ranges=[PRODUCT])
    assert columns(trace, "flops", "bytes", "work_from") == [
        (2_000_000_000, 6_000_000, "shapes"),
        (2_000_000_000, 6_000_000, "alike"),
    ]


def test_a_kernel_that_a_view_launched_is_not_without_work():
    view = {"name": "aten::select", **recorded(tensor("bf16", 8, 8), 0, 0)}
    assert columns(measured({"op_row": 0}, ranges=[view]), "bytes") == [(None,)]
    on_host = measured({"op_row": 0, "activity": "host"}, ranges=[view], device=None)
    assert columns(on_host, "bytes") == [(0,)]


def test_in_host_mode_an_operators_pieces_share_its_work():
    pieces = [{"activity": "host", "device": -1, "op_row": 0, "duration_ns": d} for d in (300, 100)]
    trace = measured(*pieces, ranges=[COPY])
    assert columns(trace, "bytes", "work_from") == [
        (1_500_000, "shapes"),
        (500_000, "shapes"),
    ]


def test_a_trace_without_ranges_has_only_recorded_work():
    trace = measured({}, {"name": GPU_COPY, "activity": "memcpy", "copied_bytes": 8})
    assert columns(trace, "bytes") == [(None,), (16,)]


@given(
    total=st.lists(st.integers(0, 10**15), min_size=4, max_size=4),
    rows=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 10**10)), max_size=40),
)
def test_split_work_adds_up_to_the_last_flop(total, rows):
    group = np.array([g for g, _ in rows], dtype=np.int64)
    duration = np.array([d for _, d in rows], dtype=np.int64)
    part = shares_by_duration(group, duration).split(np.array(total))
    assert (part >= 0).all()
    assert part[group == NO_ROW].sum() == 0
    sums = {int(g): int(part[group == g].sum()) for g in np.unique(group[group != NO_ROW])}
    assert sums == {g: total[g] for g in sums}


def chunked(num_blocks, duration_ns):
    grid = None if num_blocks is None else f"{num_blocks},1,1"
    return {"name": LIST_KERNEL, "op_row": 0, "grid": grid, "duration_ns": duration_ns}


DECAY = {"name": "aten::_foreach_mul_", **recorded(tensors((1000, 600), (1000, 400)), 0.9)}


def test_launches_over_lists_share_the_work_by_their_blocks():
    # 4 MB read and written: 8 us at 1 TB/s, of which the second launch has a tenth.
    trace = measured(chunked(9, 10_000), chunked(1, 10_000), ranges=[DECAY])
    found = columns(trace, "bytes", "limit_ns", "bound")
    assert found == [(7_200_000, 7_200, "memory"), (800_000, 800, None)]


def test_launches_over_lists_whose_blocks_were_not_recorded_share_by_duration():
    trace = measured(chunked(9, 10_000), chunked(None, 10_000), ranges=[DECAY])
    assert columns(trace, "bytes") == [(4_000_000,), (4_000_000,)]


def test_what_rounding_leaves_goes_to_the_longest():
    part = shares_by_duration(np.array([0, 0, 0]), np.array([3, 3, 4])).split(np.array([10]))
    assert part.tolist() == [3, 3, 4]
    part = shares_by_duration(np.array([0, 0, 0]), np.array([3, 3, 4])).split(np.array([11]))
    assert part.tolist() == [3, 3, 5]


def test_the_first_of_rows_without_duration_gets_everything():
    part = shares_by_duration(np.array([0, 0]), np.array([0, 0])).split(np.array([10]))
    assert part.tolist() == [10, 0]
