"""Replay: when everything would have run, if some of it took another time.

A node is a point of the host's program or an activity of a device; an edge says that one begins no
earlier than so long after another has ended. Everything begins as early as its edges allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import pandas as pd

from kprof.analyze.intervals import Intervals
from kprof.analyze.whatif.host_program import HostProgram

HOST, LAUNCH, STREAM, ACROSS, WAIT, GONE = range(6)
LONG_AGO_NS = -(2**62)
# Sums of two such numbers stay within an int64.
LARGEST_NS = 2**61
# Share of a step's activities by which steps of the same work may differ.
ALIKE = 0.02
LEAST_STEPS = 3
# Confidence of the interval of the mean gain in future steps, from the recorded ones.
CONFIDENCE = 0.9
LONG_SERIES = 2_000

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""Edges of one kind as they are found: sources, targets, lags, and the kind."""


@dataclass(frozen=True)
class Edges:
    """Edges in the order of their targets; a lag counts from the end of the source."""

    source: np.ndarray
    target: np.ndarray
    lag_ns: np.ndarray
    kind: np.ndarray
    """`HOST`, `LAUNCH`, `STREAM`, `ACROSS` streams or within a graph, `WAIT`, or `GONE`.

    An edge that is gone holds nothing. It stays in its place, so that the chains stay as well.
    """
    kept_ns: np.ndarray
    """The part of a host lag that remains when recording is subtracted, in ns."""
    known: dict[tuple[int, int], Chains] = field(default_factory=dict, repr=False, compare=False)
    """The chains among the edges by number of points and nodes, shared by edges of other lags."""

    def take(self, chosen: np.ndarray) -> Edges:
        """Return those that a mask chooses."""
        at = np.flatnonzero(chosen)
        return Edges(
            self.source[at], self.target[at], self.lag_ns[at], self.kind[at], self.kept_ns[at]
        )

    def sharing(self, other: Edges) -> Edges:
        """Return these with the chains that are known of others between the same nodes."""
        are_same = np.array_equal(self.source, other.source) and np.array_equal(
            self.target, other.target
        )
        return replace(self, known=other.known) if are_same else self

    def chains(self, first_activity: int, number: int) -> Chains:
        """Return the chains among these edges of so many nodes."""
        key = first_activity, number
        if key not in self.known:
            self.known[key] = find_chains(self.source, self.target, first_activity, number)
        return self.known[key]


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
        is_gone = edges.kind == GONE
        if is_gone.any():
            lag_ns = without_edges(lag_ns, is_gone, self.start_ns[self.is_root])
        base = np.where(self.is_root, self.start_ns, LONG_AGO_NS)
        chains = edges.chains(self.first_activity, len(base))
        return np.asarray(chains.earliest_starts(base, lag_ns) + self.duration_ns)

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
    def spans_ns(self) -> np.ndarray:
        """How long each span takes."""
        return self.span_times(self.run())

    @property
    def counted_ns(self) -> np.ndarray:
        """How long each span takes that counts; one entry for each, in the order of `spans`."""
        return np.asarray(self.spans_ns[self.spans.counts])

    def step_ns(self) -> float:
        """Return what a step takes: of the rank in which it takes longest, on average."""
        return float(means_of_ranks(self.counted_ns, self.spans.rank[self.spans.counts]).max())

    def every_step_ns(self) -> float:
        """Return what a step takes, as `step_ns`, where every span counts."""
        return float(means_of_ranks(self.spans_ns, self.spans.rank).max())

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
        mark = self.spans.mark
        begin = end_ns[mark]
        if (mark < 0).any():
            first = np.full(len(rank), np.iinfo(np.int64).max)
            np.minimum.at(first, of_node[known], (end_ns - self.duration_ns)[known])
            begin = np.where(mark >= 0, begin, first)
        np.maximum.at(begin, led_by[led_by >= 0], end_ns[led_by >= 0])
        return np.asarray(end - np.where(is_first, begin, before))


def without_edges(lag_ns: np.ndarray, is_gone: np.ndarray, roots_ns: np.ndarray) -> np.ndarray:
    """Return lags by which the edges that are gone hold nothing that another edge holds.

    All lags, with the time between the roots, are more than lies between any two nodes. Of a lag
    twice as negative even what follows it begins before every root.
    """
    spread_ns = float(np.ptp(roots_ns)) if len(roots_ns) else 0.0
    most_ns = spread_ns + float(lag_ns.sum(dtype=np.float64))
    return np.where(is_gone, -int(min(2 * most_ns + 1, LARGEST_NS)), lag_ns)


def earliest_starts(
    base: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    lag_ns: np.ndarray,
    first_activity: int,
) -> np.ndarray:
    """Return when each node starts: as early as its edges allow, and not before its `base`.

    Edges are sorted by the place of their targets in time; lags are not negative.
    """
    return find_chains(source, target, first_activity, len(base)).earliest_starts(base, lag_ns)


@dataclass(frozen=True)
class Chains:
    """Nodes that come after the one before them, and the few edges between such chains.

    Most nodes come after the one before them in the host's program or on their stream, and after
    one launch. Such chains are computed as arrays, from the nodes where they meet; only these go
    one by one. All of this follows from the edges' ends; lags may change.
    """

    first_activity: int
    number: int
    """Number of the nodes."""
    host: np.ndarray
    """Points of the host that come after the point before them and nothing else."""
    host_edge: np.ndarray
    hub: np.ndarray
    """For each point, the one it follows by a chain of the host's; itself where there is none."""
    members: np.ndarray
    """Activities of blocks: runs on one stream with launches after one hub."""
    edge: np.ndarray
    """For each member, the edge from the activity before it."""
    block: np.ndarray
    first: np.ndarray
    """For each block, the place of its first member."""
    launched: np.ndarray
    """Places of the members that have a launch of their own."""
    launch_edge: np.ndarray
    launch: np.ndarray
    """For these, the point that launched them."""
    hub_of_member: np.ndarray
    before: np.ndarray
    """For each member, the activity that its block follows."""
    source: np.ndarray
    target: np.ndarray

    def earliest_starts(self, base: np.ndarray, lag_ns: np.ndarray) -> np.ndarray:
        """Return when each node starts: as early as its edges allow, and not before its `base`."""
        after_hub = self._after_hub(lag_ns)
        by_launch, by_stream = self._along_blocks(lag_ns, after_hub)
        those = self.between
        own = np.append(lag_ns, 0)[those.from_members]
        lags = np.concatenate(
            [
                lag_ns[those.from_others] + np.append(after_hub, 0)[those.points],
                own + by_launch[those.members],
                own + by_stream[those.members],
            ]
        )[those.order]
        moments = base[those.nodes].tolist()
        for to, come, wait in zip(those.to, those.since, lags.tolist(), strict=True):
            moment = moments[come] + wait
            if moment > moments[to]:
                moments[to] = moment
        start = base.copy()
        start[those.nodes] = np.array(moments, dtype=np.int64)
        start[self.host] = start[self.hub[self.host]] + after_hub[self.host]
        launched = start[self.hub_of_member] + by_launch
        start[self.members] = np.maximum(launched, start[self.before] + by_stream)
        return np.asarray(start)

    def _after_hub(self, lag_ns: np.ndarray) -> np.ndarray:
        """Return how long after its hub each point starts."""
        own = np.zeros(self.first_activity, dtype=np.int64)
        own[self.host] = lag_ns[self.host_edge]
        so_far = np.cumsum(own)
        return np.asarray(so_far - so_far[self.hub])

    def _along_blocks(
        self, lag_ns: np.ndarray, after_hub: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how long after its hub, and after what its block follows, each member starts."""
        own = lag_ns[self.edge]
        total = np.cumsum(own)
        launch_ns = lag_ns[self.launch_edge] + after_hub[self.launch] - total[self.launched]
        # The first member of each block has a launch.
        ahead = np.full(len(total), launch_ns.min(initial=0))
        ahead[self.launched] = launch_ns
        ahead = largest_so_far(ahead, self.block)
        until = (total - own)[self.first][self.block]
        return total + ahead, total - until

    @cached_property
    def between(self) -> Between:
        """The edges that go one by one."""
        is_inner = np.zeros(self.number, dtype=bool)
        is_inner[self.host] = is_inner[self.members] = True
        place = np.full(self.number, -1)
        place[self.members] = np.arange(len(self.members))
        hub = np.append(self.hub, np.arange(self.first_activity, self.number))
        rest = np.flatnonzero(~is_inner[self.target])
        from_member = place[self.source[rest]] >= 0
        one, other = rest[~from_member], rest[from_member]
        last = np.append(self.first[1:], len(self.members))[: len(self.first)] - 1
        ends = self.members[last]
        members = np.concatenate([place[self.source[other]], last])
        to = np.concatenate([self.target[one], *[self.target[other], ends] * 2])
        come = self.source[one]
        since = np.concatenate([hub[come], self.hub_of_member[members], self.before[members]])
        order = np.concatenate([one, *[other, self.edge[last]] * 2]).argsort(kind="stable")
        nodes, compact = np.unique(np.concatenate([to, since]), return_inverse=True)
        to_list, since_list = (part[order].tolist() for part in np.split(compact, 2))
        return Between(
            from_others=one,
            points=np.minimum(come, self.first_activity),
            from_members=np.concatenate([other, np.full(len(last), -1)]),
            members=members,
            order=order,
            nodes=nodes,
            to=to_list,
            since=since_list,
        )


@dataclass(frozen=True)
class Between:
    """Edges between chains, and the ways through a block to its last member.

    Those from a block stand twice: one comes from its launches, one from what the block follows.
    """

    from_others: np.ndarray
    """Edges that come from points and from activities outside of blocks."""
    points: np.ndarray
    """Where these come from, if that is a point; else the number of points."""
    from_members: np.ndarray
    """Edges that come from members; -1 for the ways to a block's last member."""
    members: np.ndarray
    """Places of these members."""
    order: np.ndarray
    """The order of the two above, the second twice, in time."""
    nodes: np.ndarray
    """The nodes that go one by one."""
    to: list[int]
    """For each edge in order, the target, as a place in `nodes`."""
    since: list[int]


def largest_so_far(values: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return the largest value up to each place of its block; blocks are numbered in order."""
    if not len(values):
        return values
    lowest, highest = int(values.min()), int(values.max())
    width = highest - lowest + 1
    if (int(block[-1]) + 1) * width > LARGEST_NS:
        return np.asarray(pd.Series(values).groupby(block).cummax().to_numpy(np.int64))
    # Each block lies above all that come before it.
    floor = block * width - lowest
    return np.asarray(np.maximum.accumulate(values + floor) - floor)


def find_chains(source: np.ndarray, target: np.ndarray, first_activity: int, number: int) -> Chains:
    """Find the chains among edges that are sorted by the place of their targets in time."""
    num_edges = np.bincount(target, minlength=number)
    is_chain = (source == target - 1) & (target != first_activity)
    chain, side = np.flatnonzero(is_chain), np.flatnonzero(~is_chain & (source < first_activity))
    num_chain = np.bincount(target[chain], minlength=number)
    chain_edge, side_edge = np.full((2, number), -1)
    chain_edge[target[chain]] = chain
    side_edge[target[side]] = side
    is_alone = (num_edges == 1) & (num_chain == 1)
    host, hub = np.flatnonzero(is_alone[:first_activity]), np.arange(first_activity)
    hub[host] = 0
    hub = np.maximum.accumulate(hub)

    # From here on places among the activities.
    activities = slice(first_activity, None)
    is_alone, side_edge = is_alone[activities], side_edge[activities]
    is_launched = (num_edges[activities] == 2) & (num_chain[activities] == 1) & (side_edge != -1)
    launch = np.append(source, 0)[side_edge]
    # An activity without a launch continues the block of the one before it, if that is in one.
    head = np.maximum.accumulate(np.where(is_alone, 0, np.arange(len(is_alone))))
    is_member = is_launched | (is_alone & is_launched[head])
    members = np.flatnonzero(is_member)
    of_hub = hub[launch[head[members]]]
    begins = np.append(True, (np.diff(members) != 1) | (np.diff(of_hub) != 0))[: len(members)]
    first, block = np.flatnonzero(begins), np.cumsum(begins) - 1
    launched = np.flatnonzero(is_launched[members])
    launches = members[launched]
    members += first_activity
    return Chains(
        first_activity=first_activity,
        number=number,
        host=host,
        host_edge=chain_edge[host],
        hub=hub,
        members=members,
        edge=chain_edge[members],
        block=block,
        first=first,
        launched=launched,
        launch_edge=side_edge[launches],
        launch=launch[launches],
        hub_of_member=of_hub,
        before=(members[first] - 1)[block],
        source=source,
        target=target,
    )


def means_of_ranks(times: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the mean of each rank's spans."""
    ranks, of = np.unique(rank, return_inverse=True)
    return np.asarray(np.bincount(of, times, len(ranks)) / np.bincount(of, minlength=len(ranks)))


def gain_error_ns(before: Replay, *after: Replay) -> float:
    """Return half the interval of the mean gain, as the gains in single steps differ.

    Of several replays, of the sum of their gains.
    Of the rank whose steps take longest before, by Student's distribution. 0 where one step tells
    nothing of others.
    """
    rank = before.spans.rank[before.spans.counts]
    slowest = np.unique(rank)[int(means_of_ranks(before.counted_ns, rank).argmax())]
    gains = sum(before.counted_ns - one.counted_ns for one in after)[rank == slowest]
    if len(gains) < 2:
        return 0.0
    times = student_quantile(len(gains) - 1)
    return float(times * gains.std(ddof=1) / np.sqrt(len(gains)))


@cache
def student_quantile(degrees: int) -> float:
    """Return how many standard errors Student's interval of `CONFIDENCE` reaches to each side.

    By bisection of the angle whose tangent is t / sqrt(degrees), in the finite series for whole
    degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4). SciPy takes 0.2 s to import,
    and so pays off for long series alone.
    """
    if degrees > LONG_SERIES:
        from scipy.special import stdtrit

        return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _student_share(angle, degrees) < CONFIDENCE else (low, angle)
    return math.tan(high) * math.sqrt(degrees)


def _student_share(angle: float, degrees: int) -> float:
    """Return the probability that Student's t lies within the tangents of this angle."""
    is_odd = degrees % 2
    square = math.cos(angle) ** 2
    term, terms = math.cos(angle) if is_odd else 1.0, []
    for number in range(1 + is_odd, degrees, 2):
        terms.append(term)
        term *= square * number / (number + 1)
    share = math.sin(angle) * math.fsum(terms)
    return 2 / math.pi * (angle + share) if is_odd else share
