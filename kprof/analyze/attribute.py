"""Attribution: from a device activity to its launch, operator, module, phase and step.

The way goes launch → runtime call (correlation id) → operator (the innermost one open on the
calling thread, or the recorded external id where no range is open) → the ranges around it.
A backward operator reaches the module of its forward through the autograd sequence number.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.ledger import is_graph_launch_name
from kprof.analyze.nesting import NO_ROW, nearest, parents
from kprof.trace import Trace

# Ranges that PyTorch itself writes and the phase that they stand for; first match wins.
PHASE_OF_RANGE = (
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
)

# Keys are (rank, id) packed into one int64: ranks stay far below 2**20, ids below 2**43.
_RANK_SHIFT = 43


def add_attribution(trace: Trace) -> Trace:
    """Add who launched every device activity; a row nobody can name says so in `bucket`."""
    ranges = trace.ranges
    parent = parents(ranges, np.flatnonzero(_has_kind(ranges, "python", invert=True)))
    launch = _launch_rows(trace)
    inner, by_external_id = _innermost(ranges, parent, launch)
    op = nearest(inner, parent, _has_kind(ranges, "op"))
    module = _module_rows(ranges, parent, inner)
    user_range = nearest(inner, parent, _has_kind(ranges, "range"))

    is_graph = _is_graph_launch(ranges, launch)
    is_named = (op != NO_ROW) | (module != NO_ROW) | (user_range != NO_ROW)
    bucket = np.select(
        [launch == NO_ROW, is_graph, is_named], ["orphan", "graph", "attributed"], "unlinked"
    )
    attributed_by = np.where(by_external_id, "external id", "nesting").astype(object)
    attributed_by[bucket != "attributed"] = None
    op = np.where(is_graph, NO_ROW, op)
    return trace.with_ranges(parent=_nullable(parent)).with_kernels(
        launch_row=_nullable(launch),
        op_row=_nullable(op),
        op=_names(ranges, op),
        module=_names(ranges, module),
        phase=_phases(ranges, parent, inner),
        step=_steps(trace, launch),
        range=_names(ranges, user_range),
        bucket=pd.Categorical(bucket),
        attributed_by=pd.Categorical(attributed_by),
        confidence=pd.Categorical.from_codes(
            np.where(bucket == "attributed", 0, -1), pd.Index(["exact"])
        ),
    )


def _launch_rows(trace: Trace) -> np.ndarray:
    """Return the row of the runtime call with each activity's correlation id, or `NO_ROW`.

    A piece of an operator's self time in host mode was launched by that operator's row.
    """
    if "op_row" in trace.kernels:
        return trace.kernels["op_row"].to_numpy(dtype=np.int64)
    calls = np.flatnonzero(
        _has_kind(trace.ranges, "runtime") & trace.ranges["correlation"].notna().to_numpy()
    )
    return _look_up(
        _keys(trace.ranges["rank"], trace.ranges["correlation"])[calls],
        calls,
        _keys(trace.kernels["rank"], trace.kernels["correlation"]),
    )


def _innermost(
    ranges: pd.DataFrame, parent: np.ndarray, launch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the innermost range around each launch, and whether the external id named it."""
    if not len(ranges):
        return launch, np.zeros(len(launch), dtype=bool)
    is_call = _has_kind(ranges, "runtime")
    inner = np.where(is_call[launch], parent[launch], launch)
    inner = np.where(launch == NO_ROW, NO_ROW, inner)
    lost = np.flatnonzero((inner == NO_ROW) & (launch != NO_ROW))
    if not len(lost):
        return inner, np.zeros(len(launch), dtype=bool)
    ids = _keys(ranges["rank"], ranges["external_id"])
    ops = np.flatnonzero(_has_kind(ranges, "op") & (ids != NO_ROW))
    inner[lost] = _look_up(ids[ops], ops, ids[launch[lost]])
    by_external_id = np.zeros(len(launch), dtype=bool)
    by_external_id[lost] = inner[lost] != NO_ROW
    return inner, by_external_id


def _module_rows(ranges: pd.DataFrame, parent: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return the module around each launch, for a backward launch the module of its forward."""
    is_module = _has_kind(ranges, "module")
    module = nearest(inner, parent, is_module)
    is_backward = _is_backward(ranges)
    missing = np.flatnonzero(module == NO_ROW)
    node = nearest(inner[missing], parent, is_backward)
    missing, node = missing[node != NO_ROW], node[node != NO_ROW]
    if not len(node):
        return module
    sequence = _keys(ranges["rank"], ranges["sequence"])
    forward = np.flatnonzero(_has_kind(ranges, "op") & ~is_backward & (sequence != NO_ROW))
    # Operators before the one that made the node may show its number too: the latest made it.
    forward = forward[np.argsort(ranges["start_ns"].to_numpy()[forward], kind="stable")]
    made_by = _look_up(sequence[forward], forward, sequence[node])
    module[missing] = nearest(made_by, parent, is_module)
    return module


def _phases(ranges: pd.DataFrame, parent: np.ndarray, inner: np.ndarray) -> pd.Categorical:
    """Return each launch's phase: recorded, or told by PyTorch's own ranges, or missing."""
    names = ranges["name"].cat.categories
    known = {str(name): str(name) for name in ("data", "forward", "backward", "optimizer")}
    by_name = np.full(len(names) + 1, None, dtype=object)
    for code, name in enumerate(names):
        by_name[code] = next((p for start, p in PHASE_OF_RANGE if name.startswith(start)), None)
    by_phase = np.array([known.get(str(name)) for name in names] + [None], dtype=object)
    codes = ranges["name"].cat.codes.to_numpy()
    is_phase = _has_kind(ranges, "phase")
    told = np.array([p is not None for p in by_name])[codes] & _has_kind(ranges, "range")
    is_backward = _is_backward(ranges)
    row = nearest(inner, parent, is_phase | told | is_backward)
    result = np.full(len(inner), None, dtype=object)
    found = np.flatnonzero(row != NO_ROW)
    at = row[found]
    result[found] = np.where(
        is_phase[at], by_phase[codes[at]], np.where(told[at], by_name[codes[at]], "backward")
    )
    return pd.Categorical(result, categories=["data", "forward", "backward", "optimizer"])


def _steps(trace: Trace, launch: np.ndarray) -> pd.arrays.IntegerArray:
    """Return the step during which each launch was made, on whatever thread."""
    ranges = trace.ranges
    step_rows = np.flatnonzero(_has_kind(ranges, "step"))
    result = np.full(len(launch), NO_ROW, dtype=np.int64)
    if len(step_rows) and len(launch):
        start = ranges["start_ns"].to_numpy()
        end = start + ranges["duration_ns"].to_numpy()
        rank = ranges["rank"].to_numpy()
        order = step_rows[np.lexsort([start[step_rows], rank[step_rows]])]
        number = np.array([_step_number(name) for name in ranges["name"].iloc[order]])
        for one in np.unique(rank[order]):
            mine = rank[order] == one
            rows, numbers = order[mine], number[mine]
            asked = np.flatnonzero((launch != NO_ROW) & (rank[launch] == one))
            at = np.searchsorted(start[rows], start[launch[asked]], side="right") - 1
            inside = (at >= 0) & (start[launch[asked]] < end[rows[at]])
            result[asked[inside]] = numbers[at[inside]]
    return _nullable(result)


def _step_number(name: object) -> int:
    text = str(name)
    return int(text) if text.isdigit() else NO_ROW


def _is_graph_launch(ranges: pd.DataFrame, launch: np.ndarray) -> np.ndarray:
    if not len(ranges):
        return np.zeros(len(launch), dtype=bool)
    named = is_graph_launch_name(ranges["name"].cat.categories)
    return np.asarray(named[ranges["name"].cat.codes.to_numpy()[launch]] & (launch != NO_ROW))


def _is_backward(ranges: pd.DataFrame) -> np.ndarray:
    """Tell which operators autograd ran for a forward one: they name its thread and number."""
    thread = ranges["forward_thread"].fillna(0).to_numpy(dtype=np.int64)
    return np.asarray((thread > 0) & ranges["sequence"].notna().to_numpy())


def _has_kind(ranges: pd.DataFrame, kind: str, *, invert: bool = False) -> np.ndarray:
    found = (ranges["kind"] == kind).to_numpy(dtype=bool)
    return ~found if invert else found


def _keys(rank: pd.Series[int], ids: pd.Series[int]) -> np.ndarray:
    """Pack (rank, id) into one integer; a missing id is `NO_ROW`."""
    packed = (rank.to_numpy(dtype=np.int64) << _RANK_SHIFT) + ids.fillna(0).to_numpy(dtype=np.int64)
    return np.where(ids.notna().to_numpy(dtype=bool), packed, NO_ROW)


def _look_up(keys: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each wanted key the last of `rows` with that key, or `NO_ROW`."""
    if not len(keys):
        return np.full(len(wanted), NO_ROW, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    hit = (at >= 0) & (keys[order][at] == wanted) & (wanted != NO_ROW)
    return np.where(hit, rows[order][at], NO_ROW)


def _names(ranges: pd.DataFrame, rows: np.ndarray) -> pd.Categorical:
    """Return the names at `rows`, missing where there is no row."""
    if not len(ranges):
        return pd.Categorical([None] * len(rows))
    codes = np.where(rows == NO_ROW, -1, ranges["name"].cat.codes.to_numpy()[rows])
    used = np.unique(codes[codes >= 0])
    compact = np.where(codes < 0, -1, np.searchsorted(used, codes))
    return pd.Categorical.from_codes(compact, categories=ranges["name"].cat.categories[used])


def _nullable(rows: np.ndarray) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(rows.astype(np.int64), rows == NO_ROW)
