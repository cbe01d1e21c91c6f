"""The correctness gate for the calls of one workload."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import json
from dataclasses import replace

import pytest

from kprof.kernels import Provider, kernel_named
from kprof.kernels.norm import rmsnorm
from kprof.kernels.swap import gated
from kprof.kernels.swap.swap_report import GATE_PASSED, CallSort
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
ROWS = CallSort((2, 3, 24), "float32", False)


def with_provider(monkeypatch, function):
    """Let a kernel have one more provider."""
    kernel = kernel_named("rmsnorm")
    more = (*kernel.providers, Provider("planted", lambda: function))
    monkeypatch.setattr(gated, "kernel_named", lambda name: replace(kernel, providers=more))


def test_a_kernel_passes_at_the_calls_of_a_workload(tmp_path):
    calls, result = tmp_path / "calls", tmp_path / "result"
    calls.write_text(
        json.dumps([{"shape": [2, 3, 24], "dtype": "float32", "has_gradients": False}])
    )
    gated.main(["rmsnorm=kprof", str(calls), str(result)])
    found = json.loads(result.read_text())
    states = {one["name"]: one["state"] for one in found["report"]["levels"]}
    assert (found["outcome"], states["L0"], states["L1"]) == (GATE_PASSED, "passed", "passed")


def wrong_beyond(columns):
    def function(x, weight, *others):
        y = rmsnorm(x, weight, *others)
        return y * 1.01 if x.shape[-1] > columns else y

    return function


@pytest.mark.parametrize(("columns", "is_right"), [(23, False), (24, True)])
def test_a_kernel_that_is_wrong_at_the_size_of_a_call_fails(monkeypatch, columns, is_right):
    with_provider(monkeypatch, wrong_beyond(columns))
    assert (gated.judge("rmsnorm=planted", [ROWS]).outcome == GATE_PASSED) is is_right


def test_the_gate_looks_at_the_sizes_dtypes_and_layouts_of_the_calls_alone():
    kernel = kernel_named("rmsnorm")
    other = CallSort((2**30, 512), "bfloat16", True, "strided")
    subject = gated.subject_for(kernel, "kprof", [ROWS, other], "cuda")
    assert subject.shapes == ((6, 24), (2**13, 512))
    assert subject.dtypes == ("float32", "bfloat16")
    assert subject.layouts == ("contiguous", "strided")
    assert subject.differentiable == kernel.differentiable
    assert gated.subject_for(kernel, "kprof", [ROWS], "cuda").differentiable == ()


def test_of_shapes_with_batches_there_are_few_batches():
    kernel = kernel_named("rope")
    call = CallSort((64, 1024, 12, 12, 64), "float32", False)
    assert gated.subject_for(kernel, "kprof", [call], "cuda").shapes == ((2, 1024, 12, 12, 64),)


def test_rows_are_few_for_the_longest_of_the_other_sizes():
    call = CallSort((2**20, 2**15, 16), "float32", False)
    subject = gated.subject_for(kernel_named("linear_cross_entropy"), "kprof", [call], "cuda")
    assert subject.shapes == ((2**7, 2**15, 16),)


def test_of_shapes_with_one_size_there_are_few_elements():
    call = CallSort((2**30,), "float32", False)
    subject = gated.subject_for(kernel_named("adamw"), "kprof", [call], "cuda")
    assert subject.shapes == ((2**22,),)


def test_an_optimizer_passes_at_the_calls_of_a_workload():
    call = CallSort((1_000_003,), "float32", False)
    assert gated.judge("adamw=kprof", [call]).outcome == GATE_PASSED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cross_entropy=kprof", (32, 504)),
        ("linear_cross_entropy=kprof", (32, 16, 504)),
        ("layernorm=aten", (2, 16, 32)),
        ("swiglu=kprof", (2, 16, 32)),
        ("rope=kprof", (2, 16, 4, 2, 32)),
        ("add_rmsnorm=kprof", (2, 16, 32)),
    ],
)
def test_the_library_passes_at_shapes_as_sites_count_them(name, shape):
    assert gated.judge(name, [CallSort(shape, "float32", True)]).outcome == GATE_PASSED


def test_where_no_call_is_known_the_gate_takes_the_kernels_own_edges():
    kernel = kernel_named("swiglu")
    assert gated.subject_for(kernel, "kprof", [], "cuda").shapes == kernel.edges
