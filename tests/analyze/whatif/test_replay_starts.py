"""Nodes of a replay start as early as their edges allow, however many of them are chained."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from kprof.analyze.whatif.replay import (
    LONG_AGO_NS,
    earliest_starts,
    find_chains,
    largest_so_far,
    student_quantile,
    without_edges,
)


@st.composite
def graphs(draw):
    """Draw nodes, the first of them points of the host, in any order of time, and their edges."""
    points, activities = draw(st.integers(1, 12)), draw(st.integers(0, 16))
    number = points + activities
    # Points, and activities of a stream, mostly lie in time as they are numbered.
    moments = np.array(draw(st.lists(st.integers(0, 20), min_size=number, max_size=number)))
    if draw(st.booleans()):
        moments[:points], moments[points:] = np.sort(moments[:points]), np.sort(moments[points:])
    place = np.empty(number, dtype=np.int64)
    place[np.argsort(moments, kind="stable")] = np.arange(number)
    edges = {(at - 1, at) for at in range(1, number) if at != points and draw(st.booleans())}
    edges |= {(draw(st.integers(0, points - 1)), at) for at in range(points, number)}
    any_node = st.integers(0, number - 1)
    edges |= draw(st.sets(st.tuples(any_node, any_node), max_size=6))
    kept = [(one, other) for one, other in edges if place[one] < place[other]]
    kept = sorted(kept, key=lambda edge: (place[edge[1]], draw(st.integers(0, 3))))
    lags = draw(st.lists(st.integers(0, 9), min_size=len(kept), max_size=len(kept)))
    source, target = np.array(kept, dtype=np.int64).reshape(-1, 2).T
    base = np.where(np.isin(np.arange(number), target), LONG_AGO_NS, moments)
    return base, source, target, np.array(lags, dtype=np.int64), points


def one_by_one(base, source, target, lag_ns):
    """Return the starts the slow way."""
    start = base.tolist()
    for come, at, lag in zip(source.tolist(), target.tolist(), lag_ns.tolist(), strict=True):
        start[at] = max(start[at], start[come] + lag)
    return start


@given(graphs())
def test_starts_are_those_of_the_edges_taken_one_by_one(graph):
    base, source, target, lag_ns, points = graph
    found = earliest_starts(base, source, target, lag_ns, points)
    assert found.tolist() == one_by_one(base, source, target, lag_ns)


def test_a_launch_holds_all_that_follows_it_on_the_stream():
    # Two points of the host, 0 and 1, and three activities in turn; the second waits for point 1.
    base = np.array([0, LONG_AGO_NS, LONG_AGO_NS, LONG_AGO_NS, LONG_AGO_NS])
    source, target = np.array([0, 0, 1, 2, 3, 0]), np.array([1, 2, 3, 3, 4, 4])
    lag_ns = np.array([100, 1, 10, 5, 5, 1])
    found = earliest_starts(base, source, target, lag_ns, 2)
    assert found.tolist() == [0, 100, 1, 110, 115]


@given(graphs(), st.integers(0, 9))
def test_chains_that_were_found_once_hold_for_other_lags(graph, more_ns):
    base, source, target, lag_ns, points = graph
    chains = find_chains(source, target, points, len(base))
    chains.earliest_starts(base, lag_ns)
    found = chains.earliest_starts(base, lag_ns + more_ns)
    assert found.tolist() == one_by_one(base, source, target, lag_ns + more_ns)


@given(graphs(), st.data())
def test_edges_that_are_gone_hold_nothing(graph, data):
    base, source, target, lag_ns, points = graph
    gone = st.lists(st.booleans(), min_size=len(source), max_size=len(source))
    # Chains of the host stay whole.
    is_gone = np.array(data.draw(gone), dtype=bool) & (target >= points)
    lags = without_edges(lag_ns, is_gone, base[base != LONG_AGO_NS])
    found = earliest_starts(base, source, target, lags, points)
    expected = np.array(
        one_by_one(base, source[~is_gone], target[~is_gone], lag_ns[~is_gone]), dtype=np.int64
    )
    is_held = expected >= 0
    assert found[is_held].tolist() == expected[is_held].tolist()
    assert (found[~is_held] < 0).all()


def test_the_largest_so_far_begins_anew_with_each_block():
    values, block = np.array([3, 1, 5, 2, 4, -7]), np.array([0, 0, 0, 1, 1, 2])
    assert largest_so_far(values, block).tolist() == [3, 3, 5, 2, 4, -7]


def test_the_largest_so_far_of_values_that_are_far_apart():
    values, block = np.array([2**61, 1, -(2**61), 2]), np.array([0, 0, 1, 1])
    assert largest_so_far(values, block).tolist() == [2**61, 2**61, -(2**61), 2]


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 999, 5_000])
def test_students_quantile_is_that_of_scipy(degrees):
    assert student_quantile(degrees) == pytest.approx(stdtrit(degrees, 0.95), rel=1e-12)
