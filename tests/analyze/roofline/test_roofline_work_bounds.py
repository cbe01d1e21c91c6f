"""Work that is known only within bounds: at most so much, or at least."""

import pytest

from tests.analyze.calls import recorded, tensor
from tests.analyze.roofline.roofline_rows import LIST_KERNEL, PRODUCT, SQUARE, columns, measured


def test_a_list_kernel_without_shapes_is_bounded_by_its_grid():
    trace = measured({"name": LIST_KERNEL, "grid": "2,1,1", "duration_ns": 10_000})
    found = columns(trace, "flops", "bytes", "work_from")
    assert found == [(131_072, 1_048_576, "bounds")]


def test_list_kernels_of_apex_are_bounded_too_with_moments_in_fp32():
    name = "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<c10::Half>, float>"
    trace = measured({"name": name, "grid": "2,1,1", "duration_ns": 10_000})
    assert columns(trace, "bytes", "work_bound") == [(2 * 65_536 * 4 * 7, "at most")]


ADD = "at::native::CUDAFunctor_add<c10::BFloat16>"
VECTORIZED = (
    f"void at::native::vectorized_elementwise_kernel<8, {ADD}, std::array<char*, 3ul> >(int)"
)
STRIDED = f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{ADD}> >"


@pytest.mark.parametrize(
    ("name", "least"), [(VECTORIZED, 3 * 2 * (9 * 1024 + 1)), (STRIDED, 2 * (9 * 512 + 1))]
)
def test_a_pointwise_kernel_of_unknown_operator_fills_all_blocks_but_the_last(name, least):
    trace = measured({"name": name, "grid": "10,1,1", "block": "128,1,1"})
    found = columns(trace, "flops", "bytes", "work_from", "work_bound")
    assert found == [(None, least, "bounds", "at least")]


@pytest.mark.parametrize(
    "name",
    [
        VECTORIZED.replace("CUDAFunctor_add", "CompareEqFunctor"),
        VECTORIZED.replace("c10::BFloat16", "T"),
        VECTORIZED.replace("at::native::vec", "mine::vec"),
    ],
)
def test_a_pointwise_kernel_of_unknown_elements_stays_unknown(name):
    trace = measured({"name": name, "grid": "10,1,1", "block": "128,1,1"})
    assert columns(trace, "bytes") == [(None,)]


def test_a_bound_beyond_what_the_time_allows_tells_nothing():
    trace = measured({"name": LIST_KERNEL, "grid": "2,1,1", "duration_ns": 1_000})
    assert columns(trace, "flops", "work_from") == [(None, None)]


def test_a_bound_says_which_way_it_holds():
    layer = {"name": "vllm::moe_forward", **recorded(SQUARE, SQUARE)}
    trace = measured(
        {"op_row": 0, "duration_ns": 50_000},
        {"name": LIST_KERNEL, "grid": "2,1,1", "duration_ns": 10_000},
        {"op_row": 1},
        ranges=[layer, PRODUCT],
    )
    found = columns(trace, "work_from", "work_bound")
    assert found == [("bounds", "at least"), ("bounds", "at most"), ("shapes", None)]


@pytest.mark.parametrize(("duration_ns", "bound"), [(600_000, None), (62_000, "memory")])
def test_what_did_at_least_so_much_is_not_said_to_do_too_little(duration_ns, bound):
    kernel = {"name": VECTORIZED, "grid": "10000,1,1", "block": "128,1,1"}
    assert columns(measured({**kernel, "duration_ns": duration_ns}), "bound") == [(bound,)]


def test_the_time_that_it_took_limits_a_bound_from_above():
    tokens, choices = tensor("bf16", 2, 1000), tensor("int32", 2, 4)
    matrices = tensor("bf16", 64, 1000, 1000)
    call = recorded(tokens, matrices, matrices, choices, choices)
    experts = {"name": "vllm::inplace_fused_experts", **call}
    trace = measured({"op_row": 0, "duration_ns": 20_000}, ranges=[experts])
    assert columns(trace, "bytes", "limit_ns") == [(32_008_064, 20_000)]


def test_an_exact_model_around_a_bound_of_the_same_family_carries_the_work():
    given, got = tensor("bf16", 100), tensor("bf16", 900)
    ranges = [
        {"name": "c10d::alltoall_base_", **recorded(got, given, [], [])},
        {"name": "record_param_comms", "parent": 0},
        {"kind": "range", "name": "nccl:all_to_all", "parent": 1, **recorded(given)},
    ]
    trace = measured({"op_row": 1}, ranges=ranges)
    assert columns(trace, "bytes", "work_from") == [(2_000, "shapes")]


def test_an_operator_named_after_its_kernel_moves_at_most_all_of_its_buffers_twice():
    ranges = [{"name": "scale_kernel_0", **recorded(tensor("bf16", 50), tensor("bf16", 50), 50)}]
    trace = measured({"op_row": 0, "name": "scale_kernel"}, ranges=ranges)
    assert columns(trace, "flops", "bytes", "work_bound") == [(None, 400, "at most")]


def test_an_operator_that_is_not_named_after_its_kernel_stays_unknown():
    ranges = [{"name": "scale_kernels", **recorded(tensor("bf16", 50))}]
    trace = measured({"op_row": 0, "name": "scale_kernel"}, ranges=ranges)
    assert columns(trace, "bytes") == [(None,)]
