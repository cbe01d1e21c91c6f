"""Launches that were not seen, in a sequence whose others repeat."""

import numpy as np
import pytest

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.attribution.steps import find_period, find_recurring
from kprof.analyze.roofline.bound import add_roofline
from tests.analyze.calls import recorded, tensor
from tests.traces import ROUND_DEVICE, trace_of

SMALL, LARGE = tensor("bf16", 10, 100), tensor("bf16", 1000, 1000)
OPERATORS = [
    {"name": "aten::copy_", **recorded(SMALL, SMALL, False)},
    {"name": "aten::copy_", **recorded(LARGE, LARGE, False)},
]


def rows(*names, first_ns=0, **columns):
    return [
        {"name": name, "start_ns": first_ns + 10 * n, "duration_ns": 5, **columns}
        for n, name in enumerate(names)
    ]


def found(kernels, is_seen, num_bytes):
    trace = trace_of(*kernels)
    return find_recurring(trace.kernels, np.array(is_seen), np.array(num_bytes)).tolist()


@pytest.mark.parametrize(
    ("values", "period"),
    [
        ([1, 2, 1, 2], 2),
        ([1, 2, 1, 2, 1], 2),
        ([3, 3, 3], 1),
        ([1, 1, 2, 1, 1, 2], 3),
        ([1, 2, 1], None),
        ([1, 2, 1, 3], None),
        ([], None),
    ],
)
def test_what_repeats_does_so_as_a_whole_and_at_least_twice(values, period):
    assert find_period(np.array(values)) == period


def test_what_began_before_the_recording_is_what_comes_in_its_place_later():
    kernels = rows("b", "a", "b", "a", "b")
    assert found(kernels, [False, True, True, True, True], [-1, 10, 20, 10, 20])[0] == 2


def test_what_comes_after_the_last_that_was_seen_goes_on_as_well():
    kernels = rows("a", "b", "a", "b", "a")
    assert found(kernels, [True, True, True, True, False], [10, 20, 10, 20, -1])[4] == 0


def test_the_same_kernel_with_another_work_does_not_repeat():
    kernels = rows("b", "a", "b", "a", "b")
    like = found(kernels, [False, True, True, True, True], [-1, 10, 20, 10, 99])
    assert like == [NO_ROW] * 5


def test_another_kernel_ends_what_goes_on():
    kernels = rows("b", "x", "b", "a", "b", "a", "b")
    seen = [False, False, False, True, True, True, True]
    assert found(kernels, seen, [-1, -1, -1, 10, 20, 10, 20])[:3] == [NO_ROW, NO_ROW, 4]


def test_another_grid_is_another_kernel_but_a_missing_one_is_none():
    kernels = rows("a", "a", grid="2,1,1") + rows("a", "a", first_ns=20, grid="1,1,1")
    seen, work = [False, False, True, True], [-1, -1, 10, 10]
    assert found(kernels, seen, work) == [NO_ROW] * 4
    unknown = [{**kernel, "grid": None} for kernel in kernels[:2]] + kernels[2:]
    assert found(unknown, seen, work)[:2] == [2, 2]


def test_every_stream_repeats_by_itself():
    kernels = rows("a", "a", "a", stream=7) + rows("a", "b", first_ns=5, stream=8)
    seen = [False, True, True, False, True]
    assert found(kernels, seen, [-1, 10, 10, -1, 10]) == [1, NO_ROW, NO_ROW, NO_ROW, NO_ROW]


def test_work_of_a_launch_that_was_not_seen_comes_from_its_place_in_the_next_step():
    names = ("first", "second", "first", "second", "first", "second")
    kernels = [
        {**kernel, "bucket": "attributed", "op_row": n % 2}
        for n, kernel in enumerate(rows(*names, duration_ns=5_000_000))
    ]
    kernels[0] |= {"bucket": "orphan", "op_row": None}
    kernels[1] |= {"bucket": "orphan", "op_row": None}
    trace = trace_of(
        *kernels, ranges=OPERATORS * 2, passes=("attribute", "classify"), device=ROUND_DEVICE
    )
    trace.kernels.loc[4:5, "op_row"] = [2, 3]
    rows_found = add_roofline(trace).kernels
    assert rows_found["bytes"].tolist() == [4000, 4_000_000] * 3
    assert rows_found["work_from"].tolist() == ["alike"] * 2 + ["shapes"] * 4
