"""Clocks of several ranks are checked, and mended where they must be, by the collectives."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.collect.clocks import TOLERANCE_NS, Mismatch, align
from kprof.collect.merge import merge
from tests.collectives import MS, US, recordings, without
from tests.quantities import quantities_in
from tests.traces import trace_of

SECOND = 10**9
OFFSETS = st.one_of(st.integers(-60 * US, 60 * US), st.integers(-10 * SECOND, 10 * SECOND))


def collective(rank, start_ns, end_ns, sequence=1, **changes):
    row = {"rank": rank, "start_ns": start_ns, "duration_ns": end_ns - start_ns}
    row |= {"collective": "allreduce", "group": "0 [0, 1]", "group_sequence": sequence}
    return trace_of(row | changes)


def test_clocks_that_contradict_nothing_are_left_alone():
    found = align(recordings([[0, 1]], [0, 15 * US]))
    assert found.shifts_ns == (0, 0)
    assert (found.is_checked, found.doubts) == ((True, True), ())
    assert quantities_in(found.summary)[-1] == "40"


def test_a_clock_on_which_collectives_end_before_they_began_elsewhere_is_moved():
    found = align([collective(0, 10 * MS, 12 * MS), collective(1, 1 * MS, 2 * MS)])
    assert found.shifts_ns == (0, 10 * MS)
    assert found.within_ns == 2 * MS
    (doubt,) = found.doubts
    assert quantities_in(doubt.text) == ["1", "+10.0 ms", "1", "2,000.0 µs"]


def test_a_contradiction_within_the_tolerance_moves_nothing():
    start = 2 * MS + TOLERANCE_NS
    found = align([collective(0, start, start + MS), collective(1, 1 * MS, 2 * MS)])
    assert found.shifts_ns == (0, 0)


def test_what_is_left_of_doubt_never_exceeds_what_causality_allows():
    found = align([collective(0, 50 * US, 60 * US), collective(1, 1 * MS, 1 * MS + 10 * US)])
    assert found.shifts_ns == (0, -950 * US)
    assert found.within_ns == 10 * US
    assert quantities_in(found.summary)[-1] == "10.0 µs"


@given(
    offset=OFFSETS,
    seed=st.integers(0, 10**6),
    apart=st.integers(1, 20 * MS),
    numbered=st.booleans(),
    lost=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_a_planted_offset_is_found_within_the_stated_uncertainty(
    offset, seed, apart, numbered, lost
):
    first, second = recordings(
        [[0, 1]], [0, offset], seed=seed, apart_ns=apart, numbered=numbered, number=30
    )
    first, second = without(first, range(lost[0])), without(second, range(lost[1]))
    found = align([first, second])
    assert error_of(found, [0, offset]) <= found.within_ns


@given(
    offsets=st.tuples(st.just(0), OFFSETS, OFFSETS, OFFSETS),
    seed=st.integers(0, 10**6),
    numbered=st.booleans(),
)
def test_ranks_that_share_no_group_with_the_first_are_reached_through_others(
    offsets, seed, numbered
):
    groups = [[0, 1], [2, 3], [0, 2], [1, 3]]
    found = align(recordings(groups, offsets, seed=seed, numbered=numbered))
    assert all(found.is_checked)
    assert error_of(found, offsets) <= found.within_ns


@given(offset=st.integers(SECOND, 10 * SECOND), seed=st.integers(0, 10**6))
def test_unnumbered_collectives_with_records_missing_in_between_move_nothing_far(offset, seed):
    first, second = recordings([[0, 1]], [0, offset], seed=seed, numbered=False, number=30)
    found = align([first, without(second, [12])])
    assert error_of(found, [0, offset]) <= found.within_ns or not found.is_checked[1]


def test_unnumbered_collectives_that_fit_in_several_ways_are_refused():
    rows = [{"rank": 0, "start_ns": i * MS, "duration_ns": 9 * US} for i in range(20)]
    rows = [row | {"collective": "allreduce", "group": "0 [0, 1]"} for row in rows]
    others = [row | {"rank": 1, "start_ns": row["start_ns"] + SECOND} for row in rows]
    found = align([trace_of(*rows), trace_of(*others)])
    assert (found.shifts_ns, found.is_checked) == ((0, 0), (True, False))
    assert found.doubts == ()
    assert Mismatch.UNCLEAR.value in found.summary
    assert all(rank in found.summary for rank in ("rank 0", "rank 1"))


def test_ranks_of_two_runs_are_not_moved_onto_one_clock():
    first, _ = recordings([[0, 1]], [0, 0], seed=1)
    _, second = recordings([[0, 1]], [0, SECOND], seed=2)
    found = align([first, second])
    assert found.shifts_ns == (0, 0)
    assert found.doubts[0].id == "clocks_contradict"


def test_one_in_twenty_collectives_may_contradict_the_rest():
    first, second = recordings([[0, 1]], [0, SECOND])
    second.kernels.loc[7, "start_ns"] += 5 * SECOND
    found = align([first, second])
    assert abs(found.shifts_ns[1] + SECOND) < 20 * US


@pytest.mark.parametrize(
    "operation", ["broadcast", "send", "recv", "all_to_all", "reduce", "gather"]
)
def test_operations_that_not_all_ranks_wait_for_tell_nothing(operation):
    found = align(recordings([[0, 1]], [0, SECOND], collective=operation))
    assert (found.shifts_ns, found.is_checked) == ((0, 0), (True, False))
    assert found.doubts == ()


@pytest.mark.parametrize(
    "operation", ["all_gather", "_allgather_base", "_reduce_scatter_base", "barrier"]
)
def test_operations_that_all_ranks_wait_for_tell_it_under_all_their_names(operation):
    found = align(recordings([[0, 1]], [0, SECOND], collective=operation))
    assert found.is_checked == (True, True)


def test_a_drift_is_said_and_widens_the_uncertainty():
    first, second = recordings([[0, 1]], [0, 0], number=300)
    start = second.kernels["start_ns"]
    second.kernels["start_ns"] = start + (start - start[0]) // 2500
    found = align([first, second])
    assert all(part in found.doubts[-1].text for part in ("rank 0", "rank 1", "drift"))
    assert found.within_ns > 150 * US


def test_ranks_without_a_shared_group_are_named():
    found = align(recordings([[0, 1], [2]], [0, 0, 0]))
    assert found.is_checked == (True, True, False)
    assert found.summary.endswith(" rank 2.")


def test_many_moved_clocks_are_one_sentence():
    found = align(recordings([list(range(8))], [0, *range(1, 8)], takes_ns=30 * US))
    assert found.doubts == ()
    moved = [MS * i for i in range(8)]
    (sentence,) = align(recordings([list(range(8))], moved)).doubts
    number, largest = quantities_in(sentence.text)[:2]
    assert (number, largest.startswith("-7,0")) == ("7", True)


def test_recordings_that_do_not_tell_their_wall_time_are_aligned_by_collectives_alone():
    merged = merge(recordings([[0, 1]], [0, 77 * SECOND]), "folder")
    start = merged.kernels.groupby("rank")["start_ns"].min()
    assert abs(start[0] - start[1]) < MS
    assert merged.meta.base_time_ns is None
    assert merged.meta.clocks == merged.meta.caveats[0].text


def error_of(found, offsets_ns):
    """Return by how much the worst clock that was placed is still wrong."""
    shifts = zip(found.shifts_ns, offsets_ns, found.is_checked, strict=True)
    return max(abs(shift + offset) for shift, offset, is_checked in shifts if is_checked)


def test_ends_that_lie_apart_by_the_same_time_move_a_clock_that_causality_allows():
    found = align(recordings([[0, 1]], [0, 800 * US], takes_ns=3 * MS))
    assert abs(found.shifts_ns[1] + 800 * US) <= found.within_ns < 60 * US


def test_long_collectives_may_end_further_apart():
    found = align(recordings([[0, 1]], [0, 330 * US], takes_ns=42 * MS))
    assert found.shifts_ns == (0, 0)


def test_the_first_collectives_that_one_rank_lost_move_nothing():
    first, second = recordings([[0, 1]], [0, 0], numbered=False)
    found = align([first, without(second, range(6))])
    assert found.shifts_ns == (0, 0)
    assert "by 34 collectives" in found.summary


def test_coalesced_collectives_of_one_number_are_not_mixed_up():
    first, second = recordings([[0, 1]], [0, 0], number=20)
    second.kernels.loc[[3, 4], "group_sequence"] = 3
    assert "by 18 collectives" in align([first, second]).summary


def test_a_clock_reached_through_a_moved_one_stays_where_the_wall_clock_has_it():
    found = align(recordings([[0, 1], [1, 2]], [0, 5 * MS, 0]))
    assert found.shifts_ns[1] != 0
    assert found.shifts_ns[2] == 0


def rows_of(rank, times, operations=None):
    """Kernels of collectives of one group that tell no numbers, from starts and ends."""
    operations = operations or ["allreduce"] * len(times)
    named = zip(times, operations, strict=True)
    return trace_of(
        *(
            {"rank": rank, "start_ns": start, "duration_ns": end - start}
            | {"collective": operation, "group": "0 [0, 1]"}
            for (start, end), operation in named
        )
    )


def test_an_offset_lies_within_what_the_tightest_collective_allows():
    first = [(0, 500 * US), (MS, MS + 500 * US), (2 * MS, 2 * MS + 10 * US)]
    second = [*first[:2], (2 * MS + 300 * US, 2 * MS + 310 * US)]
    rows = [with_numbers(rows_of(rank, times)) for rank, times in enumerate((first, second))]
    assert align(rows).shifts_ns == (0, -290 * US)


def test_scattered_ends_widen_the_uncertainty():
    tight, loose = (
        align(recordings([[0, 1]], [0, SECOND], takes_ns=2 * MS, skew_ns=skew))
        for skew in (8 * US, 300 * US)
    )
    assert tight.within_ns < 50 * US
    assert loose.within_ns > 100 * US


def test_few_collectives_that_contradict_one_another_are_refused_however_long_it_lasted():
    first, second = recordings([[0, 1]], [0, 0], number=10, pause_ns=SECOND)
    second.kernels["start_ns"] += [0, 300 * US] * 5
    assert Mismatch.CONTRADICTORY.value in align([first, second]).summary


def test_recordings_of_different_times_have_no_number_in_common():
    first, second = recordings([[0, 1]], [0, 0], number=20)
    found = align([without(first, range(10)), without(second, range(10, 20))])
    assert found.is_checked == (True, False)
    assert "are too few" in found.summary


def test_what_changes_faster_than_clocks_do_is_no_drift():
    first, second = recordings([[0, 1]], [0, 0], number=60, takes_ns=90 * MS)
    start = second.kernels["start_ns"]
    second.kernels["start_ns"] = start + (start - start[0]) // 100
    assert "drift" not in align([first, second]).summary


def test_uncertainties_add_up_on_the_way_through_others():
    traces = recordings([[0, 1], [1, 2]], [0, 5 * MS, 900 * MS])
    assert align(traces).within_ns > align(traces[:2]).within_ns + 10 * US


def test_unnumbered_collectives_match_by_their_operations():
    operations = ["_allgather_base" if i in (3, 7, 8, 15) else "allreduce" for i in range(20)]
    times = [(i * MS, i * MS + 9 * US) for i in range(20)]
    late = [(start + SECOND, end + SECOND) for start, end in times]
    found = align([rows_of(0, times, operations), rows_of(1, late, operations)])
    assert found.shifts_ns == (0, -SECOND)


def with_numbers(trace):
    numbers = pd.array(range(len(trace.kernels)), dtype="Int64")
    return trace.with_kernels(group_sequence=numbers)
