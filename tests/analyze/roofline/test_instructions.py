"""How many instructions launches issue at least, and what that tells of their bound."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kprof.analyze.roofline.bound import (
    add_roofline,
    instructions_each,
    issue_ns,
    least_instructions,
    num_dimensions,
)
from tests.analyze.calls import recorded, tensor
from tests.traces import ROUND_DEVICE, trace_of

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
NATIVE = "at::native::"
DIVISION = f"{NATIVE}BinaryFunctor<c10::BFloat16, float, {NATIVE}DivFunctor<float> >"
COPY = f"{NATIVE}direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda(c10::BFloat16)#1}}"
WHERE = f"{NATIVE}where_kernel_impl(at::TensorIterator&)::{{lambda(bool, float, float)#1}}"
TO_FP8 = f"{NATIVE}vectorized_elementwise_kernel<4, {NATIVE}float8_copy_kernel_cuda(at::Tensor)"
# One instruction of all lanes takes 1 ps: 2 TFLOP/s are 1e12 multiply-adds a second.
HOPPER = replace(ROUND_DEVICE, name="NVIDIA H200", flops_per_s={"fp32": 2e12})
HALF = tensor("bf16", 1000, 1000)


def kernel(function, cast="_nocast", unrolled=4):
    applied = f"{NATIVE}gpu_kernel_impl{cast}<{function}>"
    return f"void {NATIVE}elementwise_kernel<128, {unrolled}, {applied}"


def each(function, *tensors, **options):
    """Instructions of each element of a launch of two blocks, whose second has one element."""
    told = recorded(*tensors)
    elements = 128 * options.get("unrolled", 4) + 1
    found = least_instructions(
        kernel(function, **options),
        "2,1,1",
        *(told[f"input_{part}"] for part in ("shapes", "strides", "dtypes")),
    )
    assert found % elements == 0
    return found // elements


def counted_in_machine_code():
    (newest,) = sorted(RESULTS.glob("instructions_sm90_*.json"))[-1:]
    return json.loads(newest.read_text())["rows"]


def by_operands():
    return [row for row in counted_in_machine_code() if "operands" in row]


def least_of(row):
    kind = {"are_cast": "cast" in row["kernel"], "is_division": "divided" in row["kernel"]}
    return instructions_each(row["operands"], row["dimensions"], **kind)


def test_there_are_no_fewer_instructions_in_the_machine_code_and_few_more():
    # What the function does itself is in the machine code, but not in the least.
    share = {row["name"]: least_of(row) / row["value"] for row in by_operands()}
    assert len(share) == 68
    assert {name: one for name, one in share.items() if not 0.85 <= one <= 1.01} == {}


def test_a_copy_from_a_broadcast_element_finds_one_dimension_for_two_operands():
    spread = tensor("bf16", 1000, 1000, strides=[0, 0])
    assert each(COPY, tensor("bf16", 1000, 1000, strides=[1000, 1]), spread) == 8 + 2 * 5 + 12


def test_each_dimension_that_stays_apart_is_divided_by():
    turned = tensor("bf16", 1000, 1000, strides=[1, 1000])
    assert each(COPY, tensor("bf16", 1000, 1000, strides=[1000, 1]), turned) == 18 + 2 * 12


def test_three_operands_read_have_four_addresses():
    row = tensor("bool", 1000, 1, strides=[1, 1])
    x = tensor("fp32", 1000, 1000, strides=[1000, 1])
    assert each(WHERE, row, x, x, unrolled=2) == 8 + 4 * 5 + 2 * 15


def test_a_fill_reads_nothing():
    turned = tensor("bf16", 1000, 1000, strides=[2000, 1])
    assert each(f"{NATIVE}FillFunctor<c10::BFloat16>", turned) == 8 + 5 + 2 * 11


def test_operands_that_are_cast_look_up_their_type_and_a_division_takes_longer():
    x = tensor("bf16", 1000, 1000, strides=[1000, 1])
    assert each(DIVISION, x, tensor("fp32"), cast="") == 8 + 3 * 5 + 14 + 3 * 12 + 10
    assert each(DIVISION, x) == 8 + 3 * 5 + 14 + 10


def test_with_one_type_nothing_is_cast_whatever_the_kernel_is_called():
    x = tensor("bf16", 1000, 1000, strides=[1000, 1])
    assert each(DIVISION, x, tensor("fp64"), 1, cast="") == each(DIVISION, x)


def converted(source, dtype="c10::Float8_e4m3fn"):
    """Instructions of a conversion of 1,000 elements."""
    name = f"{TO_FP8}::{{lambda({source})#1}}, std::array<char*, 2ul> >"
    return least_instructions(name, "1,1,1", "[[10, 100]]", "[[100, 1]]", f'["{dtype}"]')


@pytest.mark.parametrize(
    ("source", "label"), [("float", "to FP8 from float"), ("c10::BFloat16", "to FP8 from bfloat16")]
)
def test_a_conversion_to_fp8_takes_no_fewer_in_the_machine_code(source, label):
    (row,) = (row for row in counted_in_machine_code() if row["name"] == label)
    assert 950 * row["value"] <= converted(source) <= 1000 * row["value"]


def test_other_conversions_were_not_counted():
    assert converted("float", "c10::Float8_e5m2") == 0


@pytest.mark.parametrize("text", ["[]", "7", "[[], 7]", '[["a"], [2]]', "[[[2], [3]]]"])
def test_what_is_no_shape_leaves_one_dimension(text):
    assert least_instructions(kernel(COPY), "1,1,1", text, text, "[]") == 30


@pytest.mark.parametrize(
    ("strides", "number"),
    [
        ([[12, 4, 1]], 1),
        ([[12, 4, 1], [12, 4, 1]], 1),
        ([[12, 4, 1], [90, 4, 1]], 2),
        ([[12, 4, 1], [1, 2, 6]], 3),
        ([[0, 0, 0]], 1),
        ([[12, 4, 1], [0, 4, 1]], 2),
        ([], 1),
    ],
)
def test_dimensions_merge_where_every_operand_walks_on(strides, number):
    assert num_dimensions([[2, 3, 4]] * len(strides), strides) == number


def test_dimensions_of_one_element_are_none():
    assert num_dimensions([[5, 1, 1]], [[1, 1, 1]]) == 1


def test_a_dimension_of_one_that_another_operand_fills_is_broadcast():
    # A column of the first operand.
    assert num_dimensions([[5, 4], [5, 1]], [[4, 1], [4, 1]]) == 2


def copied(duration_ns, device=HOPPER, **columns):
    """A copy that turns 1,000,000 elements, at 42 instructions each: 42 us of issuing."""
    turned = tensor("bf16", 1000, 1000, strides=[1, 1000])
    straight = tensor("bf16", 1000, 1000, strides=[1000, 1])
    call = {"name": "aten::copy_", **recorded(straight, turned, False)}
    launch = {"name": kernel(COPY), "grid": "1954,1,1", "op_row": 0, "duration_ns": duration_ns}
    passes = ("attribute", "classify")
    return trace_of({**launch, **columns}, ranges=[call], passes=passes, device=device)


def test_what_issues_instructions_all_the_time_is_bound_by_issue():
    kernels = add_roofline(copied(60_000)).kernels
    assert kernels["bound"].tolist() == ["issue"]
    # What the mathematics needs is what it was: 4 MB.
    assert kernels["limit_ns"].tolist() == [4000]


def test_what_may_issue_instructions_half_of_the_time_has_no_known_bound():
    assert add_roofline(copied(80_000)).kernels["bound"].isna().all()


def test_the_run_that_was_counted_is_judged_by_its_own_time():
    kernels = add_roofline(copied(80_000, counted_ns=60_000)).kernels
    assert kernels["counted_bound"].tolist() == ["issue"]


def test_nothing_is_said_of_gpus_whose_instructions_were_not_counted():
    other = replace(HOPPER, name="NVIDIA A100-SXM4-80GB")
    assert issue_ns(copied(60_000), other).tolist() == [0]
    assert issue_ns(copied(60_000), replace(HOPPER, flops_per_s={})).tolist() == [0]


def test_nothing_is_said_of_kernels_that_load_several_elements_at_once():
    vectorized = f"void {NATIVE}vectorized_elementwise_kernel<4, {NATIVE}gpu_kernel_impl<{COPY}>"
    assert issue_ns(copied(60_000, name=vectorized), HOPPER).tolist() == [0]
