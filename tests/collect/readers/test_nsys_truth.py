"""The public exports of Nsight Systems, where they are at hand, are read exactly."""

import csv
from pathlib import Path

import numpy as np
import pytest

from kprof.analyze.attribution.ledger import balance, union_ns
from kprof.open import read
from tests.traces import measured

FOLDER = Path(__file__).parents[4] / "shared" / "traces" / "public"
TRUTH = FOLDER / "TRUTH.csv"
ROWS = [
    row
    for row in csv.DictReader(TRUTH.read_text().splitlines() if TRUTH.is_file() else [])
    if row["file"].startswith("nsys/")
]
# What lies in the files besides kernels, counted with sqlite3: copies and sets, whole replays.
FURTHER = {"mfu_2gpu_before.sqlite.gz": (1289, 0), "nsight-2025.5.2.sqlite.gz": (1, 2)}

pytestmark = [
    pytest.mark.skipif(not ROWS, reason="the public reference traces are not here"),
    pytest.mark.parametrize("row", ROWS, ids=lambda row: Path(row["file"]).name[:24]),
]


def test_a_public_export_is_counted_exactly(row):
    trace = measured(read([FOLDER / row["file"]]))
    # The reference counts kernels and runtime calls alone, of all processes together.
    kernels = trace.kernels[trace.kernels["activity"] == "kernel"]
    start = kernels["start_ns"].to_numpy()
    end = start + kernels["duration_ns"].to_numpy()
    found = {
        "bytes": trace.meta.counts["file_bytes"],
        "events": int((trace.ranges["kind"] == "runtime").sum()),
        "gpu_events": len(kernels),
        "kernels": len(kernels),
        "gpu_sum_ns": int(kernels["duration_ns"].sum()),
        "gpu_busy_union_ns": union_ns(start, end),
        "gpu_span_ns": int(end.max() - start.min()),
        "orphan_gpu_events": int((kernels["bucket"] == "orphan").sum()),
    }
    assert found == {key: int(row[key]) for key in found}
    assert balance(trace).balances


def test_copies_sets_and_whole_replays_are_not_lost(row):
    activity = read([FOLDER / row["file"]]).kernels["activity"]
    found = (int(activity.isin(["memcpy", "memset"]).sum()), int((activity == "graph").sum()))
    assert found == FURTHER[Path(row["file"]).name]


def test_no_kernel_is_given_to_another_process(row):
    trace = measured(read([FOLDER / row["file"]]))
    launched = trace.kernels[trace.kernels["launch_row"].notna()]
    ranks = trace.ranges["rank"].to_numpy()[launched["launch_row"].to_numpy(dtype=np.int64)]
    assert (ranks == launched["rank"].to_numpy()).all()
