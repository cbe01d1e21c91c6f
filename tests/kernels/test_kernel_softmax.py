"""Softmax: numbers, edges, rows read at once and in parts, gradients, compilers."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math

import pytest
import torch

import kprof.kernels.softmax as module
from kprof.kernels.softmax import KERNEL, softmax
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    are_same,
    compiled,
    errors_against_truth,
    results_of,
    rows,
    spills_of,
    why_inaccurate,
    why_untrusted,
)

pytestmark = INTERPRETED
INFINITY = math.inf


@pytest.fixture(params=["at once", "in parts"])
def reading(request, monkeypatch):
    """Reads rows at once, or as the rows of large vocabularies are read: 16 columns at a time."""
    if request.param == "in parts":
        monkeypatch.setattr(module, "FORWARD_BYTES", 0)
        monkeypatch.setattr(module, "BACKWARD_COLUMNS", 0)
        monkeypatch.setattr(module, "PART", 16)


@pytest.mark.slow
def test_the_gate_trusts_it_on_rows_that_are_no_power_of_two(reading):
    assert why_untrusted(KERNEL, (3, 37)) == ""


def test_it_is_no_less_accurate_than_what_it_replaces(reading):
    assert why_inaccurate(KERNEL, (3, 37)) == ""


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 3, 65), (2, 2_049)])
def test_rows_of_any_length_have_the_right_softmax_and_gradients(reading, shape):
    assert errors_against_truth(KERNEL, softmax, (rows(*shape),)) < 2e-6


def test_a_row_longer_than_the_registers_is_read_in_parts():
    x = rows(1, 32_769)
    assert errors_against_truth(KERNEL, softmax, (x,)) < 2e-6


def test_rows_sum_to_one(reading):
    torch.testing.assert_close(softmax(10.0 * rows(5, 77)).sum(-1), torch.ones(5))


def test_a_constant_added_to_a_row_changes_nothing(reading):
    x = torch.arange(100.0).reshape(2, 50) / 8
    assert are_same([softmax(x + 64.0)], [softmax(x)])


def test_large_values_do_not_overflow(reading):
    x = torch.tensor([[1e30, 0.0, -1e30], [-1e30, -1e30, -1e30]])
    assert are_same([softmax(x)], [torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])])


def test_masked_columns_get_nothing_wherever_they_stand(reading):
    x = torch.zeros(2, 40)
    x[0, :20] = x[1, 20:] = -INFINITY
    expected = torch.zeros(2, 40)
    expected[0, 20:] = expected[1, :20] = 0.05
    torch.testing.assert_close(softmax(x), expected)


@pytest.mark.parametrize("bad", [math.nan, INFINITY])
def test_what_is_no_finite_number_spoils_its_row_alone_as_in_torch(reading, bad):
    x = rows(3, 40)
    x[1, 25] = bad
    x[2] = -INFINITY
    assert softmax(x).isnan().all(-1).tolist() == [False, True, True]
    assert torch.softmax(x, -1).isnan().all(-1).tolist() == [False, True, True]


def test_rows_apart_and_columns_apart_are_read_where_they_are(reading):
    apart, turned = rows(4, 2, 24)[:, 1], rows(24, 4).t()
    assert are_same([softmax(apart)], [softmax(apart.contiguous())])
    assert are_same([softmax(turned)], [softmax(turned.contiguous())])


def test_a_rows_bits_do_not_depend_on_the_rows_around_it(reading):
    x = rows(70, 100)
    alone = torch.cat([softmax(x[i : i + 1]) for i in (0, 41, 69)])
    assert are_same([softmax(x)[[0, 41, 69]]], [alone])


def test_the_gradient_of_a_rows_sum_is_nothing(reading):
    x = rows(3, 50).requires_grad_()
    softmax(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros(3, 50))


def test_no_rows_give_no_rows_and_no_columns_no_columns():
    assert softmax(rows(0, 16)).shape == (0, 16)
    assert [one.shape for one in results_of(softmax, (rows(3, 0),), (0,))] == [(3, 0), (3, 0)]


@COMPILED
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_the_same_when_compiled_in_one_graph(dynamic):
    x = rows(3, 40)
    assert are_same(
        results_of(compiled(softmax, dynamic), (x,), (0,)), results_of(softmax, (x,), (0,))
    )


def test_its_operators_keep_torchs_rules():
    torch.library.opcheck(torch.ops.kprof.softmax.default, (rows(3, 40),))
    torch.library.opcheck(torch.ops.kprof.softmax_backward.default, (rows(3, 40), rows(3, 40)))


def test_what_it_cannot_do_it_refuses():
    assert "not float32" in KERNEL.refuses(torch.zeros(2, 2, dtype=torch.float64))
    assert "no rows" in KERNEL.refuses(torch.tensor(1.0))
    assert KERNEL.refuses(torch.zeros(2, 2)) is None


def test_under_autocast_torch_widens_what_this_does_not():
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in KERNEL.refuses(torch.zeros(2, 2).bfloat16())
        assert KERNEL.refuses(torch.zeros(2, 2)) is None
    assert KERNEL.refuses(torch.zeros(2, 2).bfloat16()) is None


@pytest.mark.slow
def test_nothing_spills_on_hopper_for_the_default_shapes():
    lengths = (2_048, 4_096, 8_192, 32_000, 128_256)
    assert (
        spills_of(KERNEL, *[((2, n), dtype) for n in lengths for dtype in ("bfloat16", "float32")])
        == []
    )
