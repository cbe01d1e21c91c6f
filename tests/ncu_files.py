"""Tiny files of Nsight Compute: the CSV of its raw and details pages."""

from __future__ import annotations

import csv
import io

BEFORE = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream")
PLACE = ("Block Size", "Grid Size", "Device", "CC")
UNITS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "byte",
    "dram__bytes_write.sum": "byte",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    "launch__registers_per_thread": "register/thread",
}
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"


def launch(name="copy", **metrics):
    """Return a launch of 1,000 ns: its cells by column, and its metrics with `__` as recorded."""
    place = {
        "Kernel Name": name,
        "Process ID": metrics.pop("process", "7"),
        "Grid Size": metrics.pop("grid", "(8, 1, 1)"),
        "Block Size": metrics.pop("block", "(128, 1, 1)"),
        "Device": metrics.pop("device", "0"),
        "Stream": metrics.pop("stream", "7"),
        "CC": "9.0",
        "Context": "1",
        "Process Name": "python3.11",
        "Host Name": "127.0.0.1",
    }
    return place, {DURATION: "1000", **metrics.pop("metrics", {})}


def raw_page(*launches, units=None, has_units=True):
    """Return the raw page: a header, a row of units, and a row for each launch."""
    names = list(dict.fromkeys(name for _, metrics in launches for name in metrics))
    header = [*BEFORE, *PLACE, *names]
    units = {**UNITS, **(units or {})}
    rows = [header, *([[units.get(name, "") for name in header]] if has_units else [])]
    for number, (place, metrics) in enumerate(launches):
        cells = {"ID": str(number), **place, **metrics}
        rows.append([cells.get(name, "") for name in header])
    return text_of(rows)


def details_page(*launches, units=None):
    """Return the details page: a row for each metric of each launch."""
    header = [*BEFORE, *PLACE, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    header += ["Rule Name", "Rule Type", "Rule Description"]
    units = {**UNITS, **(units or {})}
    rows = [header]
    for number, (place, metrics) in enumerate(launches):
        for name, value in metrics.items():
            cells = {
                "ID": str(number),
                **place,
                "Section Name": "GPU Speed Of Light Throughput",
                "Metric Name": name,
                "Metric Unit": units.get(name, ""),
                "Metric Value": value,
            }
            rows.append([cells.get(column, "") for column in header])
    return text_of(rows)


def text_of(rows):
    """Return rows as Nsight Compute writes them: every cell quoted."""
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return file.getvalue()
