"""The call tree is what a stack of open ranges would give, however ranges cross."""

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribution.call_tree import NO_ROW, nesting_order, parents

SPAN = st.tuples(
    st.sampled_from(["op", "runtime", "module"]),
    st.integers(0, 30),  # start
    st.integers(0, 12),  # duration
    st.integers(0, 1),  # thread
    st.integers(0, 1),  # rank
)


def ranges_of(spans):
    table = pd.DataFrame(spans, columns=["kind", "start_ns", "duration_ns", "thread", "rank"])
    return table.astype({"kind": pd.CategoricalDtype(["op", "runtime", "module"])})


def by_a_stack(ranges, rows):
    """Return each row's parent the slow way."""
    found = np.full(len(ranges), NO_ROW)
    stacks = {}
    for row in nesting_order(ranges, rows).tolist():
        one = ranges.iloc[row]
        opened = stacks.setdefault((one["rank"], one["thread"]), [])
        while opened and opened[-1][1] <= one["start_ns"]:
            opened.pop()
        found[row] = opened[-1][0] if opened else NO_ROW
        if one["kind"] != "runtime":
            opened.append((row, one["start_ns"] + one["duration_ns"]))
    return found


@given(st.lists(SPAN, max_size=40))
def test_parents_are_those_of_a_stack_of_open_ranges(spans):
    ranges = ranges_of(spans)
    rows = np.flatnonzero(ranges.index % 5 != 4)
    assert parents(ranges, rows).tolist() == by_a_stack(ranges, rows).tolist()


def test_a_range_after_very_many_siblings_finds_the_one_around_them():
    spans = [("op", 0, 3001, 0, 0), *(("op", at, 1, 0, 0) for at in range(3000))]
    ranges = ranges_of([*spans, ("op", 3000, 1, 0, 0)])
    found = parents(ranges, np.arange(len(ranges)))
    assert found.tolist() == [NO_ROW] + [0] * 3001
