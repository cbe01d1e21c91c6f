"""What the gate gives to functions: values, layouts, shapes, and memory that is watched."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from kprof.kernels.correctness.inputs import Draw, bulk_cases, edge_shapes, place
from kprof.kernels.correctness.memory import LARGE_BYTE, Guarded, poison_freed
from kprof.kernels.correctness.observe import draw, expandable, observe
from kprof.kernels.correctness.subject import DISTRIBUTIONS, Case
from tests.kernels.correctness.doubling import DOUBLED, new_is

# Memory


@pytest.mark.parametrize("layout", ["contiguous", "padded", "transposed"])
def test_a_placed_tensor_keeps_its_values_between_guards(layout):
    tensor = torch.arange(12.0).view(3, 4)
    placed = place(tensor, layout)
    assert torch.equal(placed.view, tensor)
    assert not placed.was_changed() and not placed.was_overrun()


def test_a_write_beside_a_placed_tensor_is_an_overrun_and_one_inside_a_change():
    beside, inside = place(torch.ones(4), "contiguous"), place(torch.ones(4), "contiguous")
    beside.view.as_strided((1,), (1,), beside.view.storage_offset() + 4).zero_()
    inside.view[3] = 0
    assert (beside.was_overrun(), beside.was_changed()) == (True, False)
    assert (inside.was_overrun(), inside.was_changed()) == (False, True)


def test_as_much_memory_is_poisoned_twice_as_the_results_will_take(monkeypatch):
    taken, full = [], torch.full

    def noted(shape, byte, **more):
        taken.append((shape, byte))
        return full(shape, byte, **more)

    monkeypatch.setattr(torch, "full", noted)
    poison_freed([torch.empty(3, 4), torch.empty(0)], LARGE_BYTE)
    assert taken == [((48,), LARGE_BYTE)] * 2 + [((1,), LARGE_BYTE)] * 2


def test_a_padded_layout_is_neither_dense_nor_aligned():
    view = place(torch.ones(3, 4), "padded").view
    assert view.stride() == (25, 5) or not view.is_contiguous()
    assert view.storage_offset() * view.element_size() % 16


def test_a_far_layout_has_offsets_that_32_bits_do_not_reach():
    view = place(torch.ones(3, 4), "far").view
    assert 2 * view.stride(0) >= 2**31
    assert torch.equal(view, torch.ones(3, 4))


def test_uninitialised_memory_comes_poisoned_and_guarded():
    with Guarded() as guarded:
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, dtype=torch.int64)).eq(-1).all()
    assert not any(guarded.was_overrun())


def test_a_write_past_the_end_of_what_was_allocated_is_noticed():
    with Guarded(LARGE_BYTE) as guarded:
        made = torch.empty(3)
        made.as_strided((4,), (1,), made.storage_offset()).zero_()
    assert any(guarded.was_overrun())


# Inputs


def test_a_case_draws_the_same_values_every_time_and_another_seed_others():
    case = Case((4, 8), "bfloat16", seed=3)
    one, two = draw(DOUBLED, case)[0], draw(DOUBLED, case)[0]
    assert torch.equal(one, two)
    assert not torch.equal(one, draw(replace(DOUBLED, seed=1), case)[0])


@pytest.mark.parametrize(("rows", "which"), [((), (0, 1)), ((1,), (1,)), ((1, 5), (1,))])
def test_one_row_may_stand_for_all_in_matrices_that_the_rows_name_or_in_any(rows, which):
    arguments = torch.ones(4, 8), torch.ones(4, 8)
    assert expandable(replace(DOUBLED, rows=rows), arguments) == which


@pytest.mark.parametrize(
    ("argument", "writes"),
    [
        (torch.ones(8), ()),
        (torch.ones(4, 8, dtype=torch.int64), ()),
        (2.0, ()),
        (torch.ones(4, 8), (0,)),
    ],
)
def test_vectors_whole_numbers_and_what_is_written_keep_their_rows(argument, writes):
    assert expandable(replace(DOUBLED, rows=(), writes=writes), (argument,)) == ()


def test_edge_shapes_are_one_and_one_off_the_size_and_off_the_tile_below_it():
    subject = replace(DOUBLED, shapes=((100, 7),), free=(0,))
    assert edge_shapes(subject) == [(1, 7), (63, 7), (65, 7), (99, 7), (101, 7)]


@pytest.mark.parametrize(
    ("distribution", "holds"),
    [
        ("normal", lambda x: 0.9 < x.std() < 1.1),
        ("zeros", lambda x: x.eq(0).all()),
        ("half_zero", lambda x: x[:16].eq(0).all() and x[16:].ne(0).all()),
        ("large", lambda x: 900 < x.std() < 1_100),
        ("small", lambda x: 0.9e-3 < x.std() < 1.1e-3),
        ("offset", lambda x: 7.9 < x.mean() < 8.1),
        ("nonfinite", lambda x: not x.flatten()[-1].isfinite()),
    ],
)
def test_a_distribution_is_what_its_name_says(distribution, holds):
    assert holds(Draw(Case((32, 64), "float32", distribution), DOUBLED)(32, 64))


def test_one_column_in_fifty_is_an_outlier_fifty_times_as_large():
    spread = Draw(Case((64, 4_000), "float32", "outliers"), DOUBLED)(64, 4_000).std(0)
    is_outlier = spread > 10
    assert 0.016 < is_outlier.float().mean() < 0.024
    assert 48 < spread[is_outlier].mean() < 52


def test_rounds_after_every_shape_was_in_every_layout_have_twice_the_rows_each():
    without = replace(DOUBLED, differentiable=(), distributions=("normal",))
    subject = replace(without, layouts=("contiguous", "padded"))
    cases = islice(bulk_cases(subject, "float32", lambda: True), 5)
    assert [case.shape for case in cases] == [(8, 16), (8, 16), (16, 16), (32, 16), (64, 16)]
    summed = islice(bulk_cases(replace(subject, differentiable=(0,)), "float32", lambda: True), 5)
    assert [case.shape for case in summed] == [(8, 16)] * 5


def test_rounds_grow_no_further_than_a_reach_and_not_where_such_calls_are_refused():
    subject = replace(
        DOUBLED, distributions=("normal",), layouts=("contiguous",), reach=(20,), free=(0,)
    )
    subject = replace(subject, differentiable=())
    taken = islice(bulk_cases(subject, "float32", lambda: True), 4)
    assert [case.shape[0] for case in taken] == [8, 16, 20, 20]
    refused = islice(bulk_cases(subject, "float32", lambda: False), 4)
    assert [case.shape[0] for case in refused] == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3, 4), (4, 8, 1)), ((5, 1, 4), (4, 20, 1)), ((3, 4), (4, 1))]
)
def test_a_permuted_layout_has_its_first_dimension_next_to_the_columns(shape, strides):
    tensor = torch.randn(shape)
    view = place(tensor, "permuted").view
    assert view.stride() == strides
    assert torch.equal(view, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shifted_layout_is_aligned_to_sixteen_bytes_alone(dtype):
    view = place(torch.randn(6, 8).to(dtype), "shifted").view
    assert view.is_contiguous()
    assert view.data_ptr() % 32 == 16


def test_gradients_go_through_guarded_memory_that_is_assigned_in_parts():
    x = torch.arange(6.0).requires_grad_()
    with Guarded() as guarded:
        out = torch.empty_like(x)
        out[::2], out[1::2] = 2 * x[:3], 3 * x[3:]
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.tolist() == [2, 2, 2, 3, 3, 3]
    assert not any(guarded.was_overrun())


@pytest.mark.parametrize("distribution", ["zeros", "half_zero"])
def test_zeros_have_both_signs(distribution):
    (x,) = draw(DOUBLED, Case((8, 16), "float32", distribution))
    zeros = x[x == 0]
    assert 0 < int(torch.signbit(zeros).sum()) < len(zeros)


def test_a_second_gradient_that_does_not_reach_an_argument_is_zero():
    def kinked(x, y):
        return x * x + y * x.sign()

    two = {"inputs": lambda shape, draw: (draw(*shape), draw(*shape)), "differentiable": (0, 1)}
    subject = new_is(kinked, truth=kinked, **two)
    case = Case((8, 16), "float32", context="double_backward")
    found = observe(kinked, subject, case, draw(subject, case)).results
    assert found["gradient of x"].all()
    assert not found["gradient of y"].any()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_weights_are_tame_in_every_distribution_and_of_both_signs_where_rows_have_one(distribution):
    weights = Draw(Case((8, 16), "float32", distribution), DOUBLED).plain(
        4_000, scale=0.5, shift=3.0
    )
    sizes, share_below = weights.abs(), float((weights < 0).double().mean())
    assert (2.9 < sizes.mean() < 3.1, 0.45 < sizes.std() < 0.55) == (True, True)
    assert (0.45 < share_below < 0.55) if distribution == "negative" else share_below == 0


def test_distributions_of_rows_have_the_sizes_and_signs_that_they_name():
    def drawn(distribution, *shape):
        return Draw(Case(shape, "float64", distribution), DOUBLED)(*shape)

    assert drawn("negative", 32, 64).lt(0).all()
    # Rows of a thousandth to ten, evenly over the powers of ten.
    sizes = drawn("uneven", 2_000, 64).square().mean(-1).sqrt().log10()
    assert (-3.2 < sizes.min() < -2.8, 0.8 < sizes.max() < 1.2) == (True, True)
    assert -1.1 < sizes.mean() < -0.9
    assert drawn("half_zero", 3, 5).flatten().eq(0).sum() == 8
    numbers = drawn("nonfinite", 4, 8).flatten()
    special = [numbers.isnan().sum(), numbers.isposinf().sum(), numbers.isneginf().sum()]
    assert [int(one) for one in special] == [1, 1, 1]
