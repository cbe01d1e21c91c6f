"""CUDA graphs: what put each replayed activity into its graph, while that was captured.

A replay is one call that launches all of a graph, so it names nothing in it. Where the capture was
recorded as well, the calls that added its nodes lie in it, inside their operators and modules, in
the order in which the graph runs them on one stream. Where torch noted what was marked around each
node, the trace tells that by the node's number.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.nesting import NO_ROW, nearest
from kprof.trace import Trace

# Calls that add one node to a graph, and the activity that the node becomes. First match wins.
_NODES = (
    (r"Launch(?:Cooperative)?Kernel", "kernel"),
    (r"^(?:cuda|cu)Memcpy", "memcpy"),
    (r"^(?:cuda|cu)Memset", "memset"),
)


def captured_calls(trace: Trace, parent: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Return for each activity the row of the call that was captured, or `NO_ROW`.

    `parent` holds the range around each range, `launch` the row of each activity's launch. Nothing
    is told of a graph unless its replay and its capture agree, activity by activity, in their
    number, order and sort.
    """
    ranges = trace.ranges
    found = np.full(len(launch), NO_ROW, dtype=np.int64)
    kind = ranges["kind"].to_numpy(dtype=object)
    captures = np.flatnonzero(kind == "capture")
    if not len(captures):
        return found
    replay = nearest(launch, parent, kind == "graph")
    replayed = np.flatnonzero(replay != NO_ROW)
    of_graph = {_graph(ranges, row): row for row in captures.tolist()}
    node = _node_sorts(ranges)
    known: dict[int, np.ndarray] = {}
    for call in np.unique(launch[replayed]).tolist():
        rows = replayed[launch[replayed] == call]
        capture = of_graph.get(_graph(ranges, replay[rows[0]]))
        if capture is None:
            continue
        if capture not in known:
            known[capture] = _calls_in(ranges, capture, node)
        ordered = _in_order(trace.kernels, rows)
        if ordered is not None and _agree(trace.kernels, ordered, node[known[capture]]):
            found[ordered] = known[capture]
    return found


def noted_names(trace: Trace, is_asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return range and module that torch noted of each activity's node, None where it did not."""
    note_of = {(note.rank, note.node): note for note in trace.meta.graph_notes}
    ranges = np.full(len(trace.kernels), None, dtype=object)
    modules = ranges.copy()
    rows = np.flatnonzero(is_asked & trace.kernels["graph_node"].notna() & bool(note_of))
    nodes = trace.kernels[["rank", "graph_node"]].iloc[rows].itertuples(index=False, name=None)
    for row, node in zip(rows.tolist(), nodes, strict=True):
        if (note := note_of.get(node)) is not None:
            ranges[row], modules[row] = note.range, note.module
    return ranges, modules


def _graph(ranges: pd.DataFrame, row: int) -> tuple[int, str]:
    """Return which graph a range of its capture or replay is of: rank and number."""
    return int(ranges["rank"].to_numpy()[row]), str(ranges["name"].iloc[row])


def _node_sorts(ranges: pd.DataFrame) -> np.ndarray:
    """Return the sort of node that each runtime call adds while a graph is captured, else None."""
    names = ranges["name"].cat
    sort = np.full(len(names.categories) + 1, None, dtype=object)
    for pattern, activity in reversed(_NODES):
        sort[:-1][np.asarray(names.categories.str.contains(pattern), dtype=bool)] = activity
    is_call = (ranges["kind"] == "runtime").to_numpy(dtype=bool)
    found = sort[names.codes.to_numpy()]
    found[~is_call] = None
    return np.asarray(found)


def _calls_in(ranges: pd.DataFrame, capture: int, node: np.ndarray) -> np.ndarray:
    """Return the rows of the calls that added nodes during a capture, on any thread, in order."""
    start = ranges["start_ns"].to_numpy()
    begin, end = start[capture], start[capture] + ranges["duration_ns"].to_numpy()[capture]
    is_here = (ranges["rank"] == ranges["rank"].to_numpy()[capture]).to_numpy()
    is_node = np.array([sort is not None for sort in node])
    rows = np.flatnonzero(is_here & is_node & (start >= begin) & (start < end))
    return rows[np.argsort(start[rows], kind="stable")]


def _in_order(kernels: pd.DataFrame, rows: np.ndarray) -> np.ndarray | None:
    """Return a replay's activities in the order of their nodes; None where nothing tells it."""
    node = kernels["graph_node"].iloc[rows]
    if node.notna().all():
        return rows[np.argsort(node.to_numpy(dtype=np.int64), kind="stable")]
    if kernels["stream"].iloc[rows].nunique() > 1:
        return None
    return rows[np.argsort(kernels["start_ns"].to_numpy()[rows], kind="stable")]


def _agree(kernels: pd.DataFrame, rows: np.ndarray, captured: np.ndarray) -> bool:
    replayed = kernels["activity"].iloc[rows].to_numpy(dtype=object)
    return len(replayed) == len(captured) and bool((replayed == captured).all())
