"""Two runs side by side: the rows of every layout add up to the step's difference, to the ns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.analyze.attribution.steps import IMBALANCE
from kprof.analyze.diff.alignment import (
    LAYOUTS,
    NUMBERS,
    PLACE,
    Cell,
    apportion,
    find_differences,
    match,
    without_arguments,
    without_numbers,
)
from tests.traces import analyzed_trace_of, measured, trace_of

KERNELS = st.builds(
    dict,
    name=st.sampled_from(["gemm_1", "gemm_2", "triton_poi_fused_add_0", "relu", "Memset (Device)"]),
    start_ns=st.integers(0, 5_000),
    duration_ns=st.integers(0, 900),
    rank=st.integers(0, 1),
    stream=st.integers(7, 8),
    device=st.integers(0, 1),
)
NUM_STEPS = st.integers(1, 4)


def run_of(kernels, num_steps):
    """Analyze a run of these kernels, whose window is taken as so many steps."""
    steps = [
        {"kind": "step", "name": str(i), "start_ns": i, "duration_ns": 1} for i in range(num_steps)
    ]
    return measured(trace_of(*kernels, ranges=steps))


RUNS = st.builds(run_of, st.lists(KERNELS, min_size=1, max_size=12), NUM_STEPS)


def step_of(*kernels, **meta):
    """Build an analyzed run of one step, from rows that follow one another without a gap."""
    start_ns, rows = 0, []
    for kernel in kernels:
        rows.append({"step": 0, "start_ns": start_ns, "gap_before_ns": 0, **kernel})
        start_ns += kernel.get("duration_ns", 100)
    ranges = [{"kind": "step", "name": "0", "duration_ns": start_ns}]
    return analyzed_trace_of(*rows, ranges=ranges, **meta)


def row_of(difference, layout, name):
    """Return the one row of a layout in which `name` stands on either side."""
    (found,) = [row for row in difference.layouts[layout] if name in (*row.names[0], *row.names[1])]
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(a=RUNS, b=RUNS)
def test_every_layout_adds_up_to_the_difference_of_the_steps(a, b):
    difference = find_differences(a, b)
    rows = difference.layouts.values()
    assert {sum(row.difference_ns for row in layout) for layout in rows} == {
        difference.difference_ns
    }
    assert {sum(row.a.step_ns for row in layout) for layout in rows} == {difference.a.step_ns}
    assert {sum(row.b.time_ns for row in layout) for layout in rows} == {difference.b.window_ns}


@settings(deadline=None, max_examples=10)
@given(run=RUNS)
def test_a_run_does_not_differ_from_itself(run):
    difference = find_differences(run, run)
    assert [difference.changes(layout) for layout in LAYOUTS] == [()] * len(LAYOUTS)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(a=RUNS, b=RUNS)
def test_the_other_way_round_every_difference_changes_its_sign(a, b):
    there, back = find_differences(a, b), find_differences(b, a)
    assert {
        layout: {(row.names, row.is_idle, row.a, row.b) for row in rows}
        for layout, rows in there.layouts.items()
    } == {
        layout: {(row.names[::-1], row.is_idle, row.b, row.a) for row in rows}
        for layout, rows in back.layouts.items()
    }


@given(amounts=st.lists(st.integers(0, 10**12), max_size=20), divisor=st.integers(1, 10**6))
def test_apportioned_amounts_add_up_to_the_rounded_total(amounts, divisor):
    parts = apportion(amounts, divisor)
    assert abs(divisor * sum(parts) - sum(amounts)) <= divisor / 2
    assert all(abs(p * divisor - a) < divisor for p, a in zip(parts, amounts, strict=True))


def test_apportioning_rounds_the_largest_remainders_up():
    assert apportion([14, 15, 1, 0], 10) == [1, 2, 0, 0]


def test_matches_come_in_the_order_of_their_names_whatever_that_of_the_runs():
    cells = [Cell(name, None, None, None, None, False, 1, 1) for name in "gcafbed"]
    there = match("kernel", cells, cells[::-1])
    assert "".join(found.names[0][0] for found in there) == "abcdefg"


def test_a_kernel_that_takes_longer_is_a_change_of_its_own():
    a = step_of({"name": "gemm", "duration_ns": 100}, {"name": "relu", "duration_ns": 50})
    b = step_of({"name": "gemm", "duration_ns": 130}, {"name": "relu", "duration_ns": 50})
    (change,) = find_differences(a, b).changes("kernel")
    assert (change.names, change.fate, change.difference_ns) == ((("gemm",),) * 2, "changed", 30)


def test_a_kernel_that_runs_more_often_in_the_same_time_is_a_change():
    a = step_of({"name": "gemm", "duration_ns": 100})
    b = step_of({"name": "gemm", "duration_ns": 50}, {"name": "gemm", "duration_ns": 50})
    (change,) = find_differences(a, b).changes("kernel")
    assert (change.a.calls, change.b.calls, change.difference_ns) == (1, 2, 0)


def test_what_only_one_run_has_appears_and_vanishes():
    a = step_of({"name": "relu"}, {"name": "dropout", "kind": "random"})
    b = step_of({"name": "relu"}, {"name": "fused", "kind": "norm"})
    difference = find_differences(a, b)
    assert row_of(difference, "kernel", "dropout").fate == "vanished"
    assert row_of(difference, "kernel", "fused").fate == "appeared"
    assert row_of(difference, "part", "norm").difference_ns == 100


def test_a_run_of_twice_as_many_steps_is_the_same_step():
    ranges = [{"kind": "step", "name": "0"}, {"kind": "step", "name": "1", "start_ns": 100}]
    one = analyzed_trace_of({"step": 0}, ranges=ranges[:1])
    two = analyzed_trace_of({"step": 0}, {"step": 1, "start_ns": 100}, ranges=ranges)
    assert find_differences(one, two).changes("kernel") == ()


def test_another_tile_size_is_still_the_same_kernel():
    a, b = step_of({"name": "nvjet_tst_128x64_NTN"}), step_of({"name": "nvjet_tst_256x128_NTN"})
    row = row_of(find_differences(a, b), "kernel", "nvjet_tst_128x64_NTN")
    assert (row.matched_by, row.fate) == (NUMBERS, "changed")


def test_another_number_of_inductors_is_still_the_same_kernel():
    a = step_of({"name": "triton_poi_fused_add_3", "duration_ns": 100})
    b = step_of({"name": "triton_poi_fused_add_7", "duration_ns": 90})
    row = row_of(find_differences(a, b), "kernel", "triton_poi_fused_add_3")
    assert (row.names[1], row.difference_ns) == (("triton_poi_fused_add_7",), -10)


def test_another_type_is_another_kernel():
    a, b = step_of({"name": "gemm_bf16_64"}), step_of({"name": "gemm_fp16_64"})
    rows = find_differences(a, b).layouts["kernel"]
    assert {row.fate for row in rows} == {"appeared", "vanished"}


def test_other_template_arguments_under_the_same_operator_are_the_same_function():
    a = step_of({"name": "void flash_fwd<Traits<64>, true>(Params)", "op": "aten::attention"})
    b = step_of({"name": "void flash_fwd<Traits<64>, false>(Params)", "op": "aten::attention"})
    (row,) = find_differences(a, b).layouts["kernel"]
    assert (row.matched_by, row.fate) == ("function and operator", "changed")


def test_another_kernel_of_the_same_operator_and_module_replaces_the_first():
    place = {"op": "aten::mm", "module": "layers.0.mlp"}
    a = step_of({"name": "cutlass_gemm", "duration_ns": 100, **place})
    b = step_of({"name": "nvjet", "duration_ns": 80, **place})
    (row,) = find_differences(a, b).layouts["kernel"]
    assert (row.names, row.fate) == ((("cutlass_gemm",), ("nvjet",)), "replaced")
    assert (row.matched_by, row.difference_ns) == ("operator and module", -20)


def test_layers_of_one_kind_are_one_place():
    a = step_of({"name": "old", "op": "aten::mm", "module": "layers.0.mlp"})
    b = step_of({"name": "new", "op": "aten::mm", "module": "layers.5.mlp"})
    assert row_of(find_differences(a, b), "kernel", "old").fate == "replaced"


def test_another_operator_of_the_same_kind_module_and_phase_replaces_the_first():
    place = {"kind": "attention", "module": "layers.0.attn", "phase": "forward"}
    a = step_of({"name": "flash", "op": "aten::flash_attention", **place})
    b = step_of({"name": "cudnn", "op": "aten::cudnn_attention", **place})
    for layout in ("kernel", "operator"):
        (row,) = find_differences(a, b).layouts[layout]
        assert (row.matched_by, row.fate) == (PLACE.matched_by, "replaced")


def test_kernels_in_different_places_do_not_replace_each_other():
    a = step_of({"name": "old", "op": "aten::mm", "module": "attn", "kind": "gemm"})
    b = step_of({"name": "new", "op": "aten::mm", "module": "mlp", "kind": "gemm"})
    assert {row.fate for row in find_differences(a, b).layouts["kernel"]} == {
        "appeared",
        "vanished",
    }


def test_outside_every_module_the_operator_and_the_kind_tell_what_was_replaced():
    a = step_of({"name": "old", "op": "aten::mm", "kind": "gemm"})
    b = step_of({"name": "new", "op": "aten::mm", "kind": "gemm"})
    (row,) = find_differences(a, b).layouts["kernel"]
    assert row.fate == "replaced"
    assert [word for word in ("operator", "kind", "no module") if word not in row.matched_by] == []


def test_a_copy_from_pinned_memory_takes_the_place_of_one_from_pageable_memory():
    place = {"op": "aten::copy_", "kind": "copy"}
    a = step_of({"name": "Memcpy HtoD (Pageable -> Device)", "duration_ns": 300, **place})
    b = step_of({"name": "Memcpy HtoD (Pinned -> Device)", **place})
    (row,) = find_differences(a, b).layouts["kernel"]
    assert (row.fate, row.difference_ns) == ("replaced", -200)


def test_no_kernel_is_replaced_and_new_or_gone_at_once():
    """The new kernel, which takes the old one's place in aten::mm, also runs elsewhere."""
    place = {"op": "aten::mm", "kind": "gemm", "duration_ns": 100}
    elsewhere = {"kind": "gemm", "start_ns": 200, "duration_ns": 30, "phase": "backward"}
    a = step_of({"name": "old", **place})
    b = step_of({"name": "new", **place}, {"name": "new", **elsewhere})
    for first, second, change_ns in ((a, b, 30), (b, a, -30)):
        rows = find_differences(first, second).layouts["kernel"]
        (row,) = [one for one in rows if not one.is_idle]
        assert (row.fate, row.difference_ns) == ("replaced", change_ns)
    for side in (0, 1):
        names = [name for row in rows if not row.is_idle for name in row.names[side]]
        assert len(names) == len(set(names))


def test_a_replacement_in_many_places_is_one_row():
    places = [{"op": "aten::mm", "module": name} for name in ("attn.q", "attn.k", "mlp")]
    a, b = (step_of(*({"name": name, **place} for place in places)) for name in ("old", "new"))
    (row,) = find_differences(a, b).layouts["kernel"]
    assert (row.a.calls, row.b.calls, row.fate) == (3, 3, "replaced")


def test_idle_time_is_a_part_of_every_layout():
    def run(gap_ns):
        return measured(trace_of({"name": "gemm"}, {"name": "gemm", "start_ns": 100 + gap_ns}))

    difference = find_differences(run(20), run(50))
    changes = {layout: difference.changes(layout) for layout in ("part", "module", "kernel")}
    assert {row.difference_ns for rows in changes.values() for row in rows if row.is_idle} == {30}


def test_an_unnamed_kernel_is_no_idle_time():
    a = measured(trace_of({"name": "gemm"}, {"name": "gemm", "start_ns": 150}))
    rows = find_differences(a, a).layouts["module"]
    assert sorted((row.names[0], row.is_idle, row.a.time_ns) for row in rows) == [
        ((None,), False, 200),
        ((None,), True, 50),
    ]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("triton_red_fused_add_12", "triton_red_fused_add_*"),
        ("gemm_bf16_128x64_sm90", "gemm_bf16_*x*_sm*"),
        ("quantize_e4m3_s8_float32", "quantize_e4m3_s8_float32"),
    ],
)
def test_numbers_are_left_out_of_a_name_except_those_of_types(name, shown):
    assert without_numbers(name) == shown


def test_a_functions_name_is_left_without_arguments():
    expected = {
        "void at::native::f<4, Add<float> >(int, Add<float>)": "at::native::f",
        "void (anonymous namespace)::softmax<8>(float*)": "::softmax",
        "nvjet_tst_64": "nvjet_tst_*",
        "Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD (Pinned -> Device)",
    }
    assert {name: without_arguments(name) for name in expected} == expected


def test_load_imbalance_is_a_part_of_its_own_in_every_layout():
    def ranks(*took_ns):
        marks = [
            {"kind": "step", "name": "0", "start_ns": 0, "duration_ns": took, "rank": rank}
            for rank, took in enumerate(took_ns)
        ]
        kernels = [{"start_ns": 0, "duration_ns": 3_000, "rank": rank} for rank in (0, 1)]
        return measured(trace_of(*kernels, ranges=marks, num_ranks=2))

    uneven = find_differences(ranks(3_000, 4_000), ranks(4_000, 4_000))
    for layout in ("part", "kernel", "operator", "module"):
        row = row_of(uneven, layout, IMBALANCE)
        assert (row.is_idle, row.fate, row.a.time_ns, row.b.time_ns) == (True, "vanished", 1_000, 0)
