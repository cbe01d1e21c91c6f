"""The tables of a Trace from decoded blocks."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.collect.readers.kineto.blocks import Merger, Rows
from kprof.collect.readers.kineto.columns import INPUTS
from kprof.collect.readers.kineto.events import MISSING, OPERATOR_ROLES, Role
from kprof.collect.readers.marks import mark_in
from kprof.collect.readers.table_columns import as_declared
from kprof.collect.readers.table_columns import category as _category
from kprof.collect.readers.table_columns import nullable as _nullable
from kprof.trace import NOT_RECORDED, NodeNote

_MODULE_PREFIX = "nn.Module: "
_KINDS = [
    "capture",
    "graph",
    "module",
    "op",
    "overhead",
    "phase",
    "python",
    "range",
    "runtime",
    "step",
]
_KIND_OF_ROLE = {
    Role.OPERATOR: "op",
    Role.ANNOTATION: "range",
    Role.RUNTIME: "runtime",
    Role.PYTHON: "python",
    Role.OVERHEAD: "overhead",
}
_ACTIVITIES = ["kernel", "memcpy", "memset"]  # in the order of their roles


def kernels_of(merger: Merger, rank: int) -> pd.DataFrame:
    """Return the device activities in the order of the file."""
    role = merger.numbers("device", "role")
    graph_node = merger.numbers("device", "graph_node")
    graph_node[graph_node == 0] = MISSING  # how CUPTI says that no graph was replayed
    copied_bytes = np.where(role == Role.KERNEL, MISSING, merger.numbers("device", "copied_bytes"))
    return as_declared(
        "kernels",
        len(role),
        {
            "name": _category(*merger.words("device", "name", "device_name", str)),
            "activity": _category(role - int(Role.KERNEL), _ACTIVITIES),
            "rank": _ranks(merger, "device", len(role), rank),
            "device": _devices(merger.numbers("device", "device")),
            "stream": _present(merger.numbers("device", "stream"), NOT_RECORDED),
            "start_ns": merger.numbers("device", "start_ns"),
            "duration_ns": merger.numbers("device", "duration_ns"),
            "correlation": _nullable(merger.numbers("device", "correlation")),
            "graph_node": _nullable(graph_node),
            "copied_bytes": _nullable(copied_bytes),
            "grid": _category(*merger.words("device", "grid", "grid", _dimensions)),
            "block": _category(*merger.words("device", "block", "block", _dimensions)),
            "collective": _category(*merger.words("device", "collective", "collective", _unquoted)),
            "group": _category(*merger.words("device", "group", "group", _unquoted)),
            "group_sequence": _nullable(merger.numbers("device", "group_sequence")),
        },
    )


def _ranks(merger: Merger, rows: Rows, number: int, first: int) -> NDArray[np.int32]:
    """Return the rank of each row: the file's, and in one of several processes those from it on."""
    if merger.has(rows, "rank"):
        return (first + merger.numbers(rows, "rank")).astype(np.int32)
    return np.full(number, first, dtype=np.int32)


def _devices(numbers: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return indices of GPUs; not recorded where there is none, or one that no machine has."""
    return np.where((numbers >= 0) & (numbers < 2**31), numbers, NOT_RECORDED).astype(np.int32)


def _present(values: NDArray[np.int64], otherwise: int) -> NDArray[np.int64]:
    return np.where(values == MISSING, otherwise, values)


def _dimensions(word: object) -> str | None:
    """Return a grid or a block, `[8, 1, 1]`, as `8,1,1`."""
    numbers = re.findall(rb"\d+", word) if isinstance(word, bytes) else []
    return b",".join(numbers).decode() or None


def _unquoted(word: object) -> str | None:
    """Return what recorded JSON texts say; None where there is nothing."""
    text = word.decode(errors="replace") if isinstance(word, bytes) else ""
    return text.replace('"', "").strip() or None


def notes_of(merger: Merger, rank: int) -> tuple[NodeNote, ...]:
    """Return what torch noted of the nodes of CUDA graphs, each node once."""
    code, texts = merger.words("device", "note", "note", _json_text)
    said = [[text if isinstance(text, str) else None for text in _list_in(t)] for t in texts]
    at = np.flatnonzero(code >= 0)
    pairs = zip(merger.numbers("device", "graph_node")[at].tolist(), code[at].tolist(), strict=True)
    return tuple(NodeNote(rank, node, *said[c]) for node, c in dict(pairs).items() if any(said[c]))


def _json_text(word: object) -> str | None:
    """Return recorded JSON on one line, so that equal inputs read the same in every layout."""
    if not isinstance(word, bytes) or word == b"null":
        return None
    return msgspec.json.format(word, indent=0).decode(errors="replace")


def _list_in(text: str) -> list[object]:
    found: list[object] = msgspec.json.decode(text, type=list)
    return found


def ranges_of(merger: Merger, rank: int) -> pd.DataFrame:
    """Return the host ranges in the order of the file."""
    kind, name = _kinds_and_names(merger)
    table: pd.DataFrame = pd.DataFrame(
        {
            "kind": kind,
            "name": name,
            "rank": _ranks(merger, "host", len(kind), rank),
            "thread": _threads(merger),
            "start_ns": merger.numbers("host", "start_ns"),
            "duration_ns": merger.numbers("host", "duration_ns"),
            **{
                column: _nullable(merger.numbers("host", column))
                for column in ("correlation", "external_id", "sequence", "forward_thread")
            },
            **{
                f"input_{what}": _category(*merger.words("host", what, what, _json_text))
                for what in INPUTS
            },
            "message": _category(*merger.words("host", "message", "message", _json_text)),
        },
        copy=False,
    )
    return table


def _kinds_and_names(merger: Merger) -> tuple[pd.Categorical, pd.Categorical]:
    role = merger.numbers("host", "role")
    text, texts = merger.words("host", "name", "host_name", str)
    used = _used_pairs(role, text, (len(Role), len(texts)))
    meanings = {(r, t): _meaning(Role(r), texts[t]) for r, t in np.argwhere(used).tolist()}
    names = sorted({name for _, name in meanings.values()})
    code_of = {name: code for code, name in enumerate(names)}
    kind_table, name_table = np.zeros((2, *used.shape), dtype=np.int32)
    for pair, (kind, name) in meanings.items():
        kind_table[pair], name_table[pair] = _KINDS.index(kind), code_of[name]
    return _category(kind_table[role, text], _KINDS), _category(name_table[role, text], names)


def _used_pairs(
    rows: NDArray[np.integer], columns: NDArray[np.integer], shape: tuple[int, int]
) -> NDArray[np.bool_]:
    pairs = rows.astype(np.int64) * shape[1] + columns
    return np.bincount(pairs, minlength=shape[0] * shape[1]).reshape(shape) > 0


def _meaning(role: Role, text: str) -> tuple[str, str]:
    """Return kind and name of the ranges that have this role and text."""
    if role in OPERATOR_ROLES and (mark := mark_in(text)):
        return mark
    if role == Role.PYTHON and text.startswith(_MODULE_PREFIX):
        return "module", text.removeprefix(_MODULE_PREFIX)
    return _KIND_OF_ROLE[role], text


def _threads(merger: Merger) -> NDArray[np.int64]:
    pid, pids = merger.words("host", "pid", "pid", str)
    tid, tids = merger.words("host", "tid", "tid", str)
    return thread_table(pids, tids, _used_pairs(pid, tid, (len(pids), len(tids))))[pid, tid]


def thread_table(pids: list[str], tids: list[str], is_used: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return a distinct number for each (process, thread) pair in `is_used`.

    A thread id that one process alone uses stays as it is; where several share it, the process
    id stands in its upper half. A name that is no number gets a negative one.
    """
    table = np.zeros(is_used.shape, dtype=np.int64)
    numbers = [_number_of(tid) for tid in tids]
    taken = {n for n in numbers if n is not None}
    lowest = min(taken | {0})
    for pid, tid in np.argwhere(is_used).tolist():
        number = numbers[tid]
        if number is not None and is_used[:, tid].sum() > 1:
            number = _joined(_number_of(pids[pid]), number)
            number = None if number in taken else number
        if number is None:
            lowest -= 1
            number = lowest
        taken.add(number)
        table[pid, tid] = number
    return table


def _number_of(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if -(2**62) < number < 2**62 else None


def _joined(pid: int | None, tid: int) -> int | None:
    if pid is None or not (0 <= pid < 2**31 and 0 <= tid < 2**32):
        return None
    return pid << 32 | tid


def samples_of(merger: Merger, rank: int) -> pd.DataFrame:
    """Return what the allocator held after each allocation and release."""
    quantities = ["allocated_bytes", "reserved_bytes"]
    values = np.stack([merger.numbers("memory", quantity) for quantity in quantities], axis=1)
    # Device type 0 is the host.
    is_host = merger.numbers("memory", "device_type") == 0
    device = np.where(is_host, -1, _devices(merger.numbers("memory", "device")))
    time_ns = merger.numbers("memory", "time_ns")
    is_known = (values != MISSING).ravel()
    number = int(is_known.sum())
    quantity = np.tile(np.array([0, 1], dtype=np.int8), len(values))[is_known]
    table: pd.DataFrame = pd.DataFrame(
        {
            "time_ns": np.repeat(time_ns, 2)[is_known],
            "rank": np.full(number, rank, dtype=np.int32),
            "device": np.repeat(device.astype(np.int32), 2)[is_known],
            "source": _category(np.zeros(number, dtype=np.int32), ["profiler"]),
            "quantity": _category(quantity, quantities),
            "value": values.ravel()[is_known].astype(np.float64),
        },
        copy=False,
    )
    return table


def num_module_ranges(merger: Merger) -> int:
    """Count the rows that torch names as modules."""
    name, texts = merger.words("host", "name", "host_name", str)
    is_module = np.array([text.startswith("nn.Module") for text in texts], dtype=bool)
    return int(is_module[name].sum()) if texts else 0
