"""The files of many ranks: read by any number of processes alike, each for itself."""

import pandas as pd
import pytest

from kprof.collect.ranks import read_in_processes, read_rank, read_ranks
from kprof.collect.sources import sources_of
from kprof.errors import TraceError
from kprof.opened import open_unwritten
from tests.kineto_files import kernel, launch, operator, write


def rank_file(folder, rank, **changes):
    """Write the file of a rank whose kernel takes 20 µs and one more for each rank."""
    events = operator(ts=0, dur=10), launch(ts=1), kernel(ts=5, dur=20 + rank, **changes)
    return write(folder, *events, name=f"rank{rank}.json", distributedInfo={"rank": rank})


@pytest.fixture
def ranks(tmp_path):
    """A folder of five ranks."""
    for rank in range(5):
        rank_file(tmp_path, rank)
    return tmp_path


@pytest.fixture
def in_children(tmp_path_factory, monkeypatch):
    """Return a function that lets every process that is started run a text of Python first."""
    folder = tmp_path_factory.mktemp("first")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return (folder / "sitecustomize.py").write_text


@pytest.mark.parametrize("number", [1, 2])
def test_any_number_of_processes_reads_the_same_in_the_order_of_the_files(ranks, number):
    sources = sources_of([ranks])
    alone = [read_rank(source) for source in sources]
    together = read_in_processes(sources, number)
    assert [trace.meta for trace in together] == [trace.meta for trace in alone]
    for one, other in zip(alone, together, strict=True):
        pd.testing.assert_frame_equal(one.kernels, other.kernels)
        pd.testing.assert_frame_equal(one.ranges, other.ranges)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b'{"schemaVersion": 1, "devi'])
def test_a_rank_that_cannot_be_read_costs_that_rank_only(ranks, content):
    (ranks / "rank3.json").write_bytes(content)
    traces, caveats = read_ranks(sources_of([ranks]))
    assert [int(trace.kernels["rank"].iloc[0]) for trace in traces] == [0, 1, 2, 4]
    (caveat,) = caveats
    assert caveat.id == "files_left_out"
    assert "rank3.json" in caveat.text


def test_a_rank_that_is_cut_off_before_its_first_kernel_costs_that_rank_only(ranks):
    whole = (ranks / "rank3.json").read_text()
    (ranks / "rank3.json").write_text(whole[: whole.index("gemm")])
    traces, (caveat,) = read_ranks(sources_of([ranks]))
    assert len(traces) == 4
    assert caveat.id == "files_left_out"
    assert "rank3.json" in caveat.text


def test_where_no_rank_can_be_read_the_first_error_is_raised(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").touch()
    with pytest.raises(TraceError, match=r"rank0\.json"):
        read_ranks(sources_of([tmp_path]))


def test_ranks_that_are_all_read_have_no_caveat(ranks):
    assert read_ranks(sources_of([ranks]))[1] == []


DIES_OF_RANK_2 = """
import os, signal, sys
def hook(event, values):
    if event == "open" and str(values[0]).endswith("rank2.json"):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


def test_a_rank_whose_processes_are_killed_costs_that_rank_only(ranks, in_children):
    in_children(DIES_OF_RANK_2)
    outcomes = read_in_processes(sources_of([ranks]), 2)
    assert "rank2.json" in outcomes.pop(2).problem
    assert [int(trace.kernels["rank"].iloc[0]) for trace in outcomes] == [0, 1, 3, 4]


def test_processes_that_cannot_start_cost_no_rank(ranks, in_children):
    in_children("raise SystemExit(3)")
    outcomes = read_in_processes(sources_of([ranks]), 2)
    assert [int(trace.kernels["rank"].iloc[0]) for trace in outcomes] == [0, 1, 2, 3, 4]


def test_the_order_in_which_ranks_are_named_does_not_change_the_summary(ranks):
    (ranks / "rank3.json").write_bytes(b"")
    usual = open_unwritten([ranks / f"rank{rank}.json" for rank in range(5)])
    named = open_unwritten([ranks / f"rank{rank}.json" for rank in (2, 0, 4, 1, 3)])
    assert named.json == usual.json
