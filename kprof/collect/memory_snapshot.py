"""Snapshots of torch's allocator: read without running anything that they hold."""

from __future__ import annotations

import io
import json
import pickle
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from kprof.analyze.memory import (
    Block,
    DeviceHistory,
    Event,
    Frame,
    Note,
    Range,
    find_peak,
)
from kprof.collect.trace_file import content_of
from kprof.errors import TraceError
from kprof.trace import MemoryPeak, Trace

# The file in the folder of a process, and the notes of the recorder beside it.
SNAPSHOT, OWNERS = "memory.pickle", "memory.json"
# The first byte of a pickle since protocol 2, and the protocols that there are.
PICKLE, PROTOCOLS = 0x80, (2, 3, 4, 5)


def is_snapshot(path: Path) -> bool:
    """Tell a pickle by its first bytes; what it holds is known when it is read."""
    try:
        # A pipe would be waited for.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return len(head) == 2 and head[0] == PICKLE and head[1] in PROTOCOLS


# Opcodes of fixed size: lists, dicts, numbers, and pairs of integers. A snapshot has no other
# tuple; the hash of nested ones takes exponential time, or more stack than there is.
_BYTES_OF_LONG = b"|".join(rb"\x%02x.{%d}" % (size, size) for size in range(10))
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:%b))" % _BYTES_OF_LONG
# A frame of the file may begin anywhere.
_FRAME = rb"\x95.{8}"
_FIXED = re.compile(
    rb"(?:h.|\x94|j.{4}|%b(?:(?:%b)?%b(?:%b)?\x86)?|[(}\])euasN\x88\x89]|q.|G.{8}|%b|\x80[\x02-\x05])"
    rb"{0,1000}" % (_INTEGER, _FRAME, _INTEGER, _FRAME, _FRAME),
    re.DOTALL,
)
# Opcodes of texts, and the number of bytes that tell their size.
_TEXTS = {0x8C: 1, ord("X"): 4, 0x8D: 8}
_LONG_PUT = ord("r")


def _require_plain(content: bytes) -> None:
    """Refuse opcodes that no snapshot has.

    Some name code. Others take time or memory out of proportion to the file: large numbers of the
    memo, of which all lower ones take space, and tuples as keys.

    Raises:
        UnpicklingError: it has such opcodes, or no end.
    """
    at = 0
    while content[at : at + 1] != b".":
        if at >= len(content):
            raise pickle.UnpicklingError("it is cut")
        matched = _FIXED.match(content, at)
        width = _TEXTS.get(content[at])
        following = int.from_bytes(content[at + 1 : at + 1 + (width or 4)], "little")
        if matched and matched.end() > at:
            at = matched.end()
        elif width is not None:
            at += 1 + width + following
        elif content[at] == _LONG_PUT and following < len(content):
            at += 5
        else:
            raise pickle.UnpicklingError(f"byte {at} is not plain data")


class _Plain(pickle.Unpickler):
    """Reads plain data; anything that names code is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ANN401 - of any type
        raise pickle.UnpicklingError("it names an object outside of it")


class _FrameOf(msgspec.Struct):
    filename: str = ""
    line: int = 0
    name: str = ""


Unsigned = Annotated[int, msgspec.Meta(ge=0)]


class _BlockOf(msgspec.Struct):
    size: Unsigned
    state: str
    address: int | None = None
    requested_size: Unsigned | None = None
    frames: Any = ()


class _SegmentOf(msgspec.Struct):
    address: int
    total_size: Unsigned
    blocks: list[_BlockOf]
    device: Unsigned = 0


class _EventOf(msgspec.Struct):
    action: str
    addr: int = 0
    size: Unsigned = 0
    time_us: int | None = None
    frames: Any = ()


class _SnapshotOf(msgspec.Struct):
    segments: list[_SegmentOf]
    device_traces: list[list[_EventOf]] = []


# How a damaged pickle may fail, besides by its own error.
DAMAGED = (
    pickle.UnpicklingError,
    msgspec.ValidationError,
    *(EOFError, ValueError, AttributeError, IndexError, KeyError, TypeError, MemoryError),
    *(OverflowError, RecursionError, OSError),
)


def read_snapshot(path: Path) -> tuple[DeviceHistory, ...]:
    """Read what `torch.cuda.memory._dump_snapshot` wrote, for each device that was used.

    Raises:
        TraceError: it is no such file, or it holds anything but plain data.
    """
    try:
        with content_of(path) as file:
            return _histories(file.read())
    except DAMAGED as error:
        raise TraceError(
            f"{path.name} is not a memory snapshot of torch: {str(error) or type(error).__name__}",
            fix="write one with torch.cuda.memory._dump_snapshot, or record with "
            "`kprof run --memory`",
        ) from error


def _histories(content: bytes | memoryview) -> tuple[DeviceHistory, ...]:
    content = bytes(content)
    _require_plain(content)
    plain = _Plain(io.BytesIO(content)).load()
    if _num_entries(plain) > len(content):
        raise pickle.UnpicklingError("it repeats its entries")
    found = msgspec.convert(plain, _SnapshotOf)
    devices = {one.device for one in found.segments}
    devices |= {number for number, events in enumerate(found.device_traces) if events}
    frames = _Frames()
    return tuple(_history(found, device, frames) for device in sorted(devices))


def _num_entries(plain: Any) -> int:  # noqa: ANN401 - any plain data
    """Count blocks and events, where there are any."""
    if not isinstance(plain, dict):
        return 0
    segments, traces = (plain.get(name) or () for name in ("segments", "device_traces"))
    lists = [one.get("blocks") for one in segments if isinstance(one, dict)]
    return sum(len(one) for one in (*lists, *traces) if isinstance(one, list))


class _Frames:
    """Frames of stacks, each list converted once: many events share it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Frame, ...]] = {}

    def __call__(self, frames: object) -> tuple[Frame, ...]:
        # The snapshot keeps the list alive while its id is known here.
        if id(frames) not in self._known:
            told = msgspec.convert(frames, list[_FrameOf])
            self._known[id(frames)] = tuple(
                _frame(one.filename, one.line, one.name) for one in told
            )
        return self._known[id(frames)]


def _history(found: _SnapshotOf, device: int, frames: _Frames) -> DeviceHistory:
    segments = [one for one in found.segments if one.device == device]
    traces = found.device_traces
    events = traces[device] if device < len(traces) else []
    return DeviceHistory(
        device,
        tuple(
            Event(
                one.action,
                one.addr,
                one.size,
                None if one.time_us is None else one.time_us * 1_000,
                frames(one.frames),
            )
            for one in events
        ),
        tuple(block for one in segments for block in _blocks(one, frames)),
        sum(one.total_size for one in segments),
    )


def _blocks(segment: _SegmentOf, frames: _Frames) -> list[Block]:
    """Return the blocks that tensors use; older versions of torch give no addresses."""
    found, address = [], segment.address
    for one in segment.blocks:
        at = address if one.address is None else one.address
        if one.state == "active_allocated":
            size = one.size if one.requested_size is None else one.requested_size
            found.append(Block(at, size, frames(one.frames)))
        address = at + one.size
    return found


@cache
def _frame(filename: str, line: int, name: str) -> Frame:
    """Return one object for each frame: stacks share most of theirs."""
    return Frame(filename, line, name)


class _NoteOf(msgspec.Struct):
    time_ns: int
    addresses: dict[str, list[int]]


class _OwnersOf(msgspec.Struct):
    notes: list[_NoteOf] = []
    devices: dict[str, dict[str, int]] = {}


def add_memory(trace: Trace, part: Path) -> Trace:
    """Add the peaks of memory that a process of a run recorded; `part` is its folder."""
    path, notes = part / SNAPSHOT, part / OWNERS
    if not path.is_file():
        return trace
    owners = _OwnersOf()
    if notes.is_file():
        try:
            owners = msgspec.convert(json.loads(notes.read_bytes()), _OwnersOf)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise TraceError(
                f"{part.name}/{OWNERS} cannot be read: {error}", fix="record the run again"
            ) from error
    told = [Note(one.time_ns, one.addresses) for one in owners.notes]
    ranges = _ranges(trace)
    peaks = []
    for history in read_snapshot(path):
        peak = find_peak(history, told, ranges)
        peaks.append(_with_statistics(peak, owners.devices.get(str(history.device), {}), trace))
    return replace(trace, meta=replace(trace.meta, memory=tuple(peaks)))


def _with_statistics(peak: MemoryPeak, told: dict[str, int], trace: Trace) -> MemoryPeak:
    samples = trace.samples
    of_device = samples[
        ((samples["quantity"] == "allocated_bytes") & (samples["device"] == peak.device)).to_numpy(
            bool
        )
    ]
    highest = int(of_device["value"].max()) if len(of_device) else None
    return replace(
        peak,
        allocated_bytes=highest,
        capacity_bytes=told.get("capacity_bytes"),
        highest_requested_bytes=told.get("requested_bytes.peak"),
        highest_allocated_bytes=told.get("allocated_bytes.peak"),
    )


def _ranges(trace: Trace) -> list[Range]:
    """Return phases and modules of the host, in wall time; none where that is unknown."""
    base_ns = trace.meta.base_time_ns
    if base_ns is None:
        return []
    ranges = trace.ranges
    chosen = ranges[ranges["kind"].isin(["phase", "module"]).to_numpy(bool)]
    starts = chosen["start_ns"] + base_ns
    columns = (chosen["kind"], chosen["name"], starts, starts + chosen["duration_ns"])
    return [Range(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
