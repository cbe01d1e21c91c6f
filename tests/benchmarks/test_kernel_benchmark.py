"""`benchmarks/kernels.py`: what is measured again, what counts, and the table in the documents."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from kprof.kernels import kernel_named
from kprof.kernels.bench import measure
from kprof.kernels.bench.measure import Timed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = (8_192, 4_096)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


class Timer:
    """Takes these times, one after the other, and the last one from then on."""

    def __init__(self, name, *times_ns, copy_ns=90.0):
        self.name, self.times_ns, self.copy_ns = name, list(times_ns), copy_ns
        self.num_asked = 0

    def measure(self, direction, shape, copy_ns, ends_s):
        self.num_asked += 1
        gpu_ns = self.times_ns.pop(0) if len(self.times_ns) > 1 else self.times_ns[0]
        found = {"bytes_per_s": 1e12, "share_of_copy": self.copy_ns / gpu_ns, "extra_bytes": 0}
        about = ("rmsnorm", self.name, shape, "bfloat16", direction)
        return Timed(*about, gpu_ns=gpu_ns, copy_ns=copy_ns or self.copy_ns, **found)


def measured(benchmark, *timers):
    found = benchmark("kernels").measured_of(
        {one.name: one for one in timers}, "forward", SHAPE, ends_s=0
    )
    return {name: one.gpu_ns for (_, _, name), one in found.items()}


def test_ours_and_a_peer_that_is_close_are_measured_twice_more_and_the_middle_one_counts(benchmark):
    timers = (Timer("kprof", 102.0, 99.0, 100.0), Timer("liger", 101.0, 104.0, 103.0))
    assert measured(benchmark, *timers) == {"kprof": 100.0, "liger": 103.0}


def test_a_peer_that_is_far_behind_is_measured_once(benchmark):
    timers = (Timer("kprof", 100.0), Timer("eager", 200.0))
    measured(benchmark, *timers)
    assert [one.num_asked for one in timers] == [1, 1]


def test_a_shape_that_ends_a_process_leaves_the_others_to_be_measured(
    benchmark, monkeypatch, tmp_path, capfd
):
    wide = (8_192, 16_384)
    about = Timed("rmsnorm", "quack", SHAPE, "bfloat16", "forward", gpu_ns=100.0)
    script = tmp_path / "peer.py"
    script.write_text(
        f"""
import json, os, sys
if {list(wide)} in [shape for _, shape in json.loads(sys.argv[-1])["wanted"]]:
    os.abort()
print('{{"ready": true}}', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["shape"] == {list(wide)}:
        os.abort()
    print(json.dumps({{**{dataclasses.asdict(about)}, "shape": asked["shape"]}}), flush=True)
"""
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    wanted = [("forward", SHAPE), ("forward", wide)]
    timer, ends_s = benchmark("kernel_timers").Timer("rmsnorm", "quack", wanted), 1e9
    timer.start(ends_s)
    found = [timer.measure("forward", shape, None, ends_s) for shape in (SHAPE, wide, SHAPE)]
    timer.stop()
    assert [bool(one.problem) for one in found] == [False, True, False]
    assert "ended early" in found[1].problem
    assert "error: Aborted" in capfd.readouterr().err


def test_whose_copy_took_another_time_than_the_others_is_measured_again(benchmark):
    odd = Timer("eager", 300.0, 200.0, copy_ns=120.0)
    told = measured(benchmark, odd, Timer("kprof", 100.0), Timer("liger", 150.0))
    assert told == {"kprof": 100.0, "liger": 150.0, "eager": 200.0}


def test_a_kernel_without_a_figure_to_reach_is_measured_in_both_passes(benchmark):
    reaches = benchmark("kernel_reaches")
    wanted = reaches.wanted_of(kernel_named("softmax"))
    assert {direction for direction, _ in wanted} == {"forward", "backward"}
    assert {shape for _, shape in wanted} == set(kernel_named("softmax").shapes)


def test_the_rows_of_a_shape_hold_ours_against_copy_and_the_best_peer(benchmark):
    reaches = benchmark("kernel_reaches")
    about = ("rmsnorm", "forward", 0.93, 1.0)
    times = {"kprof": 100.0, "aten": 95.0, "eager": 300.0}
    found = [
        Timed("rmsnorm", name, SHAPE, "bfloat16", "forward", gpu_ns=ns, share_of_copy=95.0 / ns)
        for name, ns in times.items()
    ]
    rows = {one["name"]: one for one in reaches.rows_of(reaches.Reach(*about), SHAPE, found)}
    ours, best = rows["rmsnorm-forward-8192x4096"], rows["rmsnorm-forward-8192x4096-to-best"]
    assert (ours["value"], ours["met"], ours["router"]) == (0.95, True, "aten")
    assert (best["value"], best["met"], best["peer"]) == (0.95, False, "aten")


def test_the_fastest_of_ours_is_held_against_the_others(benchmark):
    reaches = benchmark("kernel_reaches")
    times = {"kprof": 140.0, "kprof-shared": 120.0, "liger": 180.0}
    found = [
        Timed(
            "cross_entropy", name, SHAPE, "bfloat16", "training", gpu_ns=ns, share_of_copy=90 / ns
        )
        for name, ns in times.items()
    ]
    about = reaches.Reach("cross_entropy", "training", 0.7)
    rows = {one["name"]: one for one in reaches.rows_of(about, SHAPE, found)}
    what = "cross_entropy-training-8192x4096"
    assert (rows[what]["value"], rows[what]["provider"]) == (0.75, "kprof-shared")
    assert rows[f"{what}-to-best"]["value"] == 1.5
    assert set(rows) == {what, f"{what}-kprof", f"{what}-liger", f"{what}-to-best"}


def test_ours_has_a_row_where_it_could_not_be_measured(benchmark):
    reaches = benchmark("kernel_reaches")
    failed = Timed("rmsnorm", "kprof", SHAPE, "bfloat16", "forward", problem="out of time")
    rows = reaches.rows_of(reaches.Reach("rmsnorm", "forward", 0.93), SHAPE, [failed])
    assert [(one["value"], one["problem"], one["met"]) for one in rows] == [
        (None, "out of time", None)
    ]


def test_what_a_call_costs_the_host_is_the_best_of_all_shapes(benchmark):
    kernel = kernel_named("rmsnorm")
    done = {
        ("forward", (rows, 64), "kprof"): Timed(
            "rmsnorm", "kprof", (rows, 64), "bfloat16", "forward", gpu_ns=1.0, host_ns=host_ns
        )
        for rows, host_ns in ((8, 16_300.0), (16, 7_700.0), (32, 9_000.0))
    }
    (row,) = benchmark("kernel_reaches").rows_of_host(kernel, done)
    assert (row["name"], row["value"], row["met"]) == ("rmsnorm-host", 7_700.0, True)


def test_the_table_writes_each_number_with_a_marker_that_leads_to_it(benchmark, tmp_path):
    name = "rmsnorm_h200_2026-11.json"
    rows = [
        {"name": "rmsnorm-forward-8192x4096", "value": 0.9712},
        {"name": "rmsnorm-forward-8192x4096-liger", "value": None},
        {"name": "rmsnorm-forward-8192x4096-aten", "value": 0.64},
    ]
    (tmp_path / name).write_text(json.dumps({"rows": rows}))
    document = tmp_path / "kernels.md"
    marks = "<!-- kernels beside their peers -->", "<!-- end -->"
    document.write_text(f"before\n{marks[0]}\nan older table\n{marks[1]}\nafter\n")
    benchmark("kernel_table").main(tmp_path, document)
    text = document.read_text()
    assert re.findall(r"(\S+) <!-- result: (\S+) -->", text) == [
        ("0.97", f"{name}#rmsnorm-forward-8192x4096.value"),
        ("0.64", f"{name}#rmsnorm-forward-8192x4096-aten.value"),
    ]
    assert "older" not in text
    assert (text.partition("\n")[0], text.split()[-1]) == ("before", "after")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("rmsnorm", (2, 16_384)), ("cross_entropy", (5, 144)), ("softmax", (5, 127))],
)
def test_the_host_is_timed_on_few_rows_of_whole_vectors_where_there_are_such(name, shape):
    assert measure.small_shape(kernel_named(name)) == shape
