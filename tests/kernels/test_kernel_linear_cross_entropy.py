"""Linear layer and cross-entropy in one, in Triton's interpreter: both ways through it."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kprof.kernels.cross_entropy.linear_cross_entropy as ways
from kprof.kernels import Provider
from kprof.kernels.runtime import DifferentiationError
from kprof.kernels.cross_entropy._rows import Options
from kprof.kernels.cross_entropy.linear_cross_entropy import (
    KERNEL,
    linear_cross_entropy,
)
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


@pytest.fixture(params=["time", "memory"])
def saves(request):
    return request.param


@pytest.fixture
def small_pieces(monkeypatch):
    """Cuts 3 rows or more and 67 columns or more into several pieces."""
    monkeypatch.setattr(ways, "LEAST_ROWS", 2)
    monkeypatch.setattr(ways, "MULTIPLE_OF_COLUMNS", 48)


def drawn(rows=7, hidden_size=16, vocabulary=130, dtype=torch.float32, has_bias=False):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, hidden_size, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5
    bias = torch.randn(vocabulary, generator=generator) if has_bias else None
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[1] = -100
    leaves = [one.to(dtype).requires_grad_() for one in (hidden, weight, bias) if one is not None]
    return (*leaves[:2], targets, *leaves[2:])


def results_of(function, arguments, arriving=1.0, **options):
    loss = function(*arguments, **options)
    leaves = [one for one in arguments if one.requires_grad]
    return loss, *torch.autograd.grad(loss, leaves, torch.full_like(loss, arriving))


def kernel_saving(saves):
    def run(*arguments):
        return linear_cross_entropy(*arguments, saves=saves)

    return replace(KERNEL, providers=(Provider("kprof", lambda: run),))


@pytest.mark.slow
def test_the_gate_trusts_it(saves):
    assert why_untrusted(kernel_saving(saves), (3, 8, 37), dtypes=("float32",)) == ""


@pytest.mark.slow
def test_it_is_no_less_accurate_than_what_it_replaces(saves, small_pieces):
    assert why_inaccurate(kernel_saving(saves), (3, 16, 130), num_values=1_000) == ""


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_layer_and_the_loss(
    saves, small_pieces, options, has_bias
):
    arguments = drawn(has_bias=has_bias)
    found = results_of(linear_cross_entropy, arguments, 0.5, saves=saves, **options)
    expected = results_of(reference, arguments, 0.5, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0.25, 0.0), (3.0, 0.0), (1.0, 0.7), (0.5, 30.0)])
def test_logits_that_are_scaled_or_capped_have_the_loss_and_gradients_of_the_mathematics(
    shape, saves, small_pieces
):
    arguments = drawn(has_bias=True)
    options = dict(zip(("scale", "cap"), shape, strict=True))
    exact = [one.detach().double() if one.is_floating_point() else one for one in arguments]
    exact = [one.requires_grad_() if one.is_floating_point() else one for one in exact]

    found = results_of(linear_cross_entropy, arguments, saves=saves, **options)

    expected = results_of(reference, exact, **options)
    torch.testing.assert_close([one.double() for one in found], [*expected], rtol=1e-5, atol=1e-6)


def test_pieces_give_what_the_whole_gives(monkeypatch):
    arguments = drawn()
    whole = results_of(linear_cross_entropy, arguments, saves="memory", z_loss=1e-3)
    sizes = []
    monkeypatch.setattr(ways, "_chunk_shape", lambda hidden, weight: sizes.append(1) or (3, 50))
    pieces = results_of(linear_cross_entropy, arguments, saves="memory", z_loss=1e-3)
    assert len(sizes) == 2
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


def test_blocks_of_rows_are_added_up_in_float32(monkeypatch):
    arguments = drawn(rows=64, dtype=torch.bfloat16)
    whole = results_of(linear_cross_entropy, arguments)
    monkeypatch.setattr(ways, "_rows_per_block", lambda hidden, weight: 1)
    found = results_of(linear_cross_entropy, arguments)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    # One more rounding to bfloat16 would be 2e-3; those of 64 sums are 1e-2.
    off = (found[2].float() - whole[2].float()).norm() / whole[2].float().norm()
    assert off < 3e-3


def test_a_mean_without_any_target_that_counts_is_nan_with_gradients_of_zero(saves):
    hidden, weight, targets = drawn()
    targets[:] = -100
    loss, *gradients = results_of(linear_cross_entropy, (hidden, weight, targets), saves=saves)
    assert loss.isnan()
    assert not any(one.any() for one in gradients)


def test_a_target_outside_the_vocabulary_makes_its_loss_nan(saves):
    hidden, weight, targets = drawn()
    targets[3] = 130
    with torch.no_grad():
        losses = linear_cross_entropy(hidden, weight, targets, reduction="none", saves=saves)
    assert losses.isnan().nonzero().tolist() == [[3]]


def test_a_given_divisor_takes_the_place_of_the_count(saves):
    arguments = drawn()
    found = results_of(linear_cross_entropy, arguments, saves=saves, divisor=12)
    expected = results_of(reference, arguments, 1 / 12, reduction="sum")
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[0], expected[0] / 12)


def test_unrequested_gradients_are_not_made(saves):
    hidden, weight, targets = drawn()
    loss = linear_cross_entropy(hidden.detach(), weight, targets, saves=saves)
    (found,) = torch.autograd.grad(loss, weight)
    expected = torch.autograd.grad(reference(hidden.detach(), weight, targets), weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_second_backward_pass_gives_the_same_gradients(saves):
    hidden, weight, targets = drawn()
    loss = linear_cross_entropy(hidden, weight, targets, saves=saves) * 3
    first = [one.clone() for one in torch.autograd.grad(loss, (hidden, weight), retain_graph=True)]
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_gradient_of_a_gradient_is_refused(saves):
    hidden, weight, targets = drawn()
    loss = linear_cross_entropy(hidden, weight, targets, saves=saves)
    with pytest.raises(DifferentiationError):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_float16_gradient_that_only_its_scaler_keeps_from_underflow_survives():
    hidden, weight, targets = drawn(rows=2, vocabulary=4_000, dtype=torch.float16)
    targets[1] = 5
    options = {"divisor": 8_192, "arriving": 65_536.0}
    _, _, gradient = results_of(linear_cross_entropy, (hidden, weight, targets), **options)
    assert (gradient != 0).float().mean() > 0.99


def test_under_autocast_the_product_is_in_16_bits(saves):
    arguments = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        found = results_of(linear_cross_entropy, arguments, saves=saves)
    expected = results_of(reference, arguments)
    assert [one.dtype for one in found] == [torch.float32] * 3
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=0)
    assert not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("rows", [8_192, 16_384])
@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 262_144])
def test_saving_memory_a_piece_and_a_sum_take_less_than_a_twentieth_of_the_logits(rows, vocabulary):
    hidden = torch.empty(rows, 4_096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(vocabulary, 4_096, dtype=torch.bfloat16, device="meta")
    rows_each, columns_each = ways._chunk_shape(hidden, weight)
    taken = rows_each * columns_each * 2 + rows_each * 4_096 * 4
    assert taken <= rows * vocabulary * 2 / 20
    assert columns_each >= 1_024


@pytest.mark.parametrize(("rows", "each"), [(2_048, 2_048), (8_192, 4_096), (65_536, 2_048)])
def test_saving_time_logits_are_made_in_halves_only_where_those_are_small(rows, each):
    weight = torch.empty(128_256, 4_096, dtype=torch.bfloat16, device="meta")
    assert ways._rows_per_block(weight.new_empty(rows, 4_096), weight) == each


def test_saving_time_half_the_logits_and_the_gradients_are_a_quarter_of_what_eager_needs():
    weight = torch.empty(128_256, 4_096, dtype=torch.bfloat16, device="meta")
    hidden = weight.new_empty(8_192, 4_096)
    rows_each = ways._rows_per_block(hidden, weight)
    taken = 2 * (rows_each * 128_256 + weight.numel() + hidden.numel())
    # What eager torch was measured to need.
    assert taken <= 11.8e9 / 4


class Strides(TorchDispatchMode):
    """Notes the elements between rows of the logits that GEMMs write and read."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.seen = vocabulary, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [*args, *(kwargs or {}).values()]
        logits = [one for one in tensors if getattr(one, "shape", ())[-1:] == (self.vocabulary,)]
        if "mm" in function.__name__:
            self.seen += [one.stride(0) for one in logits if one.dim() == 2 and one.stride(1) == 1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("vocabulary", "stride"), [(130, 192), (50, 64), (128, 128), (136, 136)])
def test_saving_time_rows_of_logits_begin_where_a_gemm_can_load_them(vocabulary, stride):
    hidden, weight, targets = drawn(vocabulary=vocabulary, dtype=torch.bfloat16)
    options = Options(-100, 0.0, 0.0, "mean")
    with torch.no_grad(), Strides(vocabulary) as strides:
        ways.run_by_rows(hidden, weight, None, targets, None, options, (True, True, False))
    assert set(strides.seen) == {stride}


def test_two_blocks_of_rows_are_added_up_without_a_sum_in_float32(monkeypatch):
    arguments = drawn(rows=64, dtype=torch.bfloat16)
    whole = results_of(linear_cross_entropy, arguments)
    dtypes = []
    add = ways.add_product
    monkeypatch.setattr(
        ways,
        "add_product",
        lambda sums, *rest, **more: dtypes.append(sums.dtype) or add(sums, *rest, **more),
    )
    monkeypatch.setattr(ways, "_rows_per_block", lambda hidden, weight: 32)
    found = results_of(linear_cross_entropy, arguments)
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    off = (found[2].float() - whole[2].float()).norm() / whole[2].float().norm()
    assert off < 3e-3


@COMPILED
def test_it_compiles_without_a_graph_break_to_the_same_bits(saves):
    hidden, weight, targets = drawn()

    def step(hidden, weight, targets):
        return linear_cross_entropy(hidden * 2, weight, targets, saves=saves)

    found = results_of(compiled(step), (hidden, weight, targets))
    expected = results_of(step, (hidden, weight, targets))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"targets": torch.zeros(7, dtype=torch.int32)}, "int64"),
        ({"targets": torch.zeros(8, dtype=torch.int64)}, "shape"),
    ],
    ids=["dtype", "index", "shape"],
)
def test_what_it_cannot_take_is_refused_with_a_reason(changes, reason):
    hidden, weight, targets = drawn(dtype=changes.get("dtype", torch.float32))
    assert reason in KERNEL.refuses(hidden, weight, changes.get("targets", targets))
    assert KERNEL.refuses(*drawn()) is None


class Sharded(torch.Tensor):
    """Stands for a DTensor, of which a program sees its own part only."""


def test_tensors_that_are_more_than_they_hold_are_refused():
    hidden, weight, targets = drawn()
    assert "Sharded" in KERNEL.refuses(hidden, weight.detach().as_subclass(Sharded), targets)


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_on_the_default_shapes():
    cases = [((4, 8, shape[2]), dtype) for shape in KERNEL.shapes for dtype in KERNEL.dtypes]
    assert spills_of(KERNEL, *cases) == []
