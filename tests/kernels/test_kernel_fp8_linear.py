"""The linear layer in FP8: its error, its gradients, its routes, and what each of them gets."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from kprof.kernels.correctness.inputs import place
from kprof.kernels.correctness.subject import LAYOUTS
from kprof.kernels.fp8 import fp8_linear as _fp8_linear
from kprof.kernels.bench.choice import bucket_of
from kprof.kernels.fp8.quantize_fp8 import quantize_transposed
from kprof.kernels.fp8.fp8_linear import route_of, run_on, to_input, to_weight
from kprof.kernels.bench.measure import subject_of
from kprof.kernels.fp8.fp8_linear import KERNEL, STATED_ERROR, fp8_linear
from kprof.kernels.fp8.quantize_fp8 import KERNEL as QUANTIZE
from kprof.kernels.fp8.quantize_fp8 import dequantize_fp8, quantize_fp8
from tests.kernels.fp8_layers import given, nothing_kept  # noqa: F401
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    compiled,
    rows,
    why_untrusted,
)

pytestmark = INTERPRETED
# The interpreter's cast halves what rounds up to a power of two, here in two matrices.
WITH_ROUGH_CASTS = 0.07


def error_of(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)], ids=str)
def test_its_error_is_what_it_states(shape):
    _, weight, bias = given()
    x = rows(*shape, seed=4).half()
    found = fp8_linear(x, weight, bias)
    assert found.shape == (*shape[:-1], 32)
    assert error_of(found, functional.linear(x.double(), weight.double(), bias.double())) > 0.005
    assert error_of(found, functional.linear(x, weight, bias)) < STATED_ERROR


@pytest.mark.parametrize("least", [1, 4_096], ids=["quantised", "plain"])
def test_gradients_are_those_of_the_layer(least, monkeypatch):
    monkeypatch.setattr(_fp8_linear, "MIN_BACKWARD_ROWS", least)
    monkeypatch.setattr(_fp8_linear, "MIN_BACKWARD_INTENSITY", 1)
    some = [one.requires_grad_() for one in given(16)]
    others = [one.detach().clone().requires_grad_() for one in some]
    dy = rows(16, 32, seed=5).half()
    fp8_linear(*some).backward(dy)
    functional.linear(*others).backward(dy)
    errors = [error_of(a.grad, b.grad) for a, b in zip(some, others, strict=True)]
    assert max(errors) < WITH_ROUGH_CASTS
    assert (min(errors[:2]) > 0.005) == (least == 1)


def test_only_gradients_that_are_wanted_are_made():
    x, weight, bias = given()
    fp8_linear(x, weight.requires_grad_(), bias).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert weight.grad.shape == weight.shape


def multiply_in_blocks(x, w, y):
    (x, x_scale), (w, w_scale) = x, w
    y.copy_(dequantize_fp8(x, x_scale, "1x128") @ dequantize_fp8(w, w_scale, "128x128").t())


def test_deep_gemm_takes_all_that_a_layer_gets(monkeypatch):
    fake = SimpleNamespace(fp8_gemm_nt=multiply_in_blocks)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    _, weight, bias = given()
    x = rows(2, 3, 64, seed=4).half()
    found = KERNEL.provider("deep-gemm").load()(x, weight, bias)
    assert (found.shape, found.dtype) == ((2, 3, 32), torch.float16)
    assert error_of(found, functional.linear(x, weight, bias)) < WITH_ROUGH_CASTS


def test_products_of_a_forward_pass_and_of_x_overlap_the_cast(monkeypatch):
    told = []

    def multiply(x, w, x_scale, w_scale, *others, is_behind_cast=False):
        told.append(is_behind_cast)
        return torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)

    monkeypatch.setattr(_fp8_linear, "multiply", multiply)
    monkeypatch.setattr(_fp8_linear, "gemm_operator", multiply)
    monkeypatch.setattr(_fp8_linear, "MIN_BACKWARD_ROWS", 1)
    monkeypatch.setattr(_fp8_linear, "MIN_BACKWARD_INTENSITY", 1)
    monkeypatch.setattr(_fp8_linear, "route_of", lambda *sizes: "tiles")
    x, weight, _ = given(16)
    run_on(x, weight, None, True)
    to_input(rows(16, 32, seed=5).half(), weight)
    # There the last launch made the other operand, which is read first.
    to_weight(rows(16, 32, seed=5).half(), x)
    assert told == [True, True, False]


class Products(TorchDispatchMode):
    """Notes how far the elements of every product's matrices reach."""

    def __init__(self):
        super().__init__()
        self.spans = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            matrices = [one for one in args if one.dim() == 2]
            self.spans += [
                sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
                for one in matrices
            ]
        return func(*args, **(kwargs or {}))


def far(*shape):
    """Return a matrix whose last row 32 bits do not reach, without any data."""
    step = 2**31 // (shape[0] - 1) + 64
    whole = torch.empty((shape[0] - 1) * step + shape[1], dtype=torch.float16, device="meta")
    return whole.as_strided(shape, (step, 1))


def test_no_product_of_torchs_gets_a_matrix_that_32_bits_do_not_reach():
    x, weight, dy = far(3, 80), far(48, 80), far(3, 48)
    with Products() as products:
        assert run_on(x, weight, None, True, "plain").shape == (3, 48)
        assert _fp8_linear._run_to_input(dy, weight).shape == (3, 80)
        assert _fp8_linear._run_to_weight(dy, x).shape == (48, 80)
    assert len(products.spans) == 6
    assert max(products.spans) < 2**31


def test_what_lies_apart_within_reach_is_not_copied():
    wide = torch.empty(64, 256, dtype=torch.float16, device="meta")
    views = (wide, wide[:, 3:80], wide.t(), wide[:1].expand(64, 256))
    assert all(_fp8_linear.addressable(one) is one for one in views)
    contiguous = torch.empty(2**17, 2**15, dtype=torch.float16, device="meta")
    assert _fp8_linear.addressable(contiguous) is contiguous


@pytest.mark.parametrize("layout", LAYOUTS)
def test_however_matrices_lie_cublaslt_gets_them_whole_and_aligned(layout, monkeypatch):
    given = []

    def note(x, w, x_scale, w_scale, **options):
        given.extend((x, w.t(), x_scale, w_scale))
        return torch.empty(x.shape[0], w.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", note)
    x, weight = (place(rows(n, 64).bfloat16(), layout).view for n in (130, 48))
    run_on(x, weight, None, True, "library")
    _fp8_linear._gemm_of_quantized(quantize_transposed(x), quantize_transposed(x), None, "library")
    found = [(tuple(one.shape), one.is_contiguous(), one.data_ptr() % 16) for one in given]
    shapes = (130, 64), (48, 64), (130, 1), (1, 48), (64, 130), (64, 130), (64, 1), (1, 64)
    assert found == [(shape, True, 0) for shape in shapes]


def test_sizes_that_do_not_go_together_are_told_as_torch_does():
    x, weight, bias = given()
    for route in (None, "wide"):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            run_on(x, weight[:, :32].contiguous(), bias, True, route)


class OnGpu:
    """As much of a tensor on a GPU as a route depends on."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype):
        self.dtype = dtype


@pytest.mark.parametrize(
    ("num_rows", "shape", "dtype", "route"),
    [
        (1, (4_096, 4_096), torch.bfloat16, "tiles"),
        (1, (4_096, 4_096), torch.float16, "wide"),
        (128, (4_096, 4_096), torch.bfloat16, "plain"),
        (128, (4_096, 14_336), torch.bfloat16, "tiles"),
        (128, (28_672, 4_096), torch.bfloat16, "library"),
        (4_096, (4_096, 4_096), torch.bfloat16, "library"),
        (4_096, (4_090, 4_096), torch.bfloat16, "plain"),
        (4_096, (4_096, 4_096), torch.float16, "plain"),
        (4_096, (4_096, 131_072), torch.bfloat16, "plain"),
        (1, (4_096, 131_072), torch.bfloat16, "plain"),
    ],
)
def test_a_product_goes_the_way_that_suits_its_size(num_rows, shape, dtype, route, monkeypatch):
    monkeypatch.setattr(_fp8_linear, "has_library", lambda device: True)
    assert route_of(num_rows, *shape, OnGpu(dtype)) == route


@pytest.mark.parametrize(
    ("version", "capability", "route"),
    [
        ("13.0", (9, 0), "library"),
        ("12.9", (9, 0), "library"),
        ("12.8", (9, 0), "plain"),
        ("13.0", (8, 9), "plain"),
        ("13.0", (10, 0), "plain"),
    ],
)
def test_many_rows_meet_fp8_where_that_is_cublaslts_alone(version, capability, route, monkeypatch):
    has_library = _fp8_linear.has_library.__wrapped__
    monkeypatch.setattr(_fp8_linear, "has_library", has_library)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert route_of(4_096, 4_096, 4_096, OnGpu(torch.bfloat16)) == route


def test_a_route_may_be_forced():
    x, weight, bias = given()
    assert torch.equal(run_on(x, weight, bias, True, "plain"), functional.linear(x, weight, bias))
    for route in ("wide", "tiles"):
        found = run_on(x, weight, bias, True, route)
        assert found.dtype == x.dtype
        assert not torch.equal(found, functional.linear(x, weight, bias))


def test_no_rows_give_no_results_and_no_gradients():
    x, weight, bias = (one.requires_grad_() for one in given(0))
    y = fp8_linear(x, weight, bias)
    y.sum().backward()
    assert y.shape == (0, 32)
    assert not weight.grad.any()


@COMPILED
def test_it_compiles_without_a_graph_break_forward_and_backward():
    x, weight, bias = (one.requires_grad_() for one in given())
    expected = fp8_linear(x * 2, weight, bias)
    found = compiled(lambda x, weight, bias: fp8_linear(x * 2, weight, bias))(x, weight, bias)
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected.sum(), (x, weight, bias))
    for one, other in zip(torch.autograd.grad(found.sum(), (x, weight, bias)), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(1, 3), (5, 16), (300, 70)], ids=str)
def test_a_matrix_is_turned_round_and_scaled_by_its_columns(shape):
    x = rows(*shape)
    x[0, 2] = torch.nan if shape[0] == 300 else 0
    values, scales = quantize_transposed(x)
    expected, expected_scales = QUANTIZE.reference(x.t().contiguous())
    assert values.shape == expected.shape
    torch.testing.assert_close(scales, expected_scales, equal_nan=True)
    assert (values.float() == expected.float()).float().mean() > 0.95
    assert scales.isnan().flatten().tolist().count(True) == (shape[0] == 300)


def test_columns_that_lie_apart_are_turned_where_they_are():
    wide = rows(40, 60)
    found, expected = (
        quantize_transposed(wide[:, 7:39]),
        quantize_transposed(wide[:, 7:39].contiguous()),
    )
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("quantize", [quantize_transposed, quantize_fp8], ids=["across", "by rows"])
def test_rows_that_32_bits_do_not_reach_are_quantised_as_others(quantize):
    x = rows(3, 70).half()
    pairs = zip(quantize(place(x, "far").view), quantize(x), strict=True)
    assert all(torch.equal(a.float(), b.float()) for a, b in pairs)


def test_products_of_the_backward_pass_keep_their_shapes():
    assert to_input(rows(2, 3, 32).half(), rows(32, 64).half()).shape == (2, 3, 64)
    assert to_weight(rows(2, 3, 32).half(), rows(2, 3, 64).half()).shape == (32, 64)


def test_a_choice_holds_for_rows_up_to_a_power_of_two_and_for_these_weights_alone():
    assert bucket_of(KERNEL, (5, 48, 80)) == (8, 48, 80)
    assert bucket_of(KERNEL, (8, 48, 80)) != bucket_of(KERNEL, (8, 80, 48))


def test_the_gate_judges_it_as_a_lower_precision():
    subject = subject_of(KERNEL)
    assert (subject.precision, subject.stated_error) == ("lower", STATED_ERROR)
    assert subject_of(QUANTIZE).precision == "same"


def test_what_it_cannot_take_is_refused_with_a_reason():
    x, weight, bias = given()
    assert KERNEL.refuses(x, weight, bias) is None
    assert "float32" in KERNEL.refuses(x.float(), weight, bias)
    assert "float32" in KERNEL.refuses(x, weight, bias.float())
    assert KERNEL.refuses(x[:, :9], weight, bias) is not None
    assert "no weights" in KERNEL.refuses(x, weight[:0], None)


@pytest.mark.slow
def test_the_gate_trusts_it_unless_its_weights_are_written_to_in_secret():
    assert why_untrusted(KERNEL, (5, 16, 64)) == ""
    assert "same memory" in why_untrusted(replace(KERNEL, constant=()), (5, 16, 64))
