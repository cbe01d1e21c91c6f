"""A damaged trace is read on: what is damaged is left out and counted, and nothing else."""

import codecs
import gzip
import json
import re

import pyarrow as pa
import pytest

from kprof.collect.readers.kineto import document
from kprof.collect.readers.kineto.blocks import Merger
from kprof.collect.readers.kineto.damage import DamageError
from kprof.collect.readers.kineto.document import read_damaged, read_document
from kprof.collect.readers.kineto.reader import read
from kprof.collect.readers.kineto.tables import kernels_of
from kprof.collect.trace_file import LIMIT_VARIABLE, json_text_of, mapped
from kprof.errors import TraceError
from tests.kineto_files import annotation, kernel, launch, operator, write
from tests.quantities import quantities_in


def file_of(folder, content, name="trace.json"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def text_of(folder, *events, **around):
    return write(folder, *events, **around).read_text()


@pytest.mark.parametrize(
    ("changes", "damage"),
    [
        ({"dur": -0.04}, "damaged_activities"),
        ({"dur": None}, "damaged_activities"),
        ({"dur": True}, "damaged_activities"),
        ({"ts": False}, "damaged_activities"),
        ({"ts": "soon"}, "damaged_activities"),
        ({"ts": 2**70}, "damaged_activities"),
        ({"ts": [1]}, "damaged_activities"),
        ({"dur": 1e308}, "damaged_activities"),
        ({"dur": float("nan")}, "damaged_activities"),
        ({"ts": float("-inf")}, "damaged_activities"),
    ],
)
def test_an_activity_with_an_impossible_time_is_left_out(tmp_path, changes, damage):
    trace = read(write(tmp_path, operator(), kernel(), kernel(**{"ts": 9, "dur": 3, **changes})))
    assert trace.kernels["duration_ns"].tolist() == [2000]
    assert trace.meta.counts[damage] == 1


def test_a_host_event_with_an_impossible_time_is_left_out(tmp_path):
    trace = read(write(tmp_path, operator(), operator(name="aten::unfinished", dur=-1)))
    assert trace.ranges["name"].tolist() == ["aten::mm"]
    assert trace.meta.counts["damaged_events"] == 1


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "-nan", "nan(snan)"])
def test_a_number_that_is_none_costs_its_value_alone(tmp_path, number):
    text = text_of(tmp_path, operator(), kernel(cat="gpu_memcpy", args={"bytes": 64, "gb/s": 7777}))
    trace = read(file_of(tmp_path, text.replace("7777", number)))
    assert trace.kernels["copied_bytes"].tolist() == [64]
    assert trace.meta.counts["repaired_events"] == 1


@pytest.mark.parametrize("number", ["1e400", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize(
    ("key", "durations_ns"),
    [("dur", [2000]), ("ts", [2000]), ("device", [2000, 3000]), ("bytes", [2000, 3000])],
)
def test_a_number_beyond_a_double_costs_what_needs_it(tmp_path, number, key, durations_ns):
    odd = kernel(cat="gpu_memcpy", ts=9, dur=3, args={"bytes": 64})
    where = odd["args"] if key in odd["args"] else odd
    where[key] = 7777
    text = text_of(tmp_path, operator(), kernel(), odd)
    trace = read(file_of(tmp_path, text.replace("7777", number)))
    assert trace.kernels["duration_ns"].tolist() == durations_ns
    assert len(trace.ranges) == 1


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (b"\\ud83d lone", "\ufffd lone"),
        (b"\\ud83d\\ude00 pair", "\U0001f600 pair"),
        (b"caf\xe9", "caf\xe9"),
        (b"caf\xc3\xa9 \xe9", "caf\xe9 \xe9"),
        (b"one\ntwo", "one two"),
        (b"nul\0byte", "nul byte"),
        (b"path\\x", "path\\x"),
        (b'say "hello" to me', 'say "hello" to me'),
    ],
)
def test_a_name_that_is_no_valid_text_is_read_as_far_as_it_can_be(tmp_path, written, name):
    content = write(tmp_path, operator(name="second"), kernel()).read_bytes()
    trace = read(file_of(tmp_path, content.replace(b"second", written)))
    assert trace.ranges["name"].tolist() == [name]
    assert len(trace.kernels) == 1


EVENTS = [[operator(ts=at), kernel(ts=at + 5), kernel(ts=at + 9)] for at in (10, 50)]


@pytest.mark.parametrize("between", ["", "\n", ",", "\0"])
@pytest.mark.parametrize("around", [{}, {"deviceProperties": [{"id": 0}, {"id": 1}]}])
def test_documents_one_after_another_are_read_all(tmp_path, between, around):
    text = between.join(text_of(tmp_path, *events, **around) for events in EVENTS)
    trace = read(file_of(tmp_path, text))
    assert trace.kernels["start_ns"].tolist() == [15000, 19000, 55000, 59000]
    assert trace.ranges["start_ns"].tolist() == [10000, 50000]
    assert trace.meta.counts.get("damaged_events", 0) == 0


@pytest.mark.parametrize("name", ["trace.json", "trace.jsonl"])
def test_an_event_a_line_is_a_trace(tmp_path, name):
    text = "\n".join(json.dumps(event) for event in EVENTS[0])
    trace = read(file_of(tmp_path, text, name))
    assert trace.kernels["start_ns"].tolist() == [15000, 19000]
    assert not {"damaged_events", "damaged_keys"} & trace.meta.counts.keys()


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("}]}", "},]}", 0),
        ("}]}", "}]", 0),
        ("}]}", "}]} and more", 0),
        ("}]}", "},", 0),
        ('}, {"ph"', '} {"ph"', 0),
        ('}, {"ph"', '}, null, 7, {"ph"', 2),
        ('}, {"ph"', '}, {"ph": "X", {"ph"', 2),
    ],
)
def test_stray_text_between_events_costs_no_event(tmp_path, before, after, lost):
    text = text_of(tmp_path, operator(), kernel())
    assert before in text
    trace = read(file_of(tmp_path, text.replace(before, after)))
    assert (len(trace.ranges), len(trace.kernels)) == (1, 1)
    assert trace.meta.counts.get("damaged_events", 0) == lost


def test_arguments_that_are_no_object_count_as_none(tmp_path):
    trace = read(write(tmp_path, operator(), {**kernel(), "args": "none"}))
    assert trace.kernels["duration_ns"].tolist() == [2000]


def test_a_value_beside_the_events_that_cannot_be_read_is_missing(tmp_path):
    text = text_of(tmp_path, operator(), odd=77).replace("77", "1e400")
    assert read(file_of(tmp_path, text)).meta.counts["damaged_keys"] == 1


def test_damage_names_its_place(tmp_path):
    text = text_of(tmp_path, *[operator(ts=n) for n in range(9)], operator(name="say hello"))
    text = text.replace("}, {", "},\n{").replace("hello", '"hello"')
    caveats = " ".join(map(str, read(file_of(tmp_path, text)).meta.caveats))
    place = rf"byte {text.index('hello'):,}, line 10, .* 'say'"
    assert re.search(place, caveats)


def test_damage_in_one_of_many_blocks_costs_that_event_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(document.cuts_of, "__defaults__", (500,))
    monkeypatch.setattr(
        document.read_document, "__kwdefaults__", {"block_bytes": 500, "num_processes": 1}
    )
    events = [operator(ts=n) for n in range(40)]
    events[20]["name"] = "bad"
    text = text_of(tmp_path, *events).replace('"bad"', '"bad')
    trace = read(file_of(tmp_path, text))
    assert trace.ranges["start_ns"].tolist() == [1000 * n for n in range(40) if n != 20]


def test_a_trace_cut_at_any_byte_holds_what_came_before_or_is_refused(tmp_path):
    events = operator(), launch(), kernel(), kernel(ts=9, args={"grid": [1, 2, 3]}), annotation("é")
    content = json.dumps({"a": 1, "traceEvents": events, "b": [{"ph": "X"}]}, ensure_ascii=False)
    content = content.encode()
    sums = []
    for end in range(1, len(content) + 1):
        with json_text_of(file_of(tmp_path, content[:end])) as text:
            try:
                found = read_document(text)
            except (DamageError, ValueError):
                sums.append(0)
                continue
        sums.append(int(kernels_of(Merger(found.shares), 0)["duration_ns"].sum()))
    assert sums == sorted(sums)
    assert sums[-1] == 4000


def test_two_documents_in_one_file_are_both_read(tmp_path):
    first, second = text_of(tmp_path, operator()), text_of(tmp_path, kernel())
    trace = read(file_of(tmp_path, first + "\n" + second))
    assert (len(trace.ranges), len(trace.kernels)) == (1, 1)


def test_a_damaged_part_is_read_as_the_whole_is(tmp_path):
    path = write(tmp_path, operator(), kernel(args={"nested": [{"ph": 1}, {"ph": 2}]}), launch())
    with json_text_of(path) as text:
        found = read_damaged(mapped(text), DamageError("none"))
    assert Merger(found.shares).counts()["cat:kernel"] == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_trace_in_another_encoding_is_the_same(tmp_path, encoding):
    text = text_of(tmp_path, operator(name="é"), kernel())
    path = file_of(tmp_path, text.encode(encoding))
    assert read(path).ranges["name"].tolist() == ["é"]


def test_a_mark_without_text_is_an_empty_file(tmp_path):
    with pytest.raises(TraceError, match="is empty"):
        read(file_of(tmp_path, codecs.BOM_UTF8))


def many(folder):
    return text_of(folder, *[operator(ts=n, name=f"aten::op{n * n % 97}") for n in range(500)])


@pytest.mark.parametrize("pack", [gzip.compress, lambda b: pa.compress(b, "zstd", asbytes=True)])
def test_a_packed_trace_is_read_whatever_it_is_called(tmp_path, pack):
    packed = pack(many(tmp_path).encode())
    assert len(read(file_of(tmp_path, packed, "trace.json.zst")).ranges) == 500


def test_members_of_one_gzip_file_are_read_one_after_another(tmp_path):
    text = many(tmp_path).encode()
    packed = gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + bytes(64)
    assert len(read(file_of(tmp_path, packed, "trace.json.gz")).ranges) == 500


@pytest.mark.parametrize("pack", [gzip.compress, lambda b: pa.compress(b, "zstd", asbytes=True)])
def test_packed_data_that_is_cut_off_gives_what_comes_before(tmp_path, pack):
    events = [operator(ts=n, name=f"aten::op{hash((n, n * n)) % 9973}") for n in range(9000)]
    packed = pack(text_of(tmp_path, *events).encode())
    trace = read(file_of(tmp_path, packed[: len(packed) * 2 // 3], "trace.json.gz"))
    assert len(trace.ranges) > 100
    assert "cut_off" in {one.id for one in trace.meta.caveats}


def test_packed_data_with_a_damaged_byte_gives_what_comes_before(tmp_path):
    packed = bytearray(gzip.compress(many(tmp_path).encode()))
    packed[-6] ^= 0xFF  # of the checksum: all is there
    assert len(read(file_of(tmp_path, bytes(packed), "trace.json.gz")).ranges) == 500


def test_a_file_that_unpacks_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    path = file_of(tmp_path, gzip.compress(bytes(3_000_000)), "trace.json.gz")
    monkeypatch.setenv(LIMIT_VARIABLE, "0.002")
    with pytest.raises(TraceError) as error:
        read(path)
    assert quantities_in(error.value.problem)[-1] == "2,000,000 bytes"
    assert LIMIT_VARIABLE in error.value.fix


@pytest.mark.parametrize("told", ["lots", "-1", "nan", "inf", ""])
def test_a_limit_that_is_no_number_is_refused(tmp_path, monkeypatch, told):
    path = file_of(tmp_path, gzip.compress(b"[]"), "trace.json.gz")
    monkeypatch.setenv(LIMIT_VARIABLE, told)
    with pytest.raises(TraceError, match=LIMIT_VARIABLE):
        read(path)


def edge(ph, name, ts, **changes):
    return {
        "ph": ph,
        "cat": "user_annotation",
        "name": name,
        "pid": 10,
        "tid": 11,
        "ts": ts,
        **changes,
    }


def ranges_of(folder, *events):
    ranges = read(write(folder, kernel(ts=90, dur=10), *events)).ranges
    return sorted(zip(ranges["name"], ranges["start_ns"], ranges["duration_ns"], strict=True))


def test_a_begin_and_its_end_are_one_range(tmp_path):
    assert ranges_of(tmp_path, edge("B", "a", 1), edge("E", "a", 5)) == [("a", 1000, 4000)]


def test_begins_nest_and_an_end_needs_no_name_and_no_category(tmp_path):
    end = {"ph": "E", "pid": 10, "tid": 11}
    events = edge("B", "a", 1), edge("B", "b", 2), {**end, "ts": 3}, {**end, "ts": 5}
    assert ranges_of(tmp_path, *events) == [("a", 1000, 4000), ("b", 2000, 1000)]


def test_an_end_on_another_thread_closes_nothing(tmp_path):
    events = edge("B", "a", 1), edge("E", "a", 5, tid=12)
    # Still open where the trace ends.
    assert ranges_of(tmp_path, *events) == [("a", 1000, 99_000)]


def test_a_range_may_begin_in_one_block_and_end_in_another(tmp_path, monkeypatch):
    monkeypatch.setattr(
        document.read_document, "__kwdefaults__", {"block_bytes": 100, "num_processes": 1}
    )
    between = [operator(ts=2 + n / 100, dur=0.001, name="op") for n in range(30)]
    found = ranges_of(tmp_path, edge("B", "a", 1), *between, edge("E", "a", 5))
    assert found[0] == ("a", 1000, 4000)


def test_a_category_that_is_not_read_is_named_with_its_time(tmp_path):
    trace = read(
        write(tmp_path, kernel(dur=1.5), operator(cat="npu_op", dur=1500), operator(cat=""))
    )
    (caveat,) = [one.text for one in trace.meta.caveats if one.id == "unread_categories"]
    assert re.findall(r"\w+ \(.*?\)", caveat) == [
        "npu_op (1 events, 1.500 ms)",
        "none (1 events, 0.002 ms)",
    ]


@pytest.mark.parametrize(
    "category",
    ["xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "hpu_op", "new_runtime"],
)
def test_calls_of_other_devices_launch_their_activities(tmp_path, category):
    trace = read(write(tmp_path, launch(cat=category), kernel(cat="mtia_ccp_events", ts=5)))
    assert trace.ranges["kind"].tolist() == ["runtime"]
    assert trace.kernels["correlation"].tolist() == trace.ranges["correlation"].tolist() == [1]


def test_waits_of_an_mtia_are_no_work_and_its_requests_are_copies(tmp_path):
    names = "event_wait", "event_record", "dma_request", "fc-dtype_Float"
    events = [kernel(cat="mtia_ccp_events", name=name, ts=n) for n, name in enumerate(names)]
    kernels = read(write(tmp_path, *events)).kernels
    assert dict(zip(kernels["name"], kernels["activity"], strict=True)) == {
        "dma_request": "memcpy",
        "fc-dtype_Float": "kernel",
    }


def test_queues_of_an_xpu_are_its_streams(tmp_path):
    args = {"stream": None, "sycl queue": 64}
    events = kernel(tid=2**32 - 1, args=args), kernel(tid=2**32 - 1, args={"stream": None}, ts=9)
    assert read(write(tmp_path, *events)).kernels["stream"].tolist() == [64, -1]
