"""What is expected of every kernel that computes row by row, whatever it computes."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

from itertools import product

import pytest

from kprof.kernels import norm
from kprof.kernels import gated, gelu, relu_squared
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
KERNELS = (*norm.KERNELS, *gated.KERNELS, *gelu.KERNELS, relu_squared.KERNEL)
OF_EACH = pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one.name)
# Columns of the default shapes.
LENGTHS = {
    "layernorm": (1_024, 4_096, 8_192),
    "add_layernorm": (1_024, 4_096, 8_192),
    "rmsnorm": (2_048, 4_096, 8_192, 16_384),
    "add_rmsnorm": (2_048, 4_096, 8_192, 16_384),
    "swiglu": (8_192,),
    "geglu": (8_192,),
    "gelu": (4_096,),
    "bias_gelu": (4_096,),
    "relu_squared": (8_192,),
}
# What is known to spill.
TOO_LONG = (16_384, "float32")


@pytest.mark.slow
@OF_EACH
def test_the_gate_trusts_it_on_rows_that_are_no_power_of_two(kernel):
    assert why_untrusted(kernel, (3, 37)) == ""


@pytest.mark.slow
@OF_EACH
def test_it_is_no_less_accurate_than_what_it_replaces(kernel):
    # In float32, the next test holds results and gradients against the truth.
    assert why_inaccurate(kernel, (3, 37), ("float16",)) == ""


@pytest.mark.parametrize("shape", [(7, 3), (1, 5), (2, 3, 65), (2, 2_049)])
@OF_EACH
def test_rows_of_any_length_have_the_right_results_and_gradients(kernel, shape):
    # In one dtype: a residual of a narrower one has a gradient of that precision.
    arguments = [one.float() for one in kernel.inputs(shape, Plain())]
    assert errors_against_truth(kernel, kernel.provider("kprof").load(), arguments) < 2e-6


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("dynamic", [False, True])
@OF_EACH
def test_it_is_the_same_when_compiled_in_one_graph(kernel, dynamic):
    function = kernel.provider("kprof").load()
    arguments = kernel.inputs((3, 40), Plain())
    eager = results_of(function, arguments, kernel.differentiable)
    again = results_of(compiled(function, dynamic), arguments, kernel.differentiable)
    assert are_same(again, eager)


@pytest.mark.slow
@OF_EACH
def test_nothing_spills_on_hopper_for_the_default_shapes(kernel):
    pairs = product(LENGTHS[kernel.name], ("bfloat16", "float32"))
    assert (
        spills_of(kernel, *[((8, n), dtype) for n, dtype in pairs if (n, dtype) != TOO_LONG]) == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [norm.ADD_LAYERNORM, norm.ADD_RMSNORM], ids=lambda k: k.name)
def test_rows_that_are_no_power_of_two_are_loaded_ahead_as_far_as_shared_memory_goes(kernel):
    spilled = spills_of(kernel, ((3, 4_099), "float32"), ((3, 4_099), "bfloat16"))
    # A little, beside what is read and written.
    assert all(one["spilled_bytes"] < 100 for one in spilled)
