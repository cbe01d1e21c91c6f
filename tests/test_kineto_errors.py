"""A file that cannot be read ends in one error that names the damage and the way out."""

import gzip
import json

import pytest

from kprof.collect.readers._kineto import document
from kprof.collect.readers.kineto import read
from kprof.errors import TraceError
from tests.kineto_files import kernel, operator, write


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


def test_a_gzip_file_that_is_cut_off(tmp_path):
    whole = gzip.compress(write(tmp_path, *[operator()] * 500).read_bytes())
    path = file_of(tmp_path, whole[: len(whole) // 2], "trace.json.gz")
    assert "cut off: its gzip data ends" in problem_of(path)


def test_a_gzip_file_of_which_only_the_first_bytes_were_copied(tmp_path):
    path = file_of(tmp_path, gzip.compress(b"{}")[:5], "trace.json.gz")
    assert "cut off" in problem_of(path)


def test_a_gzip_file_with_damaged_content(tmp_path):
    whole = bytearray(gzip.compress(write(tmp_path, *[operator()] * 500).read_bytes()))
    whole[-6] ^= 0xFF
    assert "damaged" in problem_of(file_of(tmp_path, bytes(whole), "trace.json.gz"))


def test_a_plain_file_that_is_named_gz(tmp_path):
    path = write(tmp_path, operator(), name="trace.json.gz")
    assert "not compressed although its name ends in .gz" in problem_of(path)


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0)])
def test_an_empty_file(tmp_path, content):
    assert "is empty" in problem_of(file_of(tmp_path, content))


def test_a_binary_file(tmp_path):
    problem = problem_of(file_of(tmp_path, b"SQLite format 3\x00"))
    assert problem == "trace.json is not JSON; it begins with b'SQLite format 3\\x00'"


def test_json_that_is_cut_off(tmp_path):
    text = write(tmp_path, operator(), operator(name="last one")).read_bytes()
    problem = problem_of(file_of(tmp_path, text[:-20]))
    assert f"cut off at its end, byte {len(text) - 20:,}, after" in problem


def test_a_quote_inside_a_name_is_found_by_line_and_event(tmp_path):
    path = write(tmp_path, *[operator()] * 9, operator(name="say hello to me"))
    text = path.read_text().replace("}, {", "},\n{").replace("hello", '"hello"')
    problem = problem_of(file_of(tmp_path, text.encode()))
    assert f"invalid at byte {text.index('hello'):,}, line 10, in the event named 'say'" in problem


def test_damage_in_one_of_many_blocks_is_found_as_in_one(tmp_path, monkeypatch):
    monkeypatch.setattr(document.cuts_of, "__defaults__", (500,))
    path = write(tmp_path, *[operator()] * 20, operator(name="say hello to me"), *[kernel()] * 20)
    text = path.read_text().replace("hello", '"hello"')
    problem = problem_of(file_of(tmp_path, text.encode()))
    assert f"invalid at byte {text.index('hello'):,}," in problem


@pytest.mark.parametrize("content", [b"[]", b'{"traceEvents": []}', b' {"traceEvents" :\n[ ] }'])
def test_an_empty_list_of_events(tmp_path, content):
    assert "empty list of events" in problem_of(file_of(tmp_path, content))


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
    assert "without a list of `traceEvents`" in problem
    assert seen in problem


@pytest.mark.parametrize("content", [b"[1, 2]", b'["a"]', b"[[]]"])
def test_a_list_of_something_else(tmp_path, content):
    assert "event 0 is not one of Kineto's" in problem_of(file_of(tmp_path, content))


def test_a_profile_of_proton(tmp_path):
    content = json.dumps([{"children": [], "frame": {"name": "ROOT"}, "metrics": {}}]).encode()
    assert "Proton" in problem_of(file_of(tmp_path, content))


def test_a_chrome_trace_of_another_program(tmp_path):
    path = write(tmp_path, operator(cat="v8"), operator(cat="blink"))
    assert "another program" in (problem := problem_of(path))
    assert "seen: blink, v8" in problem


def test_a_trace_without_operators_and_activities(tmp_path):
    event = {"ph": "X", "cat": "overhead", "name": "Flush", "ts": 1, "dur": 2}
    assert "nothing to analyze" in problem_of(write(tmp_path, event))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dur": -0.04}, "the kernel 'gemm' at ts 1 has a negative duration (-40 ns)"),
        ({"dur": None}, "the kernel 'gemm' at ts 1 has no 'dur'"),
        ({"ts": "soon"}, "the kernel 'gemm' at ts soon has 'soon' as its 'ts'"),
        ({"ts": 2**70}, "which is no time in µs"),
    ],
)
def test_an_event_with_an_impossible_time(tmp_path, changes, said):
    assert said in problem_of(write(tmp_path, operator(), kernel(**changes)))


def test_a_time_that_is_not_a_number(tmp_path):
    path = write(tmp_path, operator(), kernel(dur=float("nan")))
    assert "in the event named 'gemm': NaN is no number there" in problem_of(path)


@pytest.mark.parametrize("content", [b'{"a": "\xff", "traceEvents": []}', b"[" * 200_000])
def test_text_that_no_decoder_takes(tmp_path, content):
    assert "cannot be decoded" in problem_of(file_of(tmp_path, content))


def test_a_name_that_is_not_utf_8(tmp_path):
    text = write(tmp_path, operator(), operator(name="spoilt")).read_bytes()
    problem = problem_of(file_of(tmp_path, text.replace(b"spoilt", b"\xff")))
    assert "event 1 is not one of Kineto's ('utf-8' codec" in problem


def test_arguments_that_are_no_object(tmp_path):
    path = write(tmp_path, operator(), {**kernel(), "args": "none"})
    assert "event 1 is not one of Kineto's" in problem_of(path)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("second", "\\ud800", "hex escape"),
        ("second", "a\nb", "invalid character"),
        ("}]}", "},]}", "trailing comma"),
        ("}]}", "}]} and more", "trailing characters"),
    ],
)
def test_other_damage_is_not_put_down_to_quotes(tmp_path, before, after, said):
    text = write(tmp_path, operator(name="second"), operator()).read_text()
    path = file_of(tmp_path, text.replace(before, after).encode())
    with pytest.raises(TraceError, match=said) as error:
        read(path)
    assert "backslash" not in error.value.fix


def test_a_quote_inside_a_name_comes_with_how_to_mend_it(tmp_path):
    text = write(tmp_path, operator(name="say hello")).read_text().replace("hello", '"hello"')
    with pytest.raises(TraceError) as error:
        read(file_of(tmp_path, text.encode()))
    assert "put a backslash before each quote" in error.value.fix


def test_a_number_out_of_range_beside_the_events_is_named(tmp_path):
    text = write(tmp_path, operator(), odd=77).read_text().replace("77", "1e400")
    assert "the value of 'odd' cannot be decoded" in problem_of(file_of(tmp_path, text.encode()))


def test_a_recording_in_which_nothing_happened(tmp_path):
    marks = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 1, "dur": 2}
    assert "nothing to analyze" in problem_of(write(tmp_path, marks))
