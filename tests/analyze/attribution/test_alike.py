"""Launches of the same kernel over the same grid share their work."""

import itertools
import random

import numpy as np
import pytest

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.roofline.launch_work import SAME_TIME, SAME_TIME_NS, SAME_WORK, find_alike
from tests.traces import table_of


def like(*launches, kind="other"):
    """Return the rows that are alike; a launch is (name, grid, duration, bytes or None)."""
    table = table_of(
        "kernels",
        [
            {"name": name, "grid": grid, "duration_ns": duration_ns, "kind": kind}
            for name, grid, duration_ns, _ in launches
        ],
    )
    num_bytes = np.array([moved or 0 for *_, moved in launches])
    is_known = np.array([moved is not None for *_, moved in launches])
    return find_alike(table, is_known, num_bytes).tolist()


def test_a_launch_without_known_work_finds_the_nearest_in_time():
    found = like(
        ("k", "8,1,1", 9_500, 64), ("k", "8,1,1", 10_100, 64), ("k", "8,1,1", 10_200, None)
    )
    assert found == [NO_ROW, NO_ROW, 1]


def test_another_kernel_or_grid_is_not_alike():
    assert like(("k", "8,1,1", 100, 64), ("k", "9,1,1", 100, None)) == [NO_ROW, NO_ROW]
    assert like(("k", "8,1,1", 100, 64), ("l", "8,1,1", 100, None)) == [NO_ROW, NO_ROW]


def test_launches_of_different_work_that_took_as_long_tell_nothing():
    known = ("k", "8,1,1", 10_000, 64), ("k", "8,1,1", 10_100, 128)
    assert like(*known, ("k", "8,1,1", 10_050, None))[2] == NO_ROW


def test_of_different_work_that_took_another_time_the_one_as_long_counts():
    known = ("k", "8,1,1", 10_000, 64), ("k", "8,1,1", 30_000, 192)
    assert like(*known, ("k", "8,1,1", 29_000, None))[2] == 1


def test_a_launch_that_took_much_longer_than_all_known_ones_is_not_alike():
    assert like(("k", "8,1,1", 200_000, 64), ("k", "8,1,1", 2_700_000, None))[1] == NO_ROW


def test_a_launch_without_a_grid_is_not_alike():
    assert like(("k", None, 100, 64), ("k", None, 100, None)) == [NO_ROW, NO_ROW]


def test_a_collective_is_not_alike_because_it_waits_for_others():
    known = ("k", "8,1,1", 100, 64)
    assert like(known, ("k", "8,1,1", 100, None), kind="collective") == [NO_ROW, NO_ROW]


@pytest.mark.parametrize("seed", range(20))
def test_of_all_launches_of_a_kernel_the_nearest_in_time_is_alike_if_all_near_ones_did_as_much(
    seed,
):
    chance = random.Random(seed)
    longest = chance.choice([30_000, 3_000_000])
    rows = [
        (
            chance.choice("kl"),
            chance.choice(["8,1,1", "9,1,1"]),
            chance.randint(1, longest),
            chance.choice([None, None, 1_000, 1_000, 1_001, 1_020, 2_000]),
        )
        for _ in range(40)
    ]
    found = like(*rows)
    for (name, grid, took, num_bytes), at in zip(rows, found, strict=True):
        reach = max(SAME_TIME * took, SAME_TIME_NS)
        near = sorted(
            (row[2], row[3])
            for row in rows
            if row[3] is not None and row[:2] == (name, grid) and abs(row[2] - took) <= reach
        )
        pairs = itertools.pairwise(work for _, work in near)
        are_same = all(max(pair) - min(pair) <= SAME_WORK * max(pair) for pair in pairs)
        if num_bytes is not None or not near or not are_same:
            assert at == NO_ROW
        else:
            assert (rows[at][:2], rows[at][3] is None) == ((name, grid), False)
            assert abs(rows[at][2] - took) == min(abs(one - took) for one, _ in near)
