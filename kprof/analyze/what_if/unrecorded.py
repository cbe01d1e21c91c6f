"""A step that nobody records: what recording adds to the host's and the device's time, taken off.

Recording lengthens what the host does, about everywhere, and the device's time between two
activities; the activities themselves stay as they are.
"""

from __future__ import annotations

from statistics import fmean, median

import numpy as np

from kprof.analyze.overhead import measure_cost
from kprof.analyze.what_if.host_program import MARK
from kprof.analyze.what_if.replay import HOST, STREAM, Replay
from kprof.analyze.what_if.untouched import with_untouched
from kprof.trace import Recording, Trace

# The recorder makes the host's work at most so much of it longer.
LEAST_HOST_SHARE = 0.2
# Of 1.4 µs between two queued kernels under CUPTI, an H200 needs at least 0.2 µs for itself: an
# empty kernel in a graph takes 1.08 µs, and runs for 0.86 (`kprof roofline`).
LEAST_GAP_SHARE = 0.15
# A host that is done with a step in less of the device's time than this was not held by a full
# queue: it shows its own time.
IS_AHEAD = 0.9
# Of the unrecorded steps: all but the fastest and the slowest tenth. Fewer than this tell nothing.
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
    if not alone or lengthened_ns <= 0:
        return 1.0
    return float(np.clip((median(alone) - kept) / lengthened_ns, LEAST_HOST_SHARE, 1.0))


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
