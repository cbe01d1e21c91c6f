"""Traces of Nsight Systems: the SQLite file that `nsys export` writes, or the report itself."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from kprof.collect.nsys import REPORT_SUFFIX, export_report
from kprof.collect.readers._nsys.activities import TABLES as DEVICE_TABLES
from kprof.collect.readers._nsys.activities import activities_of
from kprof.collect.readers._nsys.database import EXPORT_AGAIN, MAGIC, Database, opened
from kprof.collect.readers._nsys.described import (
    base_time_ns_of,
    command_of,
    host_of,
    messages_of,
    versions_of,
)
from kprof.collect.readers._nsys.processes import Processes, gpus_of, processes_of
from kprof.collect.readers._nsys.ranges import TABLES as HOST_TABLES
from kprof.collect.readers._nsys.ranges import ranges_of
from kprof.errors import TraceError
from kprof.trace import Meta, Trace, empty

SUFFIXES = (".sqlite", ".sqlite.gz", ".sqlite.zst")
# Half of what an int64 holds, so that sums of times do not overflow.
LARGEST_NS = 1 << 62
_RECORD = "record with `kprof run --nsys`, or with: nsys profile --trace=cuda,nvtx"


def knows(path: Path, head: bytes) -> bool:
    """Say whether the file could be an export, or a report that can be exported."""
    if path.is_dir():
        return False
    return path.name.endswith((*SUFFIXES, REPORT_SUFFIX)) or head.startswith(MAGIC)


def read(path: Path, ranks: Mapping[int, int] | None = None) -> Trace:
    """Read an export; a report is exported first, into a temporary folder.

    `ranks` gives the ranks of processes by their ids, which no export tells.

    Raises:
        TraceError: the file is damaged, no export, or holds nothing to analyze; or it is a report
            and Nsight Systems is not installed here.
    """
    if not path.name.endswith(REPORT_SUFFIX):
        return _read_export(path, path, ranks or {})
    with tempfile.TemporaryDirectory(prefix="kprof-") as folder:
        export = export_report(path, Path(folder) / f"{path.stem}.sqlite")
        return _read_export(export, path, ranks or {})


def _read_export(export: Path, named: Path, known: Mapping[int, int]) -> Trace:
    """Read an export of the file that was named, which may be itself."""
    with opened(export) as database:
        _require_export(database)
        processes = processes_of(database, list(DEVICE_TABLES), list(HOST_TABLES), known)
        kernels = activities_of(database, processes)
        device_end = (
            int((kernels["start_ns"] + kernels["duration_ns"]).max()) if len(kernels) else 0
        )
        ranges, special = ranges_of(database, processes, device_end)
        (kernels, num_activities), (ranges, num_ranges) = _in_order(kernels), _in_order(ranges)
        damaged = Counter(database.damaged)
        num_activities += sum(damaged[table] for table in DEVICE_TABLES)
        num_ranges += damaged.total() - sum(damaged[table] for table in DEVICE_TABLES)
        meta = Meta(
            source=named.name,
            tool="nsys",
            gpus=gpus_of(database, processes),
            command=command_of(database),
            host=host_of(database),
            versions=versions_of(database),
            base_time_ns=base_time_ns_of(database),
            num_ranks=max(len(processes.global_pids), 1),
            counts={
                "events": len(kernels) + len(ranges),
                "file_bytes": named.stat().st_size,
                "seq_ops": int(ranges["sequence"].notna().sum()),
                "nn_module_events": int((ranges["kind"] == "module").sum()),
                **({"damaged_activities": num_activities} if num_activities else {}),
                **({"damaged_events": num_ranges} if num_ranges else {}),
            },
            caveats=(
                *_caveats(kernels, ranges, special),
                *_caveats_of_processes(processes, known),
                *messages_of(database),
                *_damage_in(database.name, num_activities, num_ranges),
            ),
        )
    return Trace(kernels, ranges, empty("samples"), meta)


def _require_export(database: Database) -> None:
    if any(database.has(table) for table in (*DEVICE_TABLES, *HOST_TABLES)):
        return
    # Exports of old versions, and of sessions that recorded nothing, tell no version.
    if database.has("META_DATA_EXPORT") or database.has("TARGET_INFO_SESSION_START_TIME"):
        raise TraceError(
            f"{database.name} holds neither CUDA calls nor NVTX ranges, so nothing to analyze",
            fix=_RECORD,
        )
    raise TraceError(
        f"{database.name} is an SQLite file, but no export of Nsight Systems", fix=EXPORT_AGAIN
    )


def _in_order(table: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Leave out what ends before it starts, lacks one of the two, or lies beyond any clock."""
    start_ns, duration_ns = (table[c].to_numpy(np.int64) for c in ("start_ns", "duration_ns"))
    is_right = (duration_ns >= 0) & (start_ns > -LARGEST_NS) & (start_ns < LARGEST_NS)
    # What overflows comes back with its end.
    is_right &= (start_ns + duration_ns >= start_ns) & (start_ns + duration_ns < LARGEST_NS)
    if is_right.all():
        return table, 0
    return table[is_right].reset_index(drop=True), int((~is_right).sum())


def _damage_in(name: str, num_activities: int, num_ranges: int) -> Iterator[str]:
    if num_activities or num_ranges:
        yield (
            f"{name} is damaged: rows without numbers, that end before they start, or on pages "
            f"that cannot be read are left out, {num_activities:,} of devices and {num_ranges:,} "
            "of the host."
        )


def _caveats(kernels: pd.DataFrame, ranges: pd.DataFrame, special: Counter[str]) -> Iterator[str]:
    if num_whole := int((kernels["activity"] == "graph").sum()):
        yield (
            f"Replays of CUDA graphs that were recorded as a whole: {num_whole:,}. What ran in "
            "them is not known, nor how much of that time the device was idle: record with "
            "--cuda-graph-trace=node."
        )
    if not (ranges["kind"] == "op").any():
        yield (
            "Nsight Systems records no operators of PyTorch: activities are traced to runtime "
            "calls and NVTX ranges alone. `kprof run --nsys` adds the operators, as "
            "torch.autograd.profiler.emit_nvtx does."
        )
    elif ranges["input_shapes"].isna().all():
        yield "Operators were recorded without shapes: emit_nvtx(record_shapes=True) writes them."
    else:
        yield (
            "NVTX ranges tell the shapes of operators' inputs, not their types, so that the work "
            "of operators is not known; torch's profiler records both."
        )
    if not (ranges["kind"] != "runtime").any():
        yield "The trace holds no NVTX range, so that nothing names what its launches were for."
    if special["open"]:
        yield f"Ranges still open where the trace ends, cut there: {special['open']:,}."
    if special["crossing"]:
        yield (
            "NVTX ranges that one thread started and another ended, left out since nothing "
            f"nests in them: {special['crossing']:,}."
        )


def _caveats_of_processes(processes: Processes, known: Mapping[int, int]) -> Iterator[str]:
    unknown = [str(pid) for pid in processes.pids if pid not in known]
    if unknown and len(processes.pids) > 1:
        yield (
            "Nsight Systems does not tell the ranks of a job: the processes that used a GPU are "
            f"numbered in the order of their ids ({', '.join(unknown)})."
        )
    if processes.num_without:
        yield f"Processes that used no GPU, left out: {processes.num_without}."
