"""The public traces, where they are at hand, are read exactly."""

import csv
import gzip
import json
from decimal import Decimal
from pathlib import Path

import pytest

from kprof.collect.readers.kineto.reader import read

FOLDER = Path(__file__).parents[4] / "shared" / "traces" / "public"
TRUTH = FOLDER / "TRUTH.csv"
ROWS = [
    row
    for row in csv.DictReader(TRUTH.read_text().splitlines() if TRUTH.is_file() else [])
    if row["file"].startswith("kineto/")
]
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}

pytestmark = [
    pytest.mark.skipif(not ROWS, reason="the public traces are not at hand"),
    pytest.mark.parametrize("row", ROWS, ids=[Path(row["file"]).name[:24] for row in ROWS]),
]


def test_counts_and_sums_are_those_of_the_reference(row):
    trace = read(FOLDER / row["file"])
    kernels, counts = trace.kernels, trace.meta.counts
    found = {
        "raw_json_bytes": counts["raw_json_bytes"],
        "events": counts["events"],
        "gpu_events": len(kernels),
        "kernels": int((kernels["activity"] == "kernel").sum()),
        "gpu_sum_ns": int(kernels["duration_ns"].sum()),
        "streams": len(kernels[["device", "stream"]].drop_duplicates()),
        "nn_module_events": counts["nn_module_events"],
        "seq_ops": counts["seq_ops"],
    }
    # An empty cell stands for nothing to sum.
    assert found == {key: int(row[key] or 0) for key in found}


def test_every_time_is_the_one_that_is_written(row):
    text = gzip.decompress((FOLDER / row["file"]).read_bytes())
    events = [
        event
        for event in json.loads(text, parse_float=Decimal)["traceEvents"]
        if event["ph"] == "X" and event["cat"] in DEVICE_CATEGORIES
    ]
    kernels = read(FOLDER / row["file"]).kernels
    assert kernels["start_ns"].tolist() == [int(event["ts"] * 1000) for event in events]
    assert kernels["duration_ns"].tolist() == [int(event["dur"] * 1000) for event in events]
