"""Cross-entropy of rows that are held in registers, and summed about the target's logit."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math

import pytest
import torch

import kprof.kernels.cross_entropy._rows as launching
from kprof.kernels.cross_entropy._rows import losses_resident_kernel
from kprof.kernels.cross_entropy.cross_entropy import (
    operator_both,
    operator_both_over,
    operator_gradient,
    operator_loss,
)
from kprof.kernels.runtime import Launcher
from kprof.kernels.cross_entropy.cross_entropy import KERNEL, cross_entropy
from tests.kernels.kernel_checks import INTERPRETED, are_same, spills_of

pytestmark = INTERPRETED
H200 = torch.device("cpu")
# Ignored target, smoothing, z-loss, reduction.
PLAIN = (-100, 0.0, 0.0, "sum")


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Hold up to four of a row's tiles of 128, or two of more, with two programs in all."""
    monkeypatch.setattr(launching, "RESIDENT_WARPS", 1)
    monkeypatch.setattr(launching, "LEAST_RESIDENT_TILES", 2)
    monkeypatch.setattr(launching, "MOST_RESIDENT_TILES", 4)
    monkeypatch.setattr(launching, "RESIDENT_TILES_OF_LONG_ROWS", 2)
    monkeypatch.setattr(launching, "SMS_WITHOUT_GPU", 1)
    monkeypatch.setattr(launching, "RESIDENT_DTYPES", (torch.float32, torch.float16))
    _forget()
    yield
    _forget()


def _forget():
    for one in (launching._plan, launching._plan_resident, launching._limits):
        one.cache_clear()


class _NotingLauncher(Launcher):
    """Notes its launches."""

    def __init__(self):
        super().__init__(losses_resident_kernel)
        self.noted = []

    def __call__(self, *given, **known):
        self.noted.append(given)
        super().__call__(*given, **known)


@pytest.fixture
def launched(monkeypatch):
    """The launches of the kernel that holds rows."""
    launcher = _NotingLauncher()
    monkeypatch.setattr(launching, "_launch_losses_resident", launcher)
    return launcher.noted


def drawn(num_rows=5, columns=520):
    generator = torch.Generator().manual_seed(num_rows * columns)
    logits = 3 * torch.randn(num_rows, columns, generator=generator)
    return logits, torch.randint(columns, (num_rows,), generator=generator)


def expected_of(logits, targets, options=PLAIN):
    logits = logits.clone().requires_grad_()
    ignored, smoothing, _, reduction = options
    loss = KERNEL.reference(logits, targets, ignored, smoothing, reduction)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("columns", [256, 264, 520, 1_000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradient_are_those_of_torch(launched, columns, reduction):
    logits, targets = drawn(5, columns)
    options = (-100, 0.0, 0.0, reduction)
    found = operator_both(logits, targets, None, *options)
    torch.testing.assert_close(found, expected_of(logits, targets, options), rtol=1e-5, atol=1e-7)
    assert len(launched) == 1


def test_ignored_rows_between_others_have_no_loss_and_no_gradient(launched):
    logits, targets = drawn(9)
    targets[[0, 3, 4, 8]] = -100
    options = (-100, 0.0, 0.0, "mean")
    found = operator_both(logits, targets, None, *options)
    torch.testing.assert_close(found, expected_of(logits, targets, options), rtol=1e-5, atol=1e-7)
    assert launched


@pytest.mark.parametrize("higher", [30.0, 45.0, 87.0, 95.0, 3e4])
def test_a_logit_far_above_the_targets_costs_no_digits(launched, higher):
    logits, targets = drawn(4)
    logits[1, (targets[1] + 1) % 520] = logits[1, targets[1]] + higher
    divisor = torch.tensor(2.0**20)
    loss, gradient = operator_both(logits, targets, divisor, *PLAIN)
    expected_loss, expected = expected_of(logits, targets)
    torch.testing.assert_close(loss * divisor, expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient * divisor, expected, rtol=1e-5, atol=1e-7)
    assert launched


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("where", ["target", "first", "last", "all"])
def test_what_is_no_number_is_treated_as_torch_treats_it(launched, value, where):
    logits, targets = drawn(5)
    targets[1] = 130
    places = {"target": 130, "first": 0, "last": 519, "all": slice(None)}[where]
    logits[1, places] = value
    options = (-100, 0.0, 0.0, "none")
    loss, _ = operator_loss(logits, targets, None, *options)
    expected = KERNEL.reference(logits, targets, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
    _, gradient = operator_both(logits, targets, None, *PLAIN)
    torch.testing.assert_close(
        gradient, expected_of(logits, targets)[1], equal_nan=True, rtol=1e-5, atol=1e-7
    )
    assert launched


def test_a_target_outside_the_vocabulary_makes_its_row_nan(launched):
    logits, targets = drawn(5)
    targets[2] = 520
    _, gradient = operator_both(logits, targets, None, *PLAIN)
    assert gradient[2].isnan().all()
    assert not gradient[[0, 1, 3, 4]].isnan().any()
    assert launched


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_over_the_logits_and_in_two_passes_it_has_the_same_bits(launched, z_loss):
    logits, targets = drawn(7)
    targets[3] = -100
    # About the maximum, too.
    logits[5, (targets[5] + 1) % 520] += 60
    options = (-100, 0.0, z_loss, "mean")
    loss, gradient = operator_both(logits, targets, None, *options)
    loss_alone, state = operator_loss(logits, targets, None, *options)
    later = operator_gradient(torch.ones(()), logits, targets, state, *options)
    over = logits.clone()
    loss_over = operator_both_over(over, targets, None, *options)
    assert are_same([loss, loss, gradient, gradient], [loss_alone, loss_over, later, over])
    assert len(launched) == 3


def test_a_row_has_the_same_bits_whatever_stands_around_it(launched):
    logits, targets = drawn(9)
    _, together = operator_both(logits, targets, None, *PLAIN)
    alone = [operator_both(logits[i : i + 1], targets[i : i + 1], None, *PLAIN)[1] for i in (0, 8)]
    assert are_same([together[[0, 8]]], [torch.cat(alone)])
    assert launched


def test_rows_further_apart_and_sixteen_bits_are_taken(launched):
    logits, targets = drawn(4)
    wide = torch.full((4, 640), math.nan, dtype=torch.float16)
    wide[:, 8:528] = logits
    halves = wide[:, 8:528].requires_grad_()
    loss = cross_entropy(halves, targets)
    (gradient,) = torch.autograd.grad(loss, halves)
    expected_loss, expected = expected_of(
        halves.detach().float(), targets, (-100, 0.0, 0.0, "mean")
    )
    torch.testing.assert_close(loss.detach(), expected_loss)
    torch.testing.assert_close(gradient.float(), expected, rtol=1e-3, atol=1e-5)
    assert launched


@pytest.mark.parametrize("odd", ["columns", "address", "smoothing"])
def test_what_cannot_be_loaded_in_whole_vectors_or_needs_plain_sums_is_left_out(launched, odd):
    logits, targets = drawn(3, 521 if odd == "columns" else 520)
    if odd == "address":
        logits = torch.cat([torch.zeros(1), logits.flatten()])[1:].view(3, 520)
    options = (-100, 0.1 if odd == "smoothing" else 0.0, 0.0, "sum")
    found = operator_both(logits, targets, None, *options)
    torch.testing.assert_close(found, expected_of(logits, targets, options), rtol=1e-5, atol=1e-7)
    assert not launched


@pytest.mark.parametrize(
    ("columns", "num_resident"),
    [(8_192, 0), (16_384, 4), (32_000, 8), (65_536, 6), (128_256, 0)],
)
def test_an_h200_holds_rows_that_fit_its_cache_twice(monkeypatch, columns, num_resident):
    monkeypatch.undo()
    _forget()
    plan = launching._plan_resident(H200, torch.bfloat16, columns, columns, columns, 0)
    assert plan == ((16, 2 * 132, (512, 8, True), num_resident) if num_resident else None)
    assert launching._plan_resident(H200, torch.float32, columns, columns, columns, 0) is None


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_of_rows_that_are_held():
    lengths = (16_384, 32_000, 32_768, 50_304, 65_536)
    cases = [((64, n), dtype) for n in lengths for dtype in ("bfloat16", "float16")]
    assert spills_of(KERNEL, *cases) == []
