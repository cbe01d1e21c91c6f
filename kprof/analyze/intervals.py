"""Intervals of time as arrays: their union, painted layers, cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Moments before and after every recording; half of an int64, so that differences never overflow.
FIRST_NS, LAST_NS = -(2**62), 2**62
NOTHING = -1


@dataclass(frozen=True)
class Intervals:
    """Intervals [start, end), each with a row of the table that it comes from."""

    start: np.ndarray
    end: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: np.ndarray) -> Intervals:
        """Return the chosen ones, by position or by a mask."""
        return Intervals(self.start[chosen], self.end[chosen], self.row[chosen])


def disjoint(intervals: Intervals) -> Intervals:
    """Return the union as intervals that never overlap, in order.

    Where several cover a moment, it belongs to the one that started first.
    """
    if not len(intervals):
        return intervals
    order = _longest_first(intervals.start, intervals.end)
    start, end, row = intervals.start[order], intervals.end[order], intervals.row[order]
    covered_to = np.maximum.accumulate(end)
    begin = np.maximum(start, np.concatenate([start[:1], covered_to[:-1]]))
    keep = end > begin
    return Intervals(begin[keep], end[keep], row[keep])


def _longest_first(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the order of intervals by start, of equal ones the longest first.

    Tables are nearly in order of time, which a stable sort by one key makes use of. Few intervals
    begin at one moment: only these are put in order by their ends as well.
    """
    order = np.argsort(start, kind="stable")
    same = start[order[1:]] == start[order[:-1]]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    at = order[tied]
    order[tied] = at[np.lexsort([-end[at], start[at]])]
    return np.asarray(order)


def either(one: Intervals, other: Intervals) -> Intervals:
    """Return the union of two unions."""
    start, end, row = (
        np.concatenate(pair)
        for pair in ((one.start, other.start), (one.end, other.end), (one.row, other.row))
    )
    return disjoint(Intervals(start, end, row))


def length_before(union: Intervals, moment: np.ndarray) -> np.ndarray:
    """Return how much of a union lies before each moment, in ns."""
    if not len(union):
        return np.zeros(len(moment), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(union.end - union.start)])
    at = np.searchsorted(union.start, moment, side="right") - 1
    inside = np.clip(moment - union.start[at], 0, (union.end - union.start)[at])
    return np.where(at < 0, 0, before[np.maximum(at, 0)] + inside)


def length_in(union: Intervals, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Return how much of a union lies between each two moments, in ns."""
    return np.asarray(length_before(union, until) - length_before(union, since))


@dataclass(frozen=True)
class Cuts:
    """Parts of intervals, in order: `of` is the position of the interval, `segment` the paint's."""

    of: np.ndarray
    segment: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Painting:
    """All of time in segments, one after another; `layer`: the topmost there, or `NOTHING`."""

    edge: np.ndarray
    """Where each segment begins, and the end of the last."""
    layer: np.ndarray
    row: np.ndarray

    def lengths(self, cuts: Cuts) -> np.ndarray:
        """Return how long each cut's segment is; that of the cut where the paint has no edge."""
        is_open = np.isin(cuts.segment, [0, len(self.layer) - 1])
        own = np.diff(self.edge)[cuts.segment]
        return np.asarray(np.where(is_open, cuts.end - cuts.start, own))


def distinct(moments: np.ndarray) -> np.ndarray:
    """Return the distinct moments in order.

    `np.unique` hashes integers first, which takes longer than to sort them where most differ.
    """
    in_order = np.sort(moments)
    is_new = np.append(True, in_order[1:] != in_order[:-1])[: len(in_order)]
    return np.asarray(in_order[is_new])


def paint(layers: list[Intervals]) -> Painting:
    """Lay unions over one another, later ones over earlier ones."""
    edges = [np.array([FIRST_NS, LAST_NS], dtype=np.int64)]
    edge = distinct(np.concatenate([*edges, *(part for u in layers for part in (u.start, u.end))]))
    layer = np.full(len(edge) - 1, NOTHING, dtype=np.int8)
    row = np.full(len(edge) - 1, NOTHING, dtype=np.int64)
    for number, union in enumerate(layers):
        if len(union):
            at = np.searchsorted(union.start, edge[:-1], side="right") - 1
            inside = (at >= 0) & (edge[:-1] < union.end[at])
            layer[inside], row[inside] = number, union.row[at[inside]]
    return Painting(edge, layer, row)


def cut(start: np.ndarray, end: np.ndarray, painting: Painting) -> Cuts:
    """Cut intervals that are not empty at the edges of a painting."""
    first = np.searchsorted(painting.edge, start, side="right") - 1
    number = np.searchsorted(painting.edge, end, side="left") - first
    of = np.repeat(np.arange(len(start)), number)
    begins = np.cumsum(number) - number
    segment = np.arange(len(of)) - np.repeat(begins - first, number)
    return Cuts(
        of,
        segment,
        np.maximum(painting.edge[segment], start[of]),
        np.minimum(painting.edge[segment + 1], end[of]),
    )
