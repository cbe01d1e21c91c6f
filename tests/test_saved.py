"""A run on disk is the run that was saved."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from kprof.analyze.passes import analyze
from kprof.device import Device
from kprof.errors import KprofError, TraceError
from kprof.storage import is_saved, load, save, save_meta, whole_or_not_at_all
from kprof.trace import Caveat, Recording
from tests.traces import trace_of

TRACE = analyze(
    trace_of(
        {"name": "gemm", "correlation": 7},
        {"name": "copy", "start_ns": 2**53 + 1},
        ranges=[{"name": "aten::mm", "input_shapes": "[[2,3]]"}],
        samples=[{"value": 0.1}],
        device=Device("GPU", 1e12, {"bf16": 1e15}, "a datasheet"),
        recording=Recording("a rule", 3, (1, 2), recorded_step_ns=(5, 6), unrecorded_step_ns=(4,)),
        caveats=(Caveat("recorder", "something is missing"),),
        command=("python", "train.py"),
    )
)


def assert_same(back, saved):
    # A category that no row uses may be forgotten; the values and the kinds of column may not.
    pd.testing.assert_frame_equal(back, saved, check_categorical=False)
    assert [str(t) for t in back.dtypes] == [str(t) for t in saved.dtypes]


def test_a_saved_trace_reads_back_the_same(tmp_path):
    save(TRACE, tmp_path)
    back = load(tmp_path)
    assert back.meta == TRACE.meta
    assert_same(back.kernels, TRACE.kernels)
    assert_same(back.ranges, TRACE.ranges)
    assert_same(back.samples, TRACE.samples)
    assert_same(back.idle, TRACE.idle)


MANY_RANKS = replace(TRACE, all_ranks=replace(TRACE, diagnosis=None))
UNFINISHED = replace(TRACE, diagnosis=None)


@pytest.mark.parametrize("before", [MANY_RANKS, TRACE, UNFINISHED])
@pytest.mark.parametrize("after", [MANY_RANKS, TRACE, UNFINISHED])
def test_a_run_that_takes_another_ones_place_keeps_nothing_of_it(tmp_path, before, after):
    for trace in (before, after):
        with whole_or_not_at_all(tmp_path) as unfinished:
            save(trace, unfinished)
    back = load(tmp_path)
    assert (back.all_ranks is None) == (after.all_ranks is None)
    assert (back.diagnosis is None) == (after.diagnosis is None)
    assert not [*tmp_path.glob(".*")]


def test_a_folder_without_a_finished_run_is_not_saved(tmp_path):
    save(TRACE, tmp_path)
    (tmp_path / "meta.json").unlink()
    assert not is_saved(tmp_path)


def test_a_run_of_another_format_is_not_taken_for_ours(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"format": 999, "meta": {}}))
    assert not is_saved(tmp_path)


def test_a_damaged_table_is_one_clear_error(tmp_path):
    save(TRACE, tmp_path)
    (tmp_path / "kernels.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(TraceError, match=rf"{tmp_path.name} .*kernels\.parquet is damaged"):
        load(tmp_path)


def test_a_table_that_lacks_a_column_is_one_clear_error(tmp_path):
    save(TRACE, tmp_path)
    pd.read_parquet(tmp_path / "kernels.parquet").drop(columns="bound").to_parquet(
        tmp_path / "kernels.parquet"
    )
    with pytest.raises(TraceError, match=r"kernels\.parquet .*\bbound\n"):
        load(tmp_path)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_appear_together_and_nothing_partial_is_left(tmp_path):
    with whole_or_not_at_all(tmp_path / "run") as unfinished:
        save(TRACE, unfinished)
        assert not (tmp_path / "run" / "meta.json").exists()
    tables = ["idle.parquet", "kernels.parquet", "ranges.parquet", "samples.parquet"]
    assert names_in(tmp_path / "run") == sorted([*tables, "findings.json", "meta.json"])


def test_a_new_folder_is_gone_again_when_writing_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), whole_or_not_at_all(tmp_path / "run") as unfinished:
        save(TRACE, unfinished)
        1 / 0  # noqa: B018
    assert names_in(tmp_path) == []


def test_an_earlier_run_stays_when_writing_fails(tmp_path):
    save(TRACE, tmp_path)
    with pytest.raises(KprofError, match="No space left"), whole_or_not_at_all(tmp_path):
        raise OSError(28, "No space left on device")
    assert load(tmp_path).meta == TRACE.meta


def test_a_part_that_is_added_later_leaves_the_run_whole(tmp_path):
    save(MANY_RANKS, tmp_path)
    before = names_in(tmp_path)
    with whole_or_not_at_all(tmp_path) as unfinished:
        (unfinished / "report.html").write_text("drawn again")
        save_meta(replace(TRACE.meta, command=("python", "other.py")), unfinished / "meta.json")
    assert names_in(tmp_path) == sorted([*before, "report.html"])
    back = load(tmp_path)
    assert back.meta.command == ("python", "other.py")
    assert back.diagnosis is not None
    assert back.all_ranks is not None


def test_a_folder_may_have_any_name(tmp_path):
    folder = tmp_path / "s3:" / "run\udcff"
    folder.mkdir(parents=True)
    save(TRACE, folder)
    assert load(folder).meta == TRACE.meta


@pytest.mark.parametrize(
    ("table", "column", "row"),
    [
        ("kernels", "launch_row", 99),
        ("kernels", "op_row", -1),
        ("ranges", "parent", 1),
        ("ranges", "parent", 0),
        ("idle", "kernel_row", 2),
        ("idle", "evidence_row", 1),
    ],
)
def test_a_row_that_another_table_does_not_have_is_one_clear_error(tmp_path, table, column, row):
    save(TRACE, tmp_path)
    frame = pd.read_parquet(tmp_path / f"{table}.parquet")
    frame[column] = pd.array([row] * len(frame), dtype="Int64")
    frame.to_parquet(tmp_path / f"{table}.parquet")
    with pytest.raises(TraceError, match=rf"{tmp_path.name} .*\b{table}\.parquet"):
        load(tmp_path)


def test_a_table_of_another_run_is_one_clear_error(tmp_path):
    save(TRACE, tmp_path)
    TRACE.kernels.iloc[:1].to_parquet(tmp_path / "kernels.parquet")
    with pytest.raises(TraceError, match=r"kernels\.parquet"):
        load(tmp_path)


@pytest.mark.parametrize("column", ["start_ns", "launch_row"])
def test_a_text_where_a_number_belongs_is_one_clear_error(tmp_path, column):
    save(TRACE, tmp_path)
    frame = pd.read_parquet(tmp_path / "kernels.parquet")
    frame[column] = "soon"
    frame.to_parquet(tmp_path / "kernels.parquet")
    with pytest.raises(TraceError, match=rf"^{tmp_path.name} "):
        load(tmp_path)


def test_sentences_of_a_run_saved_before_caveats_had_ids_are_kept(tmp_path):
    save(TRACE, tmp_path)
    path = tmp_path / "meta.json"
    content = json.loads(path.read_text())
    content["meta"]["caveats"] = [one["text"] for one in content["meta"]["caveats"]]
    path.write_text(json.dumps(content))
    found = load(tmp_path).meta.caveats
    assert [one.text for one in found] == [one.text for one in TRACE.meta.caveats]
