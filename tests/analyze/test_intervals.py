"""Painting over one another: the topmost union tells what each moment belongs to."""

import numpy as np
import pytest

from kprof.analyze.intervals import FIRST_NS, LAST_NS, Intervals, distinct, paint


@pytest.mark.parametrize(
    ("moments", "expected"), [([], []), ([4], [4]), ([5, 2, 5, -1, 2, 5], [-1, 2, 5])]
)
def test_distinct_moments_come_in_order(moments, expected):
    assert distinct(np.array(moments, dtype=np.int64)).tolist() == expected


def test_a_later_layer_lies_over_an_earlier_one():
    under = Intervals(*(np.array(part) for part in ([0], [10], [7])))
    over = Intervals(*(np.array(part) for part in ([5], [10], [8])))
    painted = paint([under, over])
    assert painted.edge.tolist() == [FIRST_NS, 0, 5, 10, LAST_NS]
    assert painted.row.tolist() == [-1, 7, 8, -1]
