"""Bounds on the shares of a launch's time in which the memory and the SMs are busy."""

import numpy as np
import pytest

from kprof.analyze.roofline.bound import find_elements
from kprof.analyze.roofline.busy_shares import FAMILIES, families_of, fill_of
from kprof.device import find_device
from tests.analyze.calls import recorded, tensor
from tests.analyze.roofline.roofline_rows import columns, measured
from tests.traces import ROUND_DEVICE, trace_of

HOPPER = find_device("NVIDIA H100 80GB HBM3")
# 2 * 4096 * 4096 * 4096 FLOPs: 139 us at 989 TFLOP/s, and 100 MB: 30 us at 3.35 TB/s.
SIDE = tensor("bf16", 4096, 4096)
GEMM = {"name": "aten::mm", **recorded(SIDE, SIDE)}
FULL = {"grid": "132,1,1", "block": "384,1,1"}


def bound_of(ranges, device=HOPPER, **kernel):
    launch = {"op_row": 0 if ranges else None, **FULL, **kernel}
    trace = measured(launch, ranges=ranges, device=device)
    return columns(trace, "bound")[0][0]


def fill(grid, block="128,1,1"):
    kernels = trace_of({"grid": grid, "block": block}).kernels
    return fill_of(kernels, ROUND_DEVICE).tolist()


@pytest.mark.parametrize(
    ("grid", "block", "expected"),
    [
        ("25,1,1", "128,1,1", 0.25),
        ("5,10,1", "128,1,1", 0.5),
        ("1000,1,1", "1024,1,1", 1.0),
        ("100,1,1", "32,1,1", 0.25),
        ("100,1,1", "33,1,1", 0.5),
        (None, None, 1.0),
    ],
)
def test_sms_without_a_cta_and_schedulers_without_a_warp_are_idle(grid, block, expected):
    assert fill(grid, block) == [expected]


def test_a_kernel_on_few_sms_waits_whatever_its_work():
    assert bound_of([], duration_ns=500_000, grid="16,1,1") == "latency"
    assert bound_of([], duration_ns=500_000) is None


@pytest.mark.parametrize(("duration_ns", "bound"), [(4_400, "latency"), (4_500, None)])
def test_a_launch_that_hardly_fills_the_gpu_before_it_ends_waits(duration_ns, bound):
    assert bound_of([], duration_ns=duration_ns) == bound


@pytest.mark.parametrize(
    ("name", "duration_ns", "bound"),
    [
        ("nvjet_sm90_tst_128x256_64x4_NNT", 220_000, "compute"),
        ("nvjet_sm90_tst_128x256_64x4_NNT", 260_000, None),
        ("nvjet_sm90_tst_128x256_64x4_NNT", 340_000, "latency"),
        # The same time on pipes that need half as much again.
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_stages_64x4_nn", 330_000, "compute"),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1", 435_000, "compute"),
        ("a_kernel_that_nobody_knows", 340_000, None),
    ],
)
def test_tensor_cores_take_the_time_of_the_instruction_that_a_family_uses(name, duration_ns, bound):
    assert bound_of([GEMM], name=name, duration_ns=duration_ns) == bound


def test_a_kernel_without_flops_is_never_bound_by_compute():
    turned = tensor("bf16", 8192, 8192, strides=[1, 8192])
    straight = tensor("bf16", 8192, 8192, strides=[8192, 1])
    copy = {"name": "aten::copy_", **recorded(straight, turned, False)}
    name = (
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}"
    )
    grid = {"grid": "131072,1,1", "block": "128,1,1"}
    assert bound_of([copy], name=name, duration_ns=130_000, **grid) == "issue"


def test_a_small_copy_that_may_lie_in_the_cache_is_not_said_to_wait_for_memory():
    small = tensor("fp32", 512, 1024)
    copy = {"name": "aten::copy_", **recorded(small, small, False)}
    assert bound_of([copy], duration_ns=2_000) == "latency"


def test_the_first_family_that_matches_is_a_kernels():
    names = ["nvjet_sm90", "nobody", "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>"]
    found = families_of(trace_of(*({"name": name} for name in names)).kernels)
    assert found.tolist()[1] == -1
    assert [FAMILIES[place].executed[0] for place in found[[0, 2]]] == [1.0, 1.45]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.names)
def test_what_a_family_does_at_least_is_at_most_what_it_does_at_most(family):
    for bounds in (family.executed, family.instructions):
        assert bounds is None or bounds[0] <= bounds[1]
    assert family.traffic is None or family.traffic >= 1
    assert np.isfinite(family.part or 0)


def test_the_launches_that_multiply_do_all_flops_of_their_operator():
    gemm = {"name": "nvjet_sm90_tst_128x256_64x4_NNT", "duration_ns": 220_000}
    layout = {"name": "void cudnn::nchwToNhwcKernel<float>", "duration_ns": 220_000}
    both = [{"op_row": 0, **FULL, **kernel} for kernel in (gemm, layout)]
    found = columns(measured(*both, ranges=[GEMM], device=HOPPER), "bound")
    assert found == [("compute",), (None,)]


def test_reductions_of_short_rows_may_issue_most_of_their_instructions_for_each_thread():
    mean = {"name": "aten::sum", **recorded(tensor("bf16", 2048, 49), None)}
    name = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>"
    few = bound_of([mean], name=name, duration_ns=9_000, grid="264,1,1", block="128,1,1")
    many = bound_of([mean], name=name, duration_ns=9_000, grid="2048,1,1", block="512,1,1")
    assert (few, many) == ("latency", None)


@pytest.mark.parametrize(
    ("shapes", "elements"),
    [
        ("[[2, 3], [4]]", 6),
        ("[[5, 1], [1, 4]]", 20),
        ("[[[2, 3], [4]], []]", 10),
        ("[[], []]", None),
        ("nan", None),
    ],
)
def test_elements_are_those_of_the_largest_operand_stretched_or_of_a_whole_list(shapes, elements):
    call = {"name": "aten::add", "input_shapes": shapes, "input_dtypes": '["float", "float"]'}
    trace = trace_of({"op_row": 0}, ranges=[call], passes=("attribute", "classify"))
    (found,) = find_elements(trace)
    assert (None if np.isnan(found) else found) == elements


@pytest.mark.parametrize(
    ("functor", "bound"),
    [
        ("at::native::CUDAFunctor_add<float>", "latency"),
        ("at::native::CUDAFunctor_add<double>", None),
        ("at::native::lgamma_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}", None),
    ],
)
def test_instructions_are_few_only_for_functions_that_are_known_to_be_short(functor, bound):
    small = tensor("fp32", 1000, 1000)
    add = {"name": "aten::add", **recorded(small, small, 1)}
    name = f"void at::native::vectorized_elementwise_kernel<4, {functor}, std::array<char*, 3ul> >"
    grid = {"grid": "977,1,1", "block": "128,1,1"}
    assert bound_of([add], name=name, duration_ns=9_000, **grid) == bound


def test_on_other_gpus_every_instruction_may_reach_the_peak():
    a100 = find_device("NVIDIA A100-SXM4-80GB")
    name = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x4_nn"
    # 440 us at 312 TFLOP/s.
    assert bound_of([GEMM], device=a100, name=name, duration_ns=700_000) == "compute"
    assert bound_of([GEMM], device=a100, name=name, duration_ns=900_000) is None


def test_what_the_cache_holds_is_read_from_the_memory_once_by_a_gemm():
    # 12 MB of weights for eight tokens; 1.5 times as many bytes could pass in the time.
    tokens, weights = tensor("bf16", 8, 2048), tensor("bf16", 2048, 3072)
    held = {"name": "aten::mm", **recorded(tokens, weights)}
    large = {"name": "aten::mm", **recorded(tokens, tensor("bf16", 2048, 30_720))}
    name = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"
    assert bound_of([held], name=name, duration_ns=9_000) == "latency"
    assert bound_of([large], name=name, duration_ns=90_000) is None


def test_one_launch_of_several_may_issue_all_instructions_of_their_operator():
    image = tensor("bf16", 64, 128, 28, 28)
    norm = {"name": "aten::native_batch_norm", **recorded(image)}
    name = "void at::native::batch_norm_transform_input_channels_last_kernel<c10::BFloat16, float>"
    grid = {"op_row": 0, "grid": "1024,1,1", "block": "128,1,1", "duration_ns": 14_000}
    alone = columns(measured({**grid, "name": name}, ranges=[norm], device=HOPPER), "bound")
    other = {**grid, "name": "anything_else", "duration_ns": 100_000}
    beside = measured({**grid, "name": name}, other, ranges=[norm], device=HOPPER)
    assert columns(beside, "bound")[0] == alone[0]
