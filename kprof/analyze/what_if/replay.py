"""Replay: when everything would have run, if some of it took another time.

A node is a point of the host's program or an activity of a device; an edge says that one begins no
earlier than so long after another has ended. Everything begins as early as its edges allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kprof.analyze.intervals import Intervals
from kprof.analyze.what_if.host_program import HostProgram

HOST, LAUNCH, STREAM, ACROSS, WAIT = range(5)
LONG_AGO_NS = -(2**62)
# Of the activities of a step: by as many may others differ that do the same.
ALIKE = 0.02
LEAST_STEPS = 3

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""Edges of one kind as they are found: sources, targets, lags, and the kind."""


@dataclass(frozen=True)
class Edges:
    """Edges in the order of their targets; a lag counts from the end of the source."""

    source: np.ndarray
    target: np.ndarray
    lag_ns: np.ndarray
    kind: np.ndarray
    """`HOST`, `LAUNCH`, `STREAM`, `ACROSS` streams or within a graph, or `WAIT`."""
    kept_ns: np.ndarray
    """Of a lag of the host's, what stays when recording is taken off it."""

    def take(self, chosen: np.ndarray) -> Edges:
        """Return the chosen ones, by position or by a mask."""
        parts = (self.source, self.target, self.lag_ns, self.kind, self.kept_ns)
        return Edges(*(part[chosen] for part in parts))


@dataclass(frozen=True)
class Spans:
    """The steps of every rank, or the window of its devices where it has none; one entry a span."""

    rank: np.ndarray
    of_node: np.ndarray
    """Span whose end each node belongs to, or -1: the last of them ends it."""
    mark: np.ndarray
    """Node at which the first span of each entry's rank begins; -1: with its first activity."""
    counts: np.ndarray
    """Whether it counts in the mean of its rank."""


@dataclass(frozen=True)
class Replay:
    """Points of the host, then a node for every row of `kernels`, and the edges between them."""

    program: HostProgram
    start_ns: np.ndarray
    """As measured."""
    duration_ns: np.ndarray
    edges: Edges
    is_root: np.ndarray
    """Whether nothing tells what it came after: it stays where it was."""
    spans: Spans
    untouched: Mapping[int, Intervals] = field(default_factory=dict)
    """By program, when the host did what is kept of its lags; empty where nothing is."""

    @property
    def first_activity(self) -> int:
        """Node of the first row of `kernels`."""
        return len(self.program.time_ns)

    def run(self) -> np.ndarray:
        """Return when each node ends."""
        edges = self.edges
        # Activities of a stream may overlap, but none begins before the one it follows.
        lag_ns = np.maximum(self.duration_ns[edges.source] + edges.lag_ns, 0)
        start = np.where(self.is_root, self.start_ns, LONG_AGO_NS).tolist()
        for source, target, lag in zip(
            edges.source.tolist(), edges.target.tolist(), lag_ns.tolist(), strict=True
        ):
            moment = start[source] + lag
            if moment > start[target]:
                start[target] = moment
        return np.asarray(np.array(start, dtype=np.int64) + self.duration_ns)

    def scaled(self, kind: int, share: float) -> Replay:
        """Return the replay with the lags of one kind of edges at a share of what they are.

        What is kept of a lag stays.
        """
        lag_ns, kept_ns = self.edges.lag_ns, self.edges.kept_ns
        is_longer = (self.edges.kind == kind) & (lag_ns > 0)
        shorter = kept_ns + np.rint((lag_ns - kept_ns) * share)
        lag_ns = np.where(is_longer, shorter, lag_ns).astype(np.int64)
        return replace(self, edges=replace(self.edges, lag_ns=lag_ns))

    def step_ns(self) -> float:
        """Return what a step takes: of the rank in which it takes longest, on average."""
        return self._step_ns

    @cached_property
    def _step_ns(self) -> float:
        counts = self.spans.counts
        times = self.span_times(self.run())[counts]
        return float(means_of_ranks(times, self.spans.rank[counts]).max())

    def behind_the_drain(self) -> Replay:
        """Return the replay whose mean leaves out each rank's first step, where steps are alike.

        Before it a recorder drains the device, so that the host has no lead. Where steps do
        different work, or are two, none can stand for it.
        """
        rank, of_node = self.spans.rank, self.spans.of_node[self.first_activity :]
        work = np.bincount(of_node[of_node >= 0], minlength=len(rank))
        counts = np.ones(len(rank), dtype=bool)
        for one in np.unique(rank):
            mine = np.flatnonzero(rank == one)
            is_alike = np.ptp(work[mine]) <= ALIKE * work[mine].max()
            counts[mine[0]] = len(mine) < LEAST_STEPS or not is_alike
        return replace(self, spans=replace(self.spans, counts=counts))

    def measured(self) -> np.ndarray:
        """Return when each node ended as measured."""
        return np.asarray(self.start_ns + self.duration_ns)

    def span_times(self, end_ns: np.ndarray) -> np.ndarray:
        """Return how long each span lasts if the nodes end so.

        It lasts from the end of the last activity of the one before; the first of a rank from the
        host's entry into it. A window lasts from its first activity's start.
        """
        rank, of_node = self.spans.rank, self.spans.of_node
        end = np.full(len(rank), LONG_AGO_NS, dtype=np.int64)
        known = of_node >= 0
        np.maximum.at(end, of_node[known], end_ns[known])
        is_first = np.append(True, np.diff(rank) != 0)[: len(rank)]
        before = np.append(0, end[:-1])[: len(rank)]
        first = np.full(len(rank), np.iinfo(np.int64).max)
        np.minimum.at(first, of_node[known], (end_ns - self.duration_ns)[known])
        mark = self.spans.mark
        begin = np.where(mark >= 0, end_ns[mark], first)
        return np.asarray(end - np.where(is_first, begin, before))


def means_of_ranks(times: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the mean of each rank's spans."""
    ranks, of = np.unique(rank, return_inverse=True)
    return np.asarray(np.bincount(of, times, len(ranks)) / np.bincount(of, minlength=len(ranks)))
