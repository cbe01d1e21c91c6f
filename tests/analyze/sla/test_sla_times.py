"""The times of one answer: what each metric measures, and what is not known for sure."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.sla.curves import token_curve
from kprof.analyze.sla.responses import Response
from kprof.analyze.sla.samples import (
    longest_gap,
    time_between_tokens,
    time_per_token,
    time_to_end,
    time_to_first,
    time_to_tokens,
)
from tests.responses import MS, answer, cancelled, failure, service

NEVER = float("inf")


def ms(times):
    """Return a range in ms."""
    return None if times is None else tuple(time / MS for time in times)


def test_the_time_to_n_tokens_is_that_of_the_chunk_which_brings_the_nth():
    row = answer(50, gaps_ms=(5, 5), tokens=[2, 5, 9])
    assert [ms(time_to_tokens(row, n)) for n in (1, 2, 3, 5, 6, 9)] == [
        (50, 50),
        (50, 50),
        (55, 55),
        (55, 55),
        (60, 60),
        (60, 60),
    ]


def test_an_answer_of_fewer_tokens_has_no_time_to_n():
    assert time_to_tokens(answer(50, gaps_ms=(5,)), 3) is None


@given(st.lists(st.integers(min_value=1, max_value=100), min_size=1, max_size=20))
def test_the_first_token_is_the_first_chunk_where_chunks_have_one_token(gaps):
    row = answer(gaps[0], gaps_ms=gaps[1:])
    assert time_to_tokens(row, 1) == time_to_first(row)


@given(
    st.lists(st.integers(min_value=1, max_value=16), min_size=1, max_size=30),
    st.integers(min_value=1, max_value=300),
)
def test_the_true_time_to_n_lies_in_the_range_without_token_counts(counts, n):
    exact = answer(50, gaps_ms=range(1, len(counts)), tokens=np.cumsum(counts))
    times = time_to_tokens(exact, n)
    blind = Response(
        exact.sent_ns, chunk_ns=exact.chunk_ns, end_ns=exact.end_ns, output_tokens=sum(counts)
    )
    ends = exact.chunk_ns[[0, -1]] if len(counts) > 1 else exact.chunk_ns
    blinder = Response(
        exact.sent_ns,
        chunk_ns=ends,
        num_chunks=len(counts),
        has_every_chunk=len(ends) == len(counts),
        end_ns=exact.end_ns,
        output_tokens=sum(counts),
    )
    for row in (blind, blinder):
        found = time_to_tokens(row, n)
        assert (found is None) is (times is None)
        assert found is None or found.low <= times.low == times.high <= found.high


def test_one_token_a_chunk_is_exact_without_token_counts():
    row = answer(50, gaps_ms=(5, 5), tokens=[1, 2, 3])
    blind = Response(0, chunk_ns=row.chunk_ns, end_ns=row.end_ns, output_tokens=3)
    assert ms(time_to_tokens(blind, 2)) == (55, 55)


def test_one_chunk_more_than_tokens_may_be_empty_anywhere():
    row = Response(0, chunk_ns=np.array([50, 55, 60]) * MS, end_ns=60 * MS, output_tokens=2)
    assert ms(time_to_tokens(row, 1)) == (50, 55)
    assert ms(time_to_tokens(row, 2)) == (55, 60)


def test_times_count_from_when_a_request_was_due_and_are_sure_from_its_sending():
    assert ms(time_to_first(answer(50, sent_ms=100, late_ms=7))) == (50, 57)
    assert ms(time_to_end(answer(50, sent_ms=100, late_ms=7, gaps_ms=(3,)))) == (53, 60)


def test_what_failed_takes_for_ever():
    row = failure()
    measures = (time_to_first, time_to_end, time_per_token, time_between_tokens, longest_gap)
    assert {measure(row) for measure in measures} == {(NEVER, NEVER)}
    assert time_to_tokens(row, 64) == (NEVER, NEVER)


def test_what_was_cancelled_took_at_least_as_long_as_was_waited():
    assert ms(time_to_first(cancelled(30))) == (30, NEVER)
    assert ms(time_to_tokens(cancelled(30), 64)) == (30, NEVER)
    assert ms(time_to_end(cancelled(30))) == (30, NEVER)


def test_the_first_token_of_a_cancelled_answer_is_known():
    row = answer(20, gaps_ms=(5,), outcome="cancelled", end_ns=90 * MS)
    assert ms(time_to_first(row)) == (20, 20)
    assert ms(time_to_tokens(row, 2)) == (25, 25)
    assert ms(time_to_tokens(row, 3)) == (90, NEVER)


def test_time_per_token_leaves_the_first_out_and_is_undefined_for_one():
    assert ms(time_per_token(answer(50, gaps_ms=(10, 10, 40)))) == (20, 20)
    assert time_per_token(answer(50)) is None


def test_time_between_tokens_leaves_out_those_of_the_first_chunk():
    row = answer(50, gaps_ms=(10, 10), tokens=[4, 5, 6])
    assert ms(time_between_tokens(row)) == (10, 10)
    assert ms(time_per_token(row)) == (4, 4)


def test_the_longest_gap_is_seen_where_means_hide_it():
    assert ms(longest_gap(answer(50, gaps_ms=(1, 90, 1)))) == (90, 90)
    assert longest_gap(answer(50)) is None


def test_of_the_first_and_last_chunk_alone_the_longest_gap_is_a_range():
    row = answer(50, gaps_ms=(30,), tokens=[1, 4], num_chunks=4, has_every_chunk=False)
    assert ms(longest_gap(row)) == (10, 30)


def test_the_first_token_of_an_answer_that_was_not_streamed_lies_before_its_end():
    row = Response(0, end_ns=80 * MS, output_tokens=8)
    assert ms(time_to_first(row)) == (0, 80)
    assert ms(time_to_tokens(row, 4)) == (0, 80)
    assert time_per_token(row).high == pytest.approx(80 * MS / 7)


ROWS = st.lists(
    st.one_of(
        st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=12).map(
            lambda counts: answer(9, gaps_ms=range(1, len(counts)), tokens=np.cumsum(counts))
        ),
        st.integers(min_value=1, max_value=12).map(
            lambda n: replace(answer(9, gaps_ms=[3] * n), tokens=None, output_tokens=2 * n)
        ),
        st.just(answer(9, gaps_ms=[3], tokens=[2, 4], output_tokens=6)),
        st.just(failure()),
        st.just(cancelled(30)),
    ),
    min_size=1,
    max_size=5,
)


@given(ROWS)
def test_the_curve_over_n_is_that_of_each_n(rows):
    curve = token_curve([service(*rows)], most=40)
    for n in curve.num_tokens if curve else ():
        times = [time_to_tokens(row, n) for row in rows]
        high = sorted(time.high for time in times if time is not None)
        median = high[(len(high) - 1) // 2] if high else NEVER
        assert curve.by_level["p50"][n - 1] == (None if median == NEVER else median)
        assert curve.share_short[n - 1] == 1 - len(high) / len(rows)


@pytest.mark.parametrize("outcome", ["answered", "cancelled"])
def test_a_time_of_which_nothing_is_known_is_any(outcome):
    row = Response(5 * MS, outcome)
    measures = (time_to_first, time_to_end, lambda one: time_to_tokens(one, 64))
    assert [measure(row) for measure in measures] == [(0, NEVER)] * 3
