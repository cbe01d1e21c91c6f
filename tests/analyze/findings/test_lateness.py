"""Which ranks others wait for: found whatever hides them, and silent where nothing keeps on."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import pdtrc

from kprof.analyze.findings.rules import stragglers
from kprof.analyze.findings.savings import Pricer
from kprof.analyze.late_ranks import find_lateness, poisson_tail
from kprof.collect.merge import merge
from kprof.report.section import Figure, Table
from kprof.report.sections import ranks
from kprof.trace import ProcessGroup
from tests.late_ranks import KINDS, STEP_NS, Case, cases, recorded, simulate
from tests.quantities import quantities_in
from tests.traces import trace_of

MS = 1_000_000
EIGHT = Case("eight", 8)


def late_by(**ns_of_rank):
    by_rank = {int(name[1:]): ns for name, ns in ns_of_rank.items()}
    return lambda rng, rank, step: by_rank.get(rank, 0)


def found_in(case):
    return find_lateness(recorded(case))


def claims(case):
    return [one.claim for one in stragglers.check(recorded(case))]


def test_one_late_rank_costs_what_it_is_late_by():
    found = found_in(replace(EIGHT, late=late_by(r5=2 * MS)))
    assert found.stragglers == (5,)
    assert found.lost_ns == pytest.approx(2 * MS, rel=0.05)
    assert [one.num_late for one in found.ranks] == [0, 0, 0, 0, 0, 10, 0, 0]
    assert found.ranks[5].waits_ns < 0.1 * MS < found.ranks[4].waits_ns


def test_a_late_rank_costs_a_step_what_the_others_wait_for_it():
    trace = recorded(replace(EIGHT, late=late_by(r5=2 * MS)))
    (finding,) = stragglers.check(trace)
    saving = Pricer(trace, None).price([finding])
    assert saving.high_ns == pytest.approx(2 * MS, rel=0.05)
    assert saving.low_ns == saving.high_ns // 2


def test_two_late_ranks_do_not_hide_each_other():
    assert found_in(replace(EIGHT, late=late_by(r1=3 * MS, r6=3 * MS))).stragglers == (1, 6)
    assert found_in(replace(EIGHT, late=late_by(r1=2 * MS, r6=4 * MS))).stragglers == (1, 6)


def test_half_of_the_ranks_may_be_late_as_a_host_is():
    slow = late_by(r4=2 * MS, r5=2 * MS, r6=2 * MS, r7=2 * MS)
    found = found_in(replace(EIGHT, late=slow, hosts=4))
    assert (found.stragglers, found.where) == ((4, 5, 6, 7), "host node1")


def test_ranks_of_a_late_stage_share_the_stage_where_the_groups_are_recorded():
    stages = tuple(
        ProcessGroup(f"{rank}", (rank, rank + 2, rank + 4, rank + 6), "mesh_pp") for rank in (0, 1)
    )
    case = replace(EIGHT, late=late_by(r4=2 * MS, r5=2 * MS))
    trace = recorded(case)
    meta = replace(trace.meta, process_groups=stages)
    assert find_lateness(replace(trace, meta=meta)).where == "pipeline stage 2"
    assert find_lateness(trace).where is None


def test_late_ranks_of_several_hosts_share_no_host():
    found = found_in(replace(EIGHT, late=late_by(r1=2 * MS, r6=2 * MS), hosts=4))
    assert found.where is None


def test_a_rank_that_waits_in_one_group_is_not_late_in_another():
    groups = ((0, 1), (2, 3), (4, 5), (6, 7), (0, 2, 4, 6), (1, 3, 5, 7))
    assert found_in(replace(EIGHT, groups=groups, late=late_by(r2=3 * MS))).stragglers == (2,)


def test_a_rank_that_is_late_in_some_steps_is_found():
    case = replace(
        EIGHT, num_steps=20, late=lambda rng, rank, step: 5 * MS * (rank == 3 and step % 3 == 0)
    )
    found = found_in(case)
    assert found.stragglers == (3,)
    assert found.ranks[3].num_late == 7


@pytest.mark.parametrize(("num_times", "found"), [(2, ()), (3, (3,))])
def test_a_rank_that_is_late_three_times_in_twenty_steps_is_found(num_times, found):
    def late(rng, rank, step):
        return 5 * MS * (rank == 3 and step % 7 == 0 and step < 7 * num_times)

    assert found_in(replace(EIGHT, num_steps=20, late=late)).stragglers == found


def test_a_step_takes_as_long_as_its_range_where_that_outlasts_its_kernels():
    trace = recorded(EIGHT)
    steps = [
        {"kind": "step", "name": str(i), "start_ns": 20 * MS * i, "duration_ns": 20 * MS}
        for i in range(10)
    ]
    assert find_lateness(trace).unit_ns < 15 * MS
    assert find_lateness(replace(trace, ranges=trace_of(ranges=steps).ranges)).unit_ns == 20 * MS


def test_ranks_that_are_always_late_hide_none_that_is_late_now_and_then():
    def late(rng, rank, step):
        return 2 * MS * (rank >= 4) + MS // 2 * (rank == 0 and step % 3 == 0)

    found = found_in(replace(EIGHT, late=late))
    assert [one.num_late for one in found.ranks] == [4, 0, 0, 0, 10, 10, 10, 10]


def test_lateness_that_rotates_is_no_ranks():
    case = replace(EIGHT, num_steps=16, late=lambda rng, rank, step: 4 * MS * (rank == step % 8))
    found = found_in(case)
    assert (found.stragglers, found.num_rotating) == ((), 8)
    assert found.rotating_ns == pytest.approx(4 * MS, rel=0.05)
    (claim,) = claims(case)
    assert quantities_in(claim)[:2] == ["8", "8"]


def test_two_ranks_that_are_each_late_in_six_of_ten_steps_take_turns():
    def late(rng, rank, step):
        return 4 * MS * ((rank == 0 and step < 6) or (rank == 1 and step >= 4))

    found = found_in(Case("four", 4, late=late))
    assert (found.stragglers, found.num_rotating) == ((), 2)
    assert found.rotating_ns == pytest.approx(4 * MS, rel=0.05)


@pytest.mark.parametrize(
    ("num_times", "num_rotating", "rotating_ns"), [(2, 0, 0), (3, 2, 4 * MS * 6 / 20)]
)
def test_lateness_rotates_where_a_quarter_of_the_steps_have_it(
    num_times, num_rotating, rotating_ns
):
    def late(rng, rank, step):
        return 4 * MS * (rank < 2 and 0 <= step - 10 * rank < num_times)

    found = found_in(Case("four", 4, num_steps=20, late=late))
    assert (found.stragglers, found.num_rotating) == ((), num_rotating)
    assert found.rotating_ns == pytest.approx(rotating_ns, rel=0.05)


@pytest.mark.parametrize(
    ("late_ns", "is_one"),
    [
        (lambda step: 0.17 * MS, True),
        (lambda step: 0.1 * MS, False),
        (lambda step: 0.5 * MS * (step == 5), False),
    ],
    ids=["hardly less", "a third", "once"],
)
def test_a_rank_hardly_less_late_than_the_others_of_its_host_is_one_of_them(late_ns, is_one):
    def late(rng, rank, step):
        return 0.3 * MS if rank in (4, 5, 6) else late_ns(step) * (rank == 7)

    found = found_in(replace(EIGHT, late=late, hosts=4))
    assert found.stragglers == ((4, 5, 6, 7) if is_one else (4, 5, 6))
    assert found.where == ("host node1" if is_one else None)


@pytest.mark.parametrize("is_alone", [True, False])
def test_stragglers_that_are_a_process_group_are_named_as_one(is_alone):
    late = late_by(r5=2 * MS) if is_alone else late_by(r2=2 * MS, r5=2 * MS)
    groups = (tuple(range(8)), (5,) if is_alone else (2, 5))
    where = found_in(replace(EIGHT, groups=groups, late=late)).where
    assert (where is None) if is_alone else where.endswith("1 [2, 5]")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"jitter": 0.02},
        {"slow_collective": 4},
        {"clock_ns": lambda rng, rank: rank * MS},
        {"late": lambda rng, rank, step: STEP_NS * (rank == 3 and step == 5)},
        {"work": lambda rank: 1 + 0.02 * rank},
        {"work": lambda rank: 0.8 if rank == 2 else 1.0},
    ],
    ids=[
        *("nothing", "jitter", "slow collective", "other clocks", "one slow step"),
        *("work that grows from rank to rank", "one rank with less work"),
    ],
)
def test_no_straggler_is_found_where_there_is(change):
    assert claims(replace(EIGHT, **change)) == []


def test_collectives_without_numbers_tell_what_those_with_numbers_do():
    late = replace(EIGHT, late=late_by(r5=2 * MS))
    without, with_numbers = (found_in(replace(late, is_numbered=is_it)) for is_it in (False, True))
    assert without == with_numbers


def test_the_ranks_order_changes_nothing():
    case = replace(EIGHT, jitter=0.0, late=late_by(r1=2 * MS))
    mirrored = replace(EIGHT, jitter=0.0, late=late_by(r6=2 * MS))
    one, other = found_in(case), found_in(mirrored)
    assert other.stragglers == (6,)
    assert other.lost_ns == pytest.approx(one.lost_ns, rel=0.01)


@pytest.mark.parametrize("factor", [10, 1000])
def test_times_that_are_all_longer_change_no_verdict(factor):
    trace = recorded(replace(EIGHT, late=late_by(r5=2 * MS)))
    longer = trace.with_kernels(
        start_ns=trace.kernels["start_ns"] * factor,
        duration_ns=trace.kernels["duration_ns"] * factor,
    )
    one, other = find_lateness(trace), find_lateness(longer)
    assert other.stragglers == one.stragglers
    assert other.lost_ns == pytest.approx(factor * one.lost_ns)


def test_ranks_whose_windows_are_shifted_match_where_they_overlap():
    trace = simulate(replace(EIGHT, num_ranks=2, num_steps=12, late=late_by(r1=2 * MS)))
    first, second = (
        replace(trace, kernels=rows.reset_index(drop=True))
        for _, rows in trace.kernels.groupby("rank")
    )
    kernels = second.kernels[second.kernels["step"].to_numpy(np.int64) >= 3].reset_index(drop=True)
    merged = merge([first, replace(second, kernels=kernels)], "two")
    number = merged.kernels["group_sequence"]
    of_second = number[(merged.kernels["rank"] == 1).to_numpy()].dropna()
    assert of_second.tolist() == list(range(12, 48))


def test_ranks_that_did_different_things_get_no_numbers():
    trace = simulate(replace(EIGHT, num_ranks=2))
    first, second = (
        replace(trace, kernels=rows.reset_index(drop=True))
        for _, rows in trace.kernels.groupby("rank")
    )
    other = second.with_kernels(
        collective=second.kernels["collective"].cat.rename_categories(["_allgather_base"])
    )
    merged = merge([first, other], "two")
    assert merged.kernels["group_sequence"][(merged.kernels["rank"] == 1).to_numpy()].isna().all()


def test_the_report_lists_every_rank_the_latest_first():
    section = ranks.render(recorded(replace(EIGHT, late=late_by(r5=2 * MS), hosts=4)))
    assert quantities_in(section.parts[0].text)[-2:] == ["13.3 ms", "5"]
    table, collectives = [part for part in section.parts if isinstance(part, Table)]
    assert (len(table.rows), len(collectives.rows)) == (8, 1)
    assert table.rows[0][:4] == ("5", "node1", "10 of 10", "2 ms")
    (figure,) = [part for part in section.parts if isinstance(part, Figure)]
    (heat,) = figure.data
    assert (heat["y"], heat["x"]) == ([*range(8)], [str(step) for step in range(10)])
    # A straggler of 2 ms in steps of 13.3 ms, and no other.
    assert [rank for rank, row in enumerate(heat["z"]) if min(row) > 10] == [5]
    assert max(max(row) for rank, row in enumerate(heat["z"]) if rank != 5) < 2


def test_one_rank_is_told_to_record_all():
    section = ranks.render(recorded(replace(EIGHT, num_ranks=1)))
    assert "kprof open RANK0 RANK1" in section.parts[0].text


@pytest.mark.parametrize("kind", KINDS)
def test_stragglers_are_found_and_nothing_else_is(kind):
    (case,) = [one for one in cases(1, seed=7, sizes=(8,)) if one.name == f"{kind}-0"]
    found = found_in(case)
    is_told = found.lost_ns >= stragglers.LEAST_SHARE * found.unit_ns
    assert set(found.stragglers if is_told else ()) == case.stragglers


@pytest.mark.parametrize("mean", [1e-3, 0.5, 1.0, 7.3, 60.0, 900.0])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 30, 70, 1_000])
def test_the_tail_of_poissons_distribution_is_that_of_scipy(number, mean):
    assert poisson_tail(number, mean) == pytest.approx(pdtrc(number, mean), rel=1e-11, abs=1e-300)


def test_a_late_rank_that_costs_too_little_for_a_finding_is_named_still():
    def late(rng, rank, step):
        return MS // 2 if rank == 5 and step % 3 == 0 else 0

    case = replace(EIGHT, late=late)
    assert found_in(case).stragglers == (5,)
    assert claims(case) == []
    assert quantities_in(ranks.render(recorded(case)).parts[0].text)[-1] == "5"
