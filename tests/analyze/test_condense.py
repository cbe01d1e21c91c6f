"""What is kept of a rank beside others: it tells of waits what all of it tells, and the sums."""

from dataclasses import replace
from pathlib import Path

import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.condense import condensed, rank_totals
from kprof.analyze.late_ranks import find_lateness
from kprof.analyze.passes import analyze
from kprof.collect.merge import merge
from kprof.opened import read
from tests.late_ranks import cases, recorded

DATA = Path(__file__).parents[1] / "data" / "h200"
TRACES = Path(__file__).parents[3] / "shared" / "traces"
SAMPLED = sorted(TRACES.rglob("sampled_rank-*.json.gz"))
FILES = [[DATA / "cudagraph.json.gz"], *([SAMPLED] if SAMPLED else [])]


@pytest.mark.parametrize("case", cases(1, seed=34, sizes=(8, 12)), ids=lambda case: case.name)
def test_a_condensed_trace_tells_who_waits_for_whom_as_the_whole_one_does(case):
    trace = recorded(case)
    assert find_lateness(condensed(trace)) == find_lateness(trace)


def test_other_work_beside_collectives_hides_as_much_of_the_waits_when_condensed():
    case = replace(cases(1, seed=7, sizes=(8,))[0], hidden=0.5, num_steps=4)
    trace = recorded(case)
    assert find_lateness(condensed(trace)) == find_lateness(trace)


def test_ranks_that_were_condensed_one_by_one_are_those_that_were_condensed_together():
    trace = recorded(cases(1, seed=3, sizes=(8,))[0])
    ranks = [
        condensed(replace(trace, kernels=rows.reset_index(drop=True)))
        for _, rows in trace.kernels.groupby("rank")
    ]
    both = merge(ranks, "ranks")
    assert find_lateness(both) == find_lateness(trace)
    assert both.meta.totals == rank_totals(trace)


@pytest.mark.parametrize("paths", FILES, ids=lambda paths: paths[0].name)
def test_the_sums_of_ranks_add_up_to_the_ledger(paths):
    trace = analyze(read(paths))
    totals, ledger = rank_totals(trace), balance(trace)
    sums = [(one.window_ns, one.busy_ns, one.idle_ns, one.num_activities) for one in totals]
    whole = (ledger.window_ns, ledger.busy_ns, ledger.idle_ns, len(trace.kernels))
    assert tuple(map(sum, zip(*sums, strict=True))) == whole
    assert [sum(one.idle_by_cause_ns.values()) for one in totals] == [one.idle_ns for one in totals]
    assert all(0 <= one.exposed_communication_ns <= one.busy_ns for one in totals)


@pytest.mark.skipif(not SAMPLED, reason="needs ../shared/traces")
def test_recorded_ranks_that_were_condensed_wait_as_they_do():
    trace = analyze(read(SAMPLED))
    assert find_lateness(condensed(trace)) == find_lateness(trace)
    assert condensed(trace).meta.totals == rank_totals(trace)


@pytest.mark.skipif(not SAMPLED, reason="needs ../shared/traces")
def test_why_a_rank_is_idle_does_not_depend_on_the_ranks_beside_it():
    together = rank_totals(analyze(read(SAMPLED)))
    alone = [rank_totals(analyze(read([path])))[0] for path in SAMPLED]
    causes = [[one.idle_by_cause_ns for one in of] for of in (together, alone)]
    assert causes[0] == causes[1]
