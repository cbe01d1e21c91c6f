"""Cross-entropy, in Triton's interpreter: float16 and float32, few rows."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math
from dataclasses import replace

import pytest
import torch

import kprof.kernels.cross_entropy._rows as launching
from kprof.kernels.runtime import DifferentiationError
from kprof.kernels.cross_entropy.cross_entropy import KERNEL, cross_entropy
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    compiled,
    spills_of,
    why_inaccurate,
    why_untrusted,
)

pytestmark = INTERPRETED
reference = KERNEL.reference


def drawn(rows, columns, dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(rows * columns)
    logits = torch.randn(rows, columns, generator=generator) * scale
    return logits.to(dtype).requires_grad_(), torch.randint(columns, (rows,), generator=generator)


def gradient_of(function, logits, targets, *, arriving=1.0, **options):
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, targets, **options)
    loss.backward(torch.full_like(loss, arriving))
    return logits.grad


def with_options(*options):
    """Return the kernel, called with these options, too."""
    return replace(KERNEL, inputs=lambda shape, draw: (*KERNEL.inputs(shape, draw), *options))


OPTIONS = [(), (3, 0.1, "none")]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_the_gate_trusts_it_in_the_place_of_the_loss_of_hugging_face(options):
    rows = (0, 1) if "none" in options else ()
    assert why_untrusted(replace(with_options(*options), rows=rows), (3, 67)) == ""


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_no_less_accurate_than_what_it_replaces(options):
    assert why_inaccurate(with_options(*options), (4, 67)) == ""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothing_and_reductions_are_those_of_torch(smoothing, reduction):
    logits, targets = drawn(4, 1_003)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    loss = cross_entropy(logits.detach(), targets, **options)
    torch.testing.assert_close(loss, reference(logits.detach(), targets, **options))
    torch.testing.assert_close(
        gradient_of(cross_entropy, logits, targets, **options),
        gradient_of(reference, logits, targets, **options),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("columns", [1, 7, 64, 1_003, 4_099])
def test_the_loss_of_uniform_logits_is_the_logarithm_of_the_vocabulary(columns):
    loss = cross_entropy(torch.full((3, columns), 7.0), torch.zeros(3, dtype=torch.int64))
    assert loss.item() == pytest.approx(math.log(columns), abs=1e-6)


def test_every_row_of_the_gradient_sums_to_zero():
    logits, targets = drawn(5, 1_003)
    gradient = gradient_of(cross_entropy, logits, targets, reduction="sum")
    assert gradient.sum(1).abs().max() < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_get_no_loss_and_a_gradient_of_zero(reduction):
    logits, targets = drawn(6, 130)
    targets[[1, 4]] = -100
    gradient = gradient_of(cross_entropy, logits, targets, reduction=reduction)
    expected = gradient_of(reference, logits, targets, reduction=reduction)
    assert torch.equal(gradient[[1, 4]], torch.zeros(2, 130))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_the_mean_is_the_sum_over_the_targets_that_count():
    logits, targets = drawn(6, 130)
    targets[2] = -100
    mean = cross_entropy(logits.detach(), targets)
    assert mean.item() == pytest.approx(
        cross_entropy(logits.detach(), targets, reduction="sum").item() / 5, rel=1e-6
    )


def test_where_all_targets_are_ignored_the_mean_is_nan_and_the_gradient_zero():
    logits, _ = drawn(3, 40)
    targets = torch.full((3,), -100)
    assert cross_entropy(logits.detach(), targets).isnan()
    assert torch.equal(gradient_of(cross_entropy, logits, targets), torch.zeros(3, 40))


def test_a_given_divisor_takes_the_place_of_the_count():
    logits, targets = drawn(4, 40)
    whole = reference(logits.detach(), targets, reduction="sum").item()
    for divisor in (16, torch.tensor(16.0)):
        loss = cross_entropy(logits.detach(), targets, reduction="sum", divisor=divisor)
        assert loss.item() == pytest.approx(whole / 16, rel=1e-6)
    gradient = gradient_of(cross_entropy, logits, targets, divisor=16)
    expected = gradient_of(reference, logits, targets, reduction="sum", arriving=1 / 16)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


def test_logits_of_ten_thousand_keep_their_digits():
    logits, targets = drawn(4, 300, scale=1e4)
    loss = cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss, reference(logits, targets, reduction="none"))
    expected = gradient_of(reference, logits, targets)
    torch.testing.assert_close(gradient_of(cross_entropy, logits, targets), expected)


@pytest.mark.parametrize(
    "places", [slice(0, 60), slice(0, 299), slice(5, 300), slice(0, 300)], ids=str
)
def test_masked_logits_are_treated_as_torch_treats_them(places):
    logits, targets = drawn(3, 300)
    targets[:] = torch.tensor([2, 70, 299])
    logits.detach()[:, places] = -math.inf
    loss = cross_entropy(logits.detach(), targets, reduction="none")
    expected = reference(logits.detach(), targets, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(
        gradient_of(cross_entropy, logits, targets, reduction="sum"),
        gradient_of(reference, logits, targets, reduction="sum"),
        equal_nan=True,
    )


def test_a_target_outside_the_vocabulary_makes_the_loss_nan():
    logits, targets = drawn(3, 50)
    targets[1] = 50
    loss = cross_entropy(logits.detach(), targets, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient_of(cross_entropy, logits, targets)[1].isnan().all()


def test_the_z_loss_adds_the_squared_logarithm_of_the_sum():
    def with_z_loss(logits, targets):
        log_sum = logits.logsumexp(1)
        return (reference(logits, targets, reduction="none") + 1e-2 * log_sum**2).mean()

    logits, targets = drawn(4, 200)
    torch.testing.assert_close(
        cross_entropy(logits.detach(), targets, z_loss=1e-2), with_z_loss(logits, targets).detach()
    )
    torch.testing.assert_close(
        gradient_of(cross_entropy, logits, targets, z_loss=1e-2),
        gradient_of(with_z_loss, logits, targets),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_gradient_scales_with_what_arrives(dtype):
    logits, targets = drawn(4, 200, dtype)
    gradient = gradient_of(cross_entropy, logits, targets, arriving=0.375)
    expected = gradient_of(reference, logits, targets, arriving=0.375)
    torch.testing.assert_close(gradient, expected)


def test_a_float16_gradient_that_only_its_scaler_keeps_from_underflow_survives():
    logits, targets = drawn(2, 4_000, torch.float16, scale=0.1)
    gradient = gradient_of(cross_entropy, logits, targets, divisor=8_192, arriving=65_536.0)
    assert (gradient != 0).all()


def test_a_second_backward_pass_gives_the_same_gradient():
    logits, targets = drawn(3, 90)
    loss = cross_entropy(logits, targets) * 3
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(kept, second)
    assert torch.equal(kept, first)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_gradient_of_a_gradient_is_refused(reduction):
    logits, targets = drawn(3, 90)
    loss = cross_entropy(logits, targets, reduction=reduction).sum()
    with pytest.raises(DifferentiationError, match="of its gradient"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_are_overwritten_only_with_leave(reduction):
    logits, targets = drawn(4, 90)
    expected = gradient_of(reference, logits, targets, reduction=reduction)
    kept = logits.detach().clone()
    for may_overwrite in (False, True):
        source = (kept * 1).requires_grad_()
        middle = source * 1
        loss = cross_entropy(middle, targets, reduction=reduction, may_overwrite=may_overwrite)
        loss.sum().backward()
        assert torch.equal(middle.detach(), kept) is not may_overwrite
        torch.testing.assert_close(source.grad, expected)


def test_who_needs_the_overwritten_logits_is_told_by_autograd():
    logits, targets = drawn(4, 90)
    middle = logits.tanh()
    loss = cross_entropy(middle, targets, may_overwrite=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_programs_that_take_several_rows_each_give_the_same(monkeypatch):
    logits, targets = drawn(7, 1_003)
    targets[3] = -100
    expected = gradient_of(cross_entropy, logits, targets), cross_entropy(logits.detach(), targets)
    launching._plan.cache_clear()
    monkeypatch.setattr(launching, "SMS_WITHOUT_GPU", 1)
    monkeypatch.setattr(launching, "MOST_ROWS_PER_SM", 2)
    launching._limits.cache_clear()
    found = gradient_of(cross_entropy, logits, targets), cross_entropy(logits.detach(), targets)
    launching._plan.cache_clear()
    launching._limits.cache_clear()
    torch.testing.assert_close(found, expected)


def test_rows_that_lie_apart_or_across_are_read_where_they_are():
    logits, targets = drawn(5, 64)
    expected = gradient_of(cross_entropy, logits, targets)
    wide = torch.randn(5, 131)
    wide[:, 3:67] = logits.detach()
    apart = wide[:, 3:67].requires_grad_()
    across = logits.detach().t().contiguous().t().requires_grad_()
    for one in (apart, across):
        (gradient,) = torch.autograd.grad(cross_entropy(one, targets), one)
        torch.testing.assert_close(gradient, expected)


@COMPILED
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_compiles_without_a_graph_break_to_the_same_bits(reduction):
    logits, targets = drawn(3, 130)

    def step(logits, targets):
        return cross_entropy(logits * 2, targets, reduction=reduction)

    fast = compiled(step)
    assert torch.equal(fast(logits, targets), step(logits, targets))
    assert torch.equal(gradient_of(fast, logits, targets), gradient_of(step, logits, targets))


@pytest.mark.parametrize(
    ("logits", "targets", "reason"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), "float64"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), "int64"),
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), "shape"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), "shape"),
    ],
)
def test_what_it_cannot_take_is_refused_with_a_reason(logits, targets, reason):
    assert reason in KERNEL.refuses(logits, targets)


def test_what_it_can_take_is_not_refused():
    assert KERNEL.refuses(*drawn(2, 3)) is None


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_on_the_default_shapes():
    cases = [((64, columns), dtype) for _, columns in KERNEL.shapes for dtype in KERNEL.dtypes]
    assert spills_of(KERNEL, *cases) == []


@pytest.mark.parametrize("columns", [144, 32_000])
def test_a_divisor_of_another_dtype_has_a_binary_of_its_own(monkeypatch, columns):
    keys = []

    class Noting(launching.Launcher):
        """Notes what a binary is kept by."""

        def __call__(self, key, *given, **known):
            keys.append(key)

    for name in ("_launch_losses", "_launch_losses_resident"):
        monkeypatch.setattr(launching, name, Noting(None))
    logits, targets = (
        torch.zeros(2, columns, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.int64),
    )
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        results = torch.empty(2), torch.empty(5), None
        options = launching.Options(-100, 0.0, 0.0, "sum")
        launching.write_losses(logits, targets, torch.ones((), dtype=dtype), options, *results)
    assert len(set(keys)) == 3
