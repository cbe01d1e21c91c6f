"""FP8 quantisation fused behind RMSNorm and SwiGLU, in Triton's interpreter."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math

import pytest
import torch

from kprof.kernels import rmsnorm_quantize_fp8, swiglu_quantize_fp8
from kprof.kernels._fp8 import LARGEST
from kprof.kernels.quantize_fp8 import dequantize_fp8
from tests.kernel_checks import (
    INTERPRETED,
    compiled,
    quiet_numpy,  # noqa: F401
    spills_of,
)

pytestmark = INTERPRETED
GROUPS = ["row", "1x128"]
SHAPES = [(1, 1), (5, 127), (9, 384), (3, 4_097)]


@pytest.fixture(params=[rmsnorm_quantize_fp8, swiglu_quantize_fp8], ids=["rmsnorm", "swiglu"])
def kernel(request):
    return request.param.KERNEL


def run(kernel, *arguments):
    return kernel.provider("kprof").load()(*arguments)


def drawn(kernel, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(shape[1])

    def draw(*sizes):
        return torch.randn(sizes, generator=generator).to(dtype)

    draw.plain = lambda n, scale, shift: draw(n) * scale + shift
    return kernel.inputs(shape, draw)


def options(kernel, group):
    return (1e-6, group) if "rmsnorm" in kernel.name else (group,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_gives_what_the_two_steps_give(kernel, shape, group, dtype):
    arguments = (*drawn(kernel, shape, dtype), *options(kernel, group))
    (values, scales), (expected, expected_scales) = (
        run(kernel, *arguments),
        kernel.reference(*arguments),
    )
    torch.testing.assert_close(scales, expected_scales, rtol=1e-3, atol=0)
    # The interpreter's cast halves what rounds up to a power of two.
    is_right = (torch.frexp(expected.float().abs()).mantissa != 0.5) & (expected.float() != 0)
    one, other = (dequantize_fp8(v, scales, group)[is_right] for v in (values, expected))
    torch.testing.assert_close(one, other, rtol=0.13, atol=float(scales.max()) * 2**-8)
    assert is_right.sum() < 100 or (one == other).float().mean() > 0.98


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_reaches_the_largest_value_of_the_format(kernel, group):
    values, scales = run(kernel, *drawn(kernel, (3, 256)), *options(kernel, group))
    size = 256 if group == "row" else 128
    assert scales.shape == (3, 256 // size)
    assert bool((values.float().abs().view(3, -1, size).amax(2) == LARGEST).all())


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_a_nan_shows_in_the_scale_of_its_row_alone(kernel):
    first, second = drawn(kernel, (4, 200))
    first[2, 199] = math.nan
    _, scales = run(kernel, first, second)
    assert scales[:, 0].isnan().tolist() == [False, False, True, False]


def test_rows_that_lie_apart_are_read_where_they_are(kernel):
    first, second = drawn(kernel, (6, 140))
    expected = run(kernel, first, second)
    wide = torch.randn(6, 301)
    wide[:, 5:145] = first
    found = run(kernel, wide[:, 5:145], second)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def test_no_rows_give_no_values(kernel):
    values, scales = run(kernel, *drawn(kernel, (0, 256)))
    assert values.shape == (0, 256)
    assert scales.numel() == 0


def test_it_compiles_without_a_graph_break_to_the_same_bits(kernel):
    first, second = drawn(kernel, (4, 130))
    found = compiled(lambda a, b: run(kernel, a * 2, b))(first, second)
    expected = run(kernel, first * 2, second)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def test_what_it_cannot_take_is_refused_with_a_reason(kernel):
    first, second = drawn(kernel, (4, 130))
    assert "128x128" in kernel.refuses(first, second, *options(kernel, "128x128"))
    assert kernel.refuses(first[:, :7], second) is not None
    assert kernel.refuses(first, second) is None


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_on_the_default_shapes(kernel):
    cases = [((64, columns), dtype) for _, columns in kernel.shapes for dtype in kernel.dtypes]
    assert spills_of(kernel, *cases) == []
