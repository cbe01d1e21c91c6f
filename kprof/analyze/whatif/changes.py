"""Changes to a replay: faster or removed work, launches in a graph, no more waits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW, holding, nearest
from kprof.analyze.findings.one_offs import SILENCE_NS
from kprof.analyze.findings.recoverable import stays_ns
from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import find_host
from kprof.analyze.intervals import NOTHING, Intervals, disjoint, either, length_before, length_in
from kprof.analyze.whatif.dependencies import GRAPH_LATENCY_NS
from kprof.analyze.whatif.host_program import BEGIN, MARK, WAIT_END, HostProgram, number_threads
from kprof.analyze.whatif.replay import GONE, HOST, LAUNCH, STREAM, WAIT, Replay
from kprof.errors import KprofError
from kprof.trace import Trace, once_per_tables

# From node to node of a replayed graph, unrecorded: an empty kernel in a graph takes 1.08 µs on an
# H200, and runs for 0.86 (`kprof roofline`).
BETWEEN_NODES_NS = 220
# No kernel takes less: the shortest that CUPTI timed on an H200 (`kprof roofline`).
SHORTEST_KERNEL_NS = 860
# Maximum sum of all rows, 73 years: sums of it and of times of day fit an int64.
LONGEST_SUM_NS = 2**61

FASTER, ROOFLINE, REMOVED, REPLACED = "faster", "roofline", "removed", "replaced"
GRAPHED, WITHOUT, FILLED = "graphed", "without", "filled"
# Several changes in one prediction.
TOGETHER = "together"
# As it is asked for.
GRAPHS = "graphs"
# A copy to the host, whose result the host may use afterwards.
FETCH = r"DtoH|Device -> (?:Pageable|Pinned|Host)|CopyDeviceToHost"
AVOIDABLE = (
    causes.SYNCHRONIZATION,
    causes.DATA_LOADING,
    causes.PAGEABLE_COPY,
    causes.ALLOCATOR,
)


@dataclass(frozen=True)
class Change:
    """What is asked: what happens, and to what.

    `what` is faster, roofline, removed, replaced, graphed, without or filled. `factor` goes with
    faster, `total_ns` and `launches` (of a step) with replaced, `cause` (of idle time) with
    without, `idle_rows` with filled: the host's time in these pieces of idle time is gone.
    """

    what: str
    target: Target | None = None
    factor: float = 1.0
    cause: str = ""
    total_ns: int = 0
    launches: int = 0
    idle_rows: tuple[int, ...] = ()
    keeps_results: bool = False
    """Whether waits for a result that the host may use stay: no recording tells what it does."""
    keeps_unlaunched: bool = False
    """Whether activities stay whose launch was not recorded: their host may hold the step up."""
    turn: int | None = None
    """Which waits go, 0 or 1: every other one, so that the next one stays. Of several in a step the
    last stays, too."""

    def __str__(self) -> str:
        return f"{self.subject} {self.words}"

    @property
    def subject(self) -> str:
        """The target in a word: a target, the launches, or a cause of idle time."""
        if self.what == WITHOUT:
            return f"idle:{self.cause}"
        return "launches" if self.target is None else str(self.target)

    @property
    def question(self) -> str:
        """The argument by which `kprof whatif` is asked about it."""
        if self.what == GRAPHED:
            return GRAPHS
        how = {FASTER: f"{self.factor:g}", ROOFLINE: ROOFLINE}.get(self.what, REMOVED)
        return f"{self.subject}={how}"

    @property
    def words(self) -> str:
        """How it changes, as in 2x faster or removed."""
        speed = f"{self.factor:g}x faster" if self.factor > 1 else f"{1 / self.factor:g}x slower"
        return {
            FASTER: "unchanged" if self.factor == 1 else speed,
            ROOFLINE: "at its roofline",
            REMOVED: "removed",
            REPLACED: f"replaced by {self.launches} launches",
            GRAPHED: "in CUDA graphs",
            WITHOUT: "gone",
            FILLED: "filled",
        }[self.what]


def rows_changed(change: Change, trace: Trace) -> np.ndarray:
    """Tell which rows of `kernels` a change is about; none where it has no target."""
    if change.target is None:
        return np.zeros(len(trace.kernels), dtype=bool)
    rows = rows_of(change.target, trace)
    if change.keeps_unlaunched:
        rows = rows & trace.kernels["launch_row"].notna().to_numpy(bool)
    return rows


def rooflines_ns(trace: Trace) -> np.ndarray:
    """Return each row's time at its roofline; `NOTHING` where that is not known.

    Nor is it where the work is at least so much: with more of it, it takes longer.
    """
    kernels = trace.kernels
    is_least = (kernels["work_bound"] == "at least").to_numpy(bool)
    return np.where(is_least, NOTHING, kernels["limit_ns"].to_numpy(np.int64, na_value=NOTHING))


def new_durations(
    change: Change, trace: Trace, shortest_ns: int = SHORTEST_KERNEL_NS
) -> np.ndarray:
    """Return how long each row of `kernels` would take; faster ones no less than `shortest_ns`."""
    duration = trace.kernels["duration_ns"].to_numpy(np.int64)
    if change.target is None:
        return duration
    rows = rows_changed(change, trace)
    if change.what == FASTER:
        longest_ns = np.maximum(duration, LONGEST_SUM_NS // max(len(duration), 1))
        changed = np.rint(np.minimum(duration / change.factor, longest_ns)).astype(np.int64)
        least = np.minimum(duration, shortest_ns)
        return np.where(rows, np.maximum(changed, least), duration)
    if change.what == ROOFLINE:
        roofline = rooflines_ns(trace)
        least = np.minimum(duration, np.maximum(roofline, SHORTEST_KERNEL_NS))
        return np.where(rows & (roofline != NOTHING), least, duration)
    kept = _replaced_rows(change, trace)
    each_ns = change.total_ns // max(change.launches, 1)
    return np.where(kept, each_ns, np.where(rows, 0, duration))


def _replaced_rows(change: Change, trace: Trace) -> np.ndarray:
    """Tell which rows stand for what replaces a target: its first launches of every step."""
    kept = np.zeros(len(trace.kernels), dtype=bool)
    if change.what == REPLACED and change.target is not None:
        kernels = trace.kernels
        at = np.flatnonzero(rows_changed(change, trace))
        at = at[np.argsort(kernels["start_ns"].to_numpy(np.int64)[at], kind="stable")]
        steps = [kernels["rank"].iloc[at], kernels["step"].iloc[at]]
        number = kernels["name"].iloc[at].groupby(steps, dropna=False, observed=True).cumcount()
        kept[at] = number.to_numpy() < change.launches
    return kept


def with_durations(replay: Replay, duration_ns: np.ndarray) -> Replay:
    """Return a replay in which the rows of `kernels` take these times."""
    host = np.zeros(replay.first_activity, dtype=np.int64)
    return replace(replay, duration_ns=np.append(host, duration_ns))


def apply(changes: Iterable[Change], replay: Replay, trace: Trace) -> Replay:
    """Return the replay after all changes."""
    changes = list(changes)
    removed = np.zeros(len(trace.kernels), dtype=bool)
    for one in changes:
        if one.what in (REMOVED, REPLACED) and one.target is not None:
            removed |= rows_changed(one, trace) & ~_replaced_rows(one, trace)
    if removed.any():
        replay = without_rows(removed, replay, trace)
    for change in changes:
        if change.what in _STRUCTURAL:
            replay = _STRUCTURAL[change.what](change, replay, trace)
    return with_durations(replay, durations_after(changes, trace))


def durations_after(
    changes: Iterable[Change], trace: Trace, shortest_ns: int = SHORTEST_KERNEL_NS
) -> np.ndarray:
    """Return how long each row of `kernels` would take after all changes.

    Of two to the same row the one that takes more off counts.
    """
    duration = trace.kernels["duration_ns"].to_numpy(np.int64)
    after = duration
    for change in changes:
        changed = new_durations(change, trace, shortest_ns)
        both = np.where(after == duration, changed, np.minimum(after, changed))
        after = np.where(changed == duration, after, both)
    return np.asarray(after)


def without_rows(rows: np.ndarray, replay: Replay, trace: Trace) -> Replay:
    """Take rows of `kernels` out, a bool for each; their durations stay the caller's to change.

    What they waited for holds what follows them, and their launches cost nothing. With them goes
    the host's time in these, in operators of which nothing is left, and between two of those. A
    window without steps begins and ends with its activities, so there they stay where they were
    launched.
    """
    edges = replay.edges
    is_gone = np.append(np.zeros(replay.first_activity, dtype=bool), rows)[edges.target]
    lag_ns = np.where(is_gone & (edges.kind == STREAM), np.minimum(edges.lag_ns, 0), edges.lag_ns)
    is_window = bool((replay.spans.mark < 0).any())
    is_launch = is_gone & (edges.kind == LAUNCH) & (not is_window)
    kind = np.where(is_launch, np.int8(GONE), edges.kind)
    kept = replace(edges, lag_ns=lag_ns, kind=kind)
    return without_host_time(replace(replay, edges=kept), trace, emptied(rows, trace))


def _graph(change: Change, replay: Replay, trace: Trace) -> Replay:
    """Replay every run of launches between two waits, step edges or loads of data as one graph."""
    edges, segment = replay.edges, segments(replay, trace)
    first = replay.first_activity
    point = np.full(len(replay.start_ns), NOTHING, dtype=np.int64)
    is_launch = edges.kind == LAUNCH
    point[edges.target[is_launch]] = edges.source[is_launch]
    point[:first] = np.arange(first)
    of_node = np.where(point == NOTHING, NOTHING, np.append(segment, NOTHING)[point])
    source, target = of_node[edges.source], of_node[edges.target]
    within = (source == target) & (source != NOTHING)
    lag_ns = np.where(within & (edges.kind == HOST), _stays_ns(replay, trace), edges.lag_ns)
    between = np.minimum(edges.lag_ns, BETWEEN_NODES_NS)
    lag_ns = np.where(within & (edges.kind == STREAM), between, lag_ns)
    in_graph = is_launch & (target != NOTHING)
    lag_ns = np.where(in_graph, np.maximum(lag_ns, GRAPH_LATENCY_NS), lag_ns)
    kept_ns = np.minimum(edges.kept_ns, np.maximum(lag_ns, 0))
    return replace(replay, edges=replace(edges, lag_ns=lag_ns, kept_ns=kept_ns))


def _stays_ns(replay: Replay, trace: Trace) -> np.ndarray:
    """Return how much of each lag of the host lies in idle time that is, or may be, start-up."""
    edges, program, stays = replay.edges, replay.program, stays_ns(trace)
    found = np.zeros_like(edges.lag_ns)
    rows = np.flatnonzero(stays)
    for one, union in _spans_of_idle(rows, stays[rows], program, trace).items():
        at = np.flatnonzero(edges.kind == HOST)
        at = at[program.program[edges.target[at]] == one]
        since, until = (program.time_ns[node[at]] for node in (edges.source, edges.target))
        found[at] = np.minimum(length_in(union, since, until), np.maximum(edges.lag_ns[at], 0))
    return found


def segments(replay: Replay, trace: Trace) -> np.ndarray:
    """Return for each point of the host the number of the graph that would hold it, or `NOTHING`.

    Runs of one launch stay as they are.
    """
    program = replay.program
    is_plain = (program.what == BEGIN) & ~program.awaits
    loaded = find_host(trace).rows["loaded"]
    start = trace.ranges["start_ns"].to_numpy(np.int64)[loaded]
    union = disjoint(
        Intervals(start, start + trace.ranges["duration_ns"].to_numpy(np.int64)[loaded], loaded)
    )
    waited = np.diff(length_before(union, program.time_ns)) != 0
    waited |= np.diff(program.time_ns) > SILENCE_NS
    joins = np.zeros(len(program.time_ns), dtype=bool)
    joins[1:] = is_plain[1:] & is_plain[:-1] & (np.diff(program.program) == 0) & ~waited
    number = np.cumsum(~joins)
    sizes = np.bincount(number, minlength=1)
    return np.where(is_plain & (sizes[number] > 1), number, NOTHING)


def _avoid(change: Change, replay: Replay, trace: Trace) -> Replay:
    """Take away what causes idle time: waits, and the host's time that is spent in it."""
    host = find_host(trace)
    if change.cause == causes.DATA_LOADING:
        return without_host_time(replay, trace, host.rows["loaded"])
    calls = host.blocking.index[host.blocking == change.cause].to_numpy(np.int64)
    # Idle time that happened once is not part of future steps: it stays.
    once = trace.idle["evidence_row"].to_numpy(np.int64, na_value=NOTHING)[stays_ns(trace) > 0]
    calls = np.setdiff1d(calls, once)
    if change.cause in (causes.ALLOCATOR, causes.PAGEABLE_COPY):
        # A copy from memory that is not pinned returns before its end, when its last part is
        # staged: then it is no wait, but all of it was the host's time.
        replay = without_host_time(replay, trace, calls)
    program, edges = replay.program, replay.edges
    ends = np.flatnonzero((program.what == WAIT_END) & np.isin(program.row, calls))
    if change.keeps_results:
        ends = ends[~_follows_fetch(ends, replay, trace)]
    if change.turn is not None:
        ends = ends[~_is_last_of_several(ends, program)][change.turn :: 2]
    is_wait = (edges.kind == WAIT) & np.isin(edges.target, ends)
    return replace(replay, edges=edges.take(~is_wait))


def in_turns(changes: Sequence[Change]) -> list[list[Change]]:
    """Return two lists of changes that each take away every other wait; none where no wait goes.

    Where a wait goes alone, the next one holds the host up instead; and of several in a step the
    last stays. So both lists together save what is saved even if another wait takes the place of
    each. Other changes are in the first.
    """
    waits = [one for one in changes if one.what == WITHOUT and one.cause == causes.SYNCHRONIZATION]
    if not waits:
        return []
    rest = [one for one in changes if one not in waits]
    first, second = ([replace(one, turn=turn) for one in waits] for turn in (0, 1))
    return [[*first, *rest], second]


def _is_last_of_several(ends: np.ndarray, program: HostProgram) -> np.ndarray:
    """Tell which waits are the last of several in a step of their program, or in the window."""
    moments = np.sort(program.time_ns[program.what == MARK])
    step = np.searchsorted(moments, program.time_ns[ends], side="right")
    number = np.unique(np.vstack([program.program[ends], step]), axis=1, return_inverse=True)[1]
    # NumPy 2.0.0 alone returns a row of a matrix.
    number = number.reshape(-1)
    is_last = np.append(np.diff(number) != 0, True)[: len(ends)]
    return np.asarray(is_last & (np.bincount(number)[number] > 1))


def _follows_fetch(ends: np.ndarray, replay: Replay, trace: Trace) -> np.ndarray:
    """Tell which waits end after a copy to the host that was launched since the wait before."""
    program, edges, first = replay.program, replay.edges, replay.first_activity
    names = trace.kernels["name"].cat
    matches = np.append(np.asarray(names.categories.str.contains(FETCH), dtype=bool), False)
    is_fetch = np.append(np.zeros(first, dtype=bool), matches[names.codes.to_numpy()])
    launch = (edges.kind == LAUNCH) & is_fetch[edges.target]
    fetched = np.zeros(len(program.time_ns), dtype=np.int64)
    fetched[edges.source[launch]] = 1
    before = np.cumsum(fetched)
    all_ends = np.flatnonzero(program.what == WAIT_END)
    at = np.searchsorted(all_ends, ends)
    same = (at > 0) & (program.program[all_ends[np.maximum(at - 1, 0)]] == program.program[ends])
    since = np.where(same, before[all_ends[np.maximum(at - 1, 0)]], 0)
    return np.asarray(before[ends] > since)


def _fill(change: Change, replay: Replay, trace: Trace) -> Replay:
    """Take the host's time within pieces of idle time out of the program that ended them."""
    rows = np.array(change.idle_rows, dtype=np.int64)
    took = trace.idle["duration_ns"].to_numpy(np.int64)[rows]
    return without_host_spans(replay, _spans_of_idle(rows, took, replay.program, trace))


def _spans_of_idle(
    rows: np.ndarray, took: np.ndarray, program: HostProgram, trace: Trace
) -> dict[int, Intervals]:
    """Return when pieces of idle time lasted, so long from their begin on, by the program.

    That of the thread which ended each by a launch.
    """
    ended_by = trace.idle["kernel_row"].to_numpy(np.int64, na_value=NOTHING)[rows]
    launch = np.append(trace.kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING), NOTHING)
    call, thread = launch[ended_by], np.full(len(rows), NOTHING)
    is_launched = call != NOTHING
    thread[is_launched] = program.of_ranges(trace, call[is_launched])
    start = trace.idle["start_ns"].to_numpy(np.int64)[rows]
    return {
        one: disjoint(Intervals(*(part[thread == one] for part in (start, start + took, ended_by))))
        for one in np.unique(thread[thread != NOTHING]).tolist()
    }


_STRUCTURAL = {GRAPHED: _graph, WITHOUT: _avoid, FILLED: _fill}


SORTS = ("kernel", "op", "module", "kind", "phase")
NUM_SUGGESTED = 3


@dataclass(frozen=True)
class Target:
    """A sort of thing, one of `SORTS`, and a name, in which `*` stands for anything."""

    sort: str
    name: str

    def __str__(self) -> str:
        return f"{self.sort}:{self.name}"


def parse_target(text: str, trace: Trace) -> Target:
    """Read `module:layers.0.attn`, `op:aten::mm`, `kernel:*gemm*`, `kind:norm`, or a name alone.

    Raises:
        KprofError: nothing in the trace has that name.
    """
    sort, _, name = text.partition(":")
    asked = [Target(sort, name)] if sort in SORTS else [Target(one, text) for one in SORTS]
    for target in asked:
        if rows_of(target, trace).any():
            return target
    known = [f"{one.sort}:{known}" for one in asked for known in names_of(one.sort, trace)]
    near = difflib.get_close_matches(str(asked[0]), known, NUM_SUGGESTED, cutoff=0.0)
    raise KprofError(
        f"no device activity belongs to {text!r}",
        fix=f"the nearest names: {', '.join(near)}; * in a name stands for anything"
        if near
        else "this trace has no names of that kind; try kernel:NAME",
    )


def parse_cause(name: str, trace: Trace) -> str:
    """Read a cause of idle time that a change can take away.

    Raises:
        KprofError: there is no such cause, none in this trace, or none that can be removed.
    """
    present = set(trace.idle["cause"].dropna().unique())
    known = [cause for cause in AVOIDABLE if cause in present]
    if name in known:
        return name
    if name == causes.LAUNCH_BOUND and name in present:
        fix = f"ask what putting the launches into CUDA graphs would save: {GRAPHS}"
    elif known:
        fix = f"write {', '.join(f'idle:{cause}=removed' for cause in known)}"
    else:
        fix = "this trace has no idle time that a change can take away; name a kernel or operator"
    is_known = name in causes.CAUSES
    problem = "cannot be removed" if name in present else "does not occur in this trace"
    raise KprofError(
        f"idle time of the cause {name!r} {problem}" if is_known else f"{name!r} is no cause",
        fix=fix,
    )


def rows_of(target: Target, trace: Trace) -> np.ndarray:
    """Tell which rows of `kernels` belong to a target.

    A module or an operator has all that runs inside it.
    """
    kernels = trace.kernels
    if target.sort == "op":
        return _inside_operator(target.name, trace)
    column = kernels["name" if target.sort == "kernel" else target.sort].cat
    matches = [_matches(target, str(name)) for name in column.categories]
    return np.asarray(np.append(matches, False)[column.codes.to_numpy()], dtype=bool)


def names_of(sort: str, trace: Trace) -> list[str]:
    """Return the names of a sort that occur in a trace."""
    if sort == "op":
        is_op = (trace.ranges["kind"] == "op").to_numpy(bool)
        return sorted(set(trace.ranges["name"][is_op].dropna().astype(str)))
    return sorted(set(trace.kernels["name" if sort == "kernel" else sort].dropna().astype(str)))


def _matches(target: Target, name: str) -> bool:
    is_inside = target.sort == "module" and fnmatchcase(name, f"{_literal(target.name)}.*")
    return is_inside or name == target.name or fnmatchcase(name, _literal(target.name))


def _literal(name: str) -> str:
    """Leave only the stars of a pattern their meaning: names of kernels hold brackets."""
    return name.replace("[", "[[]").replace("?", "[?]")


def _inside_operator(name: str, trace: Trace) -> np.ndarray:
    ranges = trace.ranges
    if not len(ranges):
        return np.zeros(len(trace.kernels), dtype=bool)
    names = ranges["name"].cat
    matches = [fnmatchcase(str(one), _literal(name)) for one in names.categories]
    is_op = (ranges["kind"] == "op").to_numpy(bool)
    is_named = np.append(matches, False)[names.codes.to_numpy()].astype(bool) & is_op
    op = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NO_ROW)
    return np.asarray(nearest(op, parent, is_named) != NO_ROW)


def largest_names(sort: str, saved_ns: np.ndarray, trace: Trace, number: int) -> list[str]:
    """Return the names of a sort with most of `saved_ns`, one value for each row of `kernels`."""
    column = trace.kernels["name" if sort == "kernel" else sort].cat
    codes = column.codes.to_numpy()
    known = codes >= 0
    sums = np.bincount(codes[known], saved_ns[known], len(column.categories))
    largest = np.argsort(-sums, kind="stable")[:number]
    return [str(column.categories[at]) for at in largest if sums[at] > 0]


# Python takes some µs from one operator to the next, or tens of them under a recorder.
# Longer than this it did something of its own.
CALL_NS = 50_000
# A call that takes so long, and so many times as long as is usual for its name, uses something for
# the first time: a library is loaded, a plan is made.
FIRST_USE_NS, FIRST_USE = 1_000_000, 20


def emptied(rows: np.ndarray, trace: Trace) -> np.ndarray:
    """Return the calls and operators of which all activities are among `rows` of `kernels`.

    Those within which something was used for the first time stay: others would use it, too.
    """
    tree = _find_tree(trace)
    found = np.zeros(len(trace.ranges), dtype=bool)
    for of, has_any in zip(tree.of_activity, tree.has_any, strict=True):
        found |= has_any & ~holding(of[~rows], tree.parent)
    found &= tree.is_call
    gone = np.flatnonzero(found)
    first_uses = _first_uses(gone, trace.ranges)
    if len(first_uses):
        found &= ~holding(first_uses, tree.parent)
        gone = np.flatnonzero(found)
    return gone


@dataclass(frozen=True)
class _Tree:
    """Which range each range stands in, and which of them make activities."""

    parent: np.ndarray
    """`NOTHING` at the top."""
    is_call: np.ndarray
    """Whether it is an operator or a call."""
    of_activity: tuple[np.ndarray, np.ndarray]
    """For each row of `kernels` the call that launched it, and its operator, or `NOTHING`."""
    has_any: tuple[np.ndarray, np.ndarray]
    """Whether any activity of each of these two stands in each range."""


@once_per_tables("kernels", "ranges")
def _find_tree(trace: Trace) -> _Tree:
    ranges, kernels = trace.ranges, trace.kernels
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    is_call = ranges["kind"].isin(["op", "runtime"]).to_numpy(bool)
    launch, op = (
        kernels[column].to_numpy(np.int64, na_value=NOTHING) for column in ("launch_row", "op_row")
    )
    return _Tree(parent, is_call, (launch, op), (holding(launch, parent), holding(op, parent)))


def _first_uses(found: np.ndarray, ranges: pd.DataFrame) -> np.ndarray:
    """Return the rows of `found` that take far longer than is usual for their name and kind."""
    duration_ns = ranges["duration_ns"].to_numpy(np.int64)
    long = found[duration_ns[found] >= FIRST_USE_NS]
    if not len(long):
        return np.asarray(long)
    took_ns = duration_ns.astype(np.float64)
    names = ranges["name"]
    alike = np.flatnonzero(names.isin(names.iloc[long]).to_numpy(bool))
    keys = [ranges[column].iloc[alike].to_numpy() for column in ("kind", "name")]
    usual_ns = np.full(len(ranges), np.inf)
    usual_ns[alike] = pd.Series(took_ns[alike]).groupby(keys).transform("median").to_numpy()
    return np.asarray(long[took_ns[long] > FIRST_USE * usual_ns[long]])


def without_host_time(replay: Replay, trace: Trace, gone: np.ndarray) -> Replay:
    """Take the host's time within the ranges `gone` out of their programs.

    Of operators with nothing between them also what Python needed to get from one to the next.
    """
    return without_host_spans(replay, spans_by_program(gone, replay.program, trace))


def spans_by_program(gone: np.ndarray, program: HostProgram, trace: Trace) -> dict[int, Intervals]:
    """Return when the ranges `gone` were open, by the program of their thread."""
    start, end, row = _spans_of(gone, trace)
    return {
        one: disjoint(Intervals(start[chosen], end[chosen], row[chosen]))
        for one, chosen in _places_by(program.of_ranges(trace, row)).items()
    }


def _places_by(number: np.ndarray) -> dict[int, np.ndarray]:
    """Return the places of each number from 0 on, in their order."""
    order = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number + 1))
    parts = np.split(order, ends)[1:-1]
    return {one: part for one, part in enumerate(parts) if len(part)}


def without_host_spans(replay: Replay, gone: Mapping[int, Intervals]) -> Replay:
    """Take the host's time within a union of intervals out of each program."""
    edges, program = replay.edges, replay.program
    lag_ns, kept_ns = edges.lag_ns.copy(), edges.kept_ns.copy()
    host = np.flatnonzero(edges.kind == HOST)
    places = _places_by(program.program[edges.target[host]])
    for one, union in gone.items():
        at = host[places.get(one, host[:0])]
        source, target = edges.source[at], edges.target[at]
        since, until = program.time_ns[source], program.time_ns[target]
        before_ns = length_before(union, until)
        # Mostly an edge begins at the point at which the one before it ended.
        ahead_ns = np.append(0, before_ns)[:-1]
        first = np.flatnonzero(np.append(True, source[1:] != target[:-1])[: len(at)])
        ahead_ns[first] = length_before(union, since[first])
        removed_ns = before_ns - ahead_ns
        is_shorter = removed_ns != 0
        at, since, until = at[is_shorter], since[is_shorter], until[is_shorter]
        removed_ns, kept = removed_ns[is_shorter], edges.kept_ns[at]
        removed_kept_ns = np.zeros_like(removed_ns)
        if one in replay.untouched:
            both = _in_both(union, replay.untouched[one], since, until)
            removed_kept_ns = np.minimum(both, kept)
        # A lag that differs from the recorded one shrinks by the same share.
        rest = 1 - (removed_ns - removed_kept_ns) / np.maximum(until - since - kept, 1)
        kept_ns[at] = kept - removed_kept_ns
        lag_ns[at] = np.rint(kept_ns[at] + (lag_ns[at] - kept) * np.clip(rest, 0, 1))
    return replace(replay, edges=replace(edges, lag_ns=lag_ns, kept_ns=kept_ns))


def _in_both(one: Intervals, other: Intervals, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Return how much of the overlap of two unions lies between each two moments."""
    first, second, together = (
        length_in(union, since, until) for union in (one, other, either(one, other))
    )
    return np.asarray(first + second - together)


def _spans_of(gone: np.ndarray, trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, ends and rows of ranges, operators up to a next one that follows at once."""
    start, duration = (trace.ranges[c].to_numpy(np.int64) for c in ("start_ns", "duration_ns"))
    since = start[gone]
    until, following = since + duration[gone], _operators_in_turn(trace)[gone]
    is_gone = np.zeros(len(start) + 1, dtype=bool)
    is_gone[gone] = True
    joins = np.flatnonzero(is_gone[following])
    until[joins] = np.maximum(until[joins], start[following[joins]])
    return since, until, gone


@once_per_tables("ranges")
def _operators_in_turn(trace: Trace) -> np.ndarray:
    """Return for every range the operator that follows it at once, an operator; or `NOTHING`.

    Nothing stands between them that the host recorded, and both stand in the same range.
    """
    ranges, thread = trace.ranges, number_threads(trace)
    start = ranges["start_ns"].to_numpy(np.int64)
    end = start + ranges["duration_ns"].to_numpy(np.int64)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    shown = np.flatnonzero(~ranges["kind"].isin(["python", "overhead"]).to_numpy(bool))
    # Ranges of one parent are of one thread, and those at the top in a group for each thread.
    group = np.where(parent == NOTHING, -1 - thread, parent)[shown]
    order = shown[np.lexsort([start[shown], group])]
    this, following = order[:-1], order[1:]
    is_op = (ranges["kind"] == "op").to_numpy(bool)
    joins = is_op[this] & is_op[following] & (thread[this] == thread[following])
    joins &= (parent[this] == parent[following]) & (start[following] - end[this] <= CALL_NS)
    found = np.full(len(ranges), NOTHING, dtype=np.int64)
    found[this[joins]] = following[joins]
    return found
