"""Ranks that a Dask cluster reads: the same as this machine, also where a worker dies."""

import os
import signal

import pytest

from kprof.collect.ranks import outcomes_of, read_rank
from kprof.collect.sources import sources_of
from kprof.errors import KprofError
from kprof.opened import open_unwritten
from tests.commands.test_cli import kprof
from tests.kineto_files import kernel, launch, operator, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of four ranks whose kernel takes 20 µs and one more for each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(4):
        events = operator(ts=0, dur=10), launch(ts=1), kernel(ts=5, dur=20 + rank)
        write(folder, *events, name=f"rank{rank}.json", distributedInfo={"rank": rank})
    return folder


@pytest.fixture(scope="module")
def cluster():
    """A Dask cluster of two workers on this machine."""
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        yield cluster


def die_of_rank_2(source):
    if source.path.name == "rank2.json":
        os.kill(os.getpid(), signal.SIGKILL)
    return read_rank(source)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, [1, 3]])
def test_a_cluster_gives_the_same_result_bit_for_bit(folder, cluster, ranks):
    here = open_unwritten([folder], ranks).json
    assert open_unwritten([folder], ranks, cluster.scheduler_address).json == here
    # As with a client that the caller has already.
    with cluster.get_client() as client:
        assert open_unwritten([folder], ranks, client).json == here


@pytest.mark.slow
def test_a_rank_whose_workers_die_costs_that_rank_only(folder, cluster):
    outcomes = outcomes_of(sources_of([folder]), die_of_rank_2, cluster.scheduler_address)
    assert "rank2.json" in outcomes.pop(2).problem
    assert [int(trace.kernels["rank"].iloc[0]) for trace in outcomes] == [0, 1, 3]


@pytest.mark.slow
def test_a_file_that_workers_do_not_see_is_left_out(folder, cluster):
    sources = sources_of([folder])
    (folder / "rank1.json").rename(folder / "moved")
    try:
        outcomes = outcomes_of(sources, read_rank, cluster.scheduler_address)
    finally:
        (folder / "moved").rename(folder / "rank1.json")
    assert "rank1.json" in outcomes[1].problem


def test_no_scheduler_is_an_error(folder, monkeypatch, tmp_path):
    pytest.importorskip("distributed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kprof.collect.cluster.PATIENCE_S", 0.2)
    for address in ("tcp://127.0.0.1:9", "nowhere", "tcp://127.0.0.1:x"):
        with pytest.raises(KprofError, match="scheduler"):
            open_unwritten([folder], None, address)
        assert kprof("open", str(folder), "--scheduler", address) == 2
    assert list(tmp_path.iterdir()) == []
