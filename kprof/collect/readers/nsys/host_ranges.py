"""Host ranges of Nsight Systems: NVTX ranges (also operators), calls of runtime and system."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.intervals import Intervals, disjoint
from kprof.collect.readers.kineto.columns import Vocabulary
from kprof.collect.readers.kineto.events import MISSING
from kprof.collect.readers.marks import mark_in
from kprof.collect.readers.nsys.database import Database, Numbers
from kprof.collect.readers.nsys.ranks import ONE_THREAD, Processes
from kprof.collect.readers.table_columns import as_declared, category, nullable

TABLE = "NVTX_EVENTS"
KINDS = ("capture", "graph", "module", "op", "phase", "range", "runtime", "step", "system")
# Pushed and popped on one thread, or started and ended anywhere; also imported ones of both sorts.
_EVENT_TYPES = "(59, 60, 70, 71)"
_NUMBERS = ("start", "end", "globalTid", "endGlobalTid")


class Meaning(NamedTuple):
    """The meaning of a range's text: a number in `KINDS`, codes of name and shapes."""

    kind: int
    name: int
    sequence: int
    shapes: int


# As PyProf and DLProf write the arguments of a function, and where it was called.
_FUNCTION = re.compile(rb"\{'mod': '([\w.]*)', 'op': '(\w+)'")
_CALLED_AT = re.compile(rb"\{'traceMarker': .*'funcStack': '(?:[^']*/)?([^'/]+)'", re.DOTALL)


def name_in_payload(text: bytes) -> bytes | None:
    """Return the function that a text of PyProf or DLProf is about; None for other texts."""
    if called := _FUNCTION.match(text):
        return b".".join(filter(None, called.groups()))
    at = _CALLED_AT.match(text)
    return at.group(1) if at else None


@dataclass
class Texts:
    """Takes texts apart, as bytes, which is faster; names and shapes get numbers."""

    names: Vocabulary = field(default_factory=Vocabulary)
    shapes: Vocabulary = field(default_factory=Vocabulary)
    _ranges: dict[bytes, Meaning] = field(default_factory=dict)
    _operators: dict[bytes, Meaning] = field(default_factory=dict)
    _shapes: dict[bytes, int] = field(default_factory=lambda: {b"": -1})

    def meaning_of(self, text: bytes) -> Meaning:
        """Return what a range with this text is."""
        known = self._ranges.get(text)
        if known is None:
            known = self._operator(text)
            # An operator's text has a number of its own, so it does not come again.
            if known is None:
                known = self._ranges[text] = self._named("range", name_in_payload(text) or text)
        return known

    def _operator(self, text: bytes) -> Meaning | None:
        """Take apart `aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]]`, as torch writes it.

        Every part but the name may be absent.
        """
        head, _, shapes = text.partition(b", sizes = ")
        head, has_id, _ = head.partition(b", op_id = ")
        name, has_sequence, sequence = head.partition(b", seq = ")
        if not (has_id or has_sequence or name.startswith(b"aten::")):
            return None
        known = self._operators.get(name)
        if known is None:
            known = self._operators[name] = self._named("op", name)
        number = int(sequence) if sequence.isdigit() and len(sequence) < 19 else MISSING
        return Meaning(known.kind, known.name, number, self._shapes_of(shapes))

    def _named(self, kind: str, text: bytes) -> Meaning:
        name = text.decode(errors="replace")
        kind, name = mark_in(name) or (kind, name)
        return Meaning(KINDS.index(kind), self.names[name], MISSING, -1)

    def _shapes_of(self, text: bytes) -> int:
        """Return the code of shapes as the JSON text in which other readers give them."""
        code = self._shapes.get(text)
        if code is None:
            try:
                json = msgspec.json.format(text.partition(b", input_op_ids = ")[0], indent=0)
                code = self.shapes[json.decode(errors="replace")]
            except msgspec.DecodeError:
                code = -1
            self._shapes[text] = code
        return code


@dataclass(frozen=True)
class Batch:
    """Some ranges of one thread each; `end` is `MISSING` where a range was still open."""

    start: Numbers
    end: Numbers
    thread: Numbers
    meanings: NDArray[np.int64]
    """A row of `Meaning` for each."""
    num_crossing: int
    """Ranges left out, since they were started on one thread and ended on another."""


RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
# Traced only on request.
LIBRARIES = ("CUDNN_EVENTS", "CUBLAS_EVENTS")
SYSTEM = "OSRT_API"
# Calls of the system that are shorter explain no gap that would be worth an edit.
SHORTEST_CALL_NS = 5_000
TABLES = (RUNTIME, TABLE, *LIBRARIES)

_OF_A_CALL = ("start", "end", "globalTid", "nameId")
_COLUMNS = ("kind", "name", "start", "end", "thread", "correlation", "sequence", "shapes")
# The runtime's version in a name, not the number of a driver's call: cudaMalloc_v3020, not _v2.
VERSION = re.compile(r"_v[0-9]{4,}$")
# Prefix that autograd's engine gives the run of a node; the node's name follows.
_EVALUATION = "autograd::engine::evaluate_function: "
# The thread that made a node is not recorded; any number above 0 says that it is one.
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
    if all(database.has(SYSTEM, name) for name in _OF_A_CALL) and database.has(RUNTIME):
        # Threads that launch nothing explain no idle time, nor do short calls; both may be many.
        launching = f"globalTid IN (SELECT DISTINCT globalTid FROM {RUNTIME})"
        where = f'{launching} AND "end" - "start" >= {SHORTEST_CALL_NS}'
        _add_calls(database, rows, texts, SYSTEM, "system", where)
    for batch in batches_of(database, texts):
        _add_ranges(rows, batch)
        counts["crossing"] += batch.num_crossing
    found = _without_inner_calls(rows.joined())
    is_open = found["end"] == MISSING
    counts["open"] = int(is_open.sum())
    found["end"][is_open] = max(device_end, _latest(found))
    chosen = np.flatnonzero(processes.has_rank(found["thread"] & ~ONE_THREAD))
    chosen = chosen[np.argsort(found["start"][chosen], kind="stable")]
    found = {name: column[chosen] for name, column in found.items()}
    return _table(found, processes, texts), counts


def _add_calls(
    database: Database, rows: _Rows, texts: Texts, table: str, kind: str, where: str = "TRUE"
) -> None:
    """Add a table of calls; their names are ids of texts. The system's launch nothing."""
    calls = database.numbers(table, _OF_A_CALL, ("correlationId",), where)
    if kind == "system":
        calls["correlationId"] = np.full(len(calls["start"]), MISSING, dtype=np.int64)
    names = database.texts(table, "nameId")
    ids, codes = np.unique(calls["nameId"], return_inverse=True)
    spelled = [VERSION.sub("", names.get(number, f"call {number}")) for number in ids.tolist()]
    rows.add(
        len(codes),
        kind=np.full(len(codes), KINDS.index(kind), dtype=np.int64),
        name=texts.names.codes(spelled).astype(np.int64)[codes],
        start=calls["start"],
        end=calls["end"],
        thread=calls["globalTid"],
        correlation=calls["correlationId"],
    )


def _without_inner_calls(found: dict[str, Numbers]) -> dict[str, Numbers]:
    """Leave out calls of the system that a call of the runtime makes: they belong to it."""
    is_system = found["kind"] == KINDS.index("system")
    is_runtime = found["kind"] == KINDS.index("runtime")
    kept = ~is_system
    for thread in np.unique(found["thread"][is_system]).tolist():
        is_here = found["thread"] == thread
        calls, mine = np.flatnonzero(is_here & is_runtime), np.flatnonzero(is_here & is_system)
        runtime = disjoint(Intervals(found["start"][calls], found["end"][calls], calls))
        first = np.searchsorted(runtime.end, found["start"][mine], "right")
        begins = np.append(runtime.start, np.iinfo(np.int64).max)[first]
        kept[mine[found["end"][mine] <= begins]] = True
    return {name: column[kept] for name, column in found.items()}


def batches_of(database: Database, texts: Texts) -> Iterator[Batch]:
    """Yield all ranges, many at a time."""
    if not database.has(TABLE):
        return
    present = {name: database.has(TABLE, name) for name in ("endGlobalTid", "text", "textId")}
    numbers = [f"COALESCE({n}, {MISSING})" if present.get(n, True) else MISSING for n in _NUMBERS]
    words = [name if present[name] else "NULL" for name in ("text", "textId")]
    chosen = ", ".join(map(str, (*numbers, *words)))
    kept = f"eventType IN {_EVENT_TYPES} AND start IS NOT NULL"
    shared = {i: text.encode() for i, text in database.texts(TABLE, "textId").items()}
    for rows in database.batches(f"SELECT {chosen} FROM {TABLE} WHERE {kept} ORDER BY rowid"):
        rows, times = database.with_numbers(TABLE, rows, len(_NUMBERS))
        if not rows:
            continue
        *_, own, ids = zip(*rows, strict=True)
        spelled = (
            _as_bytes(text) if text is not None else shared.get(number, b"")
            for text, number in zip(own, ids, strict=True)
        )
        meanings = np.array(list(map(texts.meaning_of, spelled)), dtype=np.int64)
        yield _batch(times.T, meanings)


def _as_bytes(text: object) -> bytes:
    """Return a text, also one that is stored as a number."""
    return text if isinstance(text, bytes) else str(text).encode()


def _batch(numbers: NDArray[np.int64], meanings: NDArray[np.int64]) -> Batch:
    start, end, thread, end_thread = numbers
    stays = (end_thread == MISSING) | (end_thread == 0) | (end_thread == thread)
    return Batch(start[stays], end[stays], thread[stays], meanings[stays], int((~stays).sum()))


def _add_ranges(rows: _Rows, batch: Batch) -> None:
    told = dict(zip(Meaning._fields, batch.meanings.T, strict=True))
    rows.add(len(batch.start), start=batch.start, end=batch.end, thread=batch.thread, **told)


def _latest(found: dict[str, Numbers]) -> int:
    times = (found["start"], found["end"])
    return max((int(time.max()) for time in times if len(time)), default=0)


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
