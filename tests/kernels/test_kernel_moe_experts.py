"""Experts of a mixture: results, gradients, indices that are no expert, compilers, spills."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch

import kprof.kernels.moe_experts as moe_experts_module
from kprof.kernels.moe_experts import KERNEL, moe_experts
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    Plain,
    are_same,
    compiled,
    errors_against_truth,
    results_of,
    spills_of,
    why_inaccurate,
    why_untrusted,
)

pytestmark = INTERPRETED


class Drawn(Plain):
    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self._generator)


def arguments_of(*shape):
    return list(KERNEL.inputs(shape, Drawn()))


@pytest.mark.slow
def test_the_gate_trusts_it():
    assert why_untrusted(KERNEL, (3, 16, 8, 3, 2)) == ""


@pytest.mark.slow
def test_it_is_no_less_accurate_than_what_it_replaces():
    assert why_inaccurate(KERNEL, (3, 16, 8, 3, 2)) == ""


@pytest.mark.parametrize("shape", [(1, 3, 5, 1, 1), (7, 24, 40, 5, 3), (3, 2_055, 8, 4, 2)])
def test_results_and_gradients_are_those_of_the_mathematics(shape):
    assert errors_against_truth(KERNEL, moe_experts, arguments_of(*shape)) < 2e-6


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_the_activation_is_the_one_asked_for(activation):
    arguments = [*arguments_of(5, 8, 8, 3, 2), activation]
    expected = KERNEL.reference(*arguments)
    torch.testing.assert_close(moe_experts(*arguments), expected, rtol=1e-5, atol=1e-6)


def test_an_index_that_is_no_expert_adds_nothing_and_gets_no_gradient():
    x, index, weight, gate_up, down = arguments_of(4, 8, 8, 3, 2)
    index[:, 1], index[0] = 3, 3
    weight[:, 1] = float("nan")
    y, dx, dweight, *_ = results_of(moe_experts, (x, index, weight, gate_up, down), (0, 2, 3, 4))
    alone = moe_experts(x, index[:, :1], weight[:, :1].nan_to_num(), gate_up, down)
    assert torch.equal(y, alone)
    assert not y[0].any()
    assert not dx[0].any()
    assert not dweight[:, 1].any()


def test_experts_without_a_token_have_a_gradient_of_zero():
    arguments = arguments_of(3, 8, 8, 4, 2)
    arguments[1] = torch.tensor([[0, 2]] * 3)
    *_, dgate_up, ddown = results_of(moe_experts, arguments, (0, 2, 3, 4))
    assert not dgate_up[[1, 3]].any()
    assert not ddown[[1, 3]].any()


def test_no_tokens_have_no_result():
    assert moe_experts(*arguments_of(0, 8, 8, 3, 2)).shape == (0, 8)


@COMPILED
def test_what_stands_around_the_gemms_is_the_same_when_compiled_in_one_graph():
    x, index, weight, *_ = arguments_of(4, 8, 8, 3, 2)

    def moved(x, weight):
        slot, _ = moe_experts_module._sorted(index, 3)
        rows = moe_experts_module._gathered(x, slot, index, 3)
        return moe_experts_module._combined(rows.sin(), weight, slot, index, 3)

    eager = results_of(moved, (x, weight), (0, 1))
    assert are_same(results_of(compiled(moved), (x, weight), (0, 1)), eager)


@pytest.mark.slow
def test_nothing_spills_on_hopper():
    assert (
        spills_of(KERNEL, ((8, 2_048, 16, 4, 2), "bfloat16"), ((8, 40, 16, 4, 2), "bfloat16")) == []
    )
