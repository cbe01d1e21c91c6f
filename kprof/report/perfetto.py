"""A trace as a file for Perfetto: its own protobuf, or the JSON of Chrome's trace viewer.

Message fields are numbered as in Perfetto's public schema (protos/perfetto/trace of v59:
trace.proto, track_event/*.proto, interned_data/interned_data.proto).
"""

from __future__ import annotations

import gzip
import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import step_rows
from kprof.analyze.lanes import queue_name
from kprof.errors import KprofError
from kprof.findings import Finding
from kprof.report.redaction import without_secrets
from kprof.report.section import displayable
from kprof.report.units import format_range, format_time
from kprof.trace import NOT_RECORDED, Table, Trace

Argument = tuple[str, "str | int"]


class Slice(NamedTuple):
    """A named piece of a track, in ns since the begin of the trace."""

    start_ns: int
    end_ns: int
    name: str
    category: str = ""
    """The bound of a kernel, which also decides its colour; the kind of another slice."""
    arguments: tuple[Argument, ...] = ()
    flows: tuple[int, ...] = ()
    """Slices of one flow are linked."""


@dataclass
class Track:
    """Slices, or values of a counter, under a name.

    A track of a process holds the others. `lanes` never overlap: each is drawn as one row, or as
    nested ones.
    """

    name: str
    lanes: list[list[Slice]] = field(default_factory=list)
    values: list[tuple[int, float]] = field(default_factory=list)
    unit: str = ""
    tracks: list[Track] = field(default_factory=list)


ANOTHER = "name another file with --perfetto"


def write_perfetto(trace: Trace, path: Path, *, force: bool = False) -> None:
    """Write a trace for Perfetto: as JSON where the name has `.json`, packed where it has `.gz`.

    Raises:
        KprofError: the trace has no timeline, the file exists and `force` is not given, or it
            cannot be written.
    """
    require_free(path, force=force)
    if not trace.has_timeline:
        raise KprofError(
            f"{trace.meta.source} has no timeline to export: {trace.meta.untimed}",
            fix="record it with `kprof run`",
        )
    is_json = ".json" in path.suffixes
    encode = _as_json if is_json else _as_protobuf
    partial = path.with_name(path.name + ".partial")
    try:
        with _opened(partial, is_packed=path.suffix == ".gz") as file:
            for piece in encode(tracks_of(trace)):
                file.write(piece)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix=ANOTHER) from error


def require_free(path: Path, *, force: bool) -> None:
    """Refuse a folder, and a file that exists already unless `force`."""
    if path.is_dir():
        raise KprofError(f"{path} is a folder", fix=ANOTHER)
    if path.exists() and not force:
        raise KprofError(f"{path} exists already", fix=f"{ANOTHER}, or pass --force")


@contextmanager
def _opened(path: Path, *, is_packed: bool) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if not is_packed:
            yield file
            return
        # A time or a name inside the gzip header would make two equal files differ.
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            yield packed  # type: ignore[misc]


def tracks_of(trace: Trace) -> list[Track]:
    """Return the findings, then for every rank steps, host ranges, streams, idle time, counters.

    All activities and all pieces of idle time are in it. Activities that overlap on a stream are in
    several lanes.
    """
    begin_ns, end_ns = _window(trace)
    flows = _flows(trace.diagnosis.findings if trace.diagnosis else ())
    found = [_findings(trace, begin_ns, end_ns, flows)] if trace.diagnosis else []
    ranks = sorted({*trace.kernels["rank"].unique(), *trace.ranges["rank"].unique()})
    for rank in map(int, ranks):
        process = Track(f"rank {rank}")
        process.tracks += _steps(trace, rank, begin_ns)
        process.tracks += _host(trace, rank, begin_ns, flows)
        process.tracks += _device(trace, rank, begin_ns, flows)
        process.tracks += _counters(trace, rank, begin_ns)
        found.append(process)
    if machine := _counters(trace, NOT_RECORDED, begin_ns):
        found.append(Track("machine", tracks=machine))
    return [process for process in found if process.tracks]


def _window(trace: Trace) -> tuple[int, int]:
    """Return the earliest time of the trace, from which the file counts, and the latest."""
    tables = [one for one in (trace.kernels, trace.ranges, trace.idle) if len(one)]
    begins = [int(one["start_ns"].min()) for one in tables]
    ends = [int((one["start_ns"] + one["duration_ns"]).max()) for one in tables]
    if len(trace.samples):
        begins.append(int(trace.samples["time_ns"].min()))
    return min(begins, default=0), max(ends, default=0)


Place = tuple[Table, int]
"""A row of a table."""
Flows = dict[Place, list[tuple[int, int]]]
"""For each row that proves findings their positions, each with the number of a flow."""


def _flows(findings: Sequence[Finding]) -> Flows:
    flows: Flows = defaultdict(list)
    number = 0
    for position, finding in enumerate(findings):
        for place in _proofs(finding):
            number += 1
            flows[place].append((position, number))
    return flows


def _proofs(finding: Finding) -> Iterator[Place]:
    yield from (("kernels", row) for row in finding.rows)
    yield from (("idle", row) for row in finding.idle_rows)
    yield from (("ranges", row) for row in finding.range_rows)


def _numbers(flows: Flows, place: Place) -> tuple[int, ...]:
    return tuple(number for _, number in flows.get(place, ()))


def _findings(trace: Trace, begin_ns: int, end_ns: int, flows: Flows) -> Track:
    """Return a track of every finding: a slice over each row that proves it, linked to that.

    A finding without such rows is a slice over the whole trace.
    """
    assert trace.diagnosis is not None
    proofs: dict[int, list[Slice]] = defaultdict(list)
    told = [_told(one) for one in trace.diagnosis.findings]
    tables = {table for table, _ in flows}
    times = {table: _times_of(trace, table) for table in tables}
    for (table, row), found in flows.items():
        start_ns, duration_ns = times[table][row].tolist()
        start_ns -= begin_ns
        for position, number in found:
            arguments = (*told[position], (f"{table} row", row))
            rule = trace.diagnosis.findings[position].rule
            proofs[position].append(
                Slice(start_ns, start_ns + duration_ns, rule, "finding", arguments, (number,))
            )
    tracks = []
    for position, one in enumerate(trace.diagnosis.findings):
        whole = Slice(0, end_ns - begin_ns, one.rule, "finding", told[position])
        lanes = lanes_of(proofs[position] or [whole], nest=False)
        tracks.append(Track(f"{position + 1}. {one.rule}", lanes))
    return Track("Findings", tracks=tracks)


def _times_of(trace: Trace, table: Table) -> np.ndarray:
    times: np.ndarray = getattr(trace, table)[["start_ns", "duration_ns"]].to_numpy(np.int64)
    return times


def _told(finding: Finding) -> tuple[Argument, ...]:
    saving = finding.saving
    told: list[Argument] = [("claim", finding.claim), ("confidence", finding.confidence)]
    if saving is not None and saving.low_ns is not None and saving.high_ns is not None:
        ends = format_time(saving.low_ns), format_time(saving.high_ns)
        told.append(("saving", format_range(*ends)))
    told.append(("read", f"kprof playbook {finding.playbook}"))
    told += [("prove", finding.command)] if finding.command else []
    return tuple(told)


def _steps(trace: Trace, rank: int, begin_ns: int) -> list[Track]:
    rows = step_rows(trace.ranges)
    rows = rows[trace.ranges["rank"].to_numpy()[rows] == rank]
    slices = [one._replace(name=f"step {one.name}") for one in _ranges(trace, rows, begin_ns, {})]
    return [Track("steps", lanes_of(slices, nest=True))] if slices else []


HOST_KINDS = {"phase": "phases", "module": "modules", "range": "ranges"}


def _host(trace: Trace, rank: int, begin_ns: int, flows: Flows) -> list[Track]:
    """Return for each thread its phases, its modules and the ranges that were named."""
    ranges = trace.ranges
    is_here = (ranges["rank"] == rank).to_numpy(bool)
    thread = ranges["thread"].to_numpy()
    tracks = []
    for kind, name in HOST_KINDS.items():
        is_kind = is_here & (ranges["kind"] == kind).to_numpy(bool)
        for one in np.unique(thread[is_kind]).tolist():
            rows = np.flatnonzero(is_kind & (thread == one))
            slices = _ranges(trace, rows, begin_ns, flows)
            tracks.append(Track(f"{name}, thread {one}", lanes_of(slices, nest=True)))
    return tracks


def _ranges(trace: Trace, rows: np.ndarray, begin_ns: int, flows: Flows) -> list[Slice]:
    chosen = trace.ranges.iloc[rows]
    starts = (chosen["start_ns"] - begin_ns).tolist()
    columns = (chosen["duration_ns"], chosen["name"].astype(str), chosen["kind"].astype(str))
    return [
        Slice(start, start + took, name, kind, (("row", row),), _numbers(flows, ("ranges", row)))
        for row, start, took, name, kind in zip(
            rows.tolist(), starts, *(column.tolist() for column in columns), strict=True
        )
    ]


# Arguments of an activity, as the columns of `kernels` are called.
TEXTS = ("kind", "dtype", "op", "module", "phase", "range", "bucket", "grid", "block")
NUMBERS = ("step", "limit_ns", "flops", "bytes", "copied_bytes", "launches")
UNKNOWN_BOUND = "bound unknown"


def _device(trace: Trace, rank: int, begin_ns: int, flows: Flows) -> list[Track]:
    """Return a track of every stream, and one of every device's idle time below them."""
    kernels, idle = trace.kernels, trace.idle
    tracks = []
    is_here = (kernels["rank"] == rank).to_numpy(bool)
    idles_here = (idle["rank"] == rank).to_numpy(bool)
    devices = sorted({*kernels["device"][is_here], *idle["device"][idles_here]})
    for device in map(int, devices):
        is_on = is_here & (kernels["device"] == device).to_numpy(bool)
        stream = kernels["stream"].to_numpy()
        for one in np.unique(stream[is_on]).tolist():
            slices = _activities(trace, np.flatnonzero(is_on & (stream == one)), begin_ns, flows)
            name = f"thread {one}" if trace.is_host_only else queue_name(device, one)
            tracks.append(Track(name, lanes_of(slices, nest=False)))
        rows = np.flatnonzero(idles_here & (idle["device"] == device).to_numpy(bool))
        if len(rows):
            slices = _pieces(trace, rows, begin_ns, flows)
            name = f"{queue_name(device, NOT_RECORDED)} idle"
            tracks.append(Track(name, lanes_of(slices, nest=False)))
    return tracks


def _activities(trace: Trace, rows: np.ndarray, begin_ns: int, flows: Flows) -> list[Slice]:
    chosen = trace.kernels.iloc[rows]
    arguments = _arguments(chosen, TEXTS, NUMBERS)
    bounds = chosen["bound"].astype(object).fillna(UNKNOWN_BOUND).tolist()
    starts, took = (chosen["start_ns"] - begin_ns).tolist(), chosen["duration_ns"].tolist()
    names = chosen["name"].astype(str).tolist()
    return [
        Slice(
            starts[i],
            starts[i] + took[i],
            names[i],
            bounds[i],
            (("row", row), *arguments[i]),
            _numbers(flows, ("kernels", row)),
        )
        for i, row in enumerate(rows.tolist())
    ]


def _pieces(trace: Trace, rows: np.ndarray, begin_ns: int, flows: Flows) -> list[Slice]:
    chosen = trace.idle.iloc[rows]
    arguments = _arguments(chosen, ("place", "module", "line", "edge"), ("recoverable_ns",))
    starts, took = (chosen["start_ns"] - begin_ns).tolist(), chosen["duration_ns"].tolist()
    causes = chosen["cause"].astype(object).fillna("cause unknown").tolist()
    return [
        Slice(
            starts[i],
            starts[i] + took[i],
            str(causes[i]),
            "idle",
            (("row", row), *arguments[i]),
            _numbers(flows, ("idle", row)),
        )
        for i, row in enumerate(rows.tolist())
    ]


def _arguments(
    chosen: pd.DataFrame, texts: Sequence[str], numbers: Sequence[str]
) -> list[tuple[Argument, ...]]:
    """Return the known values of each row, by the names of the columns."""
    columns: list[tuple[str, list[object]]] = []
    for name in (*texts, *numbers):
        if name in chosen:
            column = chosen[name].astype(object)
            columns.append((name, column.where(chosen[name].notna(), None).tolist()))
    return [
        tuple(
            (name, values[i] if isinstance(values[i], int) else str(values[i]))  # type: ignore[misc]
            for name, values in columns
            if values[i] is not None
        )
        for i in range(len(chosen))
    ]


UNITS = {"w": "W", "mj": "mJ", "mhz": "MHz", "c": "°C", "percent": "%", "bytes": "B"}


def _counters(trace: Trace, rank: int, begin_ns: int) -> list[Track]:
    """Return a track of every sampled quantity; missing readings are left out."""
    samples = trace.samples
    mine = samples[((samples["rank"] == rank) & np.isfinite(samples["value"])).to_numpy(bool)]
    tracks = []
    groups = mine.groupby(["device", "source", "quantity"], observed=True, sort=True)
    for (device, source, quantity), readings in groups:
        readings = readings.sort_values("time_ns", kind="stable")
        times = (readings["time_ns"] - begin_ns).tolist()
        values = list(zip(times, readings["value"].tolist(), strict=True))
        place = "" if device == NOT_RECORDED else f"GPU {device} "
        unit = UNITS.get(str(quantity).rpartition("_")[2], "")
        tracks.append(Track(f"{place}{quantity} ({source})", values=values, unit=unit))
    return tracks


def lanes_of(slices: Iterable[Slice], *, nest: bool) -> list[list[Slice]]:
    """Distribute slices among as few lanes as it takes; none overlap in one, unless they nest.

    In a lane, slices are in the order of their starts, the outer before the inner.
    """
    lanes: list[list[Slice]] = []
    still_open: list[list[int]] = []
    sign = -1 if nest else 1
    for one in sorted(slices, key=lambda one: (one.start_ns, sign * one.end_ns)):
        free = (i for i, ends in enumerate(still_open) if _fits(one, ends, nest=nest))
        place = next(free, len(lanes))
        if place == len(lanes):
            lanes.append([])
            still_open.append([])
        lanes[place].append(one)
        still_open[place].append(one.end_ns)
    return lanes


def _fits(one: Slice, ends: list[int], *, nest: bool) -> bool:
    """Tell whether a slice fits into a lane with these ends; those in the past are removed."""
    while ends and ends[-1] <= one.start_ns:
        ends.pop()
    return not ends or (nest and ends[-1] >= one.end_ns)


# Protobuf: a field is its number and wire type, then the value.
VARINT, FIXED64, BYTES = 0, 1, 2


def _long_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


# Most numbers are small: lengths, and numbers of fields and texts.
SHORT_VARINTS = tuple(map(_long_varint, range(1 << 14)))


def _varint(value: int) -> bytes:
    return SHORT_VARINTS[value] if value < len(SHORT_VARINTS) else _long_varint(value)


@cache
def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _int(number: int, value: int) -> bytes:
    return _tag(number, VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _bytes(number: int, value: bytes) -> bytes:
    return _tag(number, BYTES) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, _shown(value).encode())


def _fixed64(number: int, value: int) -> bytes:
    return _tag(number, FIXED64) + struct.pack("<Q", value)


def _double(number: int, value: float) -> bytes:
    return _tag(number, FIXED64) + struct.pack("<d", value)


@cache
def _shown(text: str) -> str:
    return displayable(without_secrets(text))


# Fields of TracePacket, TrackDescriptor, TrackEvent, DebugAnnotation and InternedData.
PACKET = 1
TIMESTAMP, SEQUENCE, INTERNED, FLAGS, EVENT, DESCRIPTOR = 8, 10, 12, 13, 11, 60
CLEARED, NEEDS_STATE = 1, 2
UUID, NAME, PROCESS, PARENT, COUNTER, ORDERING, RANK = 1, 2, 3, 5, 8, 11, 12
EXPLICIT = 3
TYPE, TRACK, CATEGORY_ID, NAME_ID, ANNOTATION = 9, 11, 3, 10, 4
DOUBLE_VALUE, FLOW, COLOUR = 44, 47, 52
BEGIN, END, VALUE = 1, 2, 4
KEY_ID, INT_VALUE, TEXT_ID = 1, 4, 17
# In InternedData: names of categories, events and annotations, and texts of annotations.
CATEGORIES, NAMES, KEYS, STRINGS = 1, 2, 3, 29


class _Interned:
    """Texts that are written once, and named by numbers from then on."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], int] = {}
        self._new: list[bytes] = []
        self.annotations: dict[Argument, bytes] = {}
        """Arguments with texts, as they were written before."""

    def __call__(self, table: int, text: str) -> int:
        """Return the number of `text` in a table of InternedData."""
        number = self._known.get((table, text))
        if number is None:
            number = self._known[table, text] = len(self._known) + 1
            # EventCategory, EventName, DebugAnnotationName and InternedString: iid, then the text.
            self._new.append(_bytes(table, _int(1, number) + _text(2, text)))
        return number

    def new(self) -> bytes:
        """Return the field that introduces what was not written yet."""
        written, self._new = b"".join(self._new), []
        return _bytes(INTERNED, written) if written else b""


def _as_protobuf(processes: Sequence[Track]) -> Iterator[bytes]:
    """Yield the file piece by piece: descriptors of all tracks, then their events."""
    sequence = _int(SEQUENCE, 1)
    yield _bytes(PACKET, sequence + _int(FLAGS, CLEARED))
    head = sequence + _int(FLAGS, NEEDS_STATE)
    interned = _Interned()
    uuid = 0

    def described(*fields: bytes) -> bytes:
        return _bytes(PACKET, sequence + _bytes(DESCRIPTOR, b"".join(fields)))

    for number, process in enumerate(processes, 1):
        uuid += 1
        parent = uuid
        of_process = _bytes(PROCESS, _int(1, number) + _text(6, process.name))
        yield described(_int(UUID, parent), of_process, _int(ORDERING, EXPLICIT))
        for rank, track in enumerate(process.tracks):
            common = _int(PARENT, parent) + _text(NAME, track.name) + _int(RANK, rank)
            # Tracks of one name below one parent are drawn as one.
            for lane in track.lanes:
                uuid += 1
                yield described(_int(UUID, uuid), common)
                yield from _events(lane, uuid, head, interned)
            if track.values:
                uuid += 1
                yield described(_int(UUID, uuid), common, _bytes(COUNTER, _text(6, track.unit)))
                of_track = _int(TYPE, VALUE) + _int(TRACK, uuid)
                for time_ns, value in track.values:
                    event = _bytes(EVENT, of_track + _double(DOUBLE_VALUE, value))
                    yield _bytes(PACKET, _int(TIMESTAMP, time_ns) + head + event)


def _events(lane: list[Slice], uuid: int, head: bytes, interned: _Interned) -> Iterator[bytes]:
    """Yield begin and end of every slice of a lane, in the order of time."""
    track = _int(TRACK, uuid)
    begin, end = _int(TYPE, BEGIN) + track, _bytes(EVENT, _int(TYPE, END) + track)
    ends: list[int] = []

    def ended(until_ns: float) -> Iterator[bytes]:
        while ends and ends[-1] <= until_ns:
            yield _bytes(PACKET, _int(TIMESTAMP, ends.pop()) + head + end)

    for one in lane:
        yield from ended(one.start_ns)
        event = begin + _int(NAME_ID, interned(NAMES, one.name))
        if one.category:
            number = interned(CATEGORIES, one.category)
            event += _int(CATEGORY_ID, number) + _int(COLOUR, number)
        event += b"".join(_annotation(argument, interned) for argument in one.arguments)
        event += b"".join(_fixed64(FLOW, flow) for flow in one.flows)
        content = _int(TIMESTAMP, one.start_ns) + head + _bytes(EVENT, event)
        yield _bytes(PACKET, content + interned.new())
        ends.append(one.end_ns)
    yield from ended(float("inf"))


def _annotation(argument: Argument, interned: _Interned) -> bytes:
    name, value = argument
    if isinstance(value, int):
        key = _int(KEY_ID, interned(KEYS, name))
        return _bytes(ANNOTATION, key + _int(INT_VALUE, value))
    known = interned.annotations.get(argument)
    if known is None:
        key = _int(KEY_ID, interned(KEYS, name))
        known = _bytes(ANNOTATION, key + _int(TEXT_ID, interned(STRINGS, value)))
        interned.annotations[argument] = known
    return known


def _as_json(processes: Sequence[Track]) -> Iterator[bytes]:
    """Yield the file piece by piece: an object with the list of events."""
    yield b'{"displayTimeUnit":"ns","traceEvents":['
    separator = b"\n"
    for pid, process in enumerate(processes, 1):
        for event in _events_in_json(process, pid):
            yield separator + event
            separator = b",\n"
    yield b"\n]}\n"


def _events_in_json(process: Track, pid: int) -> Iterator[bytes]:
    yield _encoded(ph="M", name="process_name", pid=pid, args={"name": process.name})
    yield _encoded(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
    tid = 0
    for track in process.tracks:
        for lane in track.lanes:
            tid += 1
            here = {"pid": pid, "tid": tid}
            yield _encoded(ph="M", name="thread_name", **here, args={"name": track.name})
            yield _encoded(ph="M", name="thread_sort_index", **here, args={"sort_index": tid})
            for one in lane:
                yield from _slice_in_json(one, here)
        for time_ns, value in track.values:
            yield _encoded(time_ns, ph="C", name=track.name, pid=pid, args={"value": value})


def _slice_in_json(one: Slice, here: dict[str, int]) -> Iterator[bytes]:
    took_ns = one.end_ns - one.start_ns
    named = {"name": one.name, "cat": one.category, **here}
    yield _encoded(one.start_ns, took_ns, ph="X", **named, args=dict(one.arguments))
    is_finding = one.category == "finding"
    for flow in one.flows:
        yield _encoded(
            one.start_ns, ph="s" if is_finding else "f", bp="e", id=flow, cat="flow", name="proof",
            **here,
        )  # fmt: skip


def _encoded(time_ns: int | None = None, took_ns: int | None = None, **event: object) -> bytes:
    """Return an event as JSON with its times in exact microseconds, which a float would round."""
    text = json.dumps(_clean(event), separators=(",", ":"), allow_nan=False)
    for key, ns in (("dur", took_ns), ("ts", time_ns)):
        if ns is not None:
            text = f'{{"{key}":{ns // 1000}.{ns % 1000:03d},{text[1:]}'
    return text.encode("ascii")


def _clean(value: object) -> object:
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, dict):
        return {key: _clean(one) for key, one in value.items()}
    return value
