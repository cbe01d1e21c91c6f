"""A run on disk is the run that was saved."""

import json

import pandas as pd
import pytest

from kprof.analyze.attribute import add_attribution
from kprof.device import Device
from kprof.errors import TraceError
from kprof.saved import is_saved, load, save
from kprof.trace import Recording
from tests.traces import trace_of

TRACE = trace_of(
    {"name": "gemm", "correlation": 7},
    {"name": "copy", "start_ns": 2**53 + 1},
    ranges=[{"name": "aten::mm", "input_shapes": "[[2,3]]"}],
    samples=[{"value": 0.1}],
    device=Device("GPU", 1e12, {"bf16": 1e15}, "a datasheet"),
    recording=Recording("a rule", 3, (1, 2), recorded_step_ns=(5, 6), unrecorded_step_ns=(4,)),
    caveats=("something is missing",),
    command=("python", "train.py"),
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


def test_analyzed_columns_and_their_missing_values_survive(tmp_path):
    trace = add_attribution(TRACE)
    save(trace, tmp_path)
    assert_same(load(tmp_path).kernels, trace.kernels)


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
    with pytest.raises(TraceError, match="not a complete saved run"):
        load(tmp_path)


def test_nothing_partial_is_left_behind(tmp_path):
    save(TRACE, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["kernels.parquet", "meta.json", "ranges.parquet", "samples.parquet"]
