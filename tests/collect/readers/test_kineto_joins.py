"""An activity joins the call that launched it, however the file's ids tell that."""

import pytest

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.attribution.ledger import count_launches
from kprof.collect.readers.kineto.reader import read
from tests.kineto_files import kernel, launch, operator, write


def attributed(folder, *events):
    return add_attribution(read(write(folder, *events)))


def ops_of(trace):
    return dict(zip(trace.kernels["name"], trace.kernels["op"], strict=True))


def launched(op, name, at, number, pid=10, device=0, **ids):
    """Return an operator with a launch and the kernel of that launch, 10 µs later."""
    ids = ids or {"correlation": number}
    process = {"pid": pid, "tid": pid}
    return [
        operator(name=op, ts=at, dur=4, args={"External id": number}, **process),
        launch(ts=at + 1, dur=2, args={"External id": number, **ids}, **process),
        kernel(name=name, ts=at + 10, dur=5, pid=device, args={"device": device, **ids}),
    ]


@pytest.mark.parametrize(
    "number", [5, 2**63 + 5, 2**64 - 1, -3, 2**63, 2**50, "7", "0x1f", "call 7", 7.0, 10**30]
)
def test_an_id_joins_in_whatever_form_it_is_written(tmp_path, number):
    trace = attributed(tmp_path, *launched("aten::mm", "k", 0, number))
    assert ops_of(trace) == {"k": "aten::mm"}


def test_ids_that_are_equal_as_floats_stay_apart(tmp_path):
    first, second = 2**63 + 1, 2**63 + 2
    events = launched("aten::mm", "a", 0, first), launched("aten::add", "b", 2, second)
    trace = attributed(tmp_path, *events[0], *events[1])
    assert ops_of(trace) == {"a": "aten::mm", "b": "aten::add"}


def test_of_calls_with_one_id_the_last_before_the_activity_launched_it(tmp_path):
    early, late = launched("aten::mm", "first", 0, 1), launched("aten::bmm", "second", 500, 1)
    trace = attributed(tmp_path, *late, *early)
    assert ops_of(trace) == {"first": "aten::mm", "second": "aten::bmm"}
    assert sum(of_rank.num_lost for of_rank in count_launches(trace)) == 0
    assert trace.meta.counts["reused_ids"] == 1


def test_an_activity_whose_own_call_is_lost_joins_no_later_one_with_its_id(tmp_path):
    later = launched("aten::mm", "a", 5_000, 1) + launched("aten::bmm", "b", 9_000, 1)
    trace = attributed(tmp_path, *launched("aten::t", "lost", 0, 1)[2:], *later)
    assert trace.kernels["op"].isna().tolist() == [True, False, False]
    assert {"a": "aten::mm", "b": "aten::bmm"}.items() <= ops_of(trace).items()


def test_an_activity_lost_in_the_first_recording_leaves_its_launch_without_one(tmp_path):
    events = launched("aten::mm", "first", 0, 1)[:2] + launched("aten::bmm", "second", 500, 1)
    trace = attributed(tmp_path, *events)
    assert ops_of(trace) == {"second": "aten::bmm"}
    assert sum(of_rank.num_lost for of_rank in count_launches(trace)) == 1


@pytest.mark.parametrize(
    ("hosts", "devices"),
    [
        (("rank 0", "rank 1"), ("rank 0", "rank 1")),
        (("rank 1", "rank 10"), ("rank 1 GPU", "rank 10 GPU")),
        (("[TP00] 412", "[TP01] 413"), ("[TP00] 0", "[TP01] 0")),
        ((100, 200), (0, 1)),
    ],
)
def test_merged_ranks_keep_their_launches_apart(tmp_path, hosts, devices):
    events = []
    for rank, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        for n in range(3):
            op = launched(f"aten::op{rank}", f"kernel{rank}", 100 * n + 3 * rank, n + 1, pid=host)
            op[2] |= {"pid": device}
            op[2]["args"]["device"] = rank
            events += op
    trace = attributed(tmp_path, *events)
    assert ops_of(trace) == {"kernel0": "aten::op0", "kernel1": "aten::op1"}
    assert trace.meta.num_ranks == 2
    assert sorted(set(zip(trace.kernels["name"], trace.kernels["rank"], strict=True))) == [
        ("kernel0", 0),
        ("kernel1", 1),
    ]


def test_a_call_of_another_process_is_not_taken_where_the_names_tell_the_process(tmp_path):
    mine = launched("aten::mm", "mine", 0, 1, pid="rank 0")
    mine[2] |= {"pid": "rank 0"}
    theirs = launched("aten::bmm", "theirs", 50, 2, pid="rank 1")
    theirs[2] |= {"pid": "rank 1"}
    orphan = kernel(name="orphan", ts=70, pid="rank 0", args={"correlation": 2})
    trace = attributed(tmp_path, *mine, *theirs, orphan)
    assert ops_of(trace)["theirs"] == "aten::bmm"
    assert (trace.kernels["bucket"] == "orphan").tolist() == [False, False, True]


def test_two_processes_on_one_device_are_told_apart_by_the_order_of_their_calls(tmp_path):
    events = launched("aten::mm", "a", 0, 1, pid=100), launched("aten::bmm", "b", 5, 1, pid=200)
    trace = attributed(tmp_path, *events[0], *events[1])
    assert ops_of(trace) == {"a": "aten::mm", "b": "aten::bmm"}


def test_calls_on_a_devices_own_track_do_not_hide_those_of_the_host(tmp_path):
    events = [*launched("aten::mm", "a", 0, 1), *launched("aten::bmm", "b", 50, 2)]
    on_device = launch(name="synchronize", ts=90, pid=0, tid=3, args={"correlation": 9})
    assert ops_of(attributed(tmp_path, *events, on_device)) == {"a": "aten::mm", "b": "aten::bmm"}


def without(event, *names):
    return {**event, "args": {k: v for k, v in event["args"].items() if k not in names}}


@pytest.mark.parametrize("number", [25, "25", "0x19"])
def test_the_external_id_joins_where_there_is_no_correlation(tmp_path, number):
    op, call, activity = launched("aten::mm", "k", 0, 525, **{"External id": number})
    other = operator(name="aten::other", ts=900, args={"External id": 25})
    events = op, without(call, "correlation"), without(activity, "correlation", "stream"), other
    trace = attributed(tmp_path, *events)
    assert ops_of(trace) == {"k": "aten::mm"}


@pytest.mark.parametrize("empty", [0, -1])
def test_an_id_that_stands_for_none_joins_nothing(tmp_path, empty):
    # The second was launched while the first one ran, so that times do not tell.
    ids = ({"correlation": empty, "External id": number} for number in (1, 2))
    first, second = (
        launched(op, name, at, number, **own)
        for op, name, at, number, own in zip(
            ("aten::mm", "aten::add"), "ab", (0, 5), (1, 2), ids, strict=True
        )
    )
    trace = attributed(tmp_path, *first, *second)
    assert ops_of(trace) == {"a": "aten::mm", "b": "aten::add"}
    assert sum(of_rank.num_lost for of_rank in count_launches(trace)) == 0


def test_activities_of_one_external_id_belong_to_its_launches_in_their_order(tmp_path):
    moments = ("hipLaunchKernel", 2), ("hipMalloc", 4), ("hipLaunchKernel", 6)
    calls = [launch(name=name, ts=ts, dur=1) for name, ts in moments]
    kernels = [
        kernel(name=name, ts=ts, args={"External id": 1}) for name, ts in (("a", 20), ("b", 30))
    ]
    inner = operator(name="aten::inner", ts=5, dur=4, args={"External id": 9})
    events = [operator(dur=90), inner, *(without(e, "correlation") for e in calls + kernels)]
    assert ops_of(attributed(tmp_path, *events)) == {"a": "aten::mm", "b": "aten::inner"}


def test_arrows_join_where_no_id_does(tmp_path):
    op, call, activity = launched("aten::mm", "k", 0, 1)
    arrow = {"cat": "ac2g", "name": "ac2g", "id": 77}
    events = (
        op,
        without(call, "correlation", "External id"),
        {"ph": "s", **arrow, "pid": 10, "tid": 10, "ts": 1},
        without(activity, "correlation"),
        {"ph": "f", **arrow, "pid": 0, "tid": 11, "ts": 10, "bp": "e"},
    )
    assert ops_of(attributed(tmp_path, *events)) == {"k": "aten::mm"}


def test_every_event_twice_counts_once(tmp_path):
    events = launched("aten::mm", "a", 0, 1) + launched("aten::mm", "a", 50, 2)
    once, twice = attributed(tmp_path, *events), attributed(tmp_path, *events, *events)
    assert len(twice.kernels) == len(once.kernels) == 2
    assert len(twice.ranges) == len(once.ranges) == 4
    assert twice.meta.counts["copied_events"] == 6


@pytest.mark.parametrize("lacks", ["External id", "grid", "block"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_of_an_activity_may_say_less(tmp_path, lacks, is_first):
    *host, activity = launched("aten::mm", "a", 0, 1)
    activity["args"] |= {"grid": [8, 1, 1], "block": [64, 1, 1]}
    both = [without(activity, lacks), activity]
    once = attributed(tmp_path, *host, activity)
    twice = attributed(tmp_path, *host, *(both if is_first else both[::-1]))
    assert twice.kernels.equals(once.kernels)
    assert twice.meta.counts["copied_events"] == 1


def test_a_call_that_stands_twice_lost_no_activity(tmp_path):
    events = launched("aten::mm", "a", 0, 1) + launched("aten::mm", "b", 50, 2)
    calls = [event for event in events if event["cat"] == "cuda_runtime"]
    once, twice = attributed(tmp_path, *events), attributed(tmp_path, *events, *calls)
    assert twice.ranges.equals(once.ranges)
    assert sum(of_rank.num_lost for of_rank in count_launches(twice)) == 0


def test_activities_that_are_equal_but_for_their_streams_or_ids_are_two(tmp_path):
    events = [
        kernel(args={"stream": 7}),
        kernel(args={"stream": 8}),
        kernel(args={"correlation": 2}),
    ]
    assert len(read(write(tmp_path, *events)).kernels) == 3


def test_equal_activities_of_one_graph_are_two(tmp_path):
    of_graph = [kernel(name=name, ts=3) for name in ("a", "a", "b", "c", "d", "e")]
    assert len(read(write(tmp_path, launch(name="cudaGraphLaunch"), *of_graph)).kernels) == 6


def test_external_ids_that_two_recordings_share_name_each_its_own_operator(tmp_path):
    events = []
    for at, op in ((0, "aten::mm"), (500, "aten::bmm")):
        # The call lies after its operator, so that the external id alone tells.
        made = launched(op, f"of {op}", at, 1)
        made[1]["ts"] = at + 6
        events += made
    assert ops_of(attributed(tmp_path, *events)) == {
        "of aten::mm": "aten::mm",
        "of aten::bmm": "aten::bmm",
    }
