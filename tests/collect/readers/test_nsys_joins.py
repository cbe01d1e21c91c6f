"""Rows that stand twice in an export count once; ids that come twice join by time."""

import pandas as pd
import pytest

from kprof.analyze.passes import attributed
from kprof.collect.device_clock import on_the_hosts_clock
from kprof.collect.lost_records import without_lost_records
from kprof.collect.readers.nsys.reader import read
from tests.collect.nsys_files import copy, kernel, launch, nvtx, write

MS = 1_000_000


def launched(name, at, number):
    """Return an operator with a launch in it, and the kernel of that launch."""
    return [
        nvtx(name, start=at, end=at + 500),
        launch(start=at + 100, end=at + 200, correlationId=number),
        kernel(start=at + 1000, end=at + 1500, correlationId=number, demangledName=f"of {name}"),
    ]


def ops_of(trace):
    trace = attributed(trace)
    named = trace.ranges["name"].astype(object)
    rows = trace.kernels["op_row"]
    return {
        str(kernel): None if pd.isna(row) else named[row]
        for kernel, row in zip(trace.kernels["name"], rows, strict=True)
    }


@pytest.mark.parametrize("is_reversed", [False, True])
def test_of_calls_with_one_id_the_last_before_the_activity_launched_it(tmp_path, is_reversed):
    parts = [launched("aten::mm", 0, 1), launched("aten::bmm", 5 * MS, 1)]
    rows = [row for part in (parts[::-1] if is_reversed else parts) for row in part]
    trace = read(write(tmp_path, *rows))
    assert ops_of(trace) == {"of aten::mm": "aten::mm", "of aten::bmm": "aten::bmm"}
    assert trace.meta.counts["reused_ids"] == 1
    assert "reused_ids" in {one.id for one in trace.meta.caveats}


def test_an_activity_before_all_calls_with_its_id_lost_its_own(tmp_path):
    rows = launched("aten::mm", 50 * MS, 1) + launched("aten::bmm", 60 * MS, 1)
    early = kernel(start=20 * MS, end=20 * MS + 500, correlationId=1, demangledName="early")
    trace = on_the_hosts_clock(read(write(tmp_path, early, *rows)))
    assert ops_of(trace) == {
        "early": None,
        "of aten::mm": "aten::mm",
        "of aten::bmm": "aten::bmm",
    }
    assert trace.kernels["start_ns"].tolist()[0] == 20 * MS


def test_an_id_that_is_given_once_stays(tmp_path):
    rows = (
        launched("aten::mm", 0, 1) + launched("aten::bmm", MS, 1) + launched("aten::t", 2 * MS, 8)
    )
    trace = read(write(tmp_path, *rows))
    assert trace.kernels["correlation"].tolist()[2] == 8
    assert trace.ranges.query("kind == 'runtime'")["correlation"].is_unique


def test_activities_of_one_launch_of_a_graph_share_its_id(tmp_path):
    rows = [launch()] + [kernel(start=at, end=at + 10, graphNodeId=at) for at in (1000, 2000)]
    trace = read(write(tmp_path, *rows))
    assert trace.kernels["correlation"].tolist() == [1, 1]
    assert "reused_ids" not in trace.meta.counts


def test_the_number_0_on_several_calls_is_none(tmp_path):
    rows = launched("aten::mm", 0, 0) + launched("aten::bmm", MS, 0)
    trace = read(write(tmp_path, *rows))
    assert trace.kernels["correlation"].isna().all()


def test_an_export_whose_rows_stand_twice_reads_as_the_export(tmp_path):
    of_copy = launch(correlationId=2), copy(correlationId=2, start=1600, end=1700)
    rows = [*launched("aten::mm", 0, 1), *of_copy]
    once, twice = (
        read(write(tmp_path, *rows, *more, name=f"{len(more)}.sqlite")) for more in ([], rows)
    )
    pd.testing.assert_frame_equal(twice.kernels, once.kernels)
    pd.testing.assert_frame_equal(twice.ranges, once.ranges)
    assert twice.meta.counts["copied_events"] == len(rows)


def test_equal_ranges_stay_where_nothing_else_stands_twice(tmp_path):
    trace = read(write(tmp_path, *launched("aten::mm", 0, 1), nvtx("a"), nvtx("a")))
    assert trace.ranges["name"].tolist().count("a") == 2


@pytest.mark.parametrize("start_ns", [-5 * MS, -1, 0])
def test_a_kernel_before_the_clocks_zero_moves_no_other(tmp_path, start_ns):
    rows = [row for n in range(1, 6) for row in launched("aten::mm", 10 * MS * n, n)]
    damaged = launched("aten::bmm", 33 * MS, 9)
    damaged[2][1].update(start=start_ns, end=start_ns + 100)
    trace = on_the_hosts_clock(without_lost_records(read(write(tmp_path, *rows, *damaged))))
    assert trace.kernels["start_ns"].tolist() == [10 * MS * n + 1000 for n in range(1, 6)]
    assert trace.meta.counts["misplaced_activities"] == 1


def test_kernels_before_zero_stay_where_the_devices_clock_is_off(tmp_path):
    rows = [row for n in range(1, 6) for row in launched("aten::mm", 2 * MS * n, n)]
    for _, row in rows:
        if "demangledName" in row:
            row.update(start=row["start"] - 5 * MS, end=row["end"] - 5 * MS)
    trace = without_lost_records(read(write(tmp_path, *rows)))
    assert len(trace.kernels) == 5
    moved = on_the_hosts_clock(trace).kernels["start_ns"].tolist()
    assert moved == [2 * MS * n + 100 for n in range(1, 6)]
