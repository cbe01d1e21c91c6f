"""A step without late ranks, or with hidden communication, against simulations that have it so."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from kprof.analyze.attribution.steps import whole_ns
from kprof.analyze.bus_bandwidth import transfers
from kprof.analyze.condense import condensed, rank_totals
from kprof.analyze.groupings import measure_elapsed
from kprof.analyze.late_ranks import find_lateness
from kprof.analyze.passes import attributed
from kprof.analyze.whatif.across_ranks import (
    ALL_HIDDEN,
    AT_ROOFLINE,
    QUESTIONS,
    RANKS_IN_TIME,
    answer,
    predict_across_ranks,
)
from kprof.device import Links
from tests import rank_patterns
from tests.rank_patterns import opened, pattern_of
from tests.traces import ROUND_DEVICE, trace_of

ALWAYS_LATE = ("one", "host", "stage", "bursty", "slow_link", "slow_clock", "data_loader", "two")


@pytest.fixture(scope="module")
def late():
    return opened(pattern_of("one", 8, 5))


@cache
def recorded(name):
    """Return a pattern and its trace, which several laws ask about."""
    pattern = pattern_of(name, 8, 7)
    return pattern, opened(pattern)


def step_ns(pattern):
    return find_lateness(opened(pattern)).unit_ns


@pytest.mark.parametrize("name", ALWAYS_LATE)
def test_the_step_without_late_ranks_is_that_of_a_run_without_them(name):
    pattern, trace = recorded(name)
    found = answer(RANKS_IN_TIME, trace)
    truth = step_ns(replace(pattern, late_ns=None, slow_group=None))
    assert found.predicted_step_ns == pytest.approx(truth, rel=0.03)
    assert found.shortest_step_ns <= truth <= found.longest_step_ns


@pytest.mark.parametrize("name", ["one", "host", "stage", "rotating", "none", "skewed"])
def test_no_step_with_hidden_communication_is_shorter_than_predicted(name, monkeypatch):
    pattern, trace = recorded(name)
    found = answer(ALL_HIDDEN, trace)
    monkeypatch.setattr(rank_patterns, "TRANSFER_NS", 0)
    truth = step_ns(pattern)
    assert found.shortest_step_ns <= truth <= found.longest_step_ns
    # A rank whose host falls behind gains less.
    assert found.predicted_step_ns == pytest.approx(truth, rel=0.005 if name != "host" else 0.04)


@pytest.mark.parametrize("name", rank_patterns.PATTERNS)
def test_no_prediction_saves_more_than_the_exposed_communication_of_a_rank(name):
    _, trace = recorded(name)
    most_ns = max(one.exposed_communication_ns / one.num_steps for one in rank_totals(trace))
    for found in predict_across_ranks(trace):
        assert 0 <= found.step_ns - found.shortest_step_ns <= most_ns + 1
        assert found.shortest_step_ns <= found.predicted_step_ns <= found.longest_step_ns
        assert found.longest_step_ns <= found.step_ns


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_saving_is_a_part_of_the_step_of_all_other_shares(late, question):
    # One step, which lasts longer than its activities.
    ranges = late.ranges
    is_step = (ranges["kind"] == "step").to_numpy()
    is_left_out = is_step & ranges.duplicated(["rank", "kind"]).to_numpy()
    longer_ns = ranges["duration_ns"].where(~is_step, 2 * measure_elapsed(late.kernels))
    one = attributed(
        replace(late, ranges=ranges.assign(duration_ns=longer_ns)[~is_left_out].reset_index())
    )
    assert answer(question, one).step_ns == whole_ns(one) > measure_elapsed(one.kernels)


def test_the_numbers_of_the_ranks_do_not_matter(late):
    def anew(table):
        return (7 - table["rank"].to_numpy()).astype(np.int32)

    other = late.with_kernels(rank=anew(late.kernels)).with_ranges(rank=anew(late.ranges))
    assert find_lateness(other).stragglers != find_lateness(late).stragglers
    assert predict_across_ranks(other) == predict_across_ranks(late)


def test_condensed_ranks_are_told_the_same(late):
    some = replace(late, all_ranks=condensed(late))
    saved = [
        [one.step_ns - one.predicted_step_ns for one in predict_across_ranks(trace)]
        for trace in (late, some)
    ]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_rank_changes_nothing(question):
    one = attributed(trace_of({"collective": "allreduce", "group": "0 [0]"}, {"start_ns": 900}))
    assert predict_across_ranks(one) == []
    assert answer(question, one).predicted_step_ns is None
    assert answer(question, one).reason


def test_where_no_rank_is_late_there_is_nothing_to_save_by_ranks_in_time():
    trace = opened(pattern_of("none", 8, 5))
    assert [one.target for one in predict_across_ranks(trace)] == ["communication"]
    asked = answer(RANKS_IN_TIME, trace)
    assert asked.predicted_step_ns == asked.shortest_step_ns == asked.step_ns


def with_links(trace, times):
    """Return the trace of a host whose links are `times` as fast as the largest group used them."""
    bus = transfers(trace)["bus_bytes_per_s"].median()
    links = Links(times * bus, trace.meta.num_ranks)
    device = replace(ROUND_DEVICE, links=links)
    return replace(trace, meta=replace(trace.meta, device=device))


@pytest.mark.parametrize("name", ["none", "one", "bursty"])
def test_at_the_bandwidth_of_the_links_a_step_is_that_of_a_run_with_such_links(name, monkeypatch):
    pattern = pattern_of(name, 8, 7)
    found = answer(AT_ROOFLINE, with_links(opened(pattern), 2))
    monkeypatch.setattr(rank_patterns, "TRANSFER_NS", rank_patterns.TRANSFER_NS // 2)
    truth = step_ns(pattern)
    assert found.predicted_step_ns == pytest.approx(truth, rel=0.005)
    assert found.shortest_step_ns <= truth <= found.longest_step_ns == found.step_ns


def test_links_that_were_reached_leave_nothing_to_gain(late):
    found = answer(AT_ROOFLINE, with_links(late, 0.9))
    assert found.predicted_step_ns == found.step_ns


def test_ranks_that_are_condensed_gain_the_same_of_faster_links(late):
    trace = with_links(late, 2)
    some = replace(trace, all_ranks=condensed(trace))
    gained = [answer(AT_ROOFLINE, one) for one in (trace, some)]
    assert gained[0].step_ns - gained[0].predicted_step_ns > 0
    assert gained[0] == replace(gained[1], step_ns=gained[0].step_ns)


def test_without_a_measured_ceiling_of_the_links_their_roofline_is_unknown(late):
    found = answer(AT_ROOFLINE, late)
    assert (found.predicted_step_ns, found.target) == (None, "communication")
