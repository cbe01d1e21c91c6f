"""What the recorder left of each process, and what becomes of it after the run."""

import gzip

from kprof.collect.process_folders import (
    compress_parts,
    escape_name,
    leave_out_helpers,
    recorders_of,
)
from tests.recorded import recorded_part


def test_a_helper_without_steps_is_left_out_beside_a_process_with_steps(tmp_path):
    main, helper = recorded_part(tmp_path, 1, num_steps_seen=9), recorded_part(tmp_path, 2)
    leave_out_helpers(tmp_path)
    assert main.exists()
    assert not helper.exists()


def test_a_worker_with_steps_is_left_out_beside_the_process_that_started_it(tmp_path):
    main = recorded_part(tmp_path, 1, num_steps_seen=9)
    worker = recorded_part(tmp_path, 2, num_steps_seen=3, started_by=1)
    leave_out_helpers(tmp_path)
    assert main.exists()
    assert not worker.exists()


def test_a_worker_with_steps_stays_where_who_started_it_has_none(tmp_path):
    recorded_part(tmp_path, 1)
    worker = recorded_part(tmp_path, 2, num_steps_seen=3, started_by=1)
    leave_out_helpers(tmp_path)
    assert worker.exists()


def test_a_process_without_steps_stays_when_no_other_has_any(tmp_path):
    part = recorded_part(tmp_path, 1)
    leave_out_helpers(tmp_path)
    assert part.exists()


def test_a_rank_without_steps_stays(tmp_path):
    recorded_part(tmp_path, 1, num_steps_seen=9, world_size=2)
    rank = recorded_part(tmp_path, 2, world_size=2)
    leave_out_helpers(tmp_path)
    assert rank.exists()


def test_a_process_is_left_out_that_withdraws_or_is_cut_off_while_it_tells(tmp_path):
    whole, cut, gone = (recorded_part(tmp_path, number) for number in (1, 2, 3))
    (cut / "recorder.json").write_text('{"schema": 1, "pi')
    (gone / "recorder.json").unlink()
    (gone / "recorder.json").symlink_to(gone / "withdrawn")
    assert list(recorders_of(tmp_path)) == [whole]


def test_traces_are_compressed_and_the_plain_ones_go(tmp_path):
    part = tmp_path / "rank0-pid1"
    part.mkdir()
    (part / "window-0.json").write_text("{}")
    (part / "recorder.json").write_text("{}")
    assert compress_parts(tmp_path) == (part,)
    assert sorted(path.name for path in part.iterdir()) == ["recorder.json", "window-0.json.gz"]
    assert gzip.decompress((part / "window-0.json.gz").read_bytes()) == b"{}"


def test_quotes_in_names_are_escaped_and_nothing_else_changes():
    line = b'    "ph": "X", "cat": "user_annotation", "name": "a "b", c", "pid": 1, "tid": 2,\n'
    escaped = rb'"name": "a \"b\", c", "pid": 1'
    assert escape_name(line).count(escaped) == 1
    assert escape_name(escape_name(line)) == escape_name(line)
    assert escape_name(b'    "name": "say "hi"",\n') == b'    "name": "say \\"hi\\"",\n'
    plain = b'    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": "a",\n'
    assert escape_name(plain) == plain
