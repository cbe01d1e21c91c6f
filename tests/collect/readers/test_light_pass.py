"""Two passes of a recording become one trace: times of the light one, names of the full one."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.passes import attributed
from kprof.collect.readers.kineto import reader as kineto
from kprof.collect.readers.recorded import reader as recorded
from kprof.collect.readers.recorded.light_pass import PassesDifferError, SameStep, joined
from kprof.trace import LightPass
from tests.kineto_files import annotation, kernel, launch, operator
from tests.traces import trace_of

DATA = Path(__file__).parents[2] / "data" / "h200"
NAMES = ("hf_generate", "convnet_dataloader", "llama_train", "compiled", "cudagraph")
BASE_NS = 1_790_000_000_000_000_000
COLUMNS = ["kind", "name", "thread", "start_ns", "duration_ns", "correlation", "external_id"]


@pytest.fixture(scope="module", params=NAMES)
def full(request):
    return kineto.read(DATA / f"{request.param}.json.gz")


def call(correlation, start_ns, duration_ns=2, name="cudaLaunchKernel", **changes):
    return {
        "kind": "runtime",
        "name": name,
        "thread": 1,
        "start_ns": start_ns,
        "duration_ns": duration_ns,
        "correlation": correlation,
        **changes,
    }


def light_pass_of(trace, moved):
    """Return what a light pass would hold, were the host and the device as fast as `moved` says."""
    kernels, ranges = trace.kernels, trace.ranges
    calls = ranges[(ranges["kind"] == "runtime").to_numpy(bool)].reset_index(drop=True)
    tables = []
    for table in (kernels, calls):
        start = table["start_ns"].to_numpy()
        end = start + table["duration_ns"].to_numpy()
        tables.append(table.assign(start_ns=moved(start), duration_ns=moved(end) - moved(start)))
    return replace(trace, kernels=tables[0], ranges=tables[1])


def rows_of(trace):
    ranges = trace.ranges[(trace.ranges["kind"] != "overhead").to_numpy(bool)]
    table = ranges[COLUMNS].astype({"kind": object, "name": object})
    return table.reset_index(drop=True)


def test_a_recording_joined_with_itself_is_itself(full):
    again = joined(full, full)
    pd.testing.assert_frame_equal(again.kernels, full.kernels)
    pd.testing.assert_frame_equal(rows_of(again), rows_of(full))
    assert len(again.ranges) == len(full.ranges)


def test_a_faster_host_changes_times_and_no_name(full):
    origin = min(full.kernels["start_ns"].min(), full.ranges["start_ns"].min())

    def moved(times):
        past = (times - origin).astype(np.float64)
        return origin + np.rint(past / 2 + 5e4 * (1 - np.cos(past / 2e6))).astype(np.int64) // 2

    light = light_pass_of(full, moved)
    both = joined(full, light)
    assert (both.kernels["start_ns"] == light.kernels["start_ns"]).all()
    assert (both.kernels["duration_ns"] == light.kernels["duration_ns"]).all()
    before, after = attributed(full).kernels, attributed(both).kernels
    for name in ("op", "module", "phase", "step", "range", "bucket", "attributed_by"):
        pd.testing.assert_series_equal(
            after[name].astype(object), before[name].astype(object), check_names=False
        )


def test_the_ledger_of_the_joined_recording_is_that_of_the_light_pass(full):
    light = light_pass_of(full, lambda times: times // 3)
    both = joined(full, light)
    assert both.kernels["duration_ns"].sum() == light.kernels["duration_ns"].sum()
    assert len(both.kernels) == len(light.kernels)


def test_an_operator_keeps_its_place_among_the_launches():
    full = trace_of(
        {"name": "a", "correlation": 1, "start_ns": 40, "duration_ns": 5},
        {"name": "b", "correlation": 2, "start_ns": 90, "duration_ns": 5},
        ranges=(
            {"kind": "op", "name": "mm", "thread": 1, "start_ns": 10, "duration_ns": 40},
            call(1, 20, 10),
            call(2, 60, 10),
        ),
    )
    light = trace_of(
        {"name": "a", "correlation": 7, "start_ns": 13, "duration_ns": 4},
        {"name": "b", "correlation": 8, "start_ns": 22, "duration_ns": 4},
        ranges=(call(7, 10, 2), call(8, 18, 2)),
    )
    both = joined(full, light)
    assert both.kernels["start_ns"].tolist() == [13, 22]
    # Ten before the first launch, as recorded; between the launches in proportion.
    assert both.ranges["start_ns"].tolist() == [0, 10, 18]
    assert both.ranges["duration_ns"].tolist() == [16, 2, 2]


def test_a_wait_of_the_host_takes_as_long_as_in_the_light_pass():
    full = trace_of(
        {"correlation": 1, "start_ns": 20},
        ranges=(call(1, 10), call(3, 30, 5, name="cudaStreamSynchronize")),
    )
    light = trace_of(
        {"correlation": 1, "start_ns": 20},
        ranges=(call(1, 10), call(2, 14, 90, name="cudaStreamSynchronize")),
    )
    both = joined(full, light)
    assert both.ranges["start_ns"].tolist() == [10, 14]
    assert both.ranges["duration_ns"].tolist() == [2, 90]


def test_a_thread_that_has_another_name_is_known_by_its_launches():
    full = trace_of(
        {"correlation": 1, "start_ns": 20},
        ranges=(call(1, 10), call(3, 30, 5, name="cudaStreamSynchronize")),
    )
    light = trace_of(
        {"correlation": 1, "start_ns": 20},
        ranges=(
            call(1, 10, thread=140_000),
            call(2, 14, 90, name="cudaStreamSynchronize", thread=140_000),
        ),
    )
    both = joined(full, light)
    assert both.ranges["duration_ns"].tolist() == [2, 90]
    assert both.ranges["thread"].tolist() == [1, 1]


def test_without_a_call_that_is_in_both_passes_nothing_is_joined():
    with pytest.raises(PassesDifferError):
        joined(trace_of({"correlation": 1}, ranges=(call(1, 0),)), trace_of({"correlation": 1}))


def test_streams_whose_launches_interleave_in_another_way_are_paired_by_stream():
    def side_by_side(first, second):
        return trace_of(
            {"name": "a", "stream": 7, "correlation": first, "start_ns": first},
            {"name": "b", "stream": 8, "correlation": second, "start_ns": second},
            ranges=(call(1, 1, 0), call(2, 2, 0)),
        )

    both = joined(side_by_side(1, 2), side_by_side(2, 1))
    assert both.kernels["start_ns"].tolist() == [2, 1]


def test_a_stream_with_another_number_is_paired_by_the_order_of_launches():
    full = trace_of({"stream": 7, "correlation": 1, "start_ns": 5}, ranges=(call(1, 1),))
    light = trace_of({"stream": 9, "correlation": 1, "start_ns": 3}, ranges=(call(1, 1),))
    both = joined(full, light)
    assert both.kernels["start_ns"].tolist() == [3]
    assert both.kernels["stream"].tolist() == [7]


@pytest.mark.parametrize("others", [({"name": "other"},), ({"name": "gemm"}, {"name": "gemm"}), ()])
def test_other_activities_are_not_joined(others):
    with pytest.raises(PassesDifferError):
        joined(trace_of({"name": "gemm"}), trace_of(*others))


def test_the_edges_of_a_step_are_those_of_the_light_pass():
    full = trace_of(
        {"correlation": 1, "start_ns": 20},
        ranges=(
            {"kind": "step", "name": "5", "thread": 1, "start_ns": 0, "duration_ns": 50},
            call(1, 10),
        ),
    )
    light = trace_of({"correlation": 1, "start_ns": 20}, ranges=(call(1, 10),))
    both = joined(full, light, [SameStep(0, "9", 4, 30)])
    step = both.ranges.iloc[0]
    assert (step["name"], step["start_ns"], step["duration_ns"]) == ("9", 4, 26)


times = st.lists(st.integers(0, 10**12), min_size=2, max_size=30).map(sorted)


@given(times, times)
def test_the_order_of_the_hosts_ranges_stays(starts, others):
    number = min(len(starts), len(others))
    full = trace_of(
        *({"correlation": i, "start_ns": starts[i]} for i in range(number)),
        ranges=[call(i, starts[i], 0) for i in range(number)]
        + [
            {"kind": "op", "thread": 1, "start_ns": (a + b) // 2, "duration_ns": 0}
            for a, b in pairwise(starts)
        ],
    )
    light = trace_of(
        *({"correlation": i, "start_ns": others[i]} for i in range(number)),
        ranges=[call(i, others[i], 0) for i in range(number)],
    )
    both = joined(full, light)
    order = full.ranges["start_ns"].argsort(kind="stable")
    assert both.ranges["start_ns"].iloc[order].is_monotonic_increasing
    assert (both.ranges["duration_ns"] >= 0).all()


def recorded_run(folder, light_name="gemm", **changes):
    """Write a run whose full pass is twice as slow as its light one; return its folder."""
    part = folder / "train.kprof" / "raw" / "rank0-pid9"
    part.mkdir(parents=True)
    (part.parent / "launch.json").write_text("{}")
    passes = {
        "window": [
            annotation("kprof.step#1", cat="cpu_op", ts=100, dur=100),
            operator(ts=120, dur=40),
            launch(ts=130, dur=10),
            kernel(ts=150, dur=20),
        ],
        "light": [launch(ts=1015, dur=5), kernel(ts=1025, dur=22, name=light_name)],
    }
    for name, events in passes.items():
        content = {"baseTimeNanoseconds": BASE_NS, "traceEvents": events}
        text = json.dumps(content).encode()
        (part / f"{name}-0.json.gz").write_bytes(gzip.compress(text))
    steps = [
        {"index": 1, "start_ns": BASE_NS + 100_000, "end_ns": BASE_NS + 200_000, "recorded": True},
        {"index": 2, "start_ns": 0, "end_ns": 7},
        {"index": 4, "start_ns": BASE_NS + 1_000_000, "end_ns": BASE_NS + 1_050_000, "light": True},
        {"index": 5, "start_ns": 0, "end_ns": 8},
        {"index": 6, "start_ns": 0, "end_ns": 9},
    ]
    (part / "recorder.json").write_text(json.dumps({"steps": steps, **changes}))
    return folder / "train.kprof"


def test_a_run_has_the_times_of_its_light_pass(tmp_path):
    trace = attributed(recorded.read(recorded_run(tmp_path)))
    recording = trace.meta.recording
    assert trace.kernels["duration_ns"].tolist() == [22_000]
    assert trace.kernels["op"].tolist() == ["aten::mm"]
    assert trace.kernels["step"].tolist() == [4]
    assert recording.steps_recorded == (4,)
    assert recording.recorded_step_ns == (50_000,)
    assert recording.unrecorded_step_ns == (9,)
    assert trace.meta.light == LightPass(22_000, 20_000)


def test_a_run_whose_light_pass_differs_has_the_times_of_the_full_one(tmp_path):
    trace = recorded.read(recorded_run(tmp_path, light_name="other"))
    assert trace.kernels["duration_ns"].tolist() == [20_000]
    assert trace.meta.recording.steps_recorded == (1,)
    assert trace.meta.light is None
    assert "light_pass_differs" in [caveat.id for caveat in trace.meta.caveats]


def test_a_light_pass_that_the_recorder_does_not_vouch_for_is_not_read(tmp_path):
    trace = recorded.read(recorded_run(tmp_path, steps=[]))
    assert trace.kernels["duration_ns"].tolist() == [20_000]
    assert "light_pass_differs" not in [caveat.id for caveat in trace.meta.caveats]
