"""SwiGLU and GeGLU: numbers, edges, packed tensors, gradients, compilers."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch

from kprof.kernels.gated import geglu
from kprof.kernels.gated import swiglu
from kprof.kernels.gated import GEGLU
from kprof.kernels.gated import SWIGLU
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    Plain,
    are_same,
    compiled,
    errors_against_truth,
    results_of,
    rows,
)

pytestmark = INTERPRETED
KERNELS = pytest.mark.parametrize("kernel", [SWIGLU, GEGLU], ids=lambda one: one.name)
FUNCTIONS = pytest.mark.parametrize("function", [swiglu, geglu])


@pytest.mark.parametrize("shape", [(1, 1), (7,)])
@KERNELS
def test_a_single_element_or_row_has_the_right_product_and_gradients(kernel, shape):
    arguments = kernel.inputs(shape, Plain())
    assert errors_against_truth(kernel, kernel.provider("kprof").load(), arguments) < 2e-6


def test_the_error_function_is_there_for_those_who_do_not_approximate():
    gate, up = rows(4, 50), rows(4, 50, seed=1)
    found = results_of(lambda g, u: geglu(g, u, "none"), (gate, up), (0, 1))
    exact = (gate.double(), up.double())
    expected = results_of(lambda g, u: GEGLU.truth(g, u, "none"), exact, (0, 1))
    for one, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-6)
    assert not are_same(found[:1], [geglu(gate, up)])


@pytest.mark.parametrize("kernel", [SWIGLU, GEGLU], ids=lambda one: one.name)
def test_the_activation_is_rounded_before_the_product(kernel):
    gate, up = rows(8, 64, dtype=torch.float16), rows(8, 64, dtype=torch.float16, seed=1)
    found, expected = kernel.provider("kprof").load()(gate, up), kernel.reference(gate, up)
    unrounded = kernel.truth(gate.double(), up.double()).half()
    differing = (found != expected).float().mean()
    assert differing < 0.02
    assert differing < (unrounded != expected).float().mean()


@FUNCTIONS
@pytest.mark.parametrize("is_up_first", [False, True])
def test_the_halves_of_one_tensor_are_read_and_their_gradients_written_in_place(
    function, is_up_first
):
    packed = rows(3, 5, 2 * 33)
    halves = [half.contiguous() for half in packed.chunk(2, dim=-1)]
    order = -1 if is_up_first else 1
    y, gradient = results_of(lambda one: function(one, is_up_first=is_up_first), (packed,), (0,))
    expected, *gradients = results_of(function, halves[::order], (0, 1))
    assert are_same([y, gradient], [expected, torch.cat(gradients[::order], dim=-1)])
    assert gradient.is_contiguous()


@FUNCTIONS
def test_rows_apart_and_columns_apart_are_read_where_they_are(function):
    packed, turned = rows(4, 2 * 24), rows(24, 4, seed=1).t()
    gate, up = packed.chunk(2, dim=-1)
    assert are_same([function(gate, up)], [function(gate.contiguous(), up.contiguous())])
    assert are_same([function(gate, turned)], [function(gate, turned.contiguous())])


@FUNCTIONS
def test_elements_bits_do_not_depend_on_what_is_around_them(function):
    gate, up = rows(50, 90), rows(50, 90, seed=1)
    whole = function(gate, up)
    assert are_same(
        [whole[17:18], whole[:, :1]],
        [function(gate[17:18], up[17:18]), function(gate[:, :1], up[:, :1])],
    )


@FUNCTIONS
def test_nothing_in_is_nothing_out(function):
    y, dgate, dup = results_of(function, (rows(0, 16), rows(0, 16)), (0, 1))
    assert y.shape == dgate.shape == dup.shape == (0, 16)
    assert function(rows(3, 0)).shape == (3, 0)


def test_float32_keeps_its_digits_where_the_gate_is_nearly_closed():
    gate = -torch.linspace(1, 80, 1_001)
    exact = SWIGLU.truth(gate.double(), torch.ones(1_001).double())
    error = swiglu(gate, torch.ones(1_001)).double() / exact - 1
    assert float(error.abs().max()) < 4e-7


def test_a_closed_gate_lets_nothing_through():
    gate, up = torch.tensor([0.0, -200.0]), torch.tensor([3.0, 3.0])
    assert are_same([swiglu(gate, up), geglu(gate, up)], [torch.zeros(2), torch.zeros(2)])


def test_a_wide_open_gate_is_itself():
    gate, up = torch.tensor([100.0, 1e30]), torch.tensor([2.0, 1.0])
    assert are_same([swiglu(gate, up), geglu(gate, up)], [gate * up, gate * up])


@COMPILED
@pytest.mark.parametrize("dynamic", [False, True])
@FUNCTIONS
def test_packed_it_is_the_same_when_compiled_in_one_graph(function, dynamic):
    packed = (rows(3, 80),)
    eager = results_of(function, packed, (0,))
    assert are_same(results_of(compiled(function, dynamic), packed, (0,)), eager)


def test_its_operators_keep_torchs_rules():
    gate, up, dy = rows(3, 40), rows(3, 40, seed=1), rows(3, 40, seed=2)
    torch.library.opcheck(torch.ops.kprof.glu.default, (gate, up, 0))
    torch.library.opcheck(torch.ops.kprof.glu_backward.default, (dy, gate, up, 1, False))
    torch.library.opcheck(torch.ops.kprof.glu_backward.default, (dy, gate, up, 2, True))
    torch.library.opcheck(torch.ops.kprof.glu_backward.default, (dy, gate, up, 2, True, True))


@KERNELS
def test_what_it_cannot_do_it_refuses(kernel):
    gate = torch.zeros(2, 8)
    assert "none of float32" in kernel.refuses(gate.double(), gate.double())
    assert "up is (1, 8)" in kernel.refuses(gate, gate[:1])
    assert "up is" in kernel.refuses(gate, gate.half())
    assert "no two halves" in kernel.refuses(gate[:, :7])
    assert kernel.refuses(gate, gate) is None
    assert kernel.refuses(gate) is None
