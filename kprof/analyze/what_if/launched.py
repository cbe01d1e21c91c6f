"""The activities of the devices, and what came before each: its launch, its stream, its graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kprof.analyze.intervals import NOTHING
from kprof.analyze.what_if.host_program import HostProgram
from kprof.trace import Trace


@dataclass(frozen=True)
class Activities:
    """The rows of `kernels`, and what came before each of them."""

    start: np.ndarray
    end: np.ndarray
    rank: np.ndarray
    call: np.ndarray
    """Row of the launching call in `ranges`, or `NOTHING`."""
    point: np.ndarray
    """Point of the program at which that call begins, or `NOTHING`."""
    is_first: np.ndarray
    """Whether it is the first of its call; others follow within the call's graph."""
    is_alone: np.ndarray
    """Whether its call launched nothing else: a graph's launch takes longer."""
    before: np.ndarray
    """The activity before it on its stream, or `NOTHING`."""
    lane: np.ndarray
    """Number of its stream, over all devices and ranks."""
    kind: np.ndarray
    """Number of the sort of activity: kernel, memcpy, …"""


def find_activities(trace: Trace, program: HostProgram) -> Activities:
    """Find what came before each row of `kernels` of an attributed trace."""
    kernels = trace.kernels
    start = kernels["start_ns"].to_numpy(np.int64)
    call = kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING)
    begin_of = np.append(program.begin_of(len(trace.ranges)), NOTHING)
    order = np.lexsort([start, call])
    is_first = np.zeros(len(call), dtype=bool)
    is_first[order] = np.append(True, np.diff(call[order]) != 0)[: len(call)]
    lane = kernels.groupby(["rank", "device", "stream"], sort=True).ngroup().to_numpy(np.int64)
    order = np.lexsort([start, lane])
    before = np.full(len(call), NOTHING, dtype=np.int64)
    follows = np.flatnonzero(np.diff(lane[order]) == 0)
    before[order[follows + 1]] = order[follows]
    return Activities(
        start,
        start + kernels["duration_ns"].to_numpy(np.int64),
        kernels["rank"].to_numpy(np.int64),
        call,
        begin_of[call],
        is_first & (call != NOTHING),
        np.bincount(call + 1, minlength=1)[call + 1] == 1,
        before,
        lane,
        kernels["activity"].cat.codes.to_numpy(np.int64),
    )
