"""How far two outputs lie apart."""

import math

import numpy as np
import pytest
import torch

from kprof.ab.functions import difference_of, holds_nan, poison_free_memory


def test_the_difference_is_relative_to_the_norm_of_the_first():
    assert difference_of([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.5 / 4.0)
    assert difference_of(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(0.1)


def test_the_largest_difference_of_all_arrays_counts():
    a = {"logits": torch.ones(4), "state": [torch.ones(2), 1.0]}
    b = {"logits": torch.ones(4), "state": [torch.tensor([1.0, 1.0]), 1.25]}
    assert difference_of(a, b) == pytest.approx(0.25)


@pytest.mark.parametrize("nothing", [None, "text", [], {}])
def test_nothing_to_compare_is_no_difference_of_zero(nothing):
    assert difference_of(nothing, nothing) is None


UNMATCHED = [
    (torch.ones(3), torch.ones(4)),
    (torch.ones(2, 3), torch.ones(3, 2)),
    ([1.0], [1.0, 2.0]),
    (None, 1.0),
    ([1.0], 1.0),
    ({"a": 1.0}, {"b": 1.0}),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])),
    (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
    (torch.tensor([1.0, math.nan]), torch.tensor([math.nan, 1.0])),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.inf])),
    (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
    (torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.nan])),
    (torch.zeros(2), torch.ones(2)),
]


def test_what_does_not_match_is_infinitely_far_apart():
    assert [difference_of(a, b) for a, b in UNMATCHED] == [math.inf] * len(UNMATCHED)


def test_special_values_in_the_same_places_are_no_difference():
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert difference_of(values, values.clone()) == 0.0


def test_the_order_of_keys_is_no_difference():
    assert difference_of({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}) == 0.0


def test_nan_is_found_wherever_it_is():
    assert holds_nan({"a": torch.ones(2), "b": [torch.tensor([1.0, math.nan])]})
    assert not holds_nan([torch.tensor([1.0, math.inf]), torch.tensor([1, 2]), None, "nan"])


def test_zeros_are_like_zeros():
    assert difference_of(torch.zeros(3), torch.zeros(3)) == 0.0


def test_complex_numbers_differ_in_both_parts():
    assert difference_of(torch.tensor([1 + 0j]), torch.tensor([1 + 0.5j])) == pytest.approx(0.5)


def test_numbers_of_16_bits_are_compared_in_double_precision():
    a = torch.full((70_000,), 1.0, dtype=torch.float16)
    assert difference_of(a, a * 2) == 1.0


def test_nan_is_left_where_the_next_outputs_on_a_gpu_will_lie(monkeypatch):

    empty_like, freed = torch.empty_like, []

    class OnGpu(torch.Tensor):
        is_cuda = True

    def noted(leaf):
        freed.append(empty_like(leaf.as_subclass(torch.Tensor)).zero_())
        return freed[-1]

    monkeypatch.setattr(torch, "empty_like", noted)
    numbers, whole = torch.ones(2, 3).as_subclass(OnGpu), torch.ones(4).long().as_subclass(OnGpu)
    poison_free_memory([torch.ones(5), np.ones(5), 1.0, None, {"a": (numbers, whole)}])
    assert [(tuple(one.shape), bool(one.isnan().all())) for one in freed] == [
        ((2, 3), True),
        ((4,), False),
    ]
