"""What the tests of every kernel ask: the gate, the same when compiled, no spills ahead of time."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from kprof.kernels.bench.measure import subject_of
from kprof.kernels.correctness import check, integrity, isolation
from tests.kernels.kernel_hopper import on_hopper

# Of Triton's interpreter, where a loop's bounds are its tensors.
INTERPRETED = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
# Dynamo's own, where it meets an autograd function.
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# That a program may have on Hopper.
SHARED_BYTES = 227 * 1024
DISTRIBUTIONS = ("normal", "outliers", "offset", "zeros", "nonfinite")


class Plain:
    """Draws normal values where the gate draws those of a case."""

    def __init__(self, dtype=torch.float32):
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def plain(self, *shape, scale=1.0, shift=0.0):
        return self(*shape) * scale + shift


def rows(*shape, dtype=torch.float32, seed=0):
    """Return normal values, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def why_not(level, kernel, shape, dtypes, num_values=0):
    """Return why this level of the gate does not pass on these small cases; "" where it does."""
    small = {"shapes": (shape,), "dtypes": dtypes, "distributions": DISTRIBUTIONS}
    # Growth ends by the clock, and the interpreter is slow.
    subject = replace(subject_of(kernel), **small, num_values=num_values, growth_s=0.0)
    # How often it is called is not up to a clock: as often as the gate calls the slowest code.
    with patch.object(integrity, "LONG_NS", 0), patch.object(isolation, "KEPT_NS", 0):
        found = next(one for one in check(subject, (level,)).levels if one.name == level)
    return "" if found.state == "passed" else found.why


def why_untrusted(kernel, shape, dtypes=("float16",)):
    """Return why the gate's first level does not pass."""
    return why_not("L0", kernel, shape, dtypes)


def why_inaccurate(kernel, shape, dtypes=("float16", "float32"), num_values=2_000):
    """Return why the gate's second level does not pass."""
    return why_not("L1", kernel, shape, dtypes, num_values)


def results_of(function, arguments, differentiable=()):
    """Return the outputs of a call, then the gradients for the same random gradients of them."""
    given = [one.detach().clone() if torch.is_tensor(one) else one for one in arguments]
    for i in differentiable:
        given[i].requires_grad_()
    outputs = function(*given)
    outputs = [outputs] if torch.is_tensor(outputs) else list(outputs)
    if not differentiable:
        return outputs
    generator = torch.Generator().manual_seed(0)
    arriving = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in outputs]
    return outputs + list(
        torch.autograd.grad(outputs, [given[i] for i in differentiable], arriving)
    )


def compiled(function, dynamic=False):
    """Return the function compiled in one graph, without generating code for it."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)


def are_same(some, others):
    """Tell whether all these tensors have the same values, NaN equal to itself."""
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def errors_of(found, expected):
    """Return the largest of the relative L2 errors of these tensors, against float64 ones."""
    pairs = zip(found, expected, strict=True)
    errors = [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs
    ]
    return max(errors)


def errors_against_truth(kernel, function, arguments):
    """Return the errors of outputs and gradients against the truth in float64."""
    exact = [one.double() if torch.is_tensor(one) else one for one in arguments]
    expected = results_of(kernel.truth, exact, kernel.differentiable)
    return errors_of(results_of(function, arguments, kernel.differentiable), expected)


def binaries_of(kernel, *cases):
    """Return all that these (shape, dtype) launch, forward and backward, as on Hopper."""
    differentiable = kernel.differentiable
    told = on_hopper(AHEAD, kernel_name=kernel.name, differentiable=differentiable, cases=cases)
    binaries = json.loads(told)
    assert len(binaries) >= len(cases)
    assert max(one["shared_bytes"] for one in binaries) <= SHARED_BYTES
    return binaries


def spills_of(kernel, *cases):
    """Return what spills of them."""
    return [one for one in binaries_of(kernel, *cases) if one["spilled_bytes"]]


AHEAD = """
import json
from kprof.kernels import kernel_named
from kprof.kernels.correctness.inputs import Draw
from kprof.kernels.correctness.subject import Case
from kprof.kernels.bench.ahead import compile_ahead
from kprof.kernels.bench.measure import subject_of

kernel = kernel_named(kernel_name)
subject, found = subject_of(kernel), []
for shape, dtype in cases:
    given = kernel.inputs(tuple(shape), Draw(Case(tuple(shape), dtype), subject))
    for i in differentiable:
        given[i].requires_grad_()

    def call():
        outputs = subject.new(*given)
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        if differentiable:
            sum(one.sum() for one in outputs).backward()

    for one in compile_ahead(call):
        sizes = ("name", "num_registers", "spilled_bytes", "shared_bytes")
        about = {name: getattr(one, name) for name in sizes}
        found.append({"shape": shape, "dtype": dtype, **about})
print(json.dumps(found))
"""
