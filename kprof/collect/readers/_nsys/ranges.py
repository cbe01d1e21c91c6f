"""What the host did: runtime calls, NVTX ranges, calls of libraries where they were traced."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.collect.readers._columns import as_declared, category, nullable
from kprof.collect.readers._kineto.columns import Vocabulary
from kprof.collect.readers._kineto.events import MISSING
from kprof.collect.readers._nsys import nvtx
from kprof.collect.readers._nsys.database import Database, Numbers
from kprof.collect.readers._nsys.nvtx import KINDS, Texts
from kprof.collect.readers._nsys.processes import ONE_THREAD, Processes

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
# Traced only where somebody asked for them.
LIBRARIES = ("CUDNN_EVENTS", "CUBLAS_EVENTS")
TABLES = (RUNTIME, nvtx.TABLE, *LIBRARIES)

_COLUMNS = ("kind", "name", "start", "end", "thread", "correlation", "sequence", "shapes")
# The runtime's version in a name, not the number of a driver's call: cudaMalloc_v3020, not _v2.
_VERSION = re.compile(r"_v[0-9]{4,}$")
# What autograd's engine calls the run of a node; the node's name follows.
_EVALUATION = "autograd::engine::evaluate_function: "
# Nobody recorded which thread made a node; any number above 0 says that it is one.
_SOME_THREAD = 1


@dataclass
class _Rows:
    """Rows as they are found, one list of arrays a column; what is not given is missing."""

    parts: dict[str, list[Numbers]] = field(default_factory=lambda: {n: [] for n in _COLUMNS})

    def add(self, number: int, **columns: Numbers) -> None:
        """Add so many rows."""
        absent = np.full(number, MISSING, dtype=np.int64)
        for name, parts in self.parts.items():
            parts.append(columns.get(name, absent))

    def joined(self) -> dict[str, Numbers]:
        """Return each column as one array."""
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


def ranges_of(
    database: Database, processes: Processes, device_end: int
) -> tuple[pd.DataFrame, Counter[str]]:
    """Return the ranges of all processes that have a rank, and how many of them are special.

    Counted are `open` ranges, which had no end yet (the end of the trace stands for it), and
    `crossing` ones, started on one thread and ended on another: left out, as nothing nests in them.
    """
    texts, counts, rows = Texts(), Counter[str](), _Rows()
    _add_calls(database, rows, texts, RUNTIME, "runtime")
    for table in LIBRARIES:
        _add_calls(database, rows, texts, table, "range")
    for batch in nvtx.batches_of(database, texts):
        _add_ranges(rows, batch)
        counts["crossing"] += batch.num_crossing
    found = rows.joined()
    is_open = found["end"] == MISSING
    counts["open"] = int(is_open.sum())
    found["end"][is_open] = max(device_end, _latest(found))
    chosen = np.flatnonzero(processes.has_rank(found["thread"] & ~ONE_THREAD))
    chosen = chosen[np.argsort(found["start"][chosen], kind="stable")]
    found = {name: column[chosen] for name, column in found.items()}
    return _table(found, processes, texts), counts


def _latest(found: dict[str, Numbers]) -> int:
    times = (found["start"], found["end"])
    return max((int(time.max()) for time in times if len(time)), default=0)


def _add_calls(database: Database, rows: _Rows, texts: Texts, table: str, kind: str) -> None:
    """Add a table of calls; their names are ids of texts."""
    calls = database.numbers(table, ("start", "end", "globalTid", "nameId"), ("correlationId",))
    names = database.texts(table, "nameId")
    ids, codes = np.unique(calls["nameId"], return_inverse=True)
    spelled = [_VERSION.sub("", names.get(number, f"call {number}")) for number in ids.tolist()]
    rows.add(
        len(codes),
        kind=np.full(len(codes), KINDS.index(kind), dtype=np.int64),
        name=texts.names.codes(spelled).astype(np.int64)[codes],
        start=calls["start"],
        end=calls["end"],
        thread=calls["globalTid"],
        correlation=calls["correlationId"],
    )


def _add_ranges(rows: _Rows, batch: nvtx.Batch) -> None:
    told = dict(zip(nvtx.Meaning._fields, batch.meanings.T, strict=True))
    rows.add(len(batch.start), start=batch.start, end=batch.end, thread=batch.thread, **told)


def _table(found: dict[str, Numbers], processes: Processes, texts: Texts) -> pd.DataFrame:
    is_node = _is_node(found, texts.names)
    return as_declared(
        "ranges",
        len(is_node),
        {
            "kind": category(found["kind"], list(KINDS)),
            "name": _texts(found["name"], texts.names),
            "rank": processes.ranks_of(found["thread"] & ~ONE_THREAD),
            "thread": found["thread"] & ONE_THREAD,
            "start_ns": found["start"],
            "duration_ns": found["end"] - found["start"],
            "correlation": nullable(found["correlation"]),
            "sequence": nullable(found["sequence"]),
            "forward_thread": nullable(np.where(is_node, _SOME_THREAD, MISSING)),
            "input_shapes": _texts(found["shapes"], texts.shapes),
        },
    )


def _is_node(found: dict[str, Numbers], names: Vocabulary) -> NDArray[np.bool_]:
    """Tell which operators autograd ran for a forward one: those that its engine names."""
    words = [str(word) for word in names.values_in_order()]
    nodes = {word.removeprefix(_EVALUATION) for word in words if word.startswith(_EVALUATION)}
    is_named = np.array([word in nodes for word in words] + [False], dtype=bool)
    is_op = found["kind"] == KINDS.index("op")
    return np.asarray(is_op & (found["sequence"] != MISSING) & is_named[found["name"]])


def _texts(codes: Numbers, words: Vocabulary) -> pd.Categorical:
    """Return a column of texts in their order; -1 and `MISSING` are missing."""
    texts = [str(word) for word in words.values_in_order()]
    order = np.argsort(np.array(texts, dtype=object), kind="stable")
    place = np.full(len(texts) + 1, -1, dtype=np.int32)
    place[order] = np.arange(len(texts), dtype=np.int32)
    return category(place[np.maximum(codes, -1)], [texts[i] for i in order.tolist()])
