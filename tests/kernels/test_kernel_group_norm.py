"""GroupNorm and SiLU: small and large groups, the gate, compilers, spills."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch

from kprof.kernels.group_norm import KERNEL, group_norm_silu
from kprof.kernels.runtime import DifferentiationError
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


@pytest.mark.slow
def test_the_gate_trusts_it():
    assert why_untrusted(KERNEL, (2, 6, 7, 3)) == ""


@pytest.mark.slow
def test_it_is_no_less_accurate_than_what_it_replaces():
    assert why_inaccurate(KERNEL, (2, 6, 7, 3)) == ""


@pytest.mark.parametrize(
    "shape", [(1, 2, 3, 1), (2, 6, 127, 3), (3, 4, 4_097, 2), (1, 8, 4_096, 1)]
)
def test_results_are_those_of_the_mathematics(shape):
    assert errors_against_truth(KERNEL, group_norm_silu, KERNEL.inputs(shape, Plain())) < 1e-6


def test_a_large_mean_costs_no_accuracy():
    x, groups, weight, bias = KERNEL.inputs((1, 2, 9_000, 1), Plain())
    assert errors_against_truth(KERNEL, group_norm_silu, (x + 1e4, groups, weight, bias)) < 1e-3


@pytest.mark.parametrize("shape", [(4, 5), (1, 2, 3)])
def test_any_number_of_dimensions_behind_the_channels_is_taken(shape):
    x = torch.randn(2, 4, *shape)
    weight, bias = torch.randn(4), torch.randn(4)
    found = group_norm_silu(x, 2, weight, bias)
    torch.testing.assert_close(found, KERNEL.reference(x, 2, weight, bias))


def test_gradients_are_refused():
    x, groups, weight, bias = KERNEL.inputs((1, 2, 3, 1), Plain())
    with pytest.raises(DifferentiationError):
        group_norm_silu(x.requires_grad_(), groups, weight, bias)


@pytest.mark.slow
@COMPILED
def test_it_is_the_same_when_compiled_in_one_graph():
    arguments = KERNEL.inputs((2, 6, 7, 3), Plain())
    eager = results_of(group_norm_silu, arguments)
    assert are_same(results_of(compiled(group_norm_silu), arguments), eager)


@pytest.mark.slow
def test_nothing_spills_on_hopper():
    assert spills_of(KERNEL, *[(shape, "float16") for shape in KERNEL.shapes]) == []
