"""What CUDA graphs replay is named by what was captured into them."""

import pytest

from kprof.analyze.attribute import add_attribution
from kprof.analyze.launches import count_launches
from kprof.analyze.ledger import balance
from kprof.collect.readers import kineto
from kprof.collect.readers._graphs import _timed, add_captures
from tests import kineto_files
from tests.traces import trace_of

CALL = {"kind": "runtime", "duration_ns": 5}
CAPTURE = (
    {"kind": "capture", "name": "0", "start_ns": 0, "duration_ns": 1_000},
    {"kind": "module", "name": "layers.0", "start_ns": 100, "duration_ns": 300},
    {"name": "aten::addmm", "start_ns": 110, "duration_ns": 100},
    {**CALL, "name": "cudaMemsetAsync", "start_ns": 120},
    {**CALL, "name": "cudaLaunchKernelExC", "start_ns": 130},
    {**CALL, "name": "cudaStreamIsCapturing", "start_ns": 140},
    {"name": "aten::relu", "start_ns": 300, "duration_ns": 50},
    {**CALL, "name": "cudaLaunchKernel", "start_ns": 310},
    {"kind": "phase", "name": "backward", "start_ns": 500, "duration_ns": 400},
    {"name": "aten::mul", "thread": 2, "start_ns": 600, "duration_ns": 50},
    {**CALL, "name": "cudaLaunchKernel", "thread": 2, "start_ns": 610},
)


def replay(start_ns, correlation, number="0"):
    return (
        {"kind": "step", "name": str(correlation), "start_ns": start_ns, "duration_ns": 90},
        {"kind": "graph", "name": number, "start_ns": start_ns, "duration_ns": 50},
        {**CALL, "name": "cudaGraphLaunch", "start_ns": start_ns + 1, "correlation": correlation},
    )


def replayed(start_ns, correlation, **each):
    activities = ("memset", "kernel", "kernel", "kernel")
    return tuple(
        {"activity": a, "start_ns": start_ns + 100 * i, "correlation": correlation, **each}
        for i, a in enumerate(activities)
    )


OPS = ["aten::addmm", "aten::addmm", "aten::relu", "aten::mul"]


def attributed(*kernels, ranges):
    return add_attribution(trace_of(*kernels, ranges=ranges)).kernels


def test_every_replay_is_named_by_the_calls_of_its_capture_in_their_order():
    kernels = attributed(
        *replayed(5_100, 9),
        *replayed(6_100, 10),
        ranges=CAPTURE + replay(5_000, 9) + replay(6_000, 10),
    )
    assert kernels["op"].tolist() == OPS * 2
    assert kernels["module"].tolist()[:3] == ["layers.0"] * 3
    assert kernels["phase"].tolist()[3] == "backward"
    assert kernels["step"].tolist() == [9] * 4 + [10] * 4
    assert set(kernels["attributed_by"]) == {"capture"}


def test_a_named_replay_is_attributed_and_the_books_balance():
    trace = trace_of(*replayed(5_100, 9), ranges=CAPTURE + replay(5_000, 9))
    ledger = balance(add_attribution(trace))
    assert ledger.buckets["attributed"] == ledger.sum_ns == 400


def test_nodes_tell_the_order_where_several_streams_run_them():
    kernels = replayed(5_100, 9)
    mixed = [
        {**kernel, "start_ns": 5_500 - 100 * i, "graph_node": 70 + i, "stream": i % 2}
        for i, kernel in enumerate(kernels)
    ]
    assert attributed(*mixed, ranges=CAPTURE + replay(5_000, 9))["op"].tolist() == OPS


@pytest.mark.parametrize(
    "kernels",
    [
        replayed(5_100, 9)[:3],
        (*replayed(5_100, 9)[1:], {"activity": "memset", "start_ns": 6_000, "correlation": 9}),
        tuple({**kernel, "stream": i % 2} for i, kernel in enumerate(replayed(5_100, 9))),
    ],
    ids=["another number", "another order", "several streams without nodes"],
)
def test_a_replay_that_may_not_be_the_captures_is_left_unnamed(kernels):
    found = attributed(*kernels, ranges=CAPTURE + replay(5_000, 9))
    assert found["op"].isna().all()
    assert set(found["bucket"]) == {"graph"}


def test_a_replay_of_another_graph_is_left_unnamed():
    found = attributed(*replayed(5_100, 9), ranges=CAPTURE + replay(5_000, 9, number="1"))
    assert found["op"].isna().all()


def test_the_capture_of_another_rank_names_nothing():
    other = tuple({**row, "rank": 1} for row in CAPTURE)
    found = attributed(*replayed(5_100, 9), ranges=other + replay(5_000, 9))
    assert found["op"].isna().all()


def untimed_capture():
    """Return a capture whose calls have no time: two launches before it, three in it."""
    own = {"rank": 0, "thread": 1}
    called = {**own, "kind": "runtime", "start_ns": 0, "duration_ns": 0, "thread": 9}
    return trace_of(
        ranges=[
            {**own, "kind": "capture", "name": "0", "start_ns": 1000, "duration_ns": 900},
            {**own, "kind": "op", "name": "outer", "start_ns": 1100, "duration_ns": 500}
            | {"external_id": 7},
            {**own, "kind": "op", "name": "inner", "start_ns": 1200, "duration_ns": 100}
            | {"external_id": 8},
            {**called, "name": "cudaLaunchKernel", "correlation": 50, "external_id": 7},
            {**called, "name": "cudaStreamBeginCapture", "correlation": 51},
            {**called, "name": "cudaLaunchKernel", "correlation": 54, "external_id": 7},
            {**called, "name": "cudaLaunchKernel", "correlation": 53, "external_id": 8},
            {**called, "name": "cudaLaunchKernel", "correlation": 52, "external_id": 7},
        ]
    )


def test_calls_of_a_capture_without_times_lie_in_their_operators_in_their_order():
    calls = _timed(untimed_capture()).ranges.iloc[[7, 6, 5]]
    assert calls["start_ns"].tolist() == [1100, 1200, 1300]
    assert set(calls["thread"]) == {1}


def test_a_launch_before_the_capture_is_none_of_its_calls():
    assert _timed(untimed_capture()).ranges["start_ns"].iloc[3] == 0


def test_calls_that_have_times_keep_them():
    timed = untimed_capture()
    timed = timed.with_ranges(start_ns=timed.ranges["start_ns"].replace(0, 1150))
    assert _timed(timed).ranges["start_ns"].tolist() == timed.ranges["start_ns"].tolist()


def test_what_was_captured_is_no_launch_that_left_no_activity(tmp_path):
    captured = (
        kineto_files.annotation("kprof.capture#0", ts=1, dur=9),
        kineto_files.launch(ts=2, args={"correlation": 7}),
    )
    kineto_files.write(tmp_path, *captured, name="graph-0.json", baseTimeNanoseconds=0)
    ran = (kineto_files.launch(ts=20), kineto_files.kernel(ts=30))
    window = kineto_files.write(tmp_path, *ran, baseTimeNanoseconds=0)
    trace = add_captures(kineto.read(window), tmp_path)
    assert len(trace.ranges) == 3
    (launches,) = count_launches(add_attribution(trace))
    assert (launches.number, launches.num_lost) == (1, 0)


def test_a_step_within_a_capture_is_none(tmp_path):
    captured = (
        kineto_files.annotation("kprof.capture#0", ts=1, dur=9),
        kineto_files.annotation("kprof.step#1", ts=2, dur=7),
        kineto_files.annotation("kprof.phase#forward", ts=3, dur=5),
    )
    kineto_files.write(tmp_path, *captured, name="graph-0.json", baseTimeNanoseconds=0)
    ran = (
        kineto_files.annotation("kprof.step#12", ts=20, dur=20),
        kineto_files.launch(ts=21),
        kineto_files.kernel(ts=30),
    )
    window = kineto_files.write(tmp_path, *ran, baseTimeNanoseconds=0)
    ranges = add_captures(kineto.read(window), tmp_path).ranges
    assert ranges["name"][ranges["kind"] == "step"].tolist() == ["12"]
    assert ranges["name"][ranges["kind"] == "phase"].tolist() == ["forward"]
