"""Profiles of Proton, Triton's profiler: launches added up by call path, or a timeline.

A timeline (data="trace") is a line of Chrome's JSON for each stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from kprof.collect.readers.table_columns import as_declared, places
from kprof.collect.trace_file import content_of
from kprof.errors import TraceError, counted
from kprof.trace import NOT_RECORDED, Caveat, Gpu, Meta, Trace, empty

# For the message about a file that no reader knows.
OPENS = "a profile of Proton: *.hatchet"

RECORD = "record with Proton's hatchet output (data='tree'), or with `kprof run`"
# In what Proton launches itself to ask a kernel for its metadata.
OWN_SCOPE = "__proton_launch_metadata"
MSGPACK_HEAD = b"\x92\x83\xa5frame"
_PYTHON_FRAME = re.compile(r".+:.*@\d+")


class Frame(msgspec.Struct):
    """The name of a node."""

    name: str = ""


class Node(msgspec.Struct):
    """A node as the file has it: a frame, its own metrics, what it called."""

    frame: Frame = msgspec.field(default_factory=Frame)
    metrics: dict[str, object] = {}
    children: list[Node] = []


Devices = dict[str, dict[str, dict[str, object]]]


@dataclass(frozen=True)
class Visit:
    """A node on the way through the tree; `is_end`: everything in it has been visited."""

    node: Node
    scopes: tuple[str, ...]
    """Names of the scopes around it and its own, outermost first; frames of Python left out."""
    is_end: bool
    is_own: bool
    """Whether Proton launched it for itself."""


# Types by the width of the operands that an author declared.
TYPES = {"flops8": "fp8", "flops16": "fp16", "flops32": "fp32", "flops64": "fp64"}


@dataclass
class Row:
    """A kernel of one call path: its launches, added up."""

    name: str
    start_ns: int
    duration_ns: int
    launches: int
    device: int | None
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
    """The content of a profile, its times arranged one after another."""

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


NS_IN_US = 1_000
_HEAD = re.compile(rb'\s*\{[^\[]{0,200}"traceEvents":\s*\[\s*\{\s*"args":\s*\{\s*"call_stack"')


class Arguments(msgspec.Struct):
    """The fields of an event."""

    call_stack: list[str] = []


class Event(msgspec.Struct):
    """A launch, or something within a kernel."""

    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)
    tid: int | str = -1
    args: Arguments = msgspec.field(default_factory=Arguments)


class Line(msgspec.Struct):
    """The content of one line."""

    traceEvents: list[Event] = []  # noqa: N815 - the name in the file
    baseTimeNanoseconds: int | None = None  # noqa: N815


UNTIMED = "Proton adds up the launches of a call path, and keeps no times of their starts"
SUFFIXES = (".hatchet", ".hatchet_msgpack", ".chrome_trace")
HEAD_BYTES = 1 << 12
_TREE = re.compile(rb'\s*\[\s*\{\s*"(?:children|frame|metrics)"')


def knows(path: Path, head: bytes) -> bool:
    """Say whether the file could be a profile: by its suffix, or by what its tree begins with."""
    if path.is_dir():
        return False
    is_tree = _TREE.match(head) is not None or head.startswith(MSGPACK_HEAD)
    return is_tree or is_timeline(head) or path.name.endswith(SUFFIXES)


def is_timeline(head: bytes) -> bool:
    """Tell it from Kineto's: the first event begins with the path of its launch."""
    return _HEAD.match(head) is not None


def read(path: Path) -> Trace:
    """Read a profile; its activities stand one after another, whenever they ran.

    Raises:
        TraceError: the file is damaged, or holds no time of any kernel.
    """
    if _is_timeline(path):
        return read_timeline(path)
    root, devices = read_tree(path)
    rows = rows_of(root)
    if not rows.kernels:
        raise TraceError(
            f"{path.name} is a profile of Proton without the time of any kernel",
            fix=f"samples of program counters and cycles within kernels say no times; {RECORD}",
        )
    meta = Meta(
        source=path.name,
        tool="proton",
        gpus=tuple(_gpus(devices)),
        untimed=UNTIMED,
        counts={
            "events": len(rows.kernels),
            "file_bytes": path.stat().st_size,
            "nn_module_events": sum(one.kind == "module" for one in rows.ranges),
        },
        caveats=tuple(_caveats(rows)),
    )
    return Trace(_kernels(rows), _ranges(rows.ranges), empty("samples"), meta)


def _is_timeline(path: Path) -> bool:
    with content_of(path) as file:
        return is_timeline(file.read(HEAD_BYTES))


def read_timeline(path: Path) -> Trace:
    """Read the launches with their times; their paths have no times, so none are ranges.

    Raises:
        TraceError: the file is damaged, or holds no launch.
    """
    with content_of(path) as file:
        texts = [text for text in file.read().splitlines() if text.strip()]
    try:
        lines = [msgspec.json.decode(text, type=Line) for text in texts]
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{path.name} is no whole trace of Proton: {error}", fix="copy the file again in full"
        ) from error
    events = [event for line in lines for event in line.traceEvents]
    launches = [event for event in events if event.ph == "X" and event.cat == "kernel"]
    if not launches:
        raise TraceError(f"{path.name} is a trace of Proton without any launch", fix=RECORD)
    base = [line.baseTimeNanoseconds for line in lines if line.baseTimeNanoseconds is not None]
    paths = "The call paths of launches are in the file, but no times of theirs: no modules."
    caveats = [Caveat("untimed_paths", paths)]
    if len(events) > len(launches):
        others = f"Events that are no launches, left out: {len(events) - len(launches):,}."
        caveats.append(Caveat("other_events", others))
    meta = Meta(
        source=path.name,
        tool="proton",
        base_time_ns=base[0] if base else None,
        counts={"events": len(events), "file_bytes": path.stat().st_size},
        caveats=tuple(caveats),
    )
    return Trace(_timeline_kernels(launches), empty("ranges"), empty("samples"), meta)


def _timeline_kernels(launches: list[Event]) -> pd.DataFrame:
    number = len(launches)
    times = np.array([[_in_ns(one.ts), _in_ns(one.dur)] for one in launches], dtype=np.int64)
    order = np.argsort(times[:, 0], kind="stable")
    ordered = [launches[row] for row in order.tolist()]
    return as_declared(
        "kernels",
        number,
        {
            "name": pd.Categorical([one.name for one in ordered]),
            "activity": pd.Categorical(["kernel"] * number),
            "rank": np.zeros(number, dtype=np.int32),
            "device": np.full(number, NOT_RECORDED, dtype=np.int32),
            "stream": np.array([_stream(one.tid) for one in ordered], dtype=np.int64),
            "start_ns": times[order, 0],
            "duration_ns": times[order, 1],
        },
    )


def _in_ns(microseconds: Decimal) -> int:
    return round(microseconds * NS_IN_US)


def _stream(thread: int | str) -> int:
    found = re.search(r"\d+", str(thread))
    return int(found[0]) if found else NOT_RECORDED


def read_tree(path: Path) -> tuple[Node, Devices]:
    """Read the tree and the devices of a profile, whether JSON or MessagePack.

    Raises:
        TraceError: the file is damaged, or no profile of Proton.
    """
    with content_of(path) as file:
        content = file.read()
    is_packed = content.startswith(MSGPACK_HEAD)
    decode = msgspec.msgpack.decode if is_packed else msgspec.json.decode
    try:
        parts = decode(content, type=list[msgspec.Raw])
        root = decode(parts[0], type=Node)
        devices = decode(parts[1], type=Devices) if len(parts) > 1 else {}
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise TraceError(
            f"{path.name} is no whole profile of Proton: {error}",
            fix="copy the file again in full, or let the workload end, so that Proton writes all",
        ) from error
    except RecursionError as error:
        raise TraceError(
            f"{path.name}: its call paths are too deep to be read",
            fix='record with proton.start(context="shadow"), whose paths are scopes alone',
        ) from error
    return root, devices


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


def walk(root: Node) -> Iterator[Visit]:
    """Visit every node below the root twice: before what it called, and after."""
    waiting = [Visit(child, (), False, False) for child in reversed(root.children)]
    while waiting:
        visit = waiting.pop()
        if visit.is_end:
            yield visit
            continue
        name = visit.node.frame.name
        own = (*visit.scopes, name) if not is_python(name) else visit.scopes
        entered = Visit(visit.node, own, False, visit.is_own or name == OWN_SCOPE)
        yield entered
        waiting.append(Visit(entered.node, own, True, entered.is_own))
        waiting += [
            Visit(child, own, False, entered.is_own) for child in reversed(visit.node.children)
        ]


def is_python(name: str) -> bool:
    """Tell a frame of Python, `file.py:function@12`, from a scope or a kernel."""
    return _PYTHON_FRAME.fullmatch(name) is not None


def _leave_out(visit: Visit, rows: Rows) -> None:
    if not visit.is_end:
        rows.own_launches += number_of(visit.node.metrics, "count") or 0
        rows.own_ns += number_of(visit.node.metrics, "time (ns)") or 0


def number_of(metrics: Mapping[str, object], name: str) -> int | None:
    """Return a metric as a whole number, by its name in any version; None where there is none."""
    for key, value in metrics.items():
        if _plain(key) != _plain(name):
            continue
        if isinstance(value, str):
            return int(value) if value.isdecimal() else None
        return round(value) if isinstance(value, int | float) else None
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _add_kernel(visit: Visit, rows: Rows, clock: int) -> int:
    """Add what a node itself ran, and return how long it took."""
    metrics = visit.node.metrics
    duration_ns, launches = number_of(metrics, "time (ns)"), number_of(metrics, "count")
    if duration_ns is None or not launches:
        return 0
    name, device = visit.node.frame.name, number_of(metrics, "device_id")
    rows.ranges.append(Range("runtime", "launches", clock, duration_ns, len(rows.kernels)))
    rows.kernels.append(Row(name, clock, duration_ns, launches, device))
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


def _gpus(devices: Devices) -> Iterator[Gpu]:
    """Yield the devices: Proton tells their architecture, not their names."""
    for kind, of_kind in devices.items():
        for index, told in of_kind.items():
            if not index.isdecimal():
                continue
            num_sms = told.get("num_sms")
            name = f"{kind} device of architecture {told.get('arch', 'unknown')}"
            yield Gpu(int(index), name, num_sms if isinstance(num_sms, int) else None)


def _caveats(rows: Rows) -> Iterator[Caveat]:
    yield Caveat(
        "summed_launches",
        "Each row adds up all launches of a kernel on one call path: single launches, their order "
        "and what overlapped are not recorded.",
    )
    if rows.own_launches:
        yield Caveat(
            "metadata_launches",
            f"Launches by which Proton asked kernels for their metadata, left out: "
            f"{rows.own_launches:,}, which took {rows.own_ns:,} ns.",
        )
    if rows.num_untyped:
        yield Caveat(
            "untyped_flops",
            "Declared FLOPs of no type, or of several types at once, are left out on "
            f"{counted(rows.num_untyped, 'call path')}: declare flops8, flops16, "
            "flops32 or flops64.",
        )


def _kernels(rows: Rows) -> pd.DataFrame:
    kernels, number = rows.kernels, len(rows.kernels)
    return as_declared(
        "kernels",
        number,
        {
            "name": pd.Categorical([row.name for row in kernels]),
            "activity": pd.Categorical(["kernel"] * number),
            "rank": np.zeros(number, dtype=np.int32),
            "device": places(row.device for row in kernels).astype(np.int32),
            "stream": np.full(number, NOT_RECORDED, dtype=np.int64),
            "start_ns": np.array([row.start_ns for row in kernels], dtype=np.int64),
            "duration_ns": np.array([row.duration_ns for row in kernels], dtype=np.int64),
            "correlation": pd.array(range(number), dtype="Int64"),
            "launches": pd.array([row.launches for row in kernels], dtype="Int64"),
            "declared_flops": pd.array([row.flops for row in kernels], dtype="Int64"),
            "declared_type": pd.Categorical([row.type for row in kernels]),
            "declared_bytes": pd.array([row.bytes for row in kernels], dtype="Int64"),
        },
    )


def _ranges(ranges: list[Range]) -> pd.DataFrame:
    number = len(ranges)
    return as_declared(
        "ranges",
        number,
        {
            "kind": pd.Categorical([one.kind for one in ranges]),
            "name": pd.Categorical([one.name for one in ranges]),
            "rank": np.zeros(number, dtype=np.int32),
            "thread": np.zeros(number, dtype=np.int64),
            "start_ns": np.array([one.start_ns for one in ranges], dtype=np.int64),
            "duration_ns": np.array([one.duration_ns for one in ranges], dtype=np.int64),
            "correlation": pd.array([one.correlation for one in ranges], dtype="Int64"),
        },
    )
