"""Groupings keep every nanosecond."""

from __future__ import annotations

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.overlap import allot_busy_time
from kprof.analyze.groupings import (
    collapse_layers,
    count_gpus,
    find_dominant,
    group_kernels,
    group_modules,
    group_operators,
    measure_capacity,
    measure_window,
    split_window,
)
from tests.traces import analyzed_trace_of


def test_every_gpu_of_every_rank_has_its_own_time():
    trace = analyzed_trace_of({"device": 0}, {"device": 1}, {"device": 0, "rank": 1})
    assert allot_busy_time(trace.kernels).tolist() == [100, 100, 100]
    assert count_gpus(trace.kernels) == 3
    assert measure_capacity(trace.kernels) == 300
    assert measure_window(trace.kernels) == 200


def test_the_window_splits_into_kinds_and_causes_of_idle_time():
    trace = analyzed_trace_of(
        {"kind": "gemm", "phase": "forward"},
        {
            "start_ns": 150,
            "kind": "norm",
            "phase": "backward",
            "gap_before_ns": 50,
        },
        {"start_ns": 200, "kind": "gemm", "phase": "backward"},
        {"start_ns": 310},
        idle=[
            {"start_ns": 100, "duration_ns": 20, "cause": "allocator", "kernel_row": 1},
            {"start_ns": 120, "duration_ns": 30, "cause": "data loading", "kernel_row": 1},
        ],
    )
    split = split_window(trace).astype(object).fillna("?")
    assert sorted(split.itertuples(index=False, name=None)) == [
        ("?", "?", False, 100),
        ("?", "?", True, 10),
        ("backward", "allocator", True, 20),
        ("backward", "data loading", True, 30),
        ("backward", "gemm", False, 100),
        ("backward", "norm", False, 50),
        ("forward", "gemm", False, 100),
    ]


KERNEL = st.fixed_dictionaries(
    {
        "start_ns": st.integers(0, 300),
        "duration_ns": st.integers(0, 80),
        "rank": st.integers(0, 1),
        "device": st.integers(0, 1),
        "kind": st.sampled_from(["gemm", "norm", None]),
        "phase": st.sampled_from(["forward", None]),
    }
)


@given(st.lists(KERNEL, max_size=12))
def test_the_split_adds_up_to_the_window_to_the_nanosecond(rows):
    trace = analyzed_trace_of(*rows)
    instants = {
        (row["rank"], row["device"], instant)
        for row in rows
        for instant in range(row["start_ns"], row["start_ns"] + row["duration_ns"])
    }
    split = split_window(trace)
    assert allot_busy_time(trace.kernels).sum() == len(instants)
    assert split["time_ns"][~split["is_idle"]].sum() == len(instants)
    assert split["time_ns"].sum() == measure_capacity(trace.kernels) == balance(trace).window_ns


def test_kernels_are_grouped_with_what_reaching_their_limit_would_save():
    trace = analyzed_trace_of(
        {"name": "a", "limit_ns": 40, "flops": 5},
        {"name": "b", "duration_ns": 300},
        {"name": "a", "limit_ns": 130},
        {"name": "a"},
    )
    groups = group_kernels(trace.kernels, ["name"]).set_index("name")
    assert groups["time_ns"].to_dict() == {"a": 300, "b": 300}
    assert groups.loc["a", ["calls", "limit_ns", "limited_time_ns", "saving_ns"]].tolist() == [
        3,
        170,
        200,
        60,
    ]
    assert pd.isna(groups.loc["b", "limit_ns"])
    assert pd.isna(groups.loc["b", "flops"])
    assert pd.isna(groups.loc["b", "saving_ns"])


def test_what_takes_less_than_its_limit_saves_nothing_which_is_known():
    trace = analyzed_trace_of({"limit_ns": 130})
    assert group_kernels(trace.kernels, ["name"])["saving_ns"].tolist() == [0]


def test_the_dominant_value_is_the_one_with_most_time_not_most_rows():
    trace = analyzed_trace_of(
        {"bound": "latency"}, {"bound": "latency"}, {"bound": "memory", "duration_ns": 500}
    )
    assert find_dominant(trace.kernels, "name", "bound") == {"kernel": "memory"}


def test_layer_numbers_collapse_and_other_digits_stay():
    names = pd.Series(
        ["model.layers.10.fc1", "0.weight_norm", "h.3", "layers.10.mlp.2", "Linear_56", None],
        dtype="category",
    )
    assert collapse_layers(names).astype(object).fillna("?").tolist() == [
        "model.layers.*.fc1",
        "*.weight_norm",
        "h.*",
        "layers.*.mlp.*",
        "Linear_*",
        "?",
    ]


def test_a_modules_time_splits_into_forward_and_backward():
    trace = analyzed_trace_of(
        {"module": "mlp", "phase": "forward", "op": "aten::mm"},
        {"module": "mlp", "phase": "backward", "duration_ns": 200, "op": "aten::bmm"},
        {"phase": "optimizer", "duration_ns": 7},
    )
    groups = group_modules(trace.kernels)
    assert groups.loc[0, ["module", "forward_ns", "backward_ns", "op"]].tolist() == [
        "mlp",
        100,
        200,
        "aten::bmm",
    ]
    assert groups["time_ns"].tolist() == [300, 7]


def test_the_phases_of_a_module_of_which_no_phase_is_known_are_missing():
    trace = analyzed_trace_of(
        {"module": "mlp", "phase": "forward"}, {"module": "mlp"}, {"module": "head"}
    )
    groups = group_modules(trace.kernels).set_index("module")
    assert groups.loc["mlp", ["forward_ns", "backward_ns"]].tolist() == [100, 0]
    assert groups.loc["head", ["forward_ns", "backward_ns"]].isna().all()


def test_operators_of_different_shapes_stay_apart():
    trace = analyzed_trace_of(
        {"op_row": 0}, {"op_row": 1}, {"op_row": 0}, {}, ranges=[{"input_shapes": "[[1]]"}, {}]
    )
    groups = group_operators(trace)
    assert groups["calls"].tolist() == [2, 2]
    assert groups["shapes"].astype(object).fillna("?").tolist() == ["[[1]]", "?"]
