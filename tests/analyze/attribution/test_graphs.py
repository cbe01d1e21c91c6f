"""What CUDA graphs replay is named by what was captured into them."""

from dataclasses import replace

import pytest

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.attribution.ledger import balance, count_launches
from kprof.collect.merge import merge
from kprof.collect.readers.kineto import reader as kineto
from kprof.collect.readers.recorded.reader import add_captures, with_times_of_calls
from kprof.trace import NodeNote
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
    calls = with_times_of_calls(untimed_capture()).ranges.iloc[[7, 6, 5]]
    assert calls["start_ns"].tolist() == [1100, 1200, 1300]
    assert set(calls["thread"]) == {1}


def test_a_call_without_a_time_lies_in_no_operator_inside_its_own():
    """The call before it is one of `innermost`, which ends before `inner` does."""
    trace = untimed_capture()
    innermost = {"rank": 0, "thread": 1, "kind": "op", "name": "innermost", "external_id": 9}
    innermost |= {"start_ns": 1210, "duration_ns": 10}
    rows = [*trace.ranges.to_dict("records"), innermost]
    rows[6]["external_id"] = 9
    assert with_times_of_calls(trace_of(ranges=rows)).ranges["start_ns"].iloc[[6, 5]].tolist() == [
        1210,
        1300,
    ]


def test_a_launch_before_the_capture_is_none_of_its_calls():
    assert with_times_of_calls(untimed_capture()).ranges["start_ns"].iloc[3] == 0


def test_calls_that_have_times_keep_them():
    timed = untimed_capture()
    timed = timed.with_ranges(start_ns=timed.ranges["start_ns"].replace(0, 1150))
    assert (
        with_times_of_calls(timed).ranges["start_ns"].tolist() == timed.ranges["start_ns"].tolist()
    )


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


def noted(graph_node, **said):
    return kineto_files.kernel(ts=30, args={"graph node id": graph_node, **said})


def texts(column):
    return column.astype(object).fillna("").tolist()


def annotated(folder, *kernels, **around):
    launch = kineto_files.launch(ts=20, name="cudaGraphLaunch")
    return kineto.read(kineto_files.write(folder, launch, *kernels, **around))


@pytest.mark.parametrize("key", ["name", "str"], ids=["since torch 2.14", "torch 2.12 and 2.13"])
def test_a_replay_is_in_the_ranges_and_modules_that_torch_noted_of_its_nodes(tmp_path, key):
    kernels = add_attribution(
        annotated(
            tmp_path,
            noted(8, **{key: "phase A"}),
            noted(9, module_fqn="layers.0"),
            noted(10),
        )
    ).kernels
    assert texts(kernels["range"]) == ["phase A", "", ""]
    assert texts(kernels["module"]) == ["", "layers.0", ""]
    assert texts(kernels["attributed_by"]) == ["annotation", "annotation", ""]
    assert kernels["bucket"].tolist() == ["attributed", "attributed", "graph"]
    assert kernels["op"].isna().all()


def test_what_looks_like_a_note_and_is_none_of_a_graphs_node_names_nothing(tmp_path):
    trace = annotated(tmp_path, noted(0, name="phase A"), noted(8, name=5), noted(9, name=None))
    assert trace.meta.graph_notes == ()
    assert not any(one.id == "graph_lanes" for one in trace.meta.caveats)


def test_a_caveat_tells_that_torch_lays_what_it_noted_on_other_streams(tmp_path):
    caveats = annotated(tmp_path, noted(8, name="phase A")).meta.caveats
    assert kineto.LANES in caveats


def test_nodes_of_several_ranks_that_share_a_number_keep_their_own_notes(tmp_path):
    traces = [
        annotated(tmp_path, noted(8, name=name), name=f"{name}.json") for name in ("one", "two")
    ]
    kernels = add_attribution(merge(traces, "both")).kernels
    assert kernels["range"].tolist() == ["one", "two"]


def test_what_the_capture_names_is_not_named_by_notes():
    trace = trace_of(*replayed(5_100, 9, graph_node=3), ranges=CAPTURE + replay(5_000, 9))
    notes = (NodeNote(rank=0, node=3, range="phase A"),)
    kernels = add_attribution(replace(trace, meta=replace(trace.meta, graph_notes=notes))).kernels
    assert set(kernels["attributed_by"]) == {"capture"}
    assert kernels["range"].isna().all()
