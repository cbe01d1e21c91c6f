"""The ranks that the benchmark writes are ranks of one run, with collectives that match."""

import runpy
from pathlib import Path

import pytest

from kprof.opened import read

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    write = runpy.run_path(str(BENCHMARKS / "ranks.py"))["write_ranks"]
    write(tmp_path, 4, num_events=1_500)
    return read([tmp_path])


def test_every_rank_is_there_with_the_same_collectives_on_one_clock(trace):
    collectives = trace.kernels[trace.kernels["collective"].notna()]
    numbers = collectives.groupby("rank")["group_sequence"].apply(list)
    assert numbers.index.tolist() == [0, 1, 2, 3]
    assert all(own == [*range(len(own))] and own for own in numbers)
    assert trace.meta.clocks_grade == "good"


def test_one_rank_comes_late_and_all_end_together(trace):
    first = trace.kernels[trace.kernels["group_sequence"] == 0]
    assert (first["start_ns"] + first["duration_ns"]).nunique() == 1
    assert first.loc[first["start_ns"].idxmax(), "rank"] == 3
