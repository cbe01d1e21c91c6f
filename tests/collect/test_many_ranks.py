"""Ranks of which some are shown in detail: the same sums and waits, whichever and however read."""

import json

import pandas as pd
import pytest

from kprof.analyze.condense import rank_totals
from kprof.analyze.cost.of_runs import gpus_in
from kprof.analyze.late_causes import find_late_causes
from kprof.analyze.late_ranks import find_lateness
from kprof.collect import many_ranks
from kprof.collect.many_ranks import condensed_rank, named
from kprof.collect.ranks import read_in_processes, read_rank
from kprof.collect.sources import sources_of
from kprof.errors import TraceError
from kprof.opened import open_run, open_unwritten
from kprof.storage import load
from tests.commands.test_cli import kprof
from tests.kineto_files import annotation, kernel, launch, operator, write
from tests.quantities import quantities_in

NUM_RANKS, NUM_STEPS, LATE = 6, 4, 4
GROUP = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Ranks": str([*range(NUM_RANKS)]),
    "In msg nelems": 4096,
    "dtype": "Float",
}


def rank_file(folder, rank, *, name=None, **about):
    """Write the file of a rank that works 100 µs a step, or 160, and waits for the latest."""
    events = []
    for step in range(NUM_STEPS):
        begin, works = 10_000 + 1_000 * step, 160 if rank == LATE else 100 + rank % 3
        ids = [{"correlation": 10 * step + 1}, {"correlation": 10 * step + 2}]
        events += [
            annotation(f"ProfilerStep#{step}", ts=begin, dur=900),
            operator(ts=begin + 1, dur=20),
            launch(ts=begin + 2, args=ids[0]),
            launch(ts=begin + 12, args=ids[1]),
            kernel(ts=begin + 5, dur=works, args=ids[0]),
            kernel(
                name="ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                ts=begin + 5 + works,
                dur=300 - works,
                args=ids[1] | GROUP | {"Seq": step, "stream": 30},
            ),
        ]
    told = {"distributedInfo": {"rank": rank, "world_size": NUM_RANKS}} | about
    return write(folder, *events, name=name or f"rank{rank}.json", **told)


@pytest.fixture
def ranks(tmp_path):
    """A folder of six ranks, of which one is late."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(NUM_RANKS):
        rank_file(folder, rank)
    return folder


def in_detail(opened):
    return sorted(opened.trace.kernels["rank"].unique().tolist())


def straggler_of(opened):
    (found,) = [one for one in opened.trace.diagnosis.findings if one.rule == "stragglers"]
    return found


def document(opened):
    return json.loads(opened.json)


def test_sums_and_waits_are_those_of_all_ranks_whichever_are_in_detail(ranks):
    whole = open_unwritten([ranks])
    some = open_unwritten([ranks], [3, 5])
    assert in_detail(some) == [3, 5]
    assert some.trace.meta.totals == rank_totals(whole.trace)
    assert find_lateness(some.trace) == find_lateness(whole.trace)
    assert find_lateness(some.trace).stragglers == (LATE,)
    by_rank = [{**one, "is_in_detail": True} for one in document(some)["ranks"]]
    assert by_rank == document(whole)["ranks"]
    # What all ranks cost does not depend on which are in detail.
    assert gpus_in(some.trace) == gpus_in(whole.trace)
    assert some.trace.meta.num_all_ranks == NUM_RANKS
    first, second = (straggler_of(opened) for opened in (some, whole))
    assert first.claim == second.claim


def test_a_straggler_in_detail_alone_is_the_straggler_still(ranks):
    assert len(straggler_of(open_unwritten([ranks], [LATE])).rows) == NUM_STEPS


def test_where_not_all_fit_the_late_rank_and_a_spread_are_in_detail(ranks, monkeypatch):
    monkeypatch.setattr(many_ranks, "FEWEST_IN_DETAIL", 3)
    monkeypatch.setattr(many_ranks, "IN_DETAIL_BYTES", 1)
    opened = open_unwritten([ranks])
    assert {0, LATE} < set(in_detail(opened))
    assert len(in_detail(opened)) == 3
    (caveat,) = [one for one in opened.trace.meta.caveats if one.id == "ranks_in_detail"]
    assert quantities_in(caveat.text)[:2] == ["6", "3"]
    assert [one["is_in_detail"] for one in document(opened)["ranks"]].count(True) == 3


def test_no_more_than_so_many_ranks_are_in_detail_where_not_all_fit(ranks, monkeypatch):
    all_bytes = sum(path.stat().st_size for path in ranks.iterdir())
    monkeypatch.setattr(many_ranks, "FEWEST_IN_DETAIL", 1)
    monkeypatch.setattr(many_ranks, "MOST_IN_DETAIL", 2)
    monkeypatch.setattr(many_ranks, "IN_DETAIL_BYTES", all_bytes - 1)
    assert len(in_detail(open_unwritten([ranks]))) == 2


@pytest.mark.parametrize("number", [2])
def test_any_number_of_processes_condenses_the_same(ranks, number):
    sources = sources_of([ranks])
    together = read_in_processes(sources, number, condensed_rank)
    for one, other in zip(map(condensed_rank, sources), together, strict=True):
        assert one.meta == other.meta
        pd.testing.assert_frame_equal(one.kernels, other.kernels)


def test_the_order_of_files_decides_nothing(ranks):
    files = sorted(ranks.iterdir())
    usual, turned = (open_unwritten(paths, [1, 3]) for paths in (files, files[::-1]))
    assert usual.json == turned.json


def test_a_damaged_rank_costs_that_rank_only(ranks):
    (ranks / "rank2.json").write_bytes(b"")
    opened = open_unwritten([ranks], [0, 5])
    assert [one["rank"] for one in document(opened)["ranks"]] == [0, 1, 3, 4, 5]
    assert {"files_left_out", "ranks_missing"} <= {one.id for one in opened.trace.meta.caveats}
    assert find_lateness(opened.trace).stragglers == (LATE,)


def test_files_that_do_not_tell_their_rank_are_numbered_in_their_order(tmp_path):
    for rank in range(3):
        rank_file(tmp_path, rank, name=f"r{rank}.json", distributedInfo={})
    opened = open_unwritten([tmp_path], [2])
    assert in_detail(opened) == [2]
    alone = read_rank(sources_of([tmp_path])[2])
    assert opened.trace.kernels["duration_ns"].tolist() == alone.kernels["duration_ns"].tolist()


def test_ranks_with_and_without_a_gpu_are_refused_together_and_each_sort_is_read(ranks):
    for rank in range(2):
        spans = [operator(ts=10 + 100 * step, dur=50 + rank) for step in range(3)]
        write(ranks, *spans, name=f"rank{rank}.json", distributedInfo={"rank": rank})
    with pytest.raises(TraceError, match="GPU"):
        open_unwritten([ranks], [4])
    hosts = [ranks / "rank0.json", ranks / "rank1.json"]
    some, both = open_unwritten(hosts, [1]), open_unwritten(hosts)
    assert some.trace.is_host_only
    assert some.trace.all_ranks.is_host_only
    assert some.trace.meta.totals == rank_totals(both.trace)


def test_a_saved_run_keeps_the_waits_of_all_ranks(ranks, tmp_path):
    opened = open_run([ranks], tmp_path / "x.kprof", force=False, ranks=[2, 3])
    again = load(tmp_path / "x.kprof")
    assert find_lateness(again) == find_lateness(opened.trace)
    assert again.meta.totals == opened.trace.meta.totals
    assert open_unwritten([tmp_path / "x.kprof"]).json == opened.json


def test_a_rank_that_no_file_holds_is_an_error(ranks):
    with pytest.raises(TraceError, match="rank 6"):
        open_unwritten([ranks], [0, 6])


def test_ranks_that_share_a_file_with_those_asked_for_are_told(tmp_path):
    for name, processes in {"a": (10, 20), "b": (30,)}.items():
        events = []
        for process in processes:
            ids = {"correlation": process, "External id": process}
            events += [operator(pid=process, args=ids), launch(pid=process, args=ids)]
            device = process // 10
            events.append(kernel(ts=5, dur=20, pid=device, args=ids | {"device": device}))
        write(tmp_path, *events, name=f"{name}.json")
    opened = open_unwritten([tmp_path], [1])
    told = {one.id: one.text for one in opened.trace.meta.caveats}
    assert in_detail(opened) == [0, 1]
    assert quantities_in(told["ranks_not_asked"]) == ["0"]
    assert quantities_in(told["ranks_in_detail"])[:2] == ["3", "2"]


@pytest.mark.parametrize("text", ["", "a", "1-", "-2", "5-3", "²", "1;2", "9" * 30])
def test_a_text_that_names_no_rank_is_an_error(ranks, monkeypatch, text):
    monkeypatch.chdir(ranks.parent)
    assert kprof("open", "ranks", f"--ranks={text}") == 2
    assert not (ranks.parent / "ranks.kprof").exists()


def test_ranks_are_named_as_people_write_them(ranks, monkeypatch):
    monkeypatch.chdir(ranks.parent)
    assert named([0, 1, 2, 5, 8, 9]) == "0-2, 5, 8-9"
    assert kprof("open", "ranks", "--ranks", "0-1, 3,5") == 0
    assert load(ranks.parent / "ranks.kprof").kernels["rank"].nunique() == 4
    # They are chosen already.
    assert kprof("open", "ranks.kprof", "--ranks", "1") == 2


def test_a_late_rank_that_is_not_in_detail_has_its_cause(ranks):
    everyone = open_unwritten([ranks])
    others = open_unwritten([ranks], [0, 1])
    assert in_detail(others) == [0, 1]
    assert [(one.rank, one.units) for one in others.trace.meta.late_times] == [
        (LATE, tuple(range(NUM_STEPS)))
    ]
    ((one,), (other,)) = map(find_late_causes, (everyone.trace, others.trace))
    assert (one.rank, one.cause) == (other.rank, other.cause) == (LATE, "compute")


def test_the_time_of_late_ranks_is_kept_with_the_run(ranks, tmp_path):
    opened = open_run([ranks], tmp_path / "some.kprof", ranks=[0, 1], force=False)
    assert load(tmp_path / "some.kprof").meta.late_times == opened.trace.meta.late_times
    assert len(opened.trace.meta.late_times) == 1
