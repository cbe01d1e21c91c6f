"""Why ranks are late: the part of their time that is longer, in the twelve patterns of a job."""

from dataclasses import replace

import numpy as np
import pytest

from kprof.analyze.late_causes import COMPUTE, find_late_causes, late_time
from kprof.analyze.late_ranks import find_lateness, waits_by_unit
from tests.rank_patterns import MS, PATTERNS, Pattern, opened, pattern_of

FOUR = Pattern("four", 4, num_steps=4, jitter=0.001)


def late_by(rank, by_ns, of=FOUR):
    late = np.zeros((of.num_ranks, of.num_steps))
    late[rank] = by_ns
    return late


@pytest.mark.parametrize("name", PATTERNS)
def test_who_is_late_and_why_is_found_and_nothing_else_is(name):
    pattern = pattern_of(name, 8, seed=11)
    trace = opened(pattern)
    found = find_lateness(trace)
    assert frozenset(found.stragglers) == pattern.ranks
    assert (found.num_rotating > 0) == pattern.is_in_turn
    assert {one.cause for one in find_late_causes(trace)} == {pattern.cause} - {None}


@pytest.mark.parametrize("fault", ["work", "clock", "data", "host"])
def test_a_rank_is_late_by_what_its_time_is_longer_by(fault):
    trace = opened(replace(FOUR, late_ns=late_by(2, 4 * MS), fault=fault))
    (cause,) = find_late_causes(trace)
    late_ns = find_lateness(trace).ranks[2].late_ns
    assert sum(cause.longer_ns.values()) == pytest.approx(late_ns, rel=0.05)


@pytest.mark.parametrize(("fault", "share"), [("work", 0.0), ("clock", 1.0)])
def test_a_slower_gpu_runs_the_launches_of_the_others(fault, share):
    trace = opened(replace(FOUR, late_ns=late_by(2, 4 * MS), fault=fault))
    (cause,) = find_late_causes(trace)
    assert cause.same_launches_share == pytest.approx(share, abs=0.05)


def test_without_grids_a_slower_gpu_is_not_told_from_more_work():
    trace = opened(replace(FOUR, late_ns=late_by(2, 4 * MS), fault="clock"))
    blank = trace.kernels["grid"].cat.set_categories([])
    (cause,) = find_late_causes(trace.with_kernels(grid=blank))
    assert (cause.cause, cause.same_launches_share) == ("compute", None)


def test_idle_time_of_unknown_cause_leaves_the_cause_inconclusive():
    trace = opened(replace(FOUR, late_ns=late_by(2, 4 * MS), fault="data"))
    unknown = trace.idle.assign(cause=trace.idle["cause"].cat.set_categories([]))
    (cause,) = find_late_causes(replace(trace, idle=unknown))
    assert cause.cause == "inconclusive"
    assert cause.why_not


def test_a_rank_that_is_late_in_some_steps_is_compared_in_those():
    pattern = replace(FOUR, num_steps=10)
    late = late_by(1, 0, pattern)
    late[1, 3:8] = 5 * MS
    trace = opened(replace(pattern, late_ns=late))
    (cause,) = find_late_causes(trace)
    assert find_lateness(trace).ranks[1].late_in == (3, 4, 5, 6, 7)
    assert cause.longer_ns[COMPUTE] == pytest.approx(5 * MS, rel=0.05)


def test_of_ranks_that_are_not_in_detail_the_cause_is_inconclusive():
    whole = opened(replace(FOUR, late_ns=late_by(2, 4 * MS)))
    others = whole.kernels[(whole.kernels["rank"] != 2).to_numpy()].reset_index(drop=True)
    some = replace(whole, kernels=others, idle=whole.idle.iloc[:0], all_ranks=whole)
    (cause,) = find_late_causes(some)
    assert (cause.rank, cause.cause) == (2, "inconclusive")


@pytest.mark.parametrize("shift_ns", [0, 7 * MS])
def test_ranks_in_detail_tell_what_all_tell_on_any_clock(shift_ns):
    whole = opened(replace(FOUR, late_ns=late_by(2, 4 * MS)))
    keep = whole.kernels["rank"].isin([0, 2]).to_numpy()
    kernels = whole.kernels[keep].reset_index(drop=True)
    kernels = kernels.assign(start_ns=kernels["start_ns"] + shift_ns)
    idle = whole.idle[whole.idle["rank"].isin([0, 2]).to_numpy()]
    idle = idle.assign(start_ns=idle["start_ns"] + shift_ns)
    (cause,) = find_late_causes(replace(whole, kernels=kernels, idle=idle, all_ranks=whole))
    assert cause.cause == "compute"
    assert cause.longer_ns[COMPUTE] == pytest.approx(4 * MS, rel=0.05)


def of_ranks(whole, ranks):
    """Return a trace that has these ranks in detail, and the waits of all."""
    tables = {
        name: table[table["rank"].isin(ranks).to_numpy()].reset_index(drop=True)
        for name, table in (("kernels", whole.kernels), ("idle", whole.idle))
    }
    return replace(whole, all_ranks=whole, **tables)


@pytest.mark.parametrize("name", ["one", "slow_clock", "data_loader", "host_bound", "slow_link"])
def test_the_cause_of_a_rank_that_is_not_in_detail_is_that_which_its_tables_tell(name):
    whole = opened(pattern_of(name, 8, 3))
    found, (waits, _) = find_lateness(whole), waits_by_unit(whole)
    late, others = found.stragglers, sorted({*range(8)} - {*found.stragglers})
    late_in = {one.rank: one.late_in for one in found.ranks}
    times = tuple(late_time(of_ranks(whole, [rank]), waits, rank, late_in[rank]) for rank in late)
    some = of_ranks(whole, others)
    some = replace(some, meta=replace(some.meta, late_times=times))
    told, wanted = find_late_causes(some), find_late_causes(of_ranks(whole, range(8)))
    assert late
    assert [(one.rank, one.cause) for one in told] == [(one.rank, one.cause) for one in wanted]
    for one, other in zip(told, wanted, strict=True):
        assert one.longer_ns == pytest.approx(other.longer_ns, abs=2)
        assert one.same_launches_share == pytest.approx(other.same_launches_share, abs=1e-6)
