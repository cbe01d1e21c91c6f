"""The recording as it is, replayed: what predictions start from, and how far to trust them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kprof.analyze.overhead import measure_cost
from kprof.analyze.steps import time_steps
from kprof.analyze.summary import measure_window
from kprof.analyze.what_if.dependencies import find_replay
from kprof.analyze.what_if.replay import HOST, Replay
from kprof.trace import Trace

# A replay that misses the measured step by more than this tells nothing about another one.
WORST_REPLAY = 0.03
# Recording that costs less than this is left in.
NEGLIGIBLE_SLOWDOWN = 0.01
# The recorder makes the host's work at most so much of it longer.
LEAST_HOST_SHARE = 0.2
HALVINGS = 14
# A replay takes some microseconds an activity.
MOST_ACTIVITIES = 1_000_000


@dataclass(frozen=True)
class Baseline:
    """The unchanged recording: its mean step as measured, and as replayed.

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
    """What recording had added to a step, and was taken off the host's time."""

    @property
    def error(self) -> float:
        """What the replay misses the measured step by, as a share of it."""
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
        if self.error <= WORST_REPLAY:
            return None
        return (
            f"replaying the unchanged recording misses the measured step by "
            f"{100 * self.error:.1f} %: more goes on in it than it tells"
        )


def find_baseline(trace: Trace) -> Baseline:
    """Replay an analyzed trace as it is, unless it is too large."""
    is_replayed = trace.has_timeline and not trace.is_host_only
    if not is_replayed or not 0 < len(trace.kernels) <= MOST_ACTIVITIES:
        steps = time_steps(trace).recorded_ns
        num = max(len(steps), 1)
        step_ns = sum(steps) // num if steps else measure_window(trace.kernels)
        return Baseline(trace, None, num, step_ns, step_ns, 0)
    replay = find_replay(trace)
    rank = replay.spans.rank
    measured = replay.span_times(replay.measured())
    replayed, roughly = (
        one.span_times(one.run()) for one in (replay, find_replay(trace, is_typical=True))
    )
    means = means_of_ranks(measured, rank)
    slowest = int(means.argmax())
    errors = [means_of_ranks(np.abs(one - measured), rank) for one in (replayed, roughly)]
    recorded = Baseline(
        trace,
        replay,
        int((rank == np.unique(rank)[slowest]).sum()),
        int(means.max()),
        int(means_of_ranks(replayed, rank).max()),
        int(max(error[slowest] for error in errors)),
    )
    return _without_recording(recorded, replay)


def _without_recording(recorded: Baseline, replay: Replay) -> Baseline:
    """Shorten the host's time until the replay takes as long as a step that nobody recorded.

    Recording lengthens what the host does, about everywhere; the device's work stays as it is.
    Where no such share of the host's time explains the difference, the recorded step stands.
    """
    cost = measure_cost(recorded.trace)
    if cost is None or abs(cost.slowdown) < NEGLIGIBLE_SLOWDOWN:
        return recorded
    wanted = recorded.step_ns / (1 + cost.slowdown)
    longest = wanted * (1 + NEGLIGIBLE_SLOWDOWN)
    is_host = replay.edges.kind == HOST

    def scaled(share: float) -> Replay:
        lag_ns = np.where(is_host, np.rint(replay.edges.lag_ns * share), replay.edges.lag_ns)
        return replace(replay, edges=replace(replay.edges, lag_ns=lag_ns.astype(np.int64)))

    def took(one: Replay) -> float:
        return float(means_of_ranks(one.span_times(one.run()), one.spans.rank).max())

    # Where the device bounds the step, many shares explain it; the largest claims least.
    low, high = LEAST_HOST_SHARE, 1.0
    for _ in range(HALVINGS):
        share = (low + high) / 2
        low, high = (share, high) if took(scaled(share)) <= longest else (low, share)
    shorter = scaled(low)
    step_ns = took(shorter)
    missed = abs(step_ns - wanted)
    if missed > WORST_REPLAY * wanted:
        return recorded
    return replace(
        recorded,
        replay=shorter,
        step_ns=int(wanted),
        replayed_ns=int(step_ns),
        uncertainty_ns=recorded.uncertainty_ns + int(missed),
        added_ns=recorded.step_ns - int(wanted),
    )


def means_of_ranks(times: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the mean of each rank's spans."""
    ranks, of = np.unique(rank, return_inverse=True)
    return np.asarray(np.bincount(of, times, len(ranks)) / np.bincount(of, minlength=len(ranks)))
