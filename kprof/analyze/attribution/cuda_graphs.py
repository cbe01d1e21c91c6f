"""CUDA graph replays: the source of each replayed activity's names, with its certainty.

A replay is one call that names nothing in its graph. If the capture was recorded, the calls that
added its nodes lie inside it, under their operators and modules, in the order in which the graph
runs them on one stream. If torch annotated the nodes, the trace has the annotation of each node's
number. Names assigned by order may be one place off. The kernels' own names check them: where one
says its kind (GEMM, convolution, attention, collective), its operator must be of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW, nearest
from kprof.analyze.attribution.kinds import find_kind
from kprof.analyze.attribution.ledger import launched_by_graph
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
    captures = np.flatnonzero((ranges["kind"] == "capture").to_numpy(bool))
    if not len(captures):
        return found
    replay = nearest(launch, parent, (ranges["kind"] == "graph").to_numpy(bool))
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


Confidence = Literal["high", "fair", "low"]

TELLING = ("gemm", "convolution", "attention", "collective")
# Libraries do some convolutions as a matrix product.
ALIKE = {"convolution": "gemm"}
# Of the time in which kernels' names tell. Eager steps agree in all of it, and in about half with
# their operators a place off, as `tests/analyze/attribution/test_replayed.py` has it.
AGREES = 0.95

ANNOTATION, CAPTURE = "annotation", "capture"
OWN_NAME, PLACE = "name in generated code", "place in generated code"
UNNAMED = "nothing"

# The basis of each way, and whether it is an order, which may be off.
WAYS: dict[str, tuple[str, bool]] = {
    ANNOTATION: ("torch noted it of the graph's node, by number; it tells no operator", False),
    CAPTURE: ("replay and recorded capture agree in number, order and sort of activities", True),
    OWN_NAME: ("the kernel has the name that the generated code gives it", False),
    PLACE: ("it ran between kernels known by name, where the code launches it", True),
}


@dataclass(frozen=True)
class Named:
    """Replayed time that got its names in one way."""

    way: str
    time_ns: int
    share: float
    """Share of all replayed time."""
    confidence: Confidence | None
    """None of time that has no name."""
    because: str
    checked_share: float | None = None
    """Share of its time in kernels whose own names tell the kind of their operator."""
    agreeing_share: float | None = None
    """Share of that whose operator is of this kind; None where no name tells."""


def how_named(trace: Trace) -> list[Named]:
    """Return the ways in which replayed time was named, longest first; none without replays."""
    replayed = trace.kernels[launched_by_graph(trace)]
    total_ns = int(replayed["duration_ns"].sum())
    if not total_ns:
        return []
    ways = replayed.groupby(_ways(replayed), sort=False)
    named = [_named(str(way), rows, total_ns) for way, rows in ways]
    return sorted(named, key=lambda one: -one.time_ns)


def _ways(replayed: pd.DataFrame) -> np.ndarray:
    """Return for each activity how it was named.

    What was captured may have its module from generated code; its operator is the capture's.
    """
    by = replayed["attributed_by"].astype(object).fillna(UNNAMED).to_numpy()
    has_own_name = (replayed["name"].astype(object) == replayed["op"].astype(object)).to_numpy()
    was_captured = replayed["op_row"].notna().to_numpy(bool)
    of_code = np.select([was_captured, has_own_name], [CAPTURE, OWN_NAME], PLACE)
    return np.where(by == "compiled", of_code.astype(object), by)


def _named(way: str, rows: pd.DataFrame, total_ns: int) -> Named:
    time_ns = int(rows["duration_ns"].sum())
    share = time_ns / total_ns
    if way not in WAYS:
        why = "neither its capture nor the code behind it was recorded, or they do not agree"
        return Named(way, time_ns, share, None, why)
    because, is_by_order = WAYS[way]
    if not is_by_order:
        return Named(way, time_ns, share, "high", because)
    checked_ns, agreeing_ns = compare_names(rows)
    if not checked_ns:
        why = f"{because}; no kernel's own name tells more"
        return Named(way, time_ns, share, "fair", why, 0.0)
    agreeing = agreeing_ns / checked_ns
    confidence: Confidence = "high" if agreeing >= AGREES else "low"
    because += (
        f"; of the {100 * checked_ns / time_ns:.1f} % of it whose kernels' own names tell what "
        f"they do, {100 * agreeing:.1f} % are of such an operator"
    )
    return Named(way, time_ns, share, confidence, because, checked_ns / time_ns, agreeing)


def compare_names(rows: pd.DataFrame) -> tuple[int, int]:
    """Return the time of kernels whose names tell a kind, and of those whose operator is of it."""
    sums = rows.groupby(["name", "op"], observed=True)["duration_ns"].sum().reset_index()
    checked_ns = agreeing_ns = 0
    for name, op, time_ns in zip(sums["name"], sums["op"], sums["duration_ns"], strict=True):
        kind = find_kind(str(name), "kernel", None, None)
        if kind not in TELLING:
            continue
        of_op = find_kind(str(op), "host", None, None)
        checked_ns += int(time_ns)
        if ALIKE.get(kind, kind) == ALIKE.get(of_op, of_op):
            agreeing_ns += int(time_ns)
    return checked_ns, agreeing_ns
