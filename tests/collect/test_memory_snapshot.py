"""Memory snapshots of torch are read as plain data, and nothing in them is run."""

import json
import os
import pickle
from dataclasses import replace

import pytest

from kprof.collect.memory_snapshot import add_memory, is_snapshot, read_snapshot
from kprof.errors import TraceError
from tests.memory_snapshots import SEGMENT, block, event, frame, snapshot, write
from tests.traces import trace_of


class Harmful:
    """A pickle of which creates a file when it is loaded by Python's own reader."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_snapshot_has_the_events_and_blocks_of_its_device(tmp_path):
    content = snapshot(
        [event("alloc", 512, 100, 7, [frame("forward")])],
        [block(0, 40), block(512, 100), block(1024, 8, "inactive")],
        reserved=4096,
        device=1,
    )
    (history,) = read_snapshot(write(tmp_path / "a.pickle", content))
    assert (history.device, history.reserved_bytes) == (1, 4096)
    assert [(one.address - SEGMENT, one.requested_bytes) for one in history.blocks] == [
        (0, 40),
        (512, 100),
    ]
    (alloc,) = history.events
    assert (alloc.action, alloc.size, alloc.time_ns) == ("alloc", 100, 7_000)
    assert alloc.frames[0].name == "forward"


def test_blocks_of_older_versions_have_no_addresses_of_their_own(tmp_path):
    content = snapshot(blocks=[block(0, 512), block(512, 100)])
    for one in content["segments"][0]["blocks"]:
        del one["address"], one["requested_size"], one["frames"]
    (history,) = read_snapshot(write(tmp_path / "a.pickle", content))
    assert [(one.address - SEGMENT, one.requested_bytes) for one in history.blocks] == [
        (0, 512),
        (512, 512),
    ]


@pytest.mark.parametrize("place", ["top", "segment", "frame"])
def test_an_object_in_a_snapshot_is_refused_and_not_made(tmp_path, place):
    harmful = Harmful(tmp_path / "made")
    content = {
        "top": harmful,
        "segment": {"segments": [harmful], "device_traces": []},
        "frame": snapshot([event("alloc", 0, 1, 1, [harmful])]),
    }[place]
    path = write(tmp_path / "a.pickle", content)
    with pytest.raises(TraceError, match="not plain data"):
        read_snapshot(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([1, 2]),
        pickle.dumps({"segments": 3}),
        pickle.dumps(snapshot())[:-20],
        pickle.dumps({"segments": [{"address": 1, "total_size": -1, "blocks": []}]}),
        pickle.dumps(snapshot([event("alloc", 0, -8, 1)])),
        b"\x80\x04",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x80\x02(lp0\nc__builtin__\neval\n(S'1'\ntR.",
        b"\x80\x04}b.",
    ],
)
def test_a_damaged_or_foreign_pickle_is_one_clear_error(tmp_path, content):
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    with pytest.raises(TraceError) as error:
        read_snapshot(path)
    # There is a reason, also of an error without words.
    assert error.value.problem.rpartition(":")[2].strip()


TUPLES = b"2\x86" * 60


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04})" + TUPLES + b"Ns.",
        b"\x80\x04\x8f()" + TUPLES + b"\x90.",
        b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
        b"\x80\x04})\x94h\x00h\x00\x86Ns.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
        b"\x80\x02]p2147483647\n.",
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",
        pickle.dumps({"segments": [{**snapshot()["segments"][0], "blocks": [{}] * 3000}] * 3000}),
    ],
    ids=["pairs", "set", "nested", "again", "memo", "memo text", "bytes", "repeated"],
)
def test_a_small_pickle_that_would_take_all_time_or_memory_is_refused(tmp_path, content):
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_snapshot(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_large_snapshot_reads_the_same_in_every_protocol(tmp_path, protocol):
    frames = [frame(f"f{number}") for number in range(300)]
    events = [
        {**event("alloc", number, number * 2**20, number, frames[:9]), "pool": (number, 2**40)}
        for number in range(3000)
    ]
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({**snapshot(events), "x": 1.5, "y": [True, None, -3]}, protocol))
    (history,) = read_snapshot(path)
    assert [one.size for one in history.events] == [number * 2**20 for number in range(3000)]
    assert {len(one.frames) for one in history.events} == {9}


@pytest.mark.parametrize("wrong", [{"size": -1}, {"frames": None}, {"frames": [3]}])
def test_a_field_that_no_allocator_writes_is_one_clear_error(tmp_path, wrong):
    content = snapshot([{**event("alloc", 0, 1), **wrong}])
    with pytest.raises(TraceError):
        read_snapshot(write(tmp_path / "a.pickle", content))


def test_a_pickle_is_told_from_other_files(tmp_path):
    write(tmp_path / "a.pickle", {})
    (tmp_path / "b.json").write_text("{}")
    told = [is_snapshot(tmp_path / name) for name in ("a.pickle", "b.json", "nothing")]
    assert told == [True, False, False]


def test_a_recorded_snapshot_has_owners_and_modules(tmp_path):
    events = [event("alloc", 512, 100, 1_030), event("alloc", 1024, 7, 1_060)]
    blocks = [block(0, 40), block(512, 100), block(1024, 7)]
    write(tmp_path / "memory.pickle", snapshot(events, blocks))
    told = {"requested_bytes.peak": 200, "allocated_bytes.peak": 2048, "capacity_bytes": 1 << 34}
    note = {"time_ns": 1_000_000, "addresses": {"parameters": [SEGMENT]}}
    (tmp_path / "memory.json").write_text(json.dumps({"notes": [note], "devices": {"0": told}}))
    trace = trace_of(
        {},
        ranges=[
            {"kind": "phase", "name": "forward", "start_ns": 20_000, "duration_ns": 50_000},
            {"kind": "module", "name": "layers.0", "start_ns": 25_000, "duration_ns": 10_000},
        ],
        samples=[{"source": "profiler", "quantity": "allocated_bytes", "value": 1536.0, "rank": 0}],
    )
    trace = replace(trace, meta=replace(trace.meta, base_time_ns=1_000_000))
    (peak,) = add_memory(trace, tmp_path).meta.memory
    assert {(one.category, one.place): one.num_bytes for one in peak.holders} == {
        ("parameters", ""): 40,
        ("activations", "layers.0"): 100,
        ("activations", ""): 7,
    }
    assert (peak.allocated_bytes, peak.capacity_bytes) == (1536, 1 << 34)
    assert peak.highest_requested_bytes == 200


def test_a_process_without_a_snapshot_has_no_peak(tmp_path):
    assert add_memory(trace_of({}), tmp_path).meta.memory == ()
