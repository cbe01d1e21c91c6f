"""Public traces give exactly the reference values that were computed without any importer."""

import csv
from pathlib import Path

import pytest

from kprof.analyze.attribution.ledger import balance, truth_columns, union_ns
from kprof.opened import read
from tests.traces import measured

TRACES = Path(__file__).parents[4] / "shared" / "traces" / "public"
TRUTH = TRACES / "TRUTH.csv"
ROWS = list(csv.DictReader(TRUTH.read_text().splitlines() if TRUTH.is_file() else []))
NOT_COMPARED = {"file"}  # the table names the folders above it too

# By file and column, the reference and what is right instead.
DEVIATIONS = {
    # The reference added start and duration of the last activity as floats, which cost a ns:
    # 4458677083276.404 + 154.782 - 4458676422880.181 µs are 660551.005 µs in exact arithmetic.
    "nccl_data.json.gz": {"gpu_span_ns": ("660551006", "660551005")},
}
# Of exports of Nsight Systems the reference counts kernels alone, without the other activities of
# the device that sqlite3 finds in the same files.
BESIDES_KERNELS = {
    "nsight-2025.5.2.sqlite.gz": {"memcpy": 1, "graph": 2},
    "mfu_2gpu_before.sqlite.gz": {"memcpy": 1020, "memset": 269},
}

pytestmark = [
    pytest.mark.skipif(not ROWS, reason="the public reference traces are not here"),
    pytest.mark.parametrize("row", ROWS, ids=lambda row: Path(row["file"]).name[:40]),
]


def as_written(value):
    return "" if value is None else str(value)


def counted_from_nsys(trace):
    """Return the columns that the reference has of an export: of kernels of all processes."""
    kernels = trace.kernels[trace.kernels["activity"] == "kernel"]
    start = kernels["start_ns"].to_numpy()
    end = start + kernels["duration_ns"].to_numpy()
    return {
        "bytes": trace.meta.counts["file_bytes"],
        "raw_json_bytes": None,
        # Calls of the runtime alone.
        "events": int((trace.ranges["kind"] == "runtime").sum()),
        "gpu_events": len(kernels),
        "kernels": len(kernels),
        "gpu_sum_ns": int(kernels["duration_ns"].sum()),
        # Of all devices on one line.
        "gpu_busy_union_ns": union_ns(start, end),
        "gpu_span_ns": int(end.max() - start.min()),
        "orphan_gpu_events": int((kernels["bucket"] == "orphan").sum()),
        "device": "nsys",
    }


@pytest.mark.slow
def test_a_public_trace_is_counted_exactly(row):
    name = Path(row["file"]).name
    trace = measured(read([TRACES / row["file"]]))
    ledger = balance(trace)
    assert ledger.balances
    is_nsys = row["file"].startswith("nsys/")
    columns = counted_from_nsys(trace) if is_nsys else truth_columns(trace, ledger)
    expected = {column: row[column] for column in row.keys() - NOT_COMPARED}
    for column, (reference, right) in DEVIATIONS.get(name, {}).items():
        assert expected[column] == reference
        expected[column] = right
    assert {column: as_written(columns.get(column)) for column in expected} == expected
    if is_nsys:
        others = trace.kernels["activity"].astype(str).value_counts().drop("kernel")
        assert others.to_dict() == BESIDES_KERNELS[name]
    # No kernel is given to another process.
    launched = trace.kernels[trace.kernels["launch_row"].notna()]
    ranks = trace.ranges["rank"].to_numpy()[launched["launch_row"].to_numpy(dtype="int64")]
    assert (ranks == launched["rank"].to_numpy()).all()
