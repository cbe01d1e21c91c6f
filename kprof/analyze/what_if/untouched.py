"""The host's time that recording leaves as it is: it stages bytes, allocates, loads or sleeps.

A recorder lengthens operators, calls and what Python does between them. Bytes that the host itself
moves for a copy, memory that the driver maps, and a worker that is not ready take what they take.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import Host, find_host
from kprof.analyze.intervals import Intervals, disjoint, length_in, paint
from kprof.analyze.what_if.host_program import HostProgram
from kprof.analyze.what_if.replay import HOST, Replay
from kprof.trace import Trace

# Calls that take longer for what they do themselves. Those that wait for the device have no time of
# their own in a replay.
OF_THEIR_OWN = (causes.PAGEABLE_COPY, causes.ALLOCATOR)


def with_untouched(replay: Replay, trace: Trace) -> Replay:
    """Return the replay that knows what is kept of the host's time where recording is taken off."""
    edges, program = replay.edges, replay.program
    kept_ns, unions = np.zeros_like(edges.lag_ns), _untouched(program, trace)
    is_own = (edges.kind == HOST) & (edges.lag_ns > 0)
    for one, union in unions.items():
        at = np.flatnonzero(is_own & (program.program[np.where(is_own, edges.target, 0)] == one))
        since, until = (program.time_ns[node[at]] for node in (edges.source, edges.target))
        kept_ns[at] = np.minimum(length_in(union, since, until), edges.lag_ns[at])
    return replace(replay, edges=replace(edges, kept_ns=kept_ns), untouched=unions)


def _untouched(program: HostProgram, trace: Trace) -> dict[int, Intervals]:
    """Return for every program of the host when it did what no recorder lengthens.

    That is in such calls, and in loads and sleep while no operator and no call is open.
    """
    host = find_host(trace)
    of_range = program.of_ranges(trace)
    idle = np.concatenate([host.rows["loaded"], host.rows["waited"]])
    is_recorded = trace.ranges["kind"].isin(["op", "runtime"]).to_numpy(bool)
    # Some recorders write loads as operators.
    layers = (
        idle,
        np.setdiff1d(np.flatnonzero(is_recorded), idle),
        host.blocking.index[host.blocking.isin(OF_THEIR_OWN)].to_numpy(np.int64),
    )
    return {
        one: _topmost([_union(host, rows[of_range[rows] == one]) for rows in layers], {0, 2})
        for one in np.unique(program.program).tolist()
    }


def _union(host: Host, rows: np.ndarray) -> Intervals:
    return disjoint(Intervals(host.start[rows], host.end[rows], rows))


def _topmost(layers: list[Intervals], wanted: set[int]) -> Intervals:
    """Return where the topmost of the layers is one of those that are wanted."""
    painting = paint(layers)
    at = np.flatnonzero(np.isin(painting.layer, list(wanted)))
    return Intervals(painting.edge[:-1][at], painting.edge[1:][at], painting.row[at])
