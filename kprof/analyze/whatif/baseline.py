"""The baseline of predictions: the unchanged recording replayed, and its error.

Recording lengthens operators, calls, the Python code between them, and the device's gaps between
activities; the activities keep their durations. It does not lengthen the host's staging of bytes
for a copy, the driver's mapping of memory, and what the host does for longer while nothing is
recorded, such as loading, sleeping and computing. The baseline of an unrecorded step subtracts that
overhead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from kprof.analyze.attribution.steps import time_steps, whole_ns
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import find_host
from kprof.analyze.intervals import NOTHING, Intervals, disjoint, length_in
from kprof.analyze.whatif.dependencies import Streams, find_recorded
from kprof.analyze.whatif.host_program import MARK, HostProgram
from kprof.analyze.whatif.replay import HOST, STREAM, Replay, means_of_ranks
from kprof.trace import Recording, Trace, once_per_tables

# A replay that misses the measured step by more than this tells nothing about another one.
WORST_REPLAY = 0.03
# A replay takes some microseconds an activity.
MOST_ACTIVITIES = 1_000_000
# Runtimes whose waiting calls are known: of CUDA, HIP, Level Zero and Unified Runtime.
KNOWN_CALLS = re.compile(r"(?:cuda|cu|hip|ze|zes|ur)[A-Z]")
OTHER_READINGS: tuple[Streams, ...] = ("free", "in order")


@dataclass(frozen=True)
class Baseline:
    """The unchanged recording: its mean step as measured, and as replayed behind the drain.

    Where steps were timed without the recorder, both are of such a step.
    """

    trace: Trace
    replay: Replay | None
    """None for the host's operators, which run one after another, and where there is too much."""
    num_steps: int
    step_ns: int
    replayed_ns: int
    uncertainty_ns: int
    added_ns: int = 0
    """The recording overhead of a step, subtracted from the host's time."""
    others: tuple[Replay, ...] = ()
    """The replay under other readings of what streams wait for, where there are several streams."""
    quick: tuple[Replay, ...] = ()
    """The replay with as quick a host as explains the step, too, where recording was taken off."""
    steady_ns: int = 0
    """Mean of the steps that the replay counts, as measured; 0 where nothing is replayed."""
    host_spread: float = 0.0
    """How far the host's time lies from what it is taken to be in most steps, as a share."""
    holds_first_step: bool = False
    """Whether `step_ns` holds the first step, before which the device had nothing to do, and the
    mean of `replay` does not."""

    @property
    def error(self) -> float:
        """The replay's error on the measured step, as a share of it."""
        return self.uncertainty_ns / max(self.step_ns, 1)

    @property
    def refusal(self) -> str | None:
        """Return why nothing can be predicted, or None."""
        if self.trace.meta.untimed is not None:
            return self.trace.meta.untimed
        if self.step_ns <= 0:
            return "the recorded steps hold no device time"
        if self.replay is None and not self.trace.is_host_only:
            return f"{len(self.trace.kernels):,} activities are too many to replay"
        if not _knows_waits(self.trace):
            return "the calls of this device's runtime in which the host waits are unknown"
        if self.error <= WORST_REPLAY:
            return None
        return (
            f"replaying the unchanged recording misses the measured step by "
            f"{100 * self.error:.1f} %: more goes on in it than it tells"
        )


@once_per_tables("ranges")
def _knows_waits(trace: Trace) -> bool:
    """Tell whether the host's calls, where there are any, are of a runtime that is known."""
    ranges = trace.ranges
    names = ranges["name"].cat
    codes = names.codes.to_numpy()[(ranges["kind"] == "runtime").to_numpy(bool)]
    calls = names.categories[np.flatnonzero(np.bincount(codes[codes >= 0]))]
    return not len(codes) or any(KNOWN_CALLS.match(str(name)) for name in calls)


def find_baseline(trace: Trace) -> Baseline:
    """Replay an analyzed trace as it is, unless it is too large."""
    is_replayed = trace.has_timeline and not trace.is_host_only
    if not is_replayed or not 0 < len(trace.kernels) <= MOST_ACTIVITIES:
        steps = time_steps(trace).recorded_ns
        num = max(len(steps), 1)
        step_ns = whole_ns(trace)
        return Baseline(trace, None, num, step_ns, step_ns, 0)
    found = find_recorded(trace)
    # A change gains in a step to come what it gains behind the drain, where the host has a lead.
    steady = found.replay().behind_the_drain()
    rank = steady.spans.rank
    measured = steady.span_times(steady.measured())
    typical = found.replay(is_typical=True)
    typical = replace(typical, edges=typical.edges.sharing(steady.edges))
    counts = steady.spans.counts
    means = means_of_ranks(measured, rank)
    slowest = int(means.argmax())
    readings = (steady.spans_ns, typical.spans_ns)
    errors = [means_of_ranks(np.abs(one - measured), rank) for one in readings]
    recorded = Baseline(
        trace,
        steady,
        int((rank == np.unique(rank)[slowest]).sum()),
        whole_ns(trace),
        int(steady.step_ns()),
        int(max(error[slowest] for error in errors)),
        steady_ns=int(means_of_ranks(measured[counts], rank[counts]).max()),
        holds_first_step=not counts.all(),
    )
    if found.has_several_streams:
        others = tuple(found.replay(streams).behind_the_drain() for streams in OTHER_READINGS)
        recorded = replace(recorded, others=others)
    return _without_recording(recorded, steady)


def _without_recording(recorded: Baseline, replay: Replay) -> Baseline:
    """Return the baseline of an unrecorded step, where such steps were timed.

    Where nothing that recording adds explains the difference, the recorded step stands.
    """
    wanted_ns = unrecorded_step_ns(recorded.step_ns, recorded.trace)
    if wanted_ns is None:
        return recorded
    shorter = take_recording_off(replay, recorded.trace, wanted_ns)
    replayed_ns = int(shorter.step_ns())
    missed_ns = abs(replayed_ns - wanted_ns)
    if missed_ns > WORST_REPLAY * wanted_ns:
        return recorded
    return replace(
        recorded,
        replay=shorter,
        others=tuple(take_recording_off(one, recorded.trace, wanted_ns) for one in recorded.others),
        quick=(with_quick_host(shorter, recorded.trace),),
        step_ns=wanted_ns,
        steady_ns=wanted_ns,
        replayed_ns=replayed_ns,
        uncertainty_ns=recorded.uncertainty_ns + missed_ns,
        added_ns=recorded.step_ns - wanted_ns,
        host_spread=host_spread(recorded.trace),
        holds_first_step=False,
    )


# Calls that take longer for what they do themselves. Those that wait for the device have no time of
# their own in a replay.
OF_THEIR_OWN = (causes.PAGEABLE_COPY, causes.ALLOCATOR)
# Recording adds less at one edge of a range: hooks in Python take some 50 µs on a slow host.
RECORDED_NS = 100_000


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

    A recorder works where it writes something: a range begins or ends. In longer stretches between
    two such edges the host loads, sleeps or computes, and that takes what it takes. So do bytes
    that the host itself moves for a copy, and memory that the driver maps, however short the call.
    """
    host = find_host(trace)
    of_range = program.of_ranges(trace)
    own = host.blocking.index[host.blocking.isin(OF_THEIR_OWN)].to_numpy(np.int64)
    found = {}
    for one in np.unique(program.program).tolist():
        rows = np.flatnonzero(of_range == one)
        edge = np.unique(np.concatenate([host.start[rows], host.end[rows]]))
        since, until = edge[:-1], edge[1:]
        is_quiet = until - since > RECORDED_NS
        calls = own[of_range[own] == one]
        found[one] = disjoint(
            Intervals(
                np.concatenate([since[is_quiet], host.start[calls]]),
                np.concatenate([until[is_quiet], host.end[calls]]),
                np.full(int(is_quiet.sum()) + len(calls), NOTHING),
            )
        )
    return found


# The recorder makes the host's work at most so much of it longer.
LEAST_HOST_SHARE = 0.2
# Of 1.4 µs between two queued kernels under CUPTI, an H200 needs at least 0.2 µs for itself: an
# empty kernel in a graph takes 1.08 µs, and runs for 0.86 (`kprof roofline`).
LEAST_GAP_SHARE = 0.15
# A host that is done with a step in less of the device's time than this was not held by a full
# queue: it shows its own time.
IS_AHEAD = 0.9
# Quantiles of unrecorded steps, and the fewest steps that show any.
MOST_STEPS = (0.1, 0.5, 0.9)
ENOUGH = 5
HALVINGS = 10
PRECISION = 0.001


def unrecorded_step_ns(recorded_ns: int, trace: Trace) -> int | None:
    """Return the time of an unrecorded step, given the mean of the recorded ones in a replay.

    Both were timed by the recorder, too, of the first process; None where they were not, or did
    not do the same work.
    """
    cost, recording = measure_cost(trace), trace.meta.recording
    if cost is None or recording is None or not cost.is_of_like_steps:
        return None
    return int(recorded_ns * cost.unrecorded_ns / fmean(recording.recorded_step_ns))


def take_recording_off(replay: Replay, trace: Trace, wanted_ns: int) -> Replay:
    """Return a replay whose steps take about `wanted_ns`.

    The host's time is scaled by the largest share that explains such a step, and that the host's
    own time in unrecorded steps allows; but for that which recording leaves as it is. What the
    device alone still takes too long is taken off its time between activities.
    """
    replay = with_untouched(replay, trace).behind_the_drain()
    at_least = replay.scaled(HOST, LEAST_HOST_SHARE).step_ns()
    most = host_share(replay, trace)
    replay = _shortened(replay, HOST, (LEAST_HOST_SHARE, most), max(wanted_ns, at_least))
    return _shortened(replay, STREAM, (LEAST_GAP_SHARE, 1.0), wanted_ns)


def with_quick_host(replay: Replay, trace: Trace) -> Replay:
    """Return a replay from which recording was taken off, with the least time of the host's.

    As long as the device is the limit, a quicker host makes the same step. As quick as it was in
    most unrecorded steps in which it ran ahead; where too few tell, as a recorder can slow it.
    """
    recording = trace.meta.recording
    alone = own_host_ns(recording) if recording is not None else []
    kept = _per_step(replay, replay.edges.kept_ns)
    lengthened_ns = _per_step(replay, replay.edges.lag_ns) - kept
    low, high = LEAST_HOST_SHARE, 1.0
    if len(alone) >= ENOUGH and lengthened_ns > 0:
        quick_ns = float(np.quantile(alone, MOST_STEPS[0]))
        low = float(np.clip((quick_ns - kept) / lengthened_ns, low, high))
    least_ns = replay.step_ns() * (1 - PRECISION)
    if replay.scaled(HOST, low).step_ns() >= least_ns:
        return replay.scaled(HOST, low)
    for _ in range(HALVINGS):
        share = (low + high) / 2
        low, high = (
            (low, share) if replay.scaled(HOST, share).step_ns() >= least_ns else (share, high)
        )
    return replay.scaled(HOST, high)


def _shortened(replay: Replay, kind: int, shares: tuple[float, float], wanted_ns: float) -> Replay:
    """Scale the lags of one kind by the largest of the shares that reaches what is wanted."""
    low, high = shares
    longest = wanted_ns * (1 + PRECISION)
    whole = replay.scaled(kind, high)
    if low >= high or whole.step_ns() <= longest:
        return whole
    for _ in range(HALVINGS):
        share = (low + high) / 2
        low, high = (
            (share, high) if replay.scaled(kind, share).step_ns() <= longest else (low, share)
        )
    return replay.scaled(kind, low)


def host_share(replay: Replay, trace: Trace) -> float:
    """Return how much of its recorded time in a step the host takes at most without the recorder.

    Known where the host ran ahead of the device in unrecorded steps; else it is all of it. Neither
    counts what is kept of it.
    """
    recording = trace.meta.recording
    alone = own_host_ns(recording) if recording is not None else []
    kept = _per_step(replay, replay.edges.kept_ns)
    lengthened_ns = _per_step(replay, replay.edges.lag_ns) - kept
    if not alone:
        return 1.0
    own_ns = max(median(alone) - kept, LEAST_HOST_SHARE * lengthened_ns)
    return own_ns / lengthened_ns if own_ns < lengthened_ns else 1.0


def own_host_ns(recording: Recording) -> list[int]:
    """Return the host's time in the unrecorded steps in which it ran ahead of the device."""
    if len(recording.unrecorded_host_ns) != len(recording.unrecorded_step_ns):
        return []
    both = zip(recording.unrecorded_host_ns, recording.unrecorded_step_ns, strict=True)
    return [host_ns for host_ns, step_ns in both if host_ns < IS_AHEAD * step_ns]


def host_spread(trace: Trace) -> float:
    """Return how far the host's time lies from its median in most unrecorded steps, as a share.

    Its own, where it ran ahead of the device in enough of them; else that of the steps, as if it
    made them as long as they are. At most all of it; 0 where too few steps tell.
    """
    recording = trace.meta.recording
    if recording is None:
        return 0.0
    times = own_host_ns(recording)
    if len(times) < ENOUGH:
        times = list(recording.unrecorded_step_ns)
    if len(times) < ENOUGH:
        return 0.0
    low, middle, high = np.quantile(times, MOST_STEPS).tolist()
    return float(min(max(high - middle, middle - low) / max(middle, 1), 1.0))


def _per_step(replay: Replay, ns: np.ndarray) -> float:
    """Return the mean over the steps of the first rank of what its host's edges have together.

    Of their lags: the host's own time, without its waits.
    """
    program, edges = replay.program, replay.edges
    marks = np.flatnonzero((program.what == MARK) & (program.rank == program.rank.min(initial=0)))
    rows = program.row[marks]
    is_host = edges.kind == HOST
    own_ns = np.zeros(len(program.time_ns), dtype=np.int64)
    # A point has one such edge, from the point before.
    own_ns[edges.target[is_host]] = ns[is_host]
    until = np.cumsum(own_ns)
    steps = [until[marks[rows == row]] for row in np.unique(rows)]
    return fmean(float(step[-1] - step[0]) for step in steps) if steps else 0.0
