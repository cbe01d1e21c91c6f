"""Rows of a trace from Proton's tree: one for each kernel of a call path, and its scopes around."""

from __future__ import annotations

from dataclasses import dataclass, field

from kprof.collect.readers._proton.tree import Node, Visit, is_python, number_of, walk

# Types by the width of the operands that an author declared.
TYPES = {"flops8": "fp8", "flops16": "fp16", "flops32": "fp32", "flops64": "fp64"}


@dataclass
class Row:
    """A kernel of one call path: its launches, added up."""

    name: str
    start_ns: int
    duration_ns: int
    launches: int
    device: int
    flops: int | None = None
    type: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Range:
    """A scope, a frame of Python, or the launches of one row."""

    kind: str
    name: str
    start_ns: int
    duration_ns: int
    correlation: int | None = None


@dataclass
class Rows:
    """What a profile holds, its times arranged one after another."""

    kernels: list[Row] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    own_launches: int = 0
    """Launches of Proton itself, which are left out."""
    own_ns: int = 0
    num_untyped: int = 0
    """Nodes with FLOPs of no declared width, or of several, which are left out."""


@dataclass(frozen=True)
class _Open:
    start_ns: int
    first_row: int


def rows_of(root: Node) -> Rows:
    """Lay the kernels of a tree out one after another, each within its scopes."""
    rows, clock, opened = Rows(), 0, list[_Open]()
    for visit in walk(root):
        if visit.is_own:
            _leave_out(visit, rows)
        elif not visit.is_end:
            opened.append(_Open(clock, len(rows.kernels)))
            clock += _add_kernel(visit, rows, clock)
        else:
            _close(visit, rows, opened.pop(), clock)
    return rows


def _leave_out(visit: Visit, rows: Rows) -> None:
    if not visit.is_end:
        rows.own_launches += number_of(visit.node.metrics, "count") or 0
        rows.own_ns += number_of(visit.node.metrics, "time (ns)") or 0


def _add_kernel(visit: Visit, rows: Rows, clock: int) -> int:
    """Add what a node itself ran, and return how long it took."""
    metrics = visit.node.metrics
    duration_ns, launches = number_of(metrics, "time (ns)"), number_of(metrics, "count")
    if duration_ns is None or not launches:
        return 0
    name, device = visit.node.frame.name, number_of(metrics, "device_id")
    rows.ranges.append(Range("runtime", "launches", clock, duration_ns, len(rows.kernels)))
    rows.kernels.append(Row(name, clock, duration_ns, launches, device or 0))
    return duration_ns


def _close(visit: Visit, rows: Rows, opened: _Open, clock: int) -> None:
    """Add the range of a node that called something, and give its rows what it declares."""
    inside = rows.kernels[opened.first_row :]
    _declare(visit.node, rows, inside)
    if not visit.node.children or not inside:
        return
    is_frame = is_python(visit.node.frame.name)
    name = visit.node.frame.name if is_frame else ".".join(visit.scopes)
    kind = "python" if is_frame else "module"
    rows.ranges.append(Range(kind, name, opened.start_ns, clock - opened.start_ns))


def _declare(node: Node, rows: Rows, inside: list[Row]) -> None:
    """Divide a node's declared work over the rows in it of which no inner node declares any."""
    found = {name: number_of(node.metrics, name) for name in (*TYPES, "flops")}
    given = [(name, number) for name, number in found.items() if number]
    if len(given) == 1 and given[0][0] in TYPES:
        width, flops = given[0]
        without = [row for row in inside if row.flops is None]
        for row, part in zip(without, _divided(flops, without), strict=True):
            row.flops, row.type = part, TYPES[width]
    elif given:
        rows.num_untyped += 1
    if num_bytes := number_of(node.metrics, "bytes"):
        without = [row for row in inside if row.bytes is None]
        for row, part in zip(without, _divided(num_bytes, without), strict=True):
            row.bytes = part


def _divided(total: int, rows: list[Row]) -> list[int]:
    """Divide a number by the rows' durations; what rounding leaves is the last one's."""
    time_ns = sum(row.duration_ns for row in rows)
    if not rows:
        return []
    parts = [total * row.duration_ns // max(time_ns, 1) for row in rows]
    return [*parts[:-1], total - sum(parts[:-1])]
