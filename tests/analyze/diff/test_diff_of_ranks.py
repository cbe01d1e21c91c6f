"""All ranks of two runs side by side: each rank's time, who is late, and how sure that is."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kprof.analyze.condense import condensed, rank_totals
from kprof.analyze.diff.ranks import MEASURES, compare_ranks
from kprof.analyze.late_ranks import find_lateness
from tests.rank_patterns import MS, opened, pattern_of
from tests.traces import trace_of

LATE = pattern_of("one", 8, 5)
(STRAGGLER,) = LATE.ranks


def whole(pattern):
    """Return a pattern as analyzed ranks of which all are in detail, with their sums."""
    trace = opened(pattern)
    return replace(trace, meta=replace(trace.meta, totals=rank_totals(trace)))


@pytest.fixture(scope="module")
def late():
    return whole(LATE)


@pytest.fixture(scope="module")
def in_time():
    return whole(replace(LATE, late_ns=None))


def fates(found):
    return {one.fate for row in (found.mean, *found.ranks) for one in row.times.values()}


def test_a_run_does_not_differ_from_itself(late):
    found = compare_ranks(late, late)
    assert fates(found) == {"same"}
    assert (found.late_a, found.late_since, found.in_time_since) == ((STRAGGLER,), (), ())


def test_a_rank_that_is_late_in_the_second_run_alone_is_named_and_comes_first(in_time, late):
    found = compare_ranks(in_time, late)
    assert (found.late_since, found.in_time_since) == ((STRAGGLER,), ())
    first = found.ranks[0]
    assert first.rank == STRAGGLER
    planted = np.mean(LATE.late_ns[STRAGGLER])
    assert first.times["late"].difference_ns == pytest.approx(planted, rel=0.1)
    others = [row.times["waits"].difference_ns for row in found.ranks[1:]]
    assert others == pytest.approx([planted] * 7, rel=0.15)


def test_turned_round_every_change_has_the_other_sign(in_time, late):
    there, back = compare_ranks(in_time, late), compare_ranks(late, in_time)
    assert (there.late_since, there.in_time_since) == (back.in_time_since, back.late_since)
    by_rank = {row.rank: row for row in back.ranks}
    for row in there.ranks:
        turned = by_rank[row.rank].times
        assert [-row.times[m].difference_ns for m in MEASURES] == [
            turned[m].difference_ns for m in MEASURES
        ]
        assert [row.times[m].fate for m in MEASURES] == [turned[m].fate for m in MEASURES]


def test_ranks_that_are_condensed_are_compared_as_those_in_detail(in_time, late):
    def some(trace):
        kernels = trace.kernels[(trace.kernels["rank"] < 2).to_numpy()].reset_index(drop=True)
        return replace(trace, kernels=kernels, all_ranks=condensed(trace))

    assert compare_ranks(some(in_time), some(late)) == compare_ranks(in_time, late)


def test_the_mean_of_the_ranks_differs_by_the_mean_of_their_differences(in_time, late):
    found = compare_ranks(in_time, late)
    for measure in MEASURES:
        each = [row.times[measure].difference_ns for row in found.ranks]
        assert found.mean.times[measure].difference_ns == pytest.approx(np.mean(each), abs=1)


def test_ranks_of_one_run_alone_appear_or_vanish(late):
    fewer = whole(pattern_of("none", 4, 5))
    by_rank = {row.rank: row.times for row in compare_ranks(fewer, late).ranks}
    assert {by_rank[rank]["step"].fate for rank in range(4, 8)} == {"appeared"}
    assert by_rank[4]["step"].a_ns is None
    assert by_rank[4]["step"].difference_ns is None
    back = {row.rank: row.times for row in compare_ranks(late, fewer).ranks}
    assert {back[rank]["busy"].fate for rank in range(4, 8)} == {"vanished"}


def test_lateness_that_is_unknown_of_a_rank_neither_appears_nor_vanishes():
    two, one = (
        trace_of(*({"rank": r, "kind": "gemm", "step": 0} for r in range(number)), num_ranks=number)
        for number in (2, 1)
    )
    for found, fate in (
        (compare_ranks(two, one), "vanished"),
        (compare_ranks(one, two), "appeared"),
    ):
        (times,) = [row.times for row in found.ranks if row.rank == 1]
        assert (times["busy"].fate, times["late"].fate) == (fate, None)


def test_a_change_within_the_tolerance_is_unchanged():
    def run(duration):
        rows = [
            {"rank": rank, "duration_ns": duration, "kind": "gemm", "step": 0} for rank in (0, 1)
        ]
        return trace_of(*rows, num_ranks=2)

    found = compare_ranks(run(1000 * MS), run(1010 * MS))
    assert {row.times["busy"].fate for row in found.ranks} == {"unchanged"}
    more = compare_ranks(run(1000 * MS), run(1020 * MS))
    assert {row.times["busy"].fate for row in more.ranks} == {"changed"}
    # Without collectives it is unknown who waits for whom.
    assert (found.late_a, found.late_since, found.ranks[0].times["late"].fate) == (None,) * 3


def test_runs_of_one_rank_have_no_ranks_to_compare():
    one = trace_of({"kind": "gemm"})
    assert compare_ranks(one, one) is None


def test_lateness_by_parts_of_the_window_is_told_of_the_whole_window(late):
    found = find_lateness(late)
    assert found.are_steps
    nowhere = pd.array([pd.NA] * len(late.kernels), "Int64")
    parts = late.with_kernels(step=nowhere)
    ranges = late.ranges[(late.ranges["kind"] != "step").to_numpy()].reset_index(drop=True)
    parts = replace(parts, ranges=ranges, meta=replace(parts.meta, totals=()))
    assert not find_lateness(parts).are_steps
    row = next(row for row in compare_ranks(parts, parts).ranks if row.rank == STRAGGLER)
    per_step = next(row for row in compare_ranks(late, late).ranks if row.rank == STRAGGLER)
    whole_ns = per_step.times["late"].a_ns * found.num_units
    assert row.times["late"].a_ns == pytest.approx(whole_ns, rel=0.1)
