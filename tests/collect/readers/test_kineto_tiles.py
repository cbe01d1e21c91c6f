"""The trace that the import benchmark makes is a longer recording, not the same one twice."""

import gzip
import runpy
from pathlib import Path

import pytest

from kprof.collect.readers.kineto.reader import read
from tests.kineto_files import annotation, kernel, launch, operator, write

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def tile(monkeypatch):
    """The benchmark's own function; a script finds its neighbours beside it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "import_speed.py"))["tile"]


def test_repetitions_have_later_times_and_ids_of_their_own(tmp_path, tile):
    path = write(
        tmp_path,
        annotation("ProfilerStep#4", ts=10.5, dur=3),
        operator(ts=10.75, dur=1, args={"External id": 5, "Sequence number": 2}),
        launch(ts=11, args={"External id": 5, "correlation": 7}),
        kernel(ts=12.001, args={"External id": 5, "correlation": 7}),
    )
    recorded = tmp_path / "recorded.json.gz"
    recorded.write_bytes(gzip.compress(path.read_bytes()))
    tiled = tmp_path / "tiled.json"
    assert tile(recorded, tiled, path.stat().st_size * 2.5) == 3
    trace = read(tiled)
    assert trace.kernels["start_ns"].tolist() == [12001, 1014001, 2016001]
    assert trace.kernels["correlation"].tolist() == [7, 8, 9]
    calls = trace.ranges[trace.ranges["kind"] == "runtime"]
    assert calls["correlation"].tolist() == [7, 8, 9]
    assert calls["external_id"].tolist() == [5, 6, 7]
    steps = trace.ranges.loc[trace.ranges["kind"] == "step", "name"].tolist()
    assert steps == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
