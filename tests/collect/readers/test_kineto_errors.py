"""A file of which nothing can be read ends in one error that names the damage and the fix."""

import gzip
import json

import pytest

from kprof.collect.readers.kineto.reader import read
from kprof.errors import TraceError
from tests.kineto_files import operator, write


def problem_of(path):
    with pytest.raises(TraceError) as error:
        read(path)
    assert error.value.fix
    assert error.value.problem.startswith(path.name)
    return error.value.problem


def file_of(folder, content, name="trace.json"):
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_gzip_file_of_which_only_the_first_bytes_were_copied(tmp_path):
    path = file_of(tmp_path, gzip.compress(b"{}")[:5], "trace.json.gz")
    assert "cut off" in problem_of(path)


def test_a_plain_file_that_is_named_gz(tmp_path):
    path = write(tmp_path, operator(), name="trace.json.gz")
    problem = problem_of(path)
    assert ("not compressed" in problem, ".gz" in problem) == (True, True)


def test_a_file_that_was_packed_twice(tmp_path):
    packed = gzip.compress(gzip.compress(write(tmp_path, operator()).read_bytes()))
    assert "compressed twice" in problem_of(file_of(tmp_path, packed, "trace.json.gz"))


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_refused(tmp_path, content):
    assert "is empty" in problem_of(file_of(tmp_path, content))


def test_a_binary_file_is_refused(tmp_path):
    begin = b"SQLite format 3\x00"
    problem = problem_of(file_of(tmp_path, begin))
    assert "not JSON" in problem
    assert problem.endswith(repr(begin))


@pytest.mark.parametrize("content", [b"[]", b'{"traceEvents": []}', b' {"traceEvents" :\n[ ] }'])
def test_an_empty_list_of_events_is_refused(tmp_path, content):
    assert "empty list" in problem_of(file_of(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"{}", "it holds nothing"),
        (b'{"a": 1, "b": 2}', "keys a, b"),
        (b'{"traceEvents": 3}', "something else"),
    ],
)
def test_json_without_a_list_of_events(tmp_path, content, seen):
    problem = problem_of(file_of(tmp_path, content))
    assert ("`traceEvents`" in problem, seen in problem) == (True, True)


@pytest.mark.parametrize("content", [b"[1, 2]", b'["a"]', b"[[]]"])
def test_a_list_of_something_else_is_refused(tmp_path, content):
    assert "list of something" in problem_of(file_of(tmp_path, content))


def test_a_profile_of_proton_is_refused(tmp_path):
    content = json.dumps([{"children": [], "frame": {"name": "ROOT"}, "metrics": {}}]).encode()
    assert "Proton" in problem_of(file_of(tmp_path, content))


def test_a_chrome_trace_of_another_program_is_refused(tmp_path):
    path = write(tmp_path, operator(cat="v8"), operator(cat="blink"))
    assert "another program" in (problem := problem_of(path))
    assert "seen: blink, v8" in problem


def test_a_trace_without_operators_and_activities_is_refused(tmp_path):
    event = {"ph": "X", "cat": "overhead", "name": "Flush", "ts": 1, "dur": 2}
    assert "nothing to analyze" in problem_of(write(tmp_path, event))


def test_text_that_no_decoder_takes_is_refused(tmp_path):
    assert "cannot be decoded" in problem_of(file_of(tmp_path, b"[" * 200_000))


def test_a_recording_in_which_nothing_happened_is_refused(tmp_path):
    marks = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 1, "dur": 2}
    assert "nothing to analyze" in problem_of(write(tmp_path, marks))
