"""Profiles of Proton, Triton's profiler: launches added up by call path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from kprof.collect.readers._columns import as_declared
from kprof.collect.readers._kineto.source import content_of
from kprof.collect.readers._proton.rows import Range, Rows, rows_of
from kprof.collect.readers._proton.timeline import is_timeline, read_timeline
from kprof.collect.readers._proton.tree import MSGPACK_HEAD, RECORD, Devices, read_tree
from kprof.errors import TraceError
from kprof.trace import Gpu, Meta, Trace, empty

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


def _kernels(rows: Rows) -> pd.DataFrame:
    kernels, number = rows.kernels, len(rows.kernels)
    return as_declared(
        "kernels",
        number,
        {
            "name": pd.Categorical([row.name for row in kernels]),
            "activity": pd.Categorical(["kernel"] * number),
            "rank": np.zeros(number, dtype=np.int32),
            "device": np.array([row.device for row in kernels], dtype=np.int32),
            "stream": np.full(number, -1, dtype=np.int64),
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


def _gpus(devices: Devices) -> Iterator[Gpu]:
    """Yield the devices: Proton tells their architecture, not their names."""
    for kind, of_kind in devices.items():
        for index, told in of_kind.items():
            if not index.isdecimal():
                continue
            num_sms = told.get("num_sms")
            name = f"{kind} device of architecture {told.get('arch', 'unknown')}"
            yield Gpu(int(index), name, num_sms if isinstance(num_sms, int) else None)


def _caveats(rows: Rows) -> Iterator[str]:
    yield (
        "Each row adds up all launches of a kernel on one call path: single launches, their order "
        "and what overlapped are not recorded."
    )
    if rows.own_launches:
        yield (
            f"Launches by which Proton asked kernels for their metadata, left out: "
            f"{rows.own_launches:,}, which took {rows.own_ns:,} ns."
        )
    if rows.num_untyped:
        yield (
            "Declared FLOPs of no type, or of several types at once, are left out on "
            f"{rows.num_untyped:,} call paths: declare flops8, flops16, flops32 or flops64."
        )
