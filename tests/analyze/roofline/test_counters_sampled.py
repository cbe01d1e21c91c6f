"""Counters sampled as a workload runs: by a stand-in for CUPTI, laid out in time, shared out."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from kprof.analyze.roofline.hardware_counters import sampled_by, share_out
from kprof.collect.readers.recorded.sampled_counters import (
    FILE,
    Sampled,
    busy_of,
    place,
    with_samples,
)
from kprof.collect.recorder.kprof_recorder import newest_cupti
from kprof.collect.recorder.kprof_recorder.capture import QUANTITIES, TRAFFIC, Counters
from kprof.errors import LaunchError
from kprof.report.sections import counters as section
from kprof.run import RunOptions, run
from tests.quantities import quantities_in
from tests.recorded import LEAN_TORCH
from tests.traces import analyzed_trace_of, trace_of

US = 1000


class Collector:
    """CUPTI's collector, with samples of its own; what `fails` names raises an error."""

    made: ClassVar[list] = []
    rows: ClassVar[list] = [(100, 50, 400, 7, 9), (0, 0, 0, 0, 0)]
    fails: ClassVar[dict] = {}
    most: ClassVar[int] = 5

    def __init__(self, device_index):
        self.calls = []
        Collector.made.append(self)

    def __getattr__(self, name):
        if name not in ("enable", "configure", "start", "stop"):
            raise AttributeError(name)

        def call(**options):
            self.calls.append(name)
            if name in self.fails:
                raise self.fails[name]
            if len(options.get("metrics", ())) > self.most:
                raise ValueError("more than one pass")

        return call

    def decode(self, max_samples):
        if "decode" in self.fails:
            raise self.fails["decode"]
        samples = [SimpleNamespace(metric_values=[float(v) for v in row]) for row in self.rows]
        return DecodedData(samples)


class DecodedData(list):
    """Samples, and how many there were."""

    @property
    def num_populated_samples(self):
        return len(self) + 1


@pytest.fixture
def cupti(monkeypatch):
    """A stand-in for CUPTI on a machine whose process uses a GPU."""
    package, module = ModuleType("cupti"), ModuleType("cupti.pm_sampling")
    module.Collector = package.pm_sampling = module
    module.Collector = Collector
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.pm_sampling", module)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(Collector, "made", [])
    monkeypatch.setattr(Collector, "fails", {})
    return Collector


def sampled_into(folder):
    counters = Counters()
    counters.prepare()
    counters.start()
    counters.stop()
    counters.write(folder)
    return json.loads((folder / FILE).read_text())


def test_a_window_leaves_its_samples_by_quantity(tmp_path, cupti):
    told = sampled_into(tmp_path)
    columns = ([100, 0], [50, 0], [400, 0], [7, 0], [9, 0])
    assert told["values"] == dict(zip(QUANTITIES[0], columns, strict=True))
    assert (told["device"], told["interval_ns"], told["num_populated"]) == (1, 20_000, 3)


def test_a_gpu_that_counts_less_in_one_pass_is_asked_for_less(tmp_path, cupti, monkeypatch):
    monkeypatch.setattr(Collector, "most", 3)
    assert list(sampled_into(tmp_path)["values"]) == list(TRAFFIC)


def test_a_second_window_does_not_set_the_counters_up_again(tmp_path, cupti):
    counters = Counters()
    for _ in range(2):
        counters.prepare()
        counters.start()
        counters.stop()
    (collector,) = cupti.made
    assert collector.calls == ["enable", "configure", "start", "stop", "start", "stop"]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("enable", PermissionError("no"), "only administrators"),
        ("configure", ValueError("several passes"), "several passes"),
        ("start", RuntimeError("started already"), "started already"),
        ("decode", MemoryError(), "record fewer steps"),
        ("stop", RuntimeError("lost"), "not give the samples"),
    ],
)
def test_a_failure_of_the_counters_is_told_and_stops_nothing(
    call, error, said, tmp_path, cupti, monkeypatch
):
    monkeypatch.setattr(Collector, "fails", {call: error})
    assert said in sampled_into(tmp_path)["problem"]


def test_without_the_extra_the_way_to_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert "pip install cupti-python" in sampled_into(tmp_path)["problem"]


def test_the_cupti_beside_the_extra_is_loaded_first_and_what_it_needs_before_it(
    tmp_path, monkeypatch
):
    (tmp_path / "cupti").mkdir()
    (tmp_path / "cupti" / "__init__.py").touch()
    libraries = tmp_path / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    for name in ("libcupti.so.13", "libnvperf_host.so", "libnvperf_target.so", "libother.so"):
        (libraries / name).touch()
    loaded = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(newest_cupti.ctypes, "CDLL", lambda path: loaded.append(Path(path).name))
    newest_cupti.load_cupti()
    assert loaded == ["libnvperf_host.so", "libnvperf_target.so", "libcupti.so.13"]


def test_a_library_that_cannot_be_loaded_is_left_to_torch(tmp_path, monkeypatch):
    (tmp_path / "cupti").mkdir()
    (tmp_path / "cupti" / "__init__.py").touch()
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "lib" / "libcupti.so.13").write_text("no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    newest_cupti.load_cupti()


def test_a_workload_without_a_gpu_is_told(tmp_path):
    told = sampled_into(tmp_path)
    assert set(told) == {"schema", "problem"}
    assert (told["schema"], "no GPU" in told["problem"]) == (1, True)


def test_a_gpu_that_gave_nothing_is_told(tmp_path, cupti, monkeypatch):
    monkeypatch.setattr(Collector, "rows", [])
    assert "no samples" in sampled_into(tmp_path)["problem"]


def kernels_at(*spans, **columns):
    """Return rows of kernels from starts and ends in microseconds."""
    return [
        {"start_ns": start * US, "duration_ns": (end - start) * US, **columns}
        for start, end in spans
    ]


# Busy from 1,003 to 1,063 and from 1,103 to 1,143 µs.
SPANS = ((1003, 1063), (1103, 1143))


def activity_from(first_us, spans, number, interval_us=20):
    """Return what a counter of all traffic shows: bytes in proportion to the time worked."""
    edges = (first_us + np.arange(number + 1) * interval_us)[:, None]
    starts, ends = (np.array(side) for side in zip(*spans, strict=True))
    worked = (np.clip(edges, starts, ends) - starts).sum(axis=1)
    return np.diff(worked) * 1000.0


def test_time_worked_counts_once_where_activities_overlap():
    busy = busy_of(trace_of(*kernels_at((0, 30), (10, 20), (25, 40))).kernels)
    assert busy.until(np.array([5, 30, 99]) * US).tolist() == [5 * US, 30 * US, 40 * US]


@pytest.mark.parametrize("first_us", [900, 905, 911, 918])
def test_samples_are_placed_where_they_fit_the_activities(first_us):
    busy = busy_of(trace_of(*kernels_at(*SPANS)).kernels)
    activity = activity_from(first_us, SPANS, 20)
    found = place(activity, Sampled(interval_ns=20 * US), busy)
    assert abs(found - first_us * US) <= 1.5 * US


def test_what_had_been_counted_before_the_first_sample_is_no_activity():
    busy = busy_of(trace_of(*kernels_at(*SPANS)).kernels)
    activity = activity_from(900, SPANS, 20)
    activity[0] = 1e9
    assert abs(place(activity, Sampled(interval_ns=20 * US), busy) - 900 * US) <= 1.5 * US


def test_edges_with_less_work_than_a_sample_may_leave_no_trace():
    busy = busy_of(trace_of(*kernels_at((700, 701), *SPANS)).kernels)
    found = place(activity_from(900, SPANS, 20), Sampled(interval_ns=20 * US), busy)
    assert abs(found - 900 * US) <= 1.5 * US


def test_edges_with_more_work_than_a_sample_leave_one():
    busy = busy_of(trace_of(*kernels_at((700, 722), *SPANS)).kernels)
    told = place(activity_from(900, SPANS, 20), Sampled(interval_ns=20 * US), busy)
    assert "0.44 ms" in quantities_in(told)


def test_samples_that_last_longer_than_the_activities_are_not_placed():
    busy = busy_of(trace_of(*kernels_at(*SPANS)).kernels)
    activity = activity_from(900, [(1003, 1063), (1203, 1243)], 30)
    assert "0.14 ms" in quantities_in(place(activity, Sampled(interval_ns=20 * US), busy))


def test_counters_that_never_moved_are_not_placed():
    busy = busy_of(trace_of(*kernels_at(*SPANS)).kernels)
    assert "never" in place(np.zeros(9), Sampled(interval_ns=20 * US), busy)


def write_samples(folder, **told):
    (folder / FILE).write_text(json.dumps({"schema": 1, **told}))


def test_samples_beside_a_trace_become_samples_of_it(tmp_path):
    everything = activity_from(983, SPANS, 8).tolist()
    values = {name: [int(value) for value in everything] for name in TRAFFIC}
    write_samples(tmp_path, device=0, interval_ns=20 * US, values=values, num_populated=10)
    trace = with_samples(trace_of(*kernels_at(*SPANS)), tmp_path)
    reads = trace.samples[trace.samples["quantity"] == "dram_read_bytes"]
    assert set(reads["source"]) == {"counters"}
    assert np.diff(reads["time_ns"]).tolist() == [20 * US] * 6
    assert reads["value"].sum() == 100_000
    assert [quantities_in(one.text) for one in trace.meta.caveats] == [["20 µs", "2"]]


def test_why_nothing_was_sampled_is_a_caveat(tmp_path):
    problem = "the driver lets only administrators read counters"
    write_samples(tmp_path, problem=problem)
    (caveat,) = with_samples(trace_of({}), tmp_path).meta.caveats
    assert problem in caveat.text


def test_damaged_samples_are_left_out_and_the_trace_stays(tmp_path):
    (tmp_path / FILE).write_text('{"values": [')
    trace = with_samples(trace_of({}), tmp_path)
    assert len(trace.kernels) == 1
    assert trace.meta.caveats[0].id == "counters_left_out"


def test_without_samples_nothing_is_added(tmp_path):
    trace = trace_of({})
    assert with_samples(trace, tmp_path) is trace


def sample(at_us, value, quantity="dram_read_bytes"):
    told = {"source": "counters", "quantity": quantity, "rank": 0, "device": 0}
    return {"time_ns": at_us * US, "value": value, **told}


def test_a_sample_belongs_to_what_ran_in_it_by_time():
    trace = trace_of(
        *kernels_at((0, 10), (10, 30)), samples=[sample(0, 80.0), sample(20, 20.0), sample(40, 7.0)]
    )
    shared = share_out(trace, "dram_read_bytes")
    assert shared.by_row.tolist() == [40.0, 60.0]
    assert shared.beside == 7.0


def test_an_instant_is_shared_out_once_where_activities_overlap():
    trace = trace_of(*kernels_at((0, 20), (10, 40)), samples=[sample(0, 80.0), sample(20, 20.0)])
    # From 10 on, both run, and the second ends last.
    assert share_out(trace, "dram_read_bytes").by_row.tolist() == [40.0, 60.0]


def test_what_runs_outside_of_all_samples_gets_nothing():
    kernels = kernels_at((0, 20), (30, 35), (90, 99))
    trace = trace_of(*kernels, samples=[sample(0, 80.0), sample(20, 20.0)])
    assert share_out(trace, "dram_read_bytes").by_row.tolist() == [80.0, 20.0, 0.0]


def test_a_module_gets_the_traffic_of_its_activities():
    trace = analyzed_trace_of(
        *kernels_at((0, 20), module="attn"),
        *kernels_at((20, 30), module="mlp"),
        samples=[
            sample(0, 80.0),
            sample(20, 20.0),
            sample(0, 4.0, "dram_written_bytes"),
            sample(20, 2.0, "dram_written_bytes"),
        ],
    )
    table = sampled_by(trace, trace.kernels["module"])
    assert table["label"].tolist() == ["attn", "mlp"]
    assert table["time_ns"].tolist() == [20 * US, 10 * US]
    assert table["read_bytes"].tolist() == [80.0, 20.0]
    assert table["written_bytes"].tolist() == [4.0, 2.0]


def test_activity_is_a_share_of_the_busiest_samples_cycles_and_of_those_of_the_sms():
    trace = analyzed_trace_of(
        *kernels_at((0, 20), name="full"),
        *kernels_at((20, 40), name="half"),
        samples=[
            sample(0, 1000.0, "sm_active_cycles"),
            sample(20, 500.0, "sm_active_cycles"),
            sample(0, 3000.0, "tensor_active_cycles"),
            sample(20, 0.0, "tensor_active_cycles"),
        ],
    )
    table = sampled_by(trace, trace.kernels["name"]).set_index("label")
    assert table["sm_share"].to_dict() == {"full": 1.0, "half": 0.5}
    assert table["tensor_share"].to_dict() == {"full": 0.75, "half": 0.0}


def test_activity_that_was_not_sampled_has_no_share():
    trace = analyzed_trace_of(*kernels_at((0, 20)), samples=[sample(0, 8.0), sample(20, 8.0)])
    table = sampled_by(trace, trace.kernels["name"])
    assert table[["sm_share", "tensor_share"]].isna().all(axis=None)


def test_the_section_tells_the_rate_of_each_module():
    trace = analyzed_trace_of(
        *kernels_at((0, 20), module="attn"),
        samples=[sample(at, 8e6) for at in (0, 20)] + [sample(0, 2e6, "dram_written_bytes")],
    )
    text, table, _ = section.render(trace).parts
    assert quantities_in(text.text)[0] == "20 µs"
    row = ("attn", "20 µs", "8 MB", "2 MB", "500 GB/s", "50.0 %", "—", "—")
    assert table.rows == (row,)


def test_of_kernels_only_those_that_last_a_sample_are_told():
    trace = analyzed_trace_of(
        *kernels_at((0, 20), name="long"),
        *kernels_at((20, 25), name="short"),
        samples=[sample(at, 8e6) for at in (0, 20)],
    )
    assert [row[0] for row in section.render(trace).parts[-1].rows] == ["long"]


def test_counters_and_nsight_systems_do_not_go_together(tmp_path):
    with pytest.raises(LaunchError, match="nor counters"):
        run(RunOptions(("true",), form="command", nsys=True, counters=True))


@pytest.mark.slow
def test_a_run_without_a_gpu_says_that_nothing_was_sampled(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(
        f"{LEAN_TORCH}\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    outcome = run(RunOptions((str(script),), out=tmp_path / "out.kprof", skip=2, counters=True))
    assert outcome.exit_code == 0
    told = json.loads(next(Path(tmp_path).rglob(FILE)).read_text())["problem"]
    assert any(told in one.text for one in outcome.opened.trace.meta.caveats)
