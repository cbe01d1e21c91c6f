"""What the host launches late after a wait is the wait's, as far as it cost the lead."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.idle.queue_starvation import find_starvation
from kprof.analyze.intervals import Intervals, cut, disjoint, length_before, paint


def intervals(*rows):
    start, end, row = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Intervals(start, end, row)


def starvation(waits, pieces, launched=(), busy=((0, 100, 0),)):
    start, end = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    held, worked = intervals(*waits), intervals(*busy)
    held_ns = length_before(worked, held.end) - length_before(worked, held.start)
    found = find_starvation(held, held_ns, np.array(launched, dtype=np.int64), start, end)
    columns = (found.piece, found.taken_ns, found.row)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_wait_explains_as_much_as_it_held_the_host_while_the_device_was_busy():
    pieces = [(110, 130), (150, 190), (200, 210)]
    assert starvation([(60, 110, 5)], pieces) == [(0, 20, 5), (1, 20, 5)]


def test_a_wait_on_an_idle_device_explains_nothing_that_comes_after_it():
    assert starvation([(100, 300, 5)], [(300, 330)]) == []


def test_no_lead_is_longer_than_what_can_be_queued():
    launched = [*range(110, 140), *[145] * 1000]
    pieces = [(110, 130), (140, 145), (150, 190)]
    assert starvation([(0, 110, 5)], pieces, launched) == [(0, 20, 5), (1, 5, 5)]


def test_nothing_before_its_end_is_a_waits():
    assert starvation([(0, 110, 5)], [(100, 109), (150, 190)]) == [(1, 40, 5)]


def test_of_two_waits_the_one_that_cost_more_explains_first():
    assert starvation([(90, 105, 5), (20, 90, 6)], [(110, 130)]) == [(0, 20, 6)]


def test_the_union_gives_every_moment_to_what_started_first():
    union = disjoint(intervals((10, 30, 1), (0, 20, 2), (25, 28, 3)))
    assert list(zip(union.start, union.end, union.row, strict=True)) == [(0, 20, 2), (20, 30, 1)]


def test_how_much_of_a_union_lies_before_a_moment():
    union = intervals((10, 20, 1), (30, 40, 2))
    assert length_before(union, np.array([0, 15, 25, 35, 99])).tolist() == [0, 5, 10, 15, 20]


SPAN = st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 5))


@given(st.lists(st.lists(SPAN, min_size=1, max_size=5), max_size=4), SPAN)
def test_a_cut_shows_at_every_moment_the_topmost_layer_that_covers_it(layers, asked):
    unions = [disjoint(intervals(*((s, s + n, row) for s, n, row in rows))) for rows in layers]
    painting = paint(unions)
    start, end = asked[0], asked[0] + asked[1]
    cuts = cut(np.array([start]), np.array([end]), painting)
    shown = {}
    for segment, begin, finish in zip(cuts.segment, cuts.start, cuts.end, strict=True):
        shown |= dict.fromkeys(range(begin, finish), painting.layer[segment])
    for moment in range(start, end):
        covering = [
            number
            for number, rows in enumerate(layers)
            if any(s <= moment < s + n for s, n, _ in rows)
        ]
        assert shown[moment] == max(covering, default=-1)
    assert len(shown) == end - start
