"""Wherever the file is cut, and whoever decodes a block, the tables are the same."""

import json
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.collect.readers.kineto import document, workers
from kprof.collect.readers.kineto.blocks import Merger
from kprof.collect.readers.kineto.cuts import cuts_of
from kprof.collect.readers.kineto.document import read_blocks, read_document, read_whole
from kprof.collect.readers.kineto.tables import kernels_of, ranges_of, samples_of
from kprof.collect.trace_file import json_text_of, mapped
from tests.kineto_files import allocation, annotation, kernel, launch, operator, python_call, write

NAMES = st.sampled_from(["aten::mm", 'a "quoted" name', '}, {"ph": "X"', "back\\slash", "é", ""])
TIMES = st.integers(0, 10**9).map(lambda ns: ns / 1000)
EVENTS = st.one_of(
    st.builds(
        lambda name, ts: operator(name=name, ts=ts, args={"Input Dims": [[2]]}), NAMES, TIMES
    ),
    st.builds(lambda name, tid: annotation(name, tid=tid), NAMES, st.integers(0, 3)),
    st.builds(lambda name: python_call("nn.Module: " + name), NAMES),
    st.builds(lambda ts, n: launch(ts=ts, args={"correlation": n}), TIMES, st.integers(0, 9)),
    st.builds(
        lambda name, n: kernel(name=name, args={"grid": [n, 1, 1]}), NAMES, st.integers(0, 9)
    ),
    st.just(allocation()),
    st.just({"ph": "M", "name": "process_name", "args": {"name": "python"}}),
)


def tables_of(found):
    merger = Merger(found.shares)
    tables = kernels_of(merger, 0), ranges_of(merger, 0), samples_of(merger, 0)
    return (*tables, dict(merger.counts()))


def assert_equal(found, expected):
    *tables, counts = tables_of(found)
    *expected_tables, expected_counts = tables_of(expected)
    for table, expected_table in zip(tables, expected_tables, strict=True):
        pd.testing.assert_frame_equal(table, expected_table)
    assert counts == expected_counts
    assert found.around == expected.around


def cuts_in(text, block_bytes):
    return cuts_of(mapped(text), block_bytes)


def whole(text):
    return read_whole(mapped(text))


@settings(deadline=None, max_examples=60)
@given(
    events=st.lists(EVENTS, min_size=1, max_size=30),
    block_bytes=st.integers(1, 3000),
    indent=st.sampled_from([None, 0, 2]),
    is_first=st.booleans(),
)
def test_a_trace_cut_anywhere_gives_the_tables_of_the_whole(events, block_bytes, indent, is_first):
    around = {"distributedInfo": {"rank": 1}}
    listed = {"traceEvents": events}
    content = listed | around if is_first else around | listed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_text(json.dumps(content, indent=indent))
        with json_text_of(path) as text:
            assert_equal(read_blocks(text, cuts_in(text, block_bytes), 1), whole(text))


def test_blocks_hold_whole_events_and_together_all_of_them(tmp_path):
    with json_text_of(write(tmp_path, *[operator()] * 9)) as text:
        view = mapped(text)
        blocks = cuts_of(view, block_bytes=300).blocks
        texts = [view[begin:end] for begin, end in blocks]
    assert len(blocks) > 2
    assert [json.loads(b"[" + block + b"]")[0]["ph"] for block in texts[:-1]] == ["X"] * (
        len(blocks) - 1
    )
    assert b"".join(texts).count(b'"ph"') == 9


def test_an_object_inside_an_event_that_looks_like_an_event_does_no_harm(tmp_path):
    nested = [{"ph": 1, "filler": "x" * 40} for _ in range(20)]
    path = write(tmp_path, operator(args={"nested": nested}), kernel(args={"nested": nested}))
    with json_text_of(path) as text:
        assert_equal(read_document(text, block_bytes=100), whole(text))


def test_a_list_of_look_alikes_after_the_events_does_no_harm(tmp_path):
    path = tmp_path / "trace.json"
    alikes = [{"ph": 1, "filler": "x" * 40} for _ in range(20)]
    path.write_text(json.dumps({"traceEvents": [operator(), kernel()], "alikes": alikes}))
    with json_text_of(path) as text:
        assert_equal(read_document(text, block_bytes=100), whole(text))


def test_another_process_gives_the_tables_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "claimed_blocks", lambda *_: iter(()))
    events = [
        operator(name=f"op {n % 5}", ts=n, args={"Input Dims": [[n % 7]]}) for n in range(400)
    ]
    with json_text_of(write(tmp_path, *events, kernel())) as text:
        mine, theirs, _ = (found := read_blocks(text, cuts_in(text, 2000), 2)).shares
        assert_equal(found, whole(text))
    assert len(mine.blocks) == 0
    assert len(theirs.blocks) > 9


def test_blocks_of_a_process_that_cannot_start_are_decoded_by_the_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    with json_text_of(write(tmp_path, *[operator()] * 50)) as text:
        found = read_document(text, block_bytes=500, num_processes=2)
        assert_equal(found, whole(text))


@pytest.mark.parametrize(
    ("num_bytes", "num_blocks", "expected"),
    [(1000, 8, 1), (document.PARALLEL_FROM_BYTES, 1, 1)],
)
def test_a_small_trace_is_decoded_by_one_process(tmp_path, num_bytes, num_blocks, expected):
    path = tmp_path / "trace.json"
    with path.open("wb+") as file:
        file.truncate(num_bytes)
        assert document.num_processes_for(file, num_blocks) == expected
