"""What the device did: kernels, copies, sets, and replays of graphs recorded as a whole."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.collect.readers.kineto.events import MISSING
from kprof.collect.readers.nsys.database import Database, Numbers
from kprof.collect.readers.nsys.ranks import Processes
from kprof.collect.readers.table_columns import as_declared, category, nullable

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
TABLES = {KERNEL: "kernel", MEMCPY: "memcpy", MEMSET: "memset", GRAPH: "graph"}

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


def activities_of(database: Database, processes: Processes) -> pd.DataFrame:
    """Return the activities of all processes that have a rank, in the order of their starts."""
    parts = [_part_of(database, table, processes) for table in TABLES]
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
            "activity": category(activity, list(TABLES.values())),
            "rank": processes.ranks_of(columns["globalPid"]),
            "device": _devices(columns["deviceId"]),
            "stream": np.where(columns["streamId"] == MISSING, -1, columns["streamId"]),
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
        "activity": np.full(number, list(TABLES).index(table), dtype=np.int64),
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
        table = list(TABLES)[row.activity]
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
    return np.where((numbers >= 0) & (numbers < 2**31), numbers, -1).astype(np.int32)


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
