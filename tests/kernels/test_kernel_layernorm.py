"""LayerNorm, alone and after a residual add: numbers, edges, gradients, compilers."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch

from kprof.kernels.norm import ADD_RMSNORM, add_layernorm, add_rmsnorm
from kprof.kernels.norm import layernorm
from kprof.kernels.norm import ADD_LAYERNORM as ADD_KERNEL
from kprof.kernels.norm import LAYERNORM
from kprof.kernels.norm import RMSNORM
from tests.kernels.kernel_checks import (
    INTERPRETED,
    Plain,
    are_same,
    errors_against_truth,
    results_of,
    rows,
)

pytestmark = INTERPRETED
KERNELS = pytest.mark.parametrize("kernel", [LAYERNORM, ADD_KERNEL], ids=lambda one: one.name)


def test_a_single_column_is_the_bias():
    assert are_same(
        [layernorm(rows(3, 1), rows(1), torch.tensor([2.0]))], [torch.full((3, 1), 2.0)]
    )


def test_sixteen_bits_are_rounded_once_at_the_end_as_torch_does():
    x, weight, bias = (
        rows(4, 64, dtype=torch.float16, seed=i)[: 4 - 3 * bool(i)] for i in range(3)
    )
    found = layernorm(x, weight[0], bias[0])
    exact = LAYERNORM.truth(x.double(), weight[0].double(), bias[0].double())
    assert float((found.double() - exact).abs().max()) <= 2**-11 * float(exact.abs().max())


def test_a_large_mean_does_not_swallow_the_variance():
    x = rows(4, 64) + 4_096.0
    error = layernorm(x).double() - torch.nn.functional.layer_norm(x.double(), (64,))
    assert float(error.abs().max()) < 1e-5


def test_a_large_mean_does_not_swallow_the_weights_gradient():
    arguments = rows(1, 64) + 4_096.0, rows(64, seed=1), rows(64, seed=2)
    assert errors_against_truth(LAYERNORM, layernorm, arguments) < 1e-5


def test_adding_a_constant_to_a_row_changes_nothing():
    x = torch.arange(50.0).reshape(2, 25)
    assert are_same([layernorm(x + 64.0)], [layernorm(x)])


@pytest.mark.parametrize("given", [(), (True,), (None, True)])
def test_weight_and_bias_may_be_missing(given):
    x, vectors = rows(3, 40), (rows(40, seed=1), rows(40, seed=2))
    given = [one and vectors[i] for i, one in enumerate(given)]
    expected = torch.nn.functional.layer_norm(x, (40,), *given)
    torch.testing.assert_close(layernorm(x, *given), expected)


def test_a_bias_without_a_weight_has_its_gradient():
    x, bias = rows(3, 40), rows(40, seed=1)
    found = results_of(lambda x, b: layernorm(x, None, b), (x, bias), (0, 1))
    expected = results_of(
        lambda x, b: torch.nn.functional.layer_norm(x, (40,), None, b), (x, bias), (0, 1)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@KERNELS
def test_no_rows_give_no_rows_and_no_gradients_of_weight_and_bias(kernel):
    arguments = kernel.inputs((0, 16), Plain())
    found = results_of(kernel.provider("kprof").load(), arguments, kernel.differentiable)
    assert are_same(found[-2:], [torch.zeros(16), torch.zeros(16)])
    assert all(one.shape == (0, 16) for one in found[:-2])


def test_rows_apart_and_columns_apart_are_read_where_they_are():
    apart, turned = rows(4, 2, 24)[:, 1], rows(24, 4).t()
    assert are_same([layernorm(apart)], [layernorm(apart.contiguous())])
    assert are_same([layernorm(turned)], [layernorm(turned.contiguous())])


def test_a_rows_bits_do_not_depend_on_the_rows_around_it():
    x, weight, bias = rows(70, 100), rows(100, seed=1), rows(100, seed=2)
    alone = torch.cat([layernorm(x[i : i + 1], weight, bias) for i in (0, 41, 69)])
    assert are_same([layernorm(x, weight, bias)[[0, 41, 69]]], [alone])


def test_the_sum_is_returned_as_it_was_normalised():
    x, residual = rows(3, 40, dtype=torch.float16), rows(3, 40, dtype=torch.float16, seed=1)
    y, added = add_layernorm(x, residual)
    assert are_same([added, y], [residual + x, layernorm(residual + x)])


@pytest.mark.parametrize("run", [add_layernorm, add_rmsnorm])
def test_a_residual_of_a_narrower_dtype_gets_its_gradient_in_that_dtype(run):
    reference = ADD_KERNEL.reference if run is add_layernorm else ADD_RMSNORM.reference
    found = []
    for function in (run, reference):
        x = rows(3, 40).requires_grad_()
        residual = rows(3, 40, dtype=torch.bfloat16, seed=1).requires_grad_()
        weight = rows(40, seed=2).requires_grad_()
        y, added = function(x, residual, weight)
        (y * rows(3, 40, seed=3) + added.square()).sum().backward()
        found.append([y, added, x.grad, residual.grad, weight.grad])
    for new, old in zip(*found, strict=True):
        assert new.dtype == old.dtype
        torch.testing.assert_close(new, old)


def test_the_sum_alone_gives_a_residual_its_gradient_in_its_dtype():
    x, residual = rows(3, 40).requires_grad_(), rows(3, 40, dtype=torch.float16).requires_grad_()
    add_layernorm(x, residual)[1].sum().backward()
    assert (x.grad.dtype, residual.grad.dtype) == (torch.float32, torch.float16)


def test_its_operators_keep_torchs_rules():
    x, weight, bias = rows(3, 40), rows(40, seed=1), rows(40, seed=2)
    torch.library.opcheck(torch.ops.kprof.norm.default, (x, x, weight, bias, 1e-5, 3, True))
    statistics = torch.rand(3), torch.rand(2, 3)
    backward = torch.ops.kprof.norm_backward.default
    torch.library.opcheck(backward, (x, x, x, weight, *statistics, 3, 2))


def test_what_it_cannot_do_it_refuses():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    assert "weight or bias" in LAYERNORM.refuses(x.half(), weight.half(), weight)
    assert "at most 8,192" in LAYERNORM.refuses(torch.zeros(1, 8_193))
    assert "a residual" in ADD_KERNEL.refuses(x, x[:1])
    assert ADD_KERNEL.refuses(x, x, weight, weight) is None
    assert ADD_KERNEL.refuses(x, x.bfloat16(), weight) is None
    assert "a residual" in ADD_KERNEL.refuses(x.bfloat16(), x)
    assert "a residual" in ADD_KERNEL.refuses(x.bfloat16(), x.half())


def test_under_autocast_torch_widens_what_this_does_not():
    x = torch.zeros(2, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in LAYERNORM.refuses(x)
        assert "autocast" in RMSNORM.refuses(x, None, form="torch")
        assert RMSNORM.refuses(x, None, form="llama") is None
    assert LAYERNORM.refuses(x) is None


@pytest.mark.parametrize("kernel", [LAYERNORM, ADD_KERNEL, RMSNORM, ADD_RMSNORM])
def test_a_norm_rounded_to_a_narrower_dtype_has_the_bits_of_one_that_is_rounded_later(kernel):
    function, half = kernel.providers[0].load(), torch.float16
    is_layer = kernel in (LAYERNORM, ADD_KERNEL)
    terms, vectors = len(kernel.rows), 2 if is_layer else 1
    inputs = [rows(3, 40, seed=seed).requires_grad_() for seed in range(terms)]
    inputs += [rows(40, seed=5 + seed).requires_grad_() for seed in range(vectors)]
    arguments = [*inputs, 1e-5, *([] if is_layer else ["llama"])]

    wide, narrow = function(*arguments), function(*arguments, half)
    wide, narrow = (one if isinstance(one, tuple) else (one,) for one in (wide, narrow))

    assert narrow[0].dtype == half
    assert are_same([narrow[0], *narrow[1:]], [wide[0].to(half), *wide[1:]])
    grads = [rows(3, 40, seed=20 + i) for i in range(len(wide))]
    rounded = [grads[0].to(half), *grads[1:]]
    assert are_same(
        torch.autograd.grad(narrow, inputs, rounded),
        torch.autograd.grad(wide, inputs, [rounded[0].float(), *grads[1:]]),
    )
