"""The collectives of two recordings, matched by their numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from kprof.collect.collectives import Run, by_number

CALLS = some.lists(
    some.tuples(some.sampled_from(["allreduce", "barrier"]), some.integers(-2, 4)), max_size=8
)


def run_of(calls):
    start_ns = 10 * np.arange(len(calls))
    operation = np.array([name for name, _ in calls], dtype=object)
    sequence = np.array([number for _, number in calls], dtype=np.int64)
    return Run(operation, sequence, start_ns, start_ns + 5)


@given(CALLS, CALLS)
def test_what_has_one_number_and_operation_once_on_both_sides_matches(mine, others):
    first, second = by_number(run_of(mine), run_of(others))
    places = [
        (at, others.index(call))
        for at, call in enumerate(mine)
        if mine.count(call) == 1 == others.count(call)
    ]
    assert first.start_ns.tolist() == [10 * at for at, _ in places]
    assert second.start_ns.tolist() == [10 * at for _, at in places]
