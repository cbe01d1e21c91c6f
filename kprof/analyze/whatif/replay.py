"""Replay: when everything would have run, if some of it took another time.

A node is a point of the host's program or an activity of a device; an edge says that one begins no
earlier than so long after another has ended. Everything begins as early as its edges allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd

from kprof.analyze.intervals import Intervals
from kprof.analyze.whatif.host_program import HostProgram

HOST, LAUNCH, STREAM, ACROSS, WAIT = range(5)
LONG_AGO_NS = -(2**62)
# Of the activities of a step: by as many may others differ that do the same.
ALIKE = 0.02
LEAST_STEPS = 3
# Of the interval of the mean gain in steps to come, as far as the recorded ones tell.
CONFIDENCE = 0.9

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
    led_by: np.ndarray
    """Span before which each node ran, launched before the first; -1: it begins after all."""


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
        base = np.where(self.is_root, self.start_ns, LONG_AGO_NS)
        start = earliest_starts(base, edges.source, edges.target, lag_ns, self.first_activity)
        return np.asarray(start + self.duration_ns)

    def scaled(self, kind: int, share: float) -> Replay:
        """Return the replay with the lags of one kind of edges at a share of what they are.

        What is kept of a lag stays.
        """
        lag_ns, kept_ns = self.edges.lag_ns, self.edges.kept_ns
        is_longer = (self.edges.kind == kind) & (lag_ns > 0)
        shorter = kept_ns + np.rint((lag_ns - kept_ns) * share)
        lag_ns = np.where(is_longer, shorter, lag_ns).astype(np.int64)
        return replace(self, edges=replace(self.edges, lag_ns=lag_ns))

    @cached_property
    def counted_ns(self) -> np.ndarray:
        """How long each span takes that counts; one entry for each, in the order of `spans`."""
        return np.asarray(self.span_times(self.run())[self.spans.counts])

    def step_ns(self) -> float:
        """Return what a step takes: of the rank in which it takes longest, on average."""
        return self._step_ns

    @cached_property
    def _step_ns(self) -> float:
        return float(means_of_ranks(self.counted_ns, self.spans.rank[self.spans.counts]).max())

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
        host's entry into it, or the end of what was launched before the first step. A window lasts
        from its first activity's start.
        """
        rank, of_node, led_by = self.spans.rank, self.spans.of_node, self.spans.led_by
        end = np.full(len(rank), LONG_AGO_NS, dtype=np.int64)
        known = of_node >= 0
        np.maximum.at(end, of_node[known], end_ns[known])
        is_first = np.append(True, np.diff(rank) != 0)[: len(rank)]
        before = np.append(0, end[:-1])[: len(rank)]
        first = np.full(len(rank), np.iinfo(np.int64).max)
        np.minimum.at(first, of_node[known], (end_ns - self.duration_ns)[known])
        mark = self.spans.mark
        begin = np.where(mark >= 0, end_ns[mark], first)
        np.maximum.at(begin, led_by[led_by >= 0], end_ns[led_by >= 0])
        return np.asarray(end - np.where(is_first, begin, before))


def earliest_starts(
    base: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    lag_ns: np.ndarray,
    first_activity: int,
) -> np.ndarray:
    """Return when each node starts: as early as its edges allow, and not before its `base`.

    Edges are sorted by the place of their targets in time; lags are not negative. Most nodes come
    after the one before them in the host's program or on their stream, and after one launch. Such
    chains are computed as arrays, from the few nodes where they meet; only these go one by one.
    """
    chains = _find_chains(source, target, lag_ns, first_activity, len(base))
    is_member = chains.block_of != -1
    inner = is_member[target]
    last = np.flatnonzero(is_member & ~np.append(chains.continues[1:], False))
    edge_of_last = chains.chain_edge[last]
    rest = np.flatnonzero(~inner & ~chains.is_host_chain[target])
    from_member = is_member[source[rest]]
    one, other = rest[~from_member], rest[from_member]
    of_one, of_other = source[one], source[other]
    # An edge from within a block is one from its launches and one from what the block follows.
    parts = [
        (one, target[one], chains.hub[of_one], lag_ns[one] + chains.after_hub[of_one]),
        (other, target[other], chains.hub[of_other], lag_ns[other] + chains.after_hub[of_other]),
        (other, target[other], chains.before[of_other], lag_ns[other] + chains.after[of_other]),
        (edge_of_last, last, chains.hub[last], chains.after_hub[last]),
        (edge_of_last, last, chains.before[last], chains.after[last]),
    ]
    place, to, since, lag = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(place, kind="stable")
    nodes, compact = np.unique(np.concatenate([to, since]), return_inverse=True)
    to_list, since_list = (part[order].tolist() for part in np.split(compact, 2))
    moments = base[nodes].tolist()
    for at, come, wait in zip(to_list, since_list, lag[order].tolist(), strict=True):
        moment = moments[come] + wait
        if moment > moments[at]:
            moments[at] = moment
    start = base.copy()
    start[nodes] = np.array(moments, dtype=np.int64)
    host = np.flatnonzero(chains.is_host_chain)
    start[host] = start[chains.hub[host]] + chains.after_hub[host]
    members = np.flatnonzero(is_member)
    launched = start[chains.hub[members]] + chains.after_hub[members]
    followed = start[chains.before[members]] + chains.after[members]
    start[members] = np.maximum(launched, followed)
    return np.asarray(start)


@dataclass(frozen=True)
class _Chains:
    """Nodes that come after the one before them; each array has one entry a node."""

    is_host_chain: np.ndarray
    """Whether a point of the host comes after the point before it and nothing else."""
    block_of: np.ndarray
    """Number of a run of activities with launches after one hub; -1 outside of such runs."""
    continues: np.ndarray
    """Whether an activity continues the block of the one before it."""
    chain_edge: np.ndarray
    """The edge from the node before, or -1."""
    hub: np.ndarray
    """The point after which a node comes by a chain of the host's, itself where by none."""
    after_hub: np.ndarray
    """How long after its hub a node starts at the earliest."""
    before: np.ndarray
    """The activity that a block follows."""
    after: np.ndarray
    """How long after that a node of the block starts at the earliest."""


def _find_chains(
    source: np.ndarray, target: np.ndarray, lag_ns: np.ndarray, first_activity: int, number: int
) -> _Chains:
    """Find the chains among the edges."""
    node = np.arange(number)
    is_activity = node >= first_activity
    num_edges = np.bincount(target, minlength=number)
    is_chain = (source == target - 1) & (is_activity[source] == is_activity[target])
    num_chain = np.bincount(target[is_chain], minlength=number)
    chain_edge, side_edge = np.full((2, number), -1)
    chain_edge[target[is_chain]] = np.flatnonzero(is_chain)
    is_side = ~is_chain & ~is_activity[source]
    side_edge[target[is_side]] = np.flatnonzero(is_side)
    chain_lag = np.where(num_chain == 1, np.append(lag_ns, 0)[chain_edge], 0)

    is_host_chain = ~is_activity & (num_edges == 1) & (num_chain == 1)
    so_far = np.cumsum(np.where(is_host_chain, chain_lag, 0))
    hub = np.maximum.accumulate(np.where(is_host_chain, 0, node))
    after_hub = so_far - so_far[hub]

    is_launched = is_activity & (num_edges == 2) & (num_chain == 1) & (side_edge != -1)
    is_alone = is_activity & (num_edges == 1) & (num_chain == 1)
    launch = np.append(source, 0)[side_edge]
    launch_hub = np.where(is_launched, hub[launch], -1)
    launch_lag = np.append(lag_ns, 0)[side_edge] + after_hub[launch]
    # An activity without a launch continues the block of the one before it, if that is in one.
    head = np.maximum.accumulate(np.where(is_alone, 0, node))
    is_member = is_launched | (is_alone & is_launched[head])
    of_hub = np.where(is_member, launch_hub[head], -1)
    continues = np.append(False, is_member[1:] & is_member[:-1] & (of_hub[1:] == of_hub[:-1]))
    continues = continues[:number]
    begins = is_member & ~continues
    block_of = np.where(is_member, np.cumsum(begins) - 1, -1)
    members, first = np.flatnonzero(is_member), np.flatnonzero(begins)
    block = block_of[members]
    total = np.cumsum(chain_lag[members])
    ahead = np.where(is_launched[members], launch_lag[members] - total, np.iinfo(np.int64).min)
    ahead = pd.Series(ahead).groupby(block).cummax().to_numpy(np.int64)
    hub[members], after_hub[members] = of_hub[members], total + ahead
    before, after = np.full(number, -1), np.zeros(number, dtype=np.int64)
    before[members] = first[block] - 1
    until = total - chain_lag[members]
    after[members] = total - until[np.searchsorted(members, first)][block]
    return _Chains(is_host_chain, block_of, continues, chain_edge, hub, after_hub, before, after)


def means_of_ranks(times: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the mean of each rank's spans."""
    ranks, of = np.unique(rank, return_inverse=True)
    return np.asarray(np.bincount(of, times, len(ranks)) / np.bincount(of, minlength=len(ranks)))


def gain_error_ns(before: Replay, after: Replay) -> float:
    """Return half the interval of the mean gain, as the gains in single steps differ.

    Of the rank whose steps take longest before, by Student's distribution. 0 where one step tells
    nothing of others.
    """
    from scipy.special import stdtrit

    rank = before.spans.rank[before.spans.counts]
    slowest = np.unique(rank)[int(means_of_ranks(before.counted_ns, rank).argmax())]
    gains = (before.counted_ns - after.counted_ns)[rank == slowest]
    if len(gains) < 2:
        return 0.0
    times = stdtrit(len(gains) - 1, (1 + CONFIDENCE) / 2)
    return float(times * gains.std(ddof=1) / np.sqrt(len(gains)))
