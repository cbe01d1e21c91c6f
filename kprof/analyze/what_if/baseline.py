"""The recording as it is, replayed: what predictions start from, and how far to trust them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from kprof.analyze.steps import time_steps, whole_ns
from kprof.analyze.what_if.dependencies import Streams, find_recorded
from kprof.analyze.what_if.replay import Replay, means_of_ranks
from kprof.analyze.what_if.unrecorded import (
    host_spread,
    take_recording_off,
    unrecorded_step_ns,
    with_quick_host,
)
from kprof.trace import Trace

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
    """What recording had added to a step, and was taken off the host's time."""
    others: tuple[Replay, ...] = ()
    """The replay under other readings of what streams wait for, where there are several streams."""
    quick: tuple[Replay, ...] = ()
    """The replay with as quick a host as explains the step, too, where recording was taken off."""
    steady_ns: int = 0
    """Mean of the steps that the replay counts, as measured; 0 where nothing is replayed."""
    host_spread: float = 0.0
    """How far the host's time lies from what it is taken to be in most steps, as a share."""

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
        if not _knows_waits(self.trace):
            return "nothing tells in which calls of this device's runtime the host waits"
        if self.error <= WORST_REPLAY:
            return None
        return (
            f"replaying the unchanged recording misses the measured step by "
            f"{100 * self.error:.1f} %: more goes on in it than it tells"
        )


def _knows_waits(trace: Trace) -> bool:
    """Tell whether the host's calls, where there are any, are of a runtime that is known."""
    ranges = trace.ranges
    calls = ranges["name"][(ranges["kind"] == "runtime").to_numpy(bool)].unique()
    return not len(calls) or any(KNOWN_CALLS.match(str(name)) for name in calls)


def find_baseline(trace: Trace) -> Baseline:
    """Replay an analyzed trace as it is, unless it is too large."""
    is_replayed = trace.has_timeline and not trace.is_host_only
    if not is_replayed or not 0 < len(trace.kernels) <= MOST_ACTIVITIES:
        steps = time_steps(trace).recorded_ns
        num = max(len(steps), 1)
        step_ns = whole_ns(trace)
        return Baseline(trace, None, num, step_ns, step_ns, 0)
    found = find_recorded(trace)
    replay = found.replay()
    rank = replay.spans.rank
    measured = replay.span_times(replay.measured())
    replayed, roughly = (
        one.span_times(one.run()) for one in (replay, found.replay(is_typical=True))
    )
    # A change gains in a step to come what it gains behind the drain, where the host has a lead.
    steady = replay.behind_the_drain()
    counts = steady.spans.counts
    means = means_of_ranks(measured, rank)
    slowest = int(means.argmax())
    errors = [means_of_ranks(np.abs(one - measured), rank) for one in (replayed, roughly)]
    recorded = Baseline(
        trace,
        steady,
        int((rank == np.unique(rank)[slowest]).sum()),
        int(means.max()),
        int(steady.step_ns()),
        int(max(error[slowest] for error in errors)),
        steady_ns=int(means_of_ranks(measured[counts], rank[counts]).max()),
    )
    if found.has_several_streams:
        others = tuple(found.replay(streams).behind_the_drain() for streams in OTHER_READINGS)
        recorded = replace(recorded, others=others)
    return _without_recording(recorded, steady)


def _without_recording(recorded: Baseline, replay: Replay) -> Baseline:
    """Return the baseline of a step that nobody records, where such steps were timed.

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
    )
