"""RMSNorm, alone and after a residual add: numbers, edges, gradients, compilers."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch

from kprof.kernels.norm import BackwardPlan
from kprof.kernels.norm import add_rmsnorm
from kprof.kernels.norm import rmsnorm
from kprof.kernels import norm
from kprof.kernels.norm import ADD_RMSNORM as ADD_KERNEL
from kprof.kernels.norm import RMSNORM
from tests.kernels.kernel_checks import (
    INTERPRETED,
    Plain,
    are_same,
    errors_against_truth,
    errors_of,
    results_of,
    rows,
)
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED
KERNELS = pytest.mark.parametrize("kernel", [RMSNORM, ADD_KERNEL], ids=lambda one: one.name)


@KERNELS
def test_two_columns_have_the_right_norm_and_gradients(kernel):
    arguments = [one.float() for one in kernel.inputs((1, 2), Plain())]
    assert errors_against_truth(kernel, kernel.provider("kprof").load(), arguments) < 2e-6


def test_sixteen_bits_are_rounded_before_the_weight_as_a_llama_of_hugging_face_does():
    x, weight = rows(4, 64, dtype=torch.float16), rows(64, dtype=torch.float16, seed=1)
    assert are_same([rmsnorm(x, weight)], [RMSNORM.reference(x, weight)])


def test_a_weight_of_float32_makes_a_llamas_result_float32():
    x, weight = rows(4, 64, dtype=torch.float16), rows(64, seed=1)
    y = rmsnorm(x, weight)
    assert y.dtype == torch.float32
    assert are_same([y], [RMSNORM.reference(x, weight)])


@pytest.mark.parametrize("form", ["torch", "gemma"])
def test_other_forms_round_once_at_the_end(form):
    x, weight = rows(4, 64, dtype=torch.float16), rows(64, seed=1)
    y = rmsnorm(x, weight, form=form)
    assert y.dtype == torch.float16
    assert are_same([y], [RMSNORM.reference(x, weight, form=form)])


def test_a_weight_of_float32_has_a_gradient_of_float32():
    x, weight = rows(4, 64, dtype=torch.float16), rows(64, seed=1)
    y, dx, dweight = results_of(rmsnorm, (x, weight), (0, 1))
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.float16, torch.float32)
    exact = results_of(RMSNORM.truth, (x.double(), weight.double()), (0, 1))
    assert errors_of([dx], exact[1:2]) < 1e-3
    assert errors_of([dweight], exact[2:]) < 1e-6


def test_gemmas_weight_lacks_its_one():
    x, weight = rows(2, 8), rows(8, seed=1)
    assert are_same([rmsnorm(x, weight, form="gemma")], [rmsnorm(x, weight + 1.0, form="torch")])


def test_without_a_weight_it_is_one():
    x = rows(2, 8)
    assert are_same([rmsnorm(x, None)], [rmsnorm(x, torch.ones(8))])


@pytest.mark.parametrize("form", ["torch", "gemma"])
def test_the_gradients_of_other_forms_are_those_of_autograd(form):
    x, weight = rows(5, 40), rows(40, seed=1)
    found = results_of(lambda *a: rmsnorm(*a, 1e-6, form), (x, weight), (0, 1))
    exact = (x.double(), weight.double())
    shift = 1.0 if form == "gemma" else 0.0
    expected = results_of(lambda x, w: RMSNORM.truth(x, w + shift), exact, (0, 1))
    for one, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-5)


@KERNELS
def test_no_rows_give_no_rows_and_no_gradient_of_the_weight(kernel):
    arguments = kernel.inputs((0, 16), Plain())
    found = results_of(kernel.provider("kprof").load(), arguments, kernel.differentiable)
    assert [tuple(one.shape) for one in found[:-1]] == [(0, 16)] * (len(found) - 1)
    assert torch.equal(found[-1], torch.zeros(16))


def test_rows_apart_and_columns_apart_are_read_where_they_are():
    apart, turned, weight = rows(4, 2, 24)[:, 1], rows(24, 4).t(), rows(24, seed=1)
    assert are_same([rmsnorm(apart, weight)], [rmsnorm(apart.contiguous(), weight)])
    assert are_same([rmsnorm(turned, weight)], [rmsnorm(turned.contiguous(), weight)])


def test_a_rows_bits_do_not_depend_on_the_rows_around_it():
    x, weight = rows(70, 100), rows(100, seed=1)
    alone = torch.cat([rmsnorm(x[i : i + 1], weight) for i in (0, 41, 69)])
    assert are_same([rmsnorm(x, weight)[[0, 41, 69]]], [alone])


def test_the_shares_of_many_programs_add_up_to_the_weights_gradient(monkeypatch):
    monkeypatch.setattr(norm, "num_sms", lambda device: 100)
    arguments = rows(150, 2_048), rows(2_048, seed=1)
    assert errors_against_truth(RMSNORM, rmsnorm, arguments) < 2e-6


def test_programs_that_walk_over_rows_give_the_same_gradient(monkeypatch):
    x, weight = rows(30, 100), rows(100, seed=1)
    expected = results_of(rmsnorm, (x, weight), (0, 1))
    walking = BackwardPlan(rows=2, block=128, warps=1, stages=2, ctas_per_sm=1)
    monkeypatch.setattr(norm, "plan_backward", lambda columns, row_bytes: walking)
    y, dx, dweight = results_of(rmsnorm, (x, weight), (0, 1))
    assert are_same([y, dx], expected[:2])
    torch.testing.assert_close(dweight, expected[2])


def test_a_weight_loaded_before_the_sum_gives_the_same_bits(monkeypatch):
    x, residual, weight = rows(3, 100), rows(3, 100, seed=2), rows(100, seed=1)
    expected = add_rmsnorm(x, residual, weight)
    monkeypatch.setattr(norm, "FEW_COLUMNS", 0)
    assert are_same(add_rmsnorm(x, residual, weight), expected)


def test_scaling_a_row_by_a_power_of_two_changes_nothing_without_eps():
    x, weight = rows(3, 50), rows(50, seed=1)
    assert are_same([rmsnorm(4.0 * x, weight, 0.0)], [rmsnorm(x, weight, 0.0)])


def test_the_sum_is_returned_as_it_was_normalised():
    x, residual = rows(3, 40, dtype=torch.float16), rows(3, 40, dtype=torch.float16, seed=1)
    weight = rows(40, dtype=torch.float16, seed=2)
    y, added = add_rmsnorm(x, residual, weight)
    assert are_same([added, y], [residual + x, rmsnorm(residual + x, weight)])


def test_the_gradient_of_the_sum_alone_passes_through_unchanged():
    x, residual = rows(3, 40).requires_grad_(), rows(3, 40, seed=1).requires_grad_()
    arriving = rows(3, 40, seed=3)
    found = torch.autograd.grad(add_rmsnorm(x, residual, None)[1], (x, residual), arriving)
    assert are_same(found, [arriving, arriving])


def test_the_gradient_of_the_norm_alone_needs_none_of_the_sum():
    x, residual, weight = rows(3, 40), rows(3, 40, seed=1), rows(40, seed=2)
    found = results_of(lambda *a: add_rmsnorm(*a)[0], (x, residual, weight), (0, 1, 2))
    assert are_same(found, results_of(rmsnorm, (residual + x, weight), (0, 0, 1)))


def test_a_frozen_weight_gets_no_gradient():
    x, weight = rows(3, 40).requires_grad_(), rows(40, seed=1)
    rmsnorm(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_its_operators_keep_torchs_rules():
    x, weight, y = rows(3, 40), rows(40, seed=1), rows(3, 40, seed=2)
    forward, backward = torch.ops.kprof.norm.default, torch.ops.kprof.norm_backward.default
    torch.library.opcheck(forward, (x, y, weight, None, 1e-6, 0, True))
    rstd = torch.rand(3)
    torch.library.opcheck(backward, (y, y, x, weight, rstd, None, 0, 1))


def test_no_more_programs_add_up_than_end_sooner():
    expected = {
        (4_096, 264): 256,
        (264, 264): 264,
        (265, 264): 133,
        (3, 264): 3,
    }
    assert {(tiles, most): norm._count_ctas(tiles, most) for tiles, most in expected} == expected


OVERLAPPING = """
import torch
from kprof.kernels import norm
from kprof.kernels.bench import ahead
from kprof.kernels.norm import rmsnorm

norm.overlaps = lambda device: True
ahead._read = lambda kernel, launch: kernel
x, weight = (torch.zeros(*shape, requires_grad=True) for shape in ((8, 2048), (2048,)))
for one in ahead.compile_ahead(lambda: rmsnorm(x, weight).sum().backward()):
    words = ("launch_dependents", "wait")
    found = [word for word in words if f"griddepcontrol.{word}" in one.asm["ptx"]]
    print(one.metadata.name, one.metadata.launch_pdl, *found)
"""


def test_a_sum_that_is_launched_early_waits_for_its_terms():
    assert on_hopper(OVERLAPPING).splitlines() == [
        "norm_forward False",
        "norm_backward False launch_dependents",
        "sum_partials True wait",
    ]


FITTED = """
import torch
from kprof.kernels.bench import ahead
from kprof.kernels.norm import add_rmsnorm

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    x, residual, weight = (torch.zeros(*shape, 2048, dtype=dtype) for shape in ((8,), (8,), ()))
    given = [one.requires_grad_() for one in (x, residual, weight)]
    run = lambda: sum(one.float().sum() for one in add_rmsnorm(*given)).backward()
    for one in ahead.compile_ahead(run):
        if one.name == "norm_backward":
            print(one.num_registers <= 112, one.spilled_bytes)
"""


def test_with_a_residual_a_program_of_2048_columns_leaves_room_and_spills_nothing():
    assert on_hopper(FITTED).splitlines() == ["True 0"] * 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8)), "none of float32"),
        ((torch.zeros(2, 8), torch.zeros(8, dtype=torch.float16)), "weight or bias is"),
        ((torch.zeros(2, 8), torch.zeros(4)), "bias of shape (4,)"),
        ((torch.zeros(1, 16_385), torch.zeros(16_385)), "16,384"),
    ],
)
def test_what_it_cannot_do_it_refuses(arguments, why):
    assert why in RMSNORM.refuses(*arguments)


def test_a_residual_of_another_shape_or_dtype_is_refused():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    assert "a residual (1, 8)" in ADD_KERNEL.refuses(x, x[:1], weight)
    assert "a residual" in ADD_KERNEL.refuses(x.half(), x, weight.half())
    assert ADD_KERNEL.refuses(x, x, weight) is None


def test_a_single_column_is_its_sign_times_the_weight():
    x = torch.tensor([[3.0], [-0.5], [0.0]])
    torch.testing.assert_close(
        rmsnorm(x, torch.tensor([2.0])), torch.tensor([[2.0], [-2.0], [0.0]])
    )
