"""Traces of Nsight Systems: the SQLite file that `nsys export` writes, or the report itself."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from kprof.collect.nsys import REPORT_SUFFIX, export_report
from kprof.collect.readers.kineto.events import MISSING
from kprof.collect.readers.kineto.joins import told_of_joins
from kprof.collect.readers.nsys.database import EXPORT_AGAIN, MAGIC, Database, Numbers, opened
from kprof.collect.readers.nsys.host_ranges import RUNTIME, VERSION, ranges_of
from kprof.collect.readers.nsys.host_ranges import TABLES as HOST_TABLES
from kprof.collect.readers.nsys.joins import settle
from kprof.collect.readers.nsys.ranks import Processes, device_of, gpus_of, processes_of
from kprof.collect.readers.table_columns import as_declared, category, nullable
from kprof.errors import TraceError, counted
from kprof.trace import NOT_RECORDED, Caveat, Meta, Trace, empty

# For the message about a file that no reader knows.
OPENS = "an export of Nsight Systems: *.sqlite or *.nsys-rep"

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
DEVICE_TABLES = {KERNEL: "kernel", MEMCPY: "memcpy", MEMSET: "memset", GRAPH: "graph"}

_PLACE = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
_FURTHER = {
    KERNEL: ("demangledName", "shortName", "graphNodeId", *_GRID, *_BLOCK),
    MEMCPY: ("copyKind", "srcKind", "dstKind", "bytes", "graphNodeId"),
    MEMSET: ("memKind", "bytes", "graphNodeId"),
    GRAPH: ("graphId",),
}
# The numbers of ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND, in CUPTI's short spelling.
_COPY = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_UNIFIED = ("UVM HtoD", "UVM DtoH", "UVM DtoD")
_MEMORY = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device", "Managed")


# Only warnings about records that kprof reads count; errors always count.
_OF_INTEREST = re.compile(
    r"CUDA|CUPTI|NVTX|GPU|drop|lost|lose|buffer|incomplete|missing|overflow|truncat", re.IGNORECASE
)
_INFORMATION, _WARNING, _ERROR = 1, 2, 3
# Of what is said by the way: records that are not there, but not that none are missing.
_OF_LOSS = re.compile(
    r"^(?!.*\b(?:no|0) (?:\w+ ){0,3}(?:dropped|lost)\b)"
    r"(?!.*\b(?:dropped|lost)\b(?: \w+){0,2}[:=]? ?0\b).*\b(?:dropped|lost)\b",
    re.IGNORECASE | re.DOTALL,
)
MOST_MESSAGES = 8
# Calls that make a device do something, or wait for it.
_DOES_WORK = re.compile(r"Launch|Memcpy|Memset|Prefetch|Synchronize")
FAILED = "failed_calls"
MOST_FAILED = 3
# A program that ends waits for what its end destroyed.
_CONTEXT_IS_GONE = 709
_SAYS = "Nsight Systems says: "

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
        kernels, ranges, joined = settle(kernels, ranges)
        damaged = Counter(database.damaged)
        num_activities += sum(damaged[table] for table in DEVICE_TABLES)
        num_ranges += damaged.total() - sum(damaged[table] for table in DEVICE_TABLES)
        gpus = gpus_of(database, processes)
        meta = Meta(
            source=named.name,
            tool="nsys",
            gpus=gpus,
            device=device_of(database, gpus[0]) if gpus else None,
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
                **joined,
            },
            caveats=(
                *_caveats(kernels, ranges, special),
                *_caveats_of_processes(processes, known),
                *_failed_calls(database),
                *(Caveat("profiler_message", said) for said in messages_of(database)),
                *_damage_in(database.name, num_activities, num_ranges),
                *told_of_joins(joined),
            ),
        )
    return Trace(kernels, ranges, empty("samples"), meta)


def _require_export(database: Database) -> None:
    if any(database.has(table) for table in (*DEVICE_TABLES, *HOST_TABLES)):
        return
    # Exports of old versions, and of sessions that recorded nothing, tell no version.
    if database.has("META_DATA_EXPORT") or database.has("TARGET_INFO_SESSION_START_TIME"):
        problem = f"{database.name} holds neither CUDA calls nor NVTX ranges, so nothing to analyze"
        raise TraceError(with_messages(problem, messages_of(database)), fix=_RECORD)
    raise TraceError(
        f"{database.name} is an SQLite file, but no export of Nsight Systems", fix=EXPORT_AGAIN
    )


def activities_of(database: Database, processes: Processes) -> pd.DataFrame:
    """Return the activities of all processes that have a rank, in the order of their starts."""
    parts = [_part_of(database, table, processes) for table in DEVICE_TABLES]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["start"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    activity = columns["activity"]
    node = columns["graphNodeId"]
    return as_declared(
        "kernels",
        len(order),
        {
            "name": _names(database, columns),
            "activity": category(activity, list(DEVICE_TABLES.values())),
            "rank": processes.ranks_of(columns["globalPid"]),
            "device": _devices(columns["deviceId"]),
            "stream": np.where(columns["streamId"] == MISSING, NOT_RECORDED, columns["streamId"]),
            "start_ns": columns["start"],
            "duration_ns": columns["end"] - columns["start"],
            "correlation": nullable(columns["correlationId"]),
            "graph_node": nullable(np.where(node == 0, MISSING, node)),
            "copied_bytes": nullable(columns["bytes"]),
            "grid": _dimensions(*(columns[name] for name in _GRID)),
            "block": _dimensions(*(columns[name] for name in _BLOCK)),
        },
    )


def _part_of(database: Database, table: str, processes: Processes) -> dict[str, Numbers]:
    """Return the rows of one table, with every column that any of the tables has."""
    found = database.numbers(table, _PLACE, _FURTHER[table])
    has_rank = processes.has_rank(found["globalPid"])
    found = {name: column[has_rank] for name, column in found.items()}
    number = int(has_rank.sum())
    absent = np.full(number, MISSING, dtype=np.int64)
    names = {name: None for further in _FURTHER.values() for name in further}
    return {
        "activity": np.full(number, list(DEVICE_TABLES).index(table), dtype=np.int64),
        **{name: found[name] for name in _PLACE},
        **{name: found.get(name, absent) for name in names},
    }


def _names(database: Database, columns: dict[str, Numbers]) -> pd.Categorical:
    """Return the names: of kernels as recorded, of the rest in the words of CUPTI's own tools."""
    full, short = (database.texts(KERNEL, name) for name in ("demangledName", "shortName"))
    kinds = ("activity", "demangledName", "shortName", "copyKind", "srcKind", "dstKind")
    keys = pd.DataFrame({name: columns[name] for name in (*kinds, "memKind", "graphId")})
    group = keys.groupby(list(keys.columns), sort=False).ngroup().to_numpy()
    names = []
    for row in keys.drop_duplicates().itertuples(index=False):
        table = list(DEVICE_TABLES)[row.activity]
        if table == KERNEL:
            unknown = f"kernel {row.demangledName} without a name"
            names.append(full.get(row.demangledName) or short.get(row.shortName) or unknown)
        elif table == MEMCPY:
            kind = _word([*_COPY, *_UNIFIED], row.copyKind)
            ends = f"{_word(_MEMORY, row.srcKind)} -> {_word(_MEMORY, row.dstKind)}"
            names.append(f"Memcpy {kind} ({ends})")
        elif table == MEMSET:
            names.append(f"Memset ({_word(_MEMORY, row.memKind)})")
        else:
            names.append(f"CUDA graph {row.graphId}, replayed as a whole")
    texts = sorted(set(names))
    code_of = {text: code for code, text in enumerate(texts)}
    return category(np.array([code_of[name] for name in names], dtype=np.int32)[group], texts)


def _word(words: tuple[str, ...] | list[str], number: int) -> str:
    known = 0 <= number < len(words) and words[number]
    return known or "Unknown"


def _devices(numbers: Numbers) -> Numbers:
    return np.where((numbers >= 0) & (numbers < 2**31), numbers, NOT_RECORDED).astype(np.int32)


def _dimensions(x: Numbers, y: Numbers, z: Numbers) -> pd.Categorical:
    """Return grids or blocks as `x,y,z`; missing where one of the three is."""
    keys = pd.DataFrame({"x": x, "y": y, "z": z})
    group = keys.groupby(["x", "y", "z"], sort=False).ngroup().to_numpy()
    distinct = keys.drop_duplicates().to_numpy()
    texts = [None if MISSING in row else ",".join(map(str, row)) for row in distinct.tolist()]
    known = sorted({text for text in texts if text is not None})
    code_of: dict[str | None, int] = {text: code for code, text in enumerate(known)}
    codes = np.array([code_of.get(text, -1) for text in texts], dtype=np.int32)
    return category(codes[group], known)


def _in_order(table: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Leave out what ends before it starts, lacks one of the two, or lies beyond any clock."""
    start_ns, duration_ns = (table[c].to_numpy(np.int64) for c in ("start_ns", "duration_ns"))
    is_right = (duration_ns >= 0) & (start_ns > -LARGEST_NS) & (start_ns < LARGEST_NS)
    # Overflowing values come back with their end.
    is_right &= (start_ns + duration_ns >= start_ns) & (start_ns + duration_ns < LARGEST_NS)
    if is_right.all():
        return table, 0
    return table[is_right].reset_index(drop=True), int((~is_right).sum())


def command_of(database: Database) -> tuple[str, ...]:
    """Return the command that Nsight Systems started, where it did."""
    told = database.pairs("META_DATA_CAPTURE")
    words = [told.get("PROCESS_0:COMMAND", "")]
    while (word := told.get(f"PROCESS_0:ARGUMENT_{len(words) - 1}")) is not None:
        words.append(word)
    return tuple(words) if words[0] else ()


def host_of(database: Database) -> str | None:
    """Return the name of the machine."""
    return database.pairs("TARGET_INFO_SYSTEM_ENV").get("Hostname") or None


def versions_of(database: Database) -> dict[str, str]:
    """Return the versions of Nsight Systems, the driver and its CUDA."""
    exported, system = database.pairs("META_DATA_EXPORT"), database.pairs("TARGET_INFO_SYSTEM_ENV")
    cuda = system.get("CudaDriverVersion", "")
    told = {
        "nsys": exported.get("EXPORT_PRODUCT_VERSION"),
        "driver": system.get("NvDriverVersion"),
        "cuda_driver": f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda.isdecimal() else "",
    }
    return {name: version for name, version in told.items() if version not in (None, "", "0")}


def base_time_ns_of(database: Database) -> int | None:
    """Return the wall time at the clock's zero, which an export may have shifted."""
    asked = database.pairs("META_DATA_EXPORT")
    if asked.get("EXPORT_PARAM_TIME_NORMALIZE") == "true":
        return 0
    table = "TARGET_INFO_SESSION_START_TIME"
    if not database.has(table, "utcEpochNs"):
        return None
    shift = asked.get("EXPORT_PARAM_TIME_SHIFT", "0")
    starts = [row[0] for row in database.rows(f"SELECT utcEpochNs FROM {table} LIMIT 1")]
    if not starts or not isinstance(starts[0], int) or not re.fullmatch(r"-?\d{1,18}", shift):
        return None
    return starts[0] - int(shift)


def _caveats(
    kernels: pd.DataFrame, ranges: pd.DataFrame, special: Counter[str]
) -> Iterator[Caveat]:
    if num_whole := int((kernels["activity"] == "graph").sum()):
        yield Caveat(
            "whole_graphs",
            f"Replays of CUDA graphs that were recorded as a whole: {num_whole:,}. What ran in "
            "them is not known, nor how much of that time the device was idle: record with "
            "--cuda-graph-trace=node.",
        )
    if not (ranges["kind"] == "op").any():
        yield Caveat(
            "no_operators",
            "Nsight Systems records no operators of PyTorch: activities are traced to runtime "
            "calls and NVTX ranges alone. `kprof run --nsys` adds the operators, as "
            "torch.autograd.profiler.emit_nvtx does.",
        )
    elif ranges["input_shapes"].isna().all():
        yield Caveat(
            "no_shapes",
            "Operators were recorded without shapes: emit_nvtx(record_shapes=True) writes them.",
        )
    else:
        yield Caveat(
            "no_input_types",
            "NVTX ranges tell the shapes of operators' inputs, not their types, so that the work "
            "of operators is not known; torch's profiler records both.",
        )
    if not (ranges["kind"] != "runtime").any():
        yield Caveat("no_nvtx", "The trace holds no NVTX range, so its launches have no names.")
    if special["open"]:
        still_open = f"Ranges still open where the trace ends, cut there: {special['open']:,}."
        yield Caveat("open_ranges", still_open)
    if special["crossing"]:
        yield Caveat(
            "crossing_ranges",
            "NVTX ranges that one thread started and another ended, left out since nothing "
            f"nests in them: {special['crossing']:,}.",
        )


def _caveats_of_processes(processes: Processes, known: Mapping[int, int]) -> Iterator[Caveat]:
    unknown = [str(pid) for pid in processes.pids if pid not in known]
    if unknown and len(processes.pids) > 1:
        yield Caveat(
            "ranks_by_process",
            "Nsight Systems does not tell the ranks of a job: the processes that used a GPU are "
            f"numbered in the order of their ids ({', '.join(unknown)}).",
        )
    if processes.num_without:
        without = f"Processes that used no GPU, left out: {processes.num_without}."
        yield Caveat("processes_without_gpu", without)


def messages_of(database: Database) -> list[str]:
    """Return what Nsight Systems itself complained about."""
    table = "DIAGNOSTIC_EVENT"
    if not (database.has(table, "severity") and database.has(table, "text")):
        return []
    told = {_INFORMATION: _OF_LOSS, _WARNING: _OF_INTEREST, _ERROR: re.compile("")}
    said = [
        " ".join(str(text).split())
        for severity, text in database.rows(f"SELECT severity, text FROM {table}")
        if severity in told and told[severity].search(str(text))
    ]
    distinct = list(dict.fromkeys(said))
    messages = [f"{_SAYS}{text}" for text in distinct[:MOST_MESSAGES]]
    if more := len(distinct) - MOST_MESSAGES:
        messages += [f"Nsight Systems has {more} more messages like these."] if more > 0 else []
    return messages


def _failed_calls(database: Database) -> Iterator[Caveat]:
    """Yield the calls that returned an error: what they should do on the device was not done.

    Queries, allocations and calls about addresses may fail where a program asks what it may do.
    """
    if not (database.has(RUNTIME, "returnValue") and database.has(RUNTIME, "nameId")):
        return
    query = (
        f"SELECT nameId, returnValue, COUNT(*) FROM {RUNTIME} "
        f"WHERE returnValue NOT IN (0, {_CONTEXT_IS_GONE}) GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2"
    )
    names = database.texts(RUNTIME, "nameId")
    found = [
        (VERSION.sub("", names.get(name, "")), error, number)
        for name, error, number in database.rows(query)
        if isinstance(name, int) and isinstance(number, int)
    ]
    failed = [one for one in found if _DOES_WORK.search(one[0])][:MOST_FAILED]
    if failed:
        told = ", ".join(
            f"{name} (error {error}) {counted(number, 'time')}" for name, error, number in failed
        )
        yield Caveat(FAILED, f"CUDA calls failed, so that the GPU did not do their work: {told}.")


def with_messages(problem: str, messages: list[str]) -> str:
    """Return a problem with what Nsight Systems said, which may be its reason."""
    said = " ".join(one.removeprefix(_SAYS) for one in messages)
    return f"{problem}; {_SAYS}{said.removesuffix('.')}" if said else problem


def _damage_in(name: str, num_activities: int, num_ranges: int) -> Iterator[Caveat]:
    if num_activities or num_ranges:
        yield Caveat(
            "damaged_records",
            f"{name} is damaged: rows without numbers, that end before they start, or on pages "
            f"that cannot be read are left out, {num_activities:,} of devices and {num_ranges:,} "
            "of the host.",
        )
