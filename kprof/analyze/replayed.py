"""What CUDA graphs replayed: how it got its names, and how sure that is.

A replay shows kernels and no operators. Operators that were laid beside it by their order may lie
a place off. The kernels' own names had no part in that, so they tell: where one says what it is (a
product, a convolution, attention, a collective), its operator must be of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from kprof.analyze.classify import find_kind
from kprof.analyze.ledger import launched_by_graph
from kprof.trace import Trace

Confidence = Literal["high", "fair", "low"]

TELLING = ("gemm", "convolution", "attention", "collective")
# Libraries do some convolutions as a matrix product.
ALIKE = {"convolution": "gemm"}
# Of the time in which kernels' names tell. Eager steps agree in all of it, and in about half with
# their operators a place off, as `tests/test_replayed.py` has it.
AGREES = 0.95

ANNOTATION, CAPTURE = "annotation", "capture"
OWN_NAME, PLACE = "name in generated code", "place in generated code"
UNNAMED = "nothing"

# What each way rests on, and whether that is an order, which may be off.
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
    """Of all replayed time."""
    confidence: Confidence | None
    """None of time that has no name."""
    because: str
    checked_share: float | None = None
    """Of its time, what kernels took whose own names tell the kind of their operator."""
    agreeing_share: float | None = None
    """Of that, the share whose operator is of this kind; None where no name tells."""


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
    checked_ns, agreeing_ns = _check(rows)
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


def _check(rows: pd.DataFrame) -> tuple[int, int]:
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
