"""Reports of Nsight Compute: its CSV, or the report itself.

Each launch was measured alone, several times over: a report has durations and traffic, no starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from kprof.collect.ncu import REPORT_SUFFIX
from kprof.collect.readers.ncu.launches import Launch, counted_columns
from kprof.collect.readers.ncu.report import read_report
from kprof.collect.readers.ncu.table import Table, is_table, read_table
from kprof.collect.readers.table_columns import as_declared
from kprof.errors import TraceError
from kprof.trace import Gpu, Meta, Trace, empty

UNTIMED = "Nsight Compute measures each kernel alone, and tells nothing of when it runs"
_COLLECT = "profile with: ncu --set basic, or --metrics gpu__time_duration.sum,…"


def knows(path: Path, head: bytes) -> bool:
    """Say whether the file could be a report, or the CSV of one."""
    if path.is_dir():
        return False
    return path.name.endswith(REPORT_SUFFIX) or is_table(head)


def read(path: Path) -> Trace:
    """Read a report; its activities stand one after another, whenever they ran.

    Raises:
        TraceError: the file is damaged, is of another tool, or holds no launch; or it is a report
            and nothing here can read it.
    """
    table = read_launches(path)
    timed = [launch for launch in table.launches if launch.duration_ns is not None]
    if not timed:
        missing = "no duration of any launch" if table.launches else "no launch"
        raise TraceError(f"{path.name} holds {missing}", fix=_COLLECT)
    meta = Meta(
        source=path.name,
        tool="ncu",
        gpus=_gpus(timed),
        untimed=UNTIMED,
        num_ranks=len({launch.process for launch in timed}),
        counts={"events": len(table.launches), "file_bytes": path.stat().st_size},
        caveats=tuple(_caveats(table, timed)),
    )
    return Trace(_kernels(timed), empty("ranges"), empty("samples"), meta)


def read_launches(path: Path) -> Table:
    """Read the launches of a report or a CSV."""
    return read_report(path) if path.name.endswith(REPORT_SUFFIX) else read_table(path)


def _gpus(launches: list[Launch]) -> tuple[Gpu, ...]:
    named = {launch.device: launch.gpu for launch in launches if launch.gpu}
    return tuple(Gpu(index, name) for index, name in sorted(named.items()))


def _caveats(table: Table, timed: list[Launch]) -> Iterator[str]:
    yield (
        "Durations are of kernels that ran alone, by default with caches flushed before each and "
        "clocks held at their base: they are not those of the workload."
    )
    if num_untimed := len(table.launches) - len(timed):
        yield f"Launches without a duration, left out: {num_untimed:,}."
    if any(launch.is_rounded for launch in timed):
        yield (
            "Times are rounded in this file, as they are written in larger units than "
            "nanoseconds: export it with --print-units base."
        )
    if all(launch.dram_read_bytes is None or launch.dram_written_bytes is None for launch in timed):
        yield (
            "The traffic with the device's memory was not counted: add "
            "--metrics dram__bytes_read.sum,dram__bytes_write.sum."
        )
    if table.num_other_lines:
        yield f"Lines, or results, that are no launch of a kernel: {table.num_other_lines:,}."
    for said in dict.fromkeys(table.said):
        yield f"Nsight Compute: {said}."


def _kernels(launches: list[Launch]) -> pd.DataFrame:
    processes = sorted({launch.process for launch in launches})
    rank = np.array([processes.index(launch.process) for launch in launches], dtype=np.int32)
    duration_ns = np.array([launch.duration_ns for launch in launches], dtype=np.int64)
    return as_declared(
        "kernels",
        len(launches),
        {
            "name": pd.Categorical([launch.name for launch in launches]),
            "activity": pd.Categorical(["kernel"] * len(launches)),
            "rank": rank,
            "device": np.array([launch.device for launch in launches], dtype=np.int32),
            "stream": np.array([launch.stream for launch in launches], dtype=np.int64),
            "start_ns": one_after_another(rank, duration_ns),
            "duration_ns": duration_ns,
            "grid": pd.Categorical([launch.grid for launch in launches]),
            "block": pd.Categorical([launch.block for launch in launches]),
            **counted_columns(launches),
        },
    )


def one_after_another(rank: np.ndarray, duration_ns: np.ndarray) -> np.ndarray:
    """Arrange each rank's activities one after another from 0, and return their starts."""
    start_ns = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank):
        rows = np.flatnonzero(rank == one)
        start_ns[rows[1:]] = np.cumsum(duration_ns[rows])[:-1]
    return start_ns
