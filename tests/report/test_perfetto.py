"""The timeline for Perfetto, read back by a reader of protobuf that shares no code with it."""

import gzip
import json
import struct
from collections import defaultdict
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kprof.analyze.attribution.ledger import balance
from kprof.errors import KprofError
from kprof.findings import Diagnosis, Finding
from kprof.opened import open_trace
from kprof.report.perfetto import Slice, lanes_of, write_perfetto
from tests.section_traces import RICH
from tests.traces import analyzed_trace_of

RECORDED = Path(__file__).parents[1] / "data" / "h200"
QUICK = ("compiled", "cudagraph")
TRACES = [
    pytest.param(path, id=path.name, marks=() if path.name.split(".")[0] in QUICK else slow)
    for slow in [pytest.mark.slow]
    for path in sorted(RECORDED.iterdir())
]


def fields_of(message):
    """Return the values of a protobuf message by the numbers of its fields, in their order."""
    found, at = defaultdict(list), 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            value = varint()
        else:
            length = {1: 8, 2: None}[wire] or varint()
            value, at = message[at : at + length], at + length
        found[number].append(value)
    return found


@dataclass
class Read:
    """What a file says: slices with the names of their tracks, counters, the tracks' parents."""

    slices: list = field(default_factory=list)
    counters: dict = field(default_factory=lambda: defaultdict(list))
    parents: dict = field(default_factory=dict)

    def on(self, prefix):
        return [one for one in self.slices if one["track"].startswith(prefix)]

    def ns_on(self, prefix):
        return sum(one["end"] - one["begin"] for one in self.on(prefix))


def packets_in(path):
    content = path.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return map(fields_of, fields_of(content)[1])


def read(path):
    """Read a protobuf file as Perfetto does: a stack of open slices on every track."""
    told, names, still_open = Read(), {}, defaultdict(list)
    interned = defaultdict(dict)
    for packet in packets_in(path):
        for descriptor in map(fields_of, packet[60]):
            (uuid,) = descriptor[1]
            process = [fields_of(one)[6][0] for one in descriptor[3]]
            names[uuid] = (process or descriptor[2])[0].decode()
            told.parents[names[uuid]] = names.get(*descriptor[5] or [None])
        for table, entries in (fields_of(packet[12][0]) if packet[12] else {}).items():
            new = map(fields_of, entries)
            interned[table].update({entry[1][0]: entry[2][0].decode() for entry in new})
        for event in map(fields_of, packet[11]):
            ((kind,), (uuid,), (time,)) = event[9], event[11], packet[8]
            if kind == 1:
                begun = {"track": names[uuid], "lane": uuid, "begin": time}
                still_open[uuid].append({**begun, **slice_of(event, interned)})
            elif kind == 2:
                told.slices.append({**still_open[uuid].pop(), "end": time})
            else:
                told.counters[names[uuid]].append((time, *struct.unpack("<d", event[44][0])))
    assert not any(still_open.values())
    return told


def slice_of(event, interned):
    return {
        "name": interned[2][event[10][0]],
        "category": interned[1][event[3][0]],
        "colour": event[52][0],
        "flows": [struct.unpack("<Q", one)[0] for one in event[47]],
        "arguments": dict(argument(fields_of(one), interned) for one in event[4]),
    }


def argument(annotation, interned):
    name = interned[3][annotation[1][0]]
    return name, annotation[4][0] if annotation[4] else interned[29][annotation[17][0]]


def written(trace, path):
    write_perfetto(trace, path)
    return path


def of_streams(told):
    return [one for one in told.slices if "row" in one["arguments"] and "stream" in one["track"]]


@pytest.fixture(scope="module", params=TRACES)
def recorded(request, tmp_path_factory):
    """Return a recorded trace, and what its timeline says."""
    trace = open_trace(request.param)
    return trace, read(written(trace, tmp_path_factory.mktemp("recorded") / "a.pftrace"))


def test_counts_and_sums_are_those_of_the_ledger(recorded):
    trace, told = recorded
    ledger = balance(trace)
    activities = of_streams(told)
    assert sorted(one["arguments"]["row"] for one in activities) == [*range(len(trace.kernels))]
    assert sum(one["end"] - one["begin"] for one in activities) == ledger.sum_ns
    idle = [one for one in told.slices if one["category"] == "idle"]
    assert len(idle) == len(trace.idle)
    inside = [one for one in idle if "edge" not in one["arguments"]]
    assert sum(one["end"] - one["begin"] for one in inside) == ledger.idle_ns
    for kind in ("phase", "module", "range"):
        is_kind = (trace.ranges["kind"] == kind).to_numpy(bool)
        slices = [one for one in told.slices if one["category"] == kind]
        took_ns = int(trace.ranges["duration_ns"][is_kind].sum())
        assert (len(slices), sum(one["end"] - one["begin"] for one in slices)) == (
            is_kind.sum(),
            took_ns,
        )


def test_the_json_has_the_same_slices(recorded, tmp_path):
    trace, told = recorded
    packed = gzip.decompress(written(trace, tmp_path / "a.json.gz").read_bytes())
    events = json.loads(packed, parse_float=Decimal)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    in_json = sorted((e["ts"] * 1000, (e["ts"] + e["dur"]) * 1000, e["name"]) for e in complete)
    assert in_json == sorted((one["begin"], one["end"], one["name"]) for one in told.slices)


def test_a_kernel_has_its_bound_as_category_and_colour(tmp_path):
    told = read(written(RICH, tmp_path / "a.pftrace"))
    by_name = {one["name"]: one for one in of_streams(told)}
    categories = {name: one["category"] for name, one in by_name.items()}
    assert categories == {
        "gemm_kernel": "compute",
        "copy_kernel": "memory",
        "strange_kernel": "bound unknown",
    }
    assert len({one["colour"] for one in by_name.values()}) == 3
    gemm = by_name["gemm_kernel"]["arguments"]
    assert (gemm["module"], gemm["flops"], gemm["limit_ns"]) == ("layers.0.mlp", 5_000_000, 50)


def test_idle_time_has_its_cause_and_unknown_ones_say_so(tmp_path):
    told = read(written(RICH, tmp_path / "a.pftrace"))
    idle = {one["name"]: one["arguments"] for one in told.on("GPU 0 idle")}
    assert idle["launch-bound"]["recoverable_ns"] == 49
    assert idle["cause unknown"]["edge"] == "after"


def test_a_value_that_is_missing_is_no_argument(tmp_path):
    told = read(written(RICH, tmp_path / "a.pftrace"))
    (strange,) = (one for one in of_streams(told) if one["name"] == "strange_kernel")
    assert strange["arguments"].keys().isdisjoint({"flops", "bytes", "module", "op"})


def test_activities_that_overlap_on_a_stream_are_on_lanes_of_one_name(tmp_path):
    trace = analyzed_trace_of({"duration_ns": 100}, {"start_ns": 50}, {"start_ns": 100})
    told = read(written(trace, tmp_path / "a.pftrace"))
    lanes = {one["begin"]: one["lane"] for one in told.on("GPU 0 stream 7")}
    assert lanes[0] == lanes[100] != lanes[50]
    assert told.ns_on("GPU 0 stream 7") == 300


def test_a_finding_is_linked_to_the_activities_that_prove_it(tmp_path):
    finding = Finding("unfused_norm", "It takes 3 ms", "high", "low", rows=(1,), idle_rows=(0,))
    trace = replace(RICH, diagnosis=Diagnosis((finding,)))
    told = read(written(trace, tmp_path / "a.pftrace"))
    first, second = sorted(told.on("1. unfused_norm"), key=lambda one: one["begin"])
    (copy,) = (one for one in of_streams(told) if one["name"] == "copy_kernel")
    (piece,) = (one for one in told.on("GPU 0 idle") if one["name"] == "launch-bound")
    assert (second["flows"], first["flows"]) == (copy["flows"], piece["flows"])
    assert (second["begin"], second["end"]) == (copy["begin"], copy["end"])
    assert second["arguments"]["claim"] == "It takes 3 ms"
    assert second["arguments"]["read"] == "kprof playbook unfused_norm"


def test_a_finding_without_rows_covers_the_trace(tmp_path):
    trace = replace(RICH, diagnosis=Diagnosis((Finding("x", "It is so", "low", "low"),)))
    (whole,) = read(written(trace, tmp_path / "a.pftrace")).on("1. x")
    assert (whole["begin"], whole["end"], whole["flows"]) == (0, 400, [])


def test_samples_are_counters_and_missing_ones_are_left_out(tmp_path):
    samples = [{"time_ns": 7, "value": 250.5}, {"time_ns": 9, "value": float("nan")}]
    trace = analyzed_trace_of({"start_ns": 5}, samples=samples)
    told = read(written(trace, tmp_path / "a.pftrace"))
    assert dict(told.counters) == {"GPU 0 power_w (nvml)": [(2, 250.5)]}
    assert told.parents["GPU 0 power_w (nvml)"] == "machine"


def test_times_before_the_clocks_zero_are_counted_from_the_first(tmp_path):
    trace = analyzed_trace_of({"start_ns": -(2**61)}, {"start_ns": -(2**61) + 100})
    told = read(written(trace, tmp_path / "a.pftrace"))
    assert [(one["begin"], one["end"]) for one in of_streams(told)] == [(0, 100), (100, 200)]


def test_any_name_is_written_and_secrets_and_controls_are_not(tmp_path):
    names = 'half "\x00\x1b[31m\u202e', "x --token=hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
    trace = analyzed_trace_of(*({"name": name, "start_ns": i} for i, name in enumerate(names)))
    shown = sorted(one["name"] for one in of_streams(read(written(trace, tmp_path / "a.pftrace"))))
    assert shown[0] == 'half "��[31m�'
    assert "hf_abc" not in shown[1]
    content = written(trace, tmp_path / "a.json").read_bytes()
    assert b"hf_abc" not in content
    assert b"u001b" not in content


def test_an_existing_file_is_replaced_only_by_force(tmp_path):
    path = tmp_path / "a.pftrace"
    path.write_text("mine")
    with pytest.raises(KprofError, match="exists"):
        write_perfetto(RICH, path)
    write_perfetto(RICH, path, force=True)
    assert len(of_streams(read(path))) == 3


def test_a_trace_without_a_timeline_is_refused(tmp_path):
    trace = replace(RICH, meta=replace(RICH.meta, untimed="sums only"))
    with pytest.raises(KprofError, match="sums only"):
        write_perfetto(trace, tmp_path / "a.pftrace")
    assert list(tmp_path.iterdir()) == []


def test_the_same_trace_gives_the_same_bytes(tmp_path):
    paths = [written(RICH, tmp_path / name) for name in ("a.pftrace.gz", "b.pftrace.gz")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(of_streams(read(paths[0]))) == 3


INTERVALS = some.lists(some.tuples(some.integers(0, 20), some.integers(0, 8)), max_size=12)


def slices_of(intervals):
    return [Slice(start, start + took, str(i)) for i, (start, took) in enumerate(intervals)]


@given(INTERVALS)
def test_lanes_keep_every_slice_and_hold_no_overlap(intervals):
    slices = slices_of(intervals)
    lanes = lanes_of(slices, nest=False)
    assert sorted(one for lane in lanes for one in lane) == sorted(slices)
    for lane in lanes:
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(lane))


@given(INTERVALS)
def test_there_are_no_more_lanes_than_slices_at_one_time(intervals):
    slices = slices_of((start, took + 1) for start, took in intervals)
    at_once = max(
        (sum(b.start_ns <= a.start_ns < b.end_ns for b in slices) for a in slices), default=0
    )
    assert len(lanes_of(slices, nest=False)) == at_once


@given(INTERVALS)
def test_slices_of_a_nested_lane_lie_inside_or_apart(intervals):
    slices = slices_of(intervals)
    lanes = lanes_of(slices, nest=True)
    assert sorted(one for lane in lanes for one in lane) == sorted(slices)
    for lane in lanes:
        for i, outer in enumerate(lane):
            for inner in lane[i + 1 :]:
                is_apart = inner.start_ns >= outer.end_ns
                assert is_apart or inner.end_ns <= outer.end_ns
