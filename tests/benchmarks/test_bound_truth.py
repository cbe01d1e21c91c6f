"""The score of `benchmarks/bound_truth.py`, and how its workload draws sizes and layouts."""

import math
import random
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kprof.trace import Gpu
from tests.traces import analyzed_trace_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RANGES = (
    {"name": "case:7:operators:0:add float32", "start_ns": 0, "duration_ns": 100},
    {"name": "case:7:models:1:bert float16", "start_ns": 100, "duration_ns": 100},
    {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 50},
    {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 150},
    {"kind": "runtime", "name": "cudaLaunchKernel", "start_ns": 900},
)
LARGE = 1 << 30


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("bound_truth")
    for name in ("bound_truth", "classify_vs_ncu", "evidence"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def cases():
    sys.path.insert(0, str(BENCHMARKS / "workloads" / "drawn"))
    yield import_module("cases")
    sys.path.pop(0)
    for name in ("cases", "chains", "models"):
        sys.modules.pop(name, None)


def counted(launch_row=2, **columns):
    told = {"dram_percent": 90.0, "sm_percent": 10.0, "bound": "memory", "work_from": "shapes"}
    traffic = {"bytes": LARGE, "dram_read_bytes": LARGE, "dram_written_bytes": 0}
    return {
        "launch_row": launch_row,
        "grid": "8,1,1",
        "duration_ns": 100,
        **told,
        **traffic,
        **columns,
    }


def rows_of(benchmark, *kernels):
    trace = analyzed_trace_of(*kernels, ranges=RANGES, gpus=(Gpu(0, "NVIDIA H200"),))
    rows, wrong = benchmark.score([trace])
    return {row["name"]: row for row in rows}, wrong


def test_launches_outside_every_case_are_not_scored(benchmark):
    rows, _ = rows_of(benchmark, counted(2), counted(3), counted(4), counted(None))
    assert rows["distinct launches off the borders"]["value"] == 2


def test_a_claim_is_right_where_counters_give_its_class(benchmark):
    wrong = counted(name="slow", bound="latency")
    rows, listed = rows_of(benchmark, counted(), wrong)
    assert rows["claims right"]["value"] == 0.5
    assert [one["kernel"] for one in listed] == ["slow"]


def test_unknown_is_no_claim_and_lowers_what_is_covered(benchmark):
    rows, listed = rows_of(benchmark, counted(), counted(name="other", bound=None))
    assert (rows["claims right"]["value"], listed) == (1.0, [])
    assert rows["claimed, of distinct launches"]["value"] == 0.5


def test_time_weighs_launches_by_their_duration(benchmark):
    long = counted(name="other", bound=None, duration_ns=300)
    rows, _ = rows_of(benchmark, counted(), long)
    assert rows["claimed, of time"]["value"] == 0.25


def test_launches_near_a_border_count_apart(benchmark):
    rows, _ = rows_of(benchmark, counted(), counted(name="near", dram_percent=58.0))
    assert rows["distinct launches off the borders"]["value"] == 1
    assert rows["distinct launches on a border"]["value"] == 1


def test_scores_stand_by_part_and_by_seed(benchmark):
    rows, _ = rows_of(benchmark, counted(2), counted(3, bound="latency"))
    assert rows["claims right, part operators"]["value"] == 1.0
    assert rows["claims right, part models"]["value"] == 0.0
    assert rows["claims right, seed 7"]["value"] == 0.5


def test_equal_sizes_are_scaled_alike_and_sizes_of_one_stay(cases):
    tensors = [torch.zeros(5, 1, 3), torch.zeros(3, 5)]
    shapes = [tuple(one.shape) for one in tensors]
    first, second = cases.scaled_sizes(shapes, tensors, 1e6, random.Random(1))
    assert first[1] == 1
    assert (first[0], first[2]) == (second[1], second[0])


@pytest.mark.parametrize("wanted", [1e4, 1e6, 1e8])
def test_scaled_tensors_have_about_the_wanted_bytes(cases, wanted):
    tensors = [torch.zeros(5, 3)]
    (size,) = cases.scaled_sizes([(5, 3)], tensors, wanted, random.Random(3))
    assert wanted / 4 <= math.prod(size) * 4 <= wanted


def test_a_stored_tensor_repeats_the_elements_in_its_layout(cases):
    small = torch.tensor([[1, 2], [3, 4]])
    made = cases.Stored(small, (4, 3), (1, 0), 2).on("cpu")
    assert made.tolist() == [[1, 2, 1], [3, 4, 3], [1, 2, 1], [3, 4, 3]]
    assert made.stride() == (2, 8)


def test_a_seed_draws_the_same_operators_again(cases):
    once, again = (cases.operator_cases(0.5, tiny=True) for _ in range(2))
    assert [next(once).name for _ in range(3)] == [next(again).name for _ in range(3)]


def test_bytes_are_compared_with_the_traffic_beyond_the_cache(benchmark):
    apart = counted(bytes=LARGE // 2)
    rows, _ = rows_of(benchmark, apart, counted(name="small", bytes=7, dram_read_bytes=1000))
    found = rows["compulsory bytes off the counters, median"]
    assert (found["value"], found["launches"]) == (0.5, 1)
