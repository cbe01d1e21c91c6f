"""FP8 with scales, in Triton's interpreter.

The interpreter casts to float8 wrongly: a value that rounds up to a power of two
comes out half as large, one in the middle between two goes away from zero, and NaN becomes 384;
nor does it round what is below the normal numbers.
Those elements are left to tests on a GPU.
"""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math
from dataclasses import replace

import pytest
import torch

from kprof.kernels.correctness import check
from kprof.kernels.bench.measure import subject_of
from kprof.kernels.fp8.quantize_fp8 import KERNEL, LARGEST, dequantize_fp8, quantize_fp8
from tests.kernels.kernel_checks import (
    INTERPRETED,
    Plain,
    compiled,
    spills_of,
)

pytestmark = INTERPRETED
GROUPS = ["row", "1x128", "128x128"]
SHAPES = [(1, 1), (5, 127), (33, 128), (130, 384), (3, 4_097)]


def drawn(shape, dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(shape[1])
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def is_cast_right(values):
    """Tell where the interpreter can be believed."""
    magnitude = values.float().abs()
    return (torch.frexp(magnitude).mantissa != 0.5) & (magnitude >= 2**-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_scales_are_those_of_torch(shape, group, dtype):
    x = drawn(shape, dtype)
    (values, scales), (expected, expected_scales) = (
        quantize_fp8(x, group),
        KERNEL.reference(x, group),
    )
    assert torch.equal(scales, expected_scales)
    is_right = is_cast_right(expected)
    assert is_right.float().mean() > 0.5 or shape == (1, 1)
    exact = x.float() / dequantize_fp8(torch.ones_like(expected), scales, group)
    middle = (values.float() + expected.float()) / 2
    is_tie = (exact - middle).abs() <= 1e-5 * exact.abs()
    assert bool(((values.float() == expected.float()) | is_tie | ~is_right).all())


@pytest.mark.parametrize("group", GROUPS)
def test_coming_back_no_value_is_off_by_more_than_a_sixteenth_of_itself(group):
    x = drawn((40, 300))
    values, scales = quantize_fp8(x, group)
    is_right = is_cast_right(KERNEL.reference(x, group)[0])
    back = dequantize_fp8(values, scales, group)
    assert is_right.any()
    assert bool((((back - x).abs() <= x.abs() / 16 * 1.001) | ~is_right).all())


@pytest.mark.parametrize("group", GROUPS)
def test_the_largest_of_a_group_becomes_the_largest_of_the_format(group):
    x = torch.zeros(2, 128)
    x[:, 7] = torch.tensor([3.0, -3.0])
    values, scales = quantize_fp8(x, group)
    assert values.float()[:, 7].tolist() == [LARGEST, -LARGEST]
    assert scales.flatten().tolist() == pytest.approx([3 / LARGEST] * scales.numel())


@pytest.mark.parametrize("group", GROUPS)
def test_zeros_come_back_as_zeros(group):
    values, scales = quantize_fp8(torch.zeros(3, 130), group)
    assert not values.float().any()
    assert scales.isfinite().all()
    assert not dequantize_fp8(values, scales, group).any()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", GROUPS)
def test_the_scale_of_a_group_tells_of_a_nan_or_an_infinity_and_no_other_does(group, special):
    x = drawn((256, 256))
    x[3, 5] = special
    _, scales = quantize_fp8(x, group)
    _, expected = KERNEL.reference(x, group)
    assert torch.equal(scales.isfinite(), expected.isfinite())
    assert scales.isfinite().sum() == scales.numel() - 1
    assert torch.equal(scales.isnan(), expected.isnan())


def test_scales_of_strips_lie_column_by_column():
    _, scales = quantize_fp8(drawn((32, 512)), "1x128")
    assert scales.shape == (32, 4)
    assert scales.stride() == (1, 32)


def test_columns_of_scales_begin_at_multiples_of_16_bytes():
    x = drawn((5, 300))
    _, scales = quantize_fp8(x, "1x128")
    assert (scales.shape, scales.stride()) == ((5, 3), (1, 8))
    assert torch.equal(scales, KERNEL.reference(x, "1x128")[1])


@pytest.mark.parametrize("group", GROUPS)
def test_rows_that_lie_apart_or_across_are_read_where_they_are(group):
    x = drawn((20, 140))
    expected = [one.float() for one in quantize_fp8(x, group)]
    wide = torch.randn(20, 301)
    wide[:, 5:145] = x
    for one in (wide[:, 5:145], x.t().contiguous().t()):
        found = [tensor.float() for tensor in quantize_fp8(one, group)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("group", ["row", "1x128"])
def test_a_row_does_not_depend_on_its_neighbours(group):
    x = drawn((37, 260))
    whole, alone = quantize_fp8(x, group), quantize_fp8(x[5:6], group)
    assert torch.equal(whole[0][5:6].float(), alone[0].float())
    assert torch.equal(whole[1][5:6], alone[1])


@pytest.mark.parametrize("group", GROUPS)
def test_no_rows_give_no_values(group):
    values, scales = quantize_fp8(torch.empty(0, 256), group)
    assert values.shape == (0, 256)
    assert scales.numel() == 0


@pytest.mark.parametrize("group", GROUPS)
def test_it_compiles_without_a_graph_break_to_the_same_bits(group):
    x = drawn((4, 130))
    found = compiled(lambda x: quantize_fp8(x * 2, group))(x)
    expected = quantize_fp8(x * 2, group)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def test_what_it_cannot_take_is_refused_with_a_reason():
    assert "float64" in KERNEL.refuses(torch.empty(2, 3, dtype=torch.float64))
    assert "dimensions" in KERNEL.refuses(torch.empty(2, 3, 4))
    assert "columns" in KERNEL.refuses(torch.empty(2, 65_537))
    assert KERNEL.refuses(torch.empty(2, 65_537), "1x128") is None
    assert KERNEL.refuses(torch.empty(2, 65_536)) is None


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_on_the_default_shapes():
    cases = [((64, columns), dtype) for _, columns in KERNEL.shapes for dtype in KERNEL.dtypes]
    assert spills_of(KERNEL, *cases) == []


def test_the_gate_can_judge_values_in_eight_bits_by_a_truth_that_is_not_rounded():
    small = {"shapes": ((3, 40),), "dtypes": ("float16",), "num_values": 1_000}
    subject = replace(subject_of(KERNEL, "eager"), **small)
    levels = check(subject, ("L0", "L1")).levels[:2]
    assert [(one.state, one.why) for one in levels if one.state != "passed"] == []
    truth = KERNEL.truth(*(one.double() for one in KERNEL.inputs((3, 40), Plain())))
    assert [one.dtype for one in truth] == [torch.float64, torch.float64]
