"""Neighbours: activities that follow one another on a stream, as patterns of operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kprof.analyze.evidence import Bools, Int64s
from kprof.trace import Trace


@dataclass(frozen=True)
class Groups:
    """Activities in groups: rows of `kernels`, group by group, each in the order of launches."""

    rows: Int64s
    of: Int64s
    """The group that each row is of."""
    number: int

    def have(self, chosen: Bools) -> Bools:
        """Tell which groups have at least one of the chosen rows."""
        return np.bincount(self.of, chosen[self.rows], self.number) > 0

    def take(self, wanted: Bools) -> Groups:
        """Return the wanted groups, numbered anew."""
        number = np.cumsum(wanted) - 1
        kept = wanted[self.of] if len(self.of) else np.zeros(0, dtype=bool)
        return Groups(self.rows[kept], number[self.of[kept]], int(wanted.sum()))

    def largest(self, values: Int64s) -> Int64s:
        """Return the largest of `values`, one for each row, in each group."""
        result = np.zeros(self.number, dtype=np.int64)
        np.maximum.at(result, self.of, values)
        return result


def launch_order(trace: Trace) -> Int64s:
    """Return the activities stream by stream in the order of their starts."""
    kernels = trace.kernels
    start = kernels["start_ns"].to_numpy(np.int64)
    lanes = [kernels[name].to_numpy() for name in ("stream", "device", "rank")]
    if all((lane == lane[0]).all() for lane in lanes if len(lane)):
        return np.asarray(np.argsort(start, kind="stable"), dtype=np.int64)
    return np.asarray(np.lexsort([start, *lanes]), dtype=np.int64)


def with_neighbours(trace: Trace, anchors: Bools, allowed: Bools, reach: tuple[int, int]) -> Groups:
    """Return for each anchor the activities around it: the unbroken run of allowed ones.

    It goes back by at most `reach[0]` activities of the stream and on by at most `reach[1]`, and
    stays within the anchor's module and phase. Nobody belongs to two anchors.
    """
    if not anchors.any():
        return Groups(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    order = launch_order(trace)
    keys = [trace.kernels[name].cat.codes.to_numpy()[order] for name in ("module", "phase")]
    keys.append(trace.kernels["stream"].to_numpy()[order])
    at, is_allowed = np.flatnonzero(anchors[order]), allowed[order]
    places, of = [at], [np.arange(len(at))]
    for ahead, steps in ((-1, reach[0]), (1, reach[1])):
        alive = np.ones(len(at), dtype=bool)
        for step in range(1, steps + 1):
            place = at + ahead * step
            alive &= (place >= 0) & (place < len(order))
            place = place.clip(0, len(order) - 1)
            alive &= is_allowed[place]
            for key in keys:
                alive &= key[place] == key[at]
            places.append(place[alive])
            of.append(np.flatnonzero(alive))
    every, first = np.unique(np.concatenate(places), return_index=True)
    owner = np.concatenate(of)[first]
    by_group = np.argsort(owner, kind="stable")
    return Groups(order[every[by_group]], owner[by_group], len(at))
