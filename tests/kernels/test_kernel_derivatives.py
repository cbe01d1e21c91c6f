"""Derivatives that our kernels do not have: an error, where torch would go on with 0."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import kprof.kernels
from kprof.kernels.runtime import DifferentiationError
from kprof.kernels.norm import layernorm
from kprof.kernels.relu_squared import relu_squared
from kprof.kernels.norm import rmsnorm
from kprof.kernels.softmax import softmax
from kprof.kernels.gated import swiglu
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = [INTERPRETED, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]
FUNCTIONS = {
    "layernorm": lambda x: layernorm(x, None, None),
    "relu_squared": relu_squared,
    "rmsnorm": lambda x: rmsnorm(x, None),
    "softmax": softmax,
    "swiglu": lambda x: swiglu(x, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_of_a_gradient_is_refused(name):
    x = torch.randn(3, 8, requires_grad=True)
    y = FUNCTIONS[name](x)
    with pytest.raises(DifferentiationError, match="of its gradient"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_derivative_in_forward_mode_is_refused(name, is_recorded):
    x, function = torch.randn(3, 8), FUNCTIONS[name]
    with torch.set_grad_enabled(is_recorded), forward_ad.dual_level():
        assert function(x).shape == x.shape
        with pytest.raises(DifferentiationError, match="forward mode"):
            function(forward_ad.make_dual(x, x))
    with pytest.raises(DifferentiationError, match="forward mode"):
        torch.func.jvp(function, (x,), (x,))
    assert function(x).shape == x.shape


def test_compiled_code_does_not_lose_a_derivative_in_forward_mode():
    x = torch.randn(3, 8)

    def derived(x):
        return torch.func.jvp(relu_squared, (x,), (x,))[1]

    torch._dynamo.reset()
    with pytest.raises(DifferentiationError, match="forward mode"):
        torch.compile(derived, backend="eager")(x)
    compiled = torch.compile(relu_squared, backend="eager")
    assert torch.equal(compiled(x), relu_squared(x))
    with forward_ad.dual_level(), pytest.raises(DifferentiationError):
        compiled(forward_ad.make_dual(x, x))
    assert torch.equal(compiled(x), relu_squared(x))


def test_no_kernel_forgets_to_refuse():
    sources = [path.read_text() for path in Path(kprof.kernels.__path__[0]).rglob("*.py")]
    functions = [re.findall(r"class (\w+)\(torch.autograd.Function\)", one) for one in sources]
    assert sum(map(len, functions)) > 5
    for source, names in zip(sources, functions, strict=True):
        for name in names:
            assert f"applied({name})" in source
            assert f"{name}.apply" not in source
