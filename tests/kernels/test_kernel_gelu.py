"""GELU and the gradient of the bias before it: dtypes, layouts, sums over rows."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch
from torch.nn import functional

from kprof.kernels.gelu import BIAS_GELU, FORMS, GELU, bias_gelu, gelu
from tests.kernels.kernel_checks import (
    INTERPRETED,
    are_same,
    results_of,
    rows,
)

pytestmark = INTERPRETED
FORM = pytest.mark.parametrize("form", FORMS)
NARROW = (torch.bfloat16, torch.float16)


@FORM
@pytest.mark.parametrize("kernel", [GELU, BIAS_GELU], ids=lambda one: one.name)
def test_each_formula_has_its_values_and_gradients(kernel, form):
    given = (rows(9, 70), rows(70, seed=1))[: len(kernel.differentiable)]
    function = kernel.provider("kprof").load()
    found = results_of(lambda *one: function(*one, form), given, kernel.differentiable)
    exact = [one.double() for one in given]
    expected = results_of(lambda *one: kernel.truth(*one, form), exact, kernel.differentiable)
    for one, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-5)


def test_the_formulas_are_those_of_torch():
    x = rows(5, 40)
    torch.testing.assert_close(gelu(x, "tanh"), functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(gelu(x, "none"), functional.gelu(x))
    torch.testing.assert_close(gelu(x, "sigmoid"), x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_wider_result_of_narrow_rows_is_not_rounded(dtype):
    x = rows(4, 50, dtype=dtype)
    y = gelu(x, "tanh", torch.float32)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, functional.gelu(x.float(), approximate="tanh"))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrower_result_is_the_wide_one_rounded_once_and_gradients_keep_their_dtypes(dtype):
    x, bias = rows(4, 50), rows(50, seed=1)
    y, dx, dbias = results_of(lambda *one: bias_gelu(*one, "none", dtype), (x, bias), (0, 1))
    torch.testing.assert_close(y, gelu(x, "none").to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert (y.dtype, dx.dtype, dbias.dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_gradient_of_a_float32_bias_is_added_up_unrounded(dtype):
    x, bias = rows(300, 20, dtype=dtype).requires_grad_(), rows(20, seed=1).requires_grad_()
    dy = rows(300, 20, dtype=dtype, seed=2)
    dx, dbias = torch.autograd.grad(bias_gelu(x, bias), (x, bias), dy)
    assert (dx.dtype, dbias.dtype) == (dtype, torch.float32)
    wide = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(functional.gelu(wide), wide, dy.double())[0].sum(0)
    errors = [(one - exact).norm() / exact.norm() for one in (dbias, dx.float().sum(0))]
    assert errors[0] < 1e-6 < errors[1]


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5, 33), (700, 3), (2, 513)])
def test_rows_of_any_number_have_the_sum_of_their_gradients(shape):
    x, bias = rows(*shape), rows(shape[-1], seed=1)
    found = results_of(bias_gelu, (x, bias), (0, 1))
    expected = results_of(BIAS_GELU.truth, (x.double(), bias.double()), (0, 1))
    for one, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-4)


def test_rows_and_gradients_with_gaps_are_read_in_their_order():
    wide, bias = rows(6, 40), rows(20, seed=1)
    x = wide[:, ::2]
    expected = results_of(bias_gelu, (x.contiguous(), bias), (0, 1))
    assert are_same(results_of(bias_gelu, (x, bias), (0, 1)), expected)
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(gelu(x), x, torch.ones(()).expand(6, 20))
    (expected,) = torch.autograd.grad(gelu(x), x, torch.ones(6, 20))
    assert are_same([dx], [expected])


def test_a_bias_without_a_gradient_costs_nothing():
    x = rows(3, 8).requires_grad_()
    y = bias_gelu(x, rows(8, seed=1))
    assert type(y.grad_fn).__name__ == type(gelu(x).grad_fn).__name__
    assert not bias_gelu(x.detach(), rows(8)).requires_grad


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (rows(3, 8), rows(7)),
        (rows(3, 8), rows(8, dtype=torch.float16)),
        (rows(3, 8).double(), rows(8).double()),
    ],
)
def test_other_shapes_and_dtypes_are_refused(x, bias):
    assert BIAS_GELU.refuses(x, bias)
    assert BIAS_GELU.refuses(rows(3, 8), rows(8)) is None
