"""Proton's other output, data="trace": a line of Chrome's JSON for each stream."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from kprof.collect.readers._columns import as_declared
from kprof.collect.readers._kineto.source import content_of
from kprof.collect.readers._proton.tree import RECORD
from kprof.errors import TraceError
from kprof.trace import Meta, Trace, empty

NS_IN_US = 1_000
_HEAD = re.compile(rb'\s*\{[^\[]{0,200}"traceEvents":\s*\[\s*\{\s*"args":\s*\{\s*"call_stack"')


class Arguments(msgspec.Struct):
    """What an event says of itself."""

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
    """What one line holds."""

    traceEvents: list[Event] = []  # noqa: N815 - the name in the file
    baseTimeNanoseconds: int | None = None  # noqa: N815


def is_timeline(head: bytes) -> bool:
    """Tell it from Kineto's: the first event begins with the path of its launch."""
    return _HEAD.match(head) is not None


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
    caveats = ["The call paths of launches are in the file, but no times of theirs: no modules."]
    if len(events) > len(launches):
        caveats.append(f"Events that are no launches, left out: {len(events) - len(launches):,}.")
    meta = Meta(
        source=path.name,
        tool="proton",
        base_time_ns=base[0] if base else None,
        counts={"events": len(events), "file_bytes": path.stat().st_size},
        caveats=tuple(caveats),
    )
    return Trace(_kernels(launches), empty("ranges"), empty("samples"), meta)


def _kernels(launches: list[Event]) -> pd.DataFrame:
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
            "device": np.zeros(number, dtype=np.int32),
            "stream": np.array([_stream(one.tid) for one in ordered], dtype=np.int64),
            "start_ns": times[order, 0],
            "duration_ns": times[order, 1],
        },
    )


def _in_ns(microseconds: Decimal) -> int:
    return round(microseconds * NS_IN_US)


def _stream(thread: int | str) -> int:
    found = re.search(r"\d+", str(thread))
    return int(found[0]) if found else -1
