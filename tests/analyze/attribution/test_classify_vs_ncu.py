"""The score of `benchmarks/classify_vs_ncu.py`, on launches whose verdicts are known."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from kprof.trace import Gpu
from tests.traces import analyzed_trace_of

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RANGES = (
    {"name": "training", "start_ns": 0, "duration_ns": 100},
    {"name": "decode", "start_ns": 100, "duration_ns": 100},
    {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 50, "thread": 2},
    {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 150},
    {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 900},
)
LARGE = 1 << 30
# Names of rows.
IN_MEMORY = "all traffic in memory"
RECORDED = "class agreement, verdict of the recorded run"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("classify_vs_ncu")
    for name in ("classify_vs_ncu", "evidence"):
        sys.modules.pop(name, None)


def counted(launch_row=2, **columns):
    told = {"dram_percent": 90.0, "sm_percent": 10.0, "bound": "memory", "work_from": "shapes"}
    traffic = {"bytes": LARGE, "dram_read_bytes": LARGE, "dram_written_bytes": 0}
    return {"launch_row": launch_row, "grid": "8,1,1", **told, **traffic, **columns}


def trace_of(*kernels):
    return analyzed_trace_of(*kernels, ranges=RANGES, gpus=(Gpu(0, "NVIDIA H200"),))


def rows_of(benchmark, *kernels):
    rows, differences = benchmark.score([trace_of(*kernels)])
    return {row["name"]: row for row in rows}, differences


def test_a_launch_belongs_to_the_part_in_which_any_thread_made_it(benchmark):
    trace = trace_of(counted(2), counted(3), counted(4), counted(None))
    assert benchmark.parts_of(trace).tolist() == ["training", "decode", None, None]


def test_the_same_launch_counts_once_in_each_part(benchmark):
    rows, _ = rows_of(benchmark, counted(2), counted(2), counted(3), counted(3, grid="9,1,1"))
    assert rows["distinct launches"]["value"] == 3


def test_launches_that_were_not_counted_are_no_evidence(benchmark):
    rows, _ = rows_of(benchmark, counted(), {"bound": "memory", "work_from": "shapes"})
    assert rows["distinct launches"]["value"] == 1


def test_verdicts_that_differ_are_listed_and_those_on_a_border_apart(benchmark):
    differing = counted(name="slow", bound="latency")
    near = counted(name="near", bound="latency", dram_percent=58.0)
    rows, told = rows_of(benchmark, counted(), differing, near)
    agreement = rows["class agreement, all traffic in memory"]
    assert (agreement["value"], agreement["borderline"]) == (0.5, 1)
    assert [one["kernel"] for one in told["differing"]] == ["slow"]
    assert [one["kernel"] for one in told["on_a_border"]] == ["near"]


def test_launches_of_which_a_cache_kept_a_part_are_counted_apart(benchmark):
    kept = counted(name="kept", dram_percent=20.0, dram_read_bytes=LARGE // 2)
    rows, told = rows_of(benchmark, counted(), kept)
    assert rows[f"distinct launches, {IN_MEMORY}"]["value"] == 1
    assert rows[f"class agreement, {IN_MEMORY}"]["value"] == 1.0
    assert rows["class agreement"]["value"] == 0.5
    assert [one["kernel"] for one in told["differing_in_a_cache"]] == ["kept"]
    assert told["differing"] == []


def test_traffic_is_compared_where_the_cache_is_too_small(benchmark):
    small = counted(name="small", bytes=1000, dram_read_bytes=9000)
    more = counted(dram_read_bytes=LARGE + LARGE // 20)
    rows, _ = rows_of(benchmark, more, small)
    traffic = rows["traffic off the least bytes, median, outside of the cache"]
    assert (traffic["value"], traffic["launches"], traffic["met"]) == (0.05, 1, True)


def test_a_beaten_ceiling_is_told_wherever_the_data_were(benchmark):
    beaten = counted(name="small", bytes=1000, limit_ns=103, duration_ns=100)
    rows, _ = rows_of(benchmark, counted(limit_ns=99, duration_ns=100), beaten)
    found = rows["ceiling beaten by at most"]
    assert (found["value"], found["met"], found["launches"]) == (0.03, False, 2)


def test_the_verdict_of_the_counted_run_is_compared_and_that_of_the_recorded_one_beside_it(
    benchmark,
):
    rows, _ = rows_of(benchmark, counted(bound="latency", counted_bound="memory"))
    assert (rows["class agreement"]["value"], rows[RECORDED]["value"]) == (1.0, 0.0)


def test_two_halves_of_the_launches_are_scored_apart_and_are_all_of_them(benchmark):
    rows, _ = rows_of(benchmark, *(counted(name=f"kernel {n}") for n in range(16)))
    names = ("class agreement, one half of the launches", "class agreement, the other half")
    assert sorted(rows[name]["agreeing"] for name in names) == [7, 9]


def test_runs_are_scored_together_and_the_last_tells_of_what_several_counted(benchmark):
    first = trace_of(counted(name="again", bound="latency"), counted(name="training's"))
    last = trace_of(counted(name="again"), counted(3, name="decode's"))
    rows, told = benchmark.score([first, last])
    named = {row["name"]: row["value"] for row in rows}
    assert named["distinct launches"] == 3
    assert named["class agreement"] == 1.0
    assert told["differing"] == []


def test_each_run_tells_its_parts_and_when_it_was_measured(benchmark):
    told = benchmark.of_a_run(trace_of(counted(3), counted(2)), {"date": "2026-11-20", "gpu": "G"})
    assert (told["parts"], told["date"]) == (["training", "decode"], "2026-11-20")
    assert "gpu" not in told
