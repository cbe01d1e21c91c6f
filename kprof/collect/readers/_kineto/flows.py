"""The arrows of a trace (flow events): from a call of the host to what it started on a device."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import msgspec

from kprof.collect.readers._kineto.cuts import BARE_LIST, BLOCK_BYTES, LIST_OF_EVENTS
from kprof.collect.readers._kineto.damage import UNREADABLE
from kprof.collect.readers._kineto.events import MISSING
from kprof.collect.readers._kineto.repair import repaired_parts
from kprof.collect.readers._kineto.times import known_ns

# Forward to backward: an arrow from host to host.
_BETWEEN_OPERATORS = ("fwdbwd", "forward_backward")


class _Flow(msgspec.Struct, gc=False):
    """What is read of an event that may be an arrow's begin or end."""

    ph: str = ""
    cat: str = ""
    id: msgspec.Raw = msgspec.Raw()
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: Decimal | None = None


@dataclass(frozen=True)
class Arrow:
    """An end of an arrow: its id, the track and the time at which it lies."""

    id: bytes
    is_begin: bool
    process: str
    thread: str
    time_ns: int


def arrows_in(text: mmap.mmap) -> list[Arrow]:
    """Read the arrows of a file; for the rare one whose events carry no ids that join."""
    start = BARE_LIST.match(text) or LIST_OF_EVENTS.search(text)
    if start is None:
        return []
    return list(_arrows(text, start.end()))


def _arrows(text: mmap.mmap, begin: int) -> Iterator[Arrow]:
    for part in repaired_parts(text, begin, BLOCK_BYTES):
        try:
            events = msgspec.json.decode(part.text, type=list[_Flow])
        except UNREADABLE:
            continue
        for event in events:
            if event.ph in ("s", "t", "f") and event.cat not in _BETWEEN_OPERATORS:
                (time_ns,) = known_ns([event.ts]).tolist()
                if time_ns != MISSING:
                    is_begin = event.ph == "s"
                    yield Arrow(bytes(event.id), is_begin, str(event.pid), str(event.tid), time_ns)
