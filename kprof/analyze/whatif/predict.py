"""What-if: a step's time after a change, by replaying the recording with it.

Beside each prediction stands the plain Amdahl figure: the step less the time that the change takes
off the activities. The two differ where something else bounds the step: the host that launches, a
wait, another stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from kprof.analyze.attribution.ledger import union_ns
from kprof.analyze.attribution.overlap import allotted_time, rows_by
from kprof.analyze.attribution.steps import outside_steps, whole_ns
from kprof.analyze.findings.one_offs import without_start_up
from kprof.analyze.findings.queries import matches
from kprof.analyze.findings.recoverable import idle_in_steps
from kprof.analyze.idle import causes
from kprof.analyze.idle.causes import group_idle, inside_window
from kprof.analyze.intervals import NOTHING
from kprof.analyze.whatif.across_ranks import predict_across_ranks
from kprof.analyze.whatif.baseline import Baseline, find_baseline
from kprof.analyze.whatif.cause_time import NO_ROWS, CauseTime
from kprof.analyze.whatif.changes import (
    AVOIDABLE,
    FASTER,
    GRAPHED,
    REMOVED,
    REPLACED,
    ROOFLINE,
    TOGETHER,
    WITHOUT,
    Change,
    Target,
    apply,
    durations_after,
    in_turns,
    largest_names,
    rooflines_ns,
    rows_changed,
    rows_of,
    segments,
)
from kprof.analyze.whatif.replay import HOST, Replay, gain_error_ns
from kprof.trace import Prediction, Trace

NUM_TARGETS = 3
# Less than this share of the step is not worth a line.
LEAST_SAVING = 0.005
# Some 20 µs an activity for all that is asked; a run of a few steps has fewer.
MOST_UNLESS_ASKED = 60_000


def predict(changes: Sequence[Change], baseline: Baseline) -> Prediction:
    """Predict the step's time after all of `changes` together."""
    trace = baseline.trace
    duration = trace.kernels["duration_ns"].to_numpy(np.int64)
    # Amdahl's figure knows of no shortest kernel.
    plain_ns = durations_after(changes, trace, shortest_ns=0)
    plain_ns = np.where(outside_steps(trace), duration, plain_ns)
    amdahl = _amdahl_ns(changes, baseline, plain_ns)
    known = min((_known_share(one, trace, duration) for one in changes), default=1.0)
    told = Prediction(
        target=" + ".join(one.subject if len(changes) == 1 else str(one) for one in changes),
        change=changes[0].words if len(changes) == 1 else "together",
        step_ns=baseline.step_ns,
        predicted_step_ns=None,
        amdahl_step_ns=amdahl,
        uncertainty_ns=None,
        known_share=known,
        is_without_recording=baseline.added_ns != 0,
        what=changes[0].what if len(changes) == 1 else TOGETHER,
    )
    reason = baseline.refusal or _obstacle(changes, baseline, known)
    if reason is not None:
        return replace(told, reason=reason, amdahl_step_ns=None if known == 0 else amdahl)
    if baseline.replay is None:
        return replace(
            told,
            predicted_step_ns=amdahl,
            uncertainty_ns=0,
            shortest_step_ns=amdahl,
            longest_step_ns=amdahl,
        )
    changed = apply(changes, baseline.replay, trace)
    steady = _predicted_ns(changed, baseline)
    predicted = _with_first_step_ns(changed, baseline) if baseline.holds_first_step else steady
    missed_ns = baseline.uncertainty_ns + _by_the_host_ns(changed, steady, baseline)
    missed_ns += _steady_ns(gain_error_ns(baseline.replay, changed), baseline)
    all_readings = [predicted, steady, *_other_readings_ns(changes, baseline)]
    least_ns = max(baseline.step_ns - _held_ns(changes, baseline, plain_ns), 0)
    return replace(
        told,
        predicted_step_ns=max(predicted, least_ns),
        uncertainty_ns=missed_ns,
        shortest_step_ns=max(min(all_readings) - missed_ns, least_ns),
        # Where the replay gains more than that, it is no surer than its error.
        longest_step_ns=max(*all_readings, least_ns) + missed_ns,
    )


def _held_ns(changes: Sequence[Change], baseline: Baseline, plain_ns: np.ndarray) -> int:
    """Return the time of a step that these changes could take away at most.

    All of it where the idle time was not split by cause.
    """
    trace = baseline.trace
    if "gap_before_ns" not in trace.kernels:
        return baseline.step_ns
    time = CauseTime(trace)
    took = trace.kernels["duration_ns"].to_numpy(np.int64)
    busy_ns = np.maximum(took - plain_ns, 0)
    idle_ns = np.zeros(len(trace.idle), dtype=np.int64)
    launches = [NO_ROWS]
    for one in changes:
        if one.what == GRAPHED:
            idle_ns = np.maximum(idle_ns, time.late_launches_ns())
        elif one.what == WITHOUT:
            idle_ns = np.maximum(idle_ns, time.of_causes(one.cause))
            if one.cause == causes.PAGEABLE_COPY:
                # What the host launches after them may run beside them.
                is_upload = matches(trace.kernels["name"], causes.PAGEABLE_UPLOAD)
                busy_ns = np.where(is_upload, took, busy_ns)
        elif one.target is not None and one.what in (REMOVED, REPLACED):
            launches.append(np.flatnonzero(rows_of(one.target, trace)))
    held = time.held(busy_ns, idle_ns, np.unique(np.concatenate(launches)))
    waits = any(one.what == WITHOUT for one in changes)
    # Without the recorder the host is ahead by more, and a wait takes that lead.
    return held.ns + held.late_ns * (waits and baseline.added_ns > 0)


def _other_readings_ns(changes: Sequence[Change], baseline: Baseline) -> list[int]:
    """Return the step under other readings of what the recording does not hold.

    Which stream waits for which; whether the host needs the results that it waits for, and what
    else it waits for; whether it holds up activities whose launch was not recorded.
    """
    trace, found = baseline.trace, []
    assert baseline.replay is not None
    asked: list[list[Sequence[Change]]] = [[changes]]
    if any(one.what == WITHOUT and one.cause == causes.SYNCHRONIZATION for one in changes):
        cautious = [replace(one, keeps_results=True) for one in changes]
        asked += [[cautious], [*in_turns(cautious)]]
    is_unlaunched = trace.kernels["launch_row"].isna().to_numpy(bool)
    if any((rows_changed(one, trace) & is_unlaunched).any() for one in changes):
        asked.append([[replace(one, keeps_unlaunched=True) for one in changes]])
    for replay in (baseline.replay, *baseline.others):
        unchanged_ns = int(replay.step_ns())
        for parts in asked if replay is not baseline.replay else asked[1:]:
            gained = [unchanged_ns - int(apply(one, replay, trace).step_ns()) for one in parts]
            found.append(_after_ns(baseline, sum(gained)))
    return found


def _by_the_host_ns(changed: Replay, predicted_ns: int, baseline: Baseline) -> int:
    """Return how far the step may lie from what is predicted as the host's time varies."""
    spread = baseline.host_spread
    if not spread:
        return 0
    # All of the host's time varies, also the part that recording does not change.
    edges = replace(changed.edges, kept_ns=np.zeros_like(changed.edges.kept_ns))
    whole = replace(changed, edges=edges)
    others = (whole.scaled(HOST, share) for share in (1 - spread, 1 + spread))
    return max(abs(_predicted_ns(one, baseline) - predicted_ns) for one in others)


def _predicted_ns(replay: Replay, baseline: Baseline) -> int:
    """Return the measured step less what the replayed one gains by the change.

    What the replay misses the measured step by is taken to lie everywhere in it.
    """
    return _after_ns(baseline, baseline.replayed_ns - int(replay.step_ns()))


def _with_first_step_ns(changed: Replay, baseline: Baseline) -> int:
    """Return the mean of all recorded steps in a changed replay.

    The first one may gain another time than later ones, since nothing was queued before it.
    """
    assert baseline.replay is not None
    before_ns = baseline.replay.every_step_ns()
    gained_ns = before_ns - changed.every_step_ns()
    scale = baseline.step_ns / max(before_ns, 1)
    return max(baseline.step_ns - round(gained_ns * scale), 0)


def _after_ns(baseline: Baseline, gained_ns: int) -> int:
    return max(baseline.step_ns - _steady_ns(gained_ns, baseline), 0)


def _steady_ns(replayed_ns: float, baseline: Baseline) -> int:
    """Return a part of the replayed step as that of a measured one."""
    return int(replayed_ns) * baseline.steady_ns // max(baseline.replayed_ns, 1)


def _obstacle(changes: Sequence[Change], baseline: Baseline, known: float) -> str | None:
    """Return why these changes cannot be predicted, or None."""
    for one in changes:
        if one.target is not None and not rows_of(one.target, baseline.trace).any():
            return f"no device activity belongs to {one.target}"
    if known == 0:
        return "the work of none of it is known, so neither is its roofline"
    if baseline.replay is not None:
        return None
    if any(one.what in (GRAPHED, WITHOUT) for one in changes):
        return "these are host operators: nothing was launched on a device"
    return None


def _amdahl_ns(changes: Sequence[Change], baseline: Baseline, plain_ns: np.ndarray) -> int:
    """Return the step less the saved busy time, and what idle causes would give back."""
    where = ["rank", "device"]
    idle = idle_in_steps(baseline.trace)
    if baseline.added_ns:
        # The recorder made these edges, and the step is one without it.
        idle = inside_window(idle)
    saved = _saved_busy_ns(baseline.trace, plain_ns)
    for one in changes:
        if one.what not in (GRAPHED, WITHOUT):
            continue
        cause = causes.LAUNCH_BOUND if one.what == GRAPHED else one.cause
        mine = idle[(idle["cause"] == cause).to_numpy(bool)]
        lost_ns = mine["recoverable_ns"].to_numpy(np.int64, na_value=0)
        given = mine[where].assign(ns=lost_ns).groupby(where)["ns"].sum()
        # The host time that recording added cannot be saved.
        added_ns = max(baseline.added_ns, 0) * baseline.num_steps if one.what == GRAPHED else 0
        saved = saved.add((given - added_ns).clip(lower=0), fill_value=0)
    return max(baseline.step_ns - int(saved.max()) // baseline.num_steps, 0)


def _saved_busy_ns(trace: Trace, plain_ns: np.ndarray) -> pd.Series[int]:
    """Return by rank and device how much shorter the union of the activities gets.

    Every activity begins where it did. One that gets longer adds its share of the instants that
    belong to it.
    """
    kernels, owned = trace.kernels, allotted_time(trace)
    duration = kernels["duration_ns"].to_numpy(np.int64)
    start, shorter = kernels["start_ns"].to_numpy(np.int64), np.minimum(plain_ns, duration)
    share = np.where(owned == duration, 1.0, owned / np.maximum(duration, 1))
    grown = np.rint((plain_ns - shorter) * share).astype(np.int64)
    keys, saved = [], []
    for rows in rows_by(kernels, "rank", "device"):
        after_ns = union_ns(start[rows], start[rows] + shorter[rows])
        keys.append((kernels["rank"].iloc[rows[0]], kernels["device"].iloc[rows[0]]))
        saved.append(int(owned[rows].sum()) - after_ns - int(grown[rows].sum()))
    names = pd.MultiIndex.from_tuples(keys, names=["rank", "device"])
    return pd.Series(saved, index=names, dtype=np.int64, name="ns")


def _known_share(change: Change, trace: Trace, duration: np.ndarray) -> float:
    """Return the share of a target's time whose roofline is known."""
    if change.what != ROOFLINE or change.target is None:
        return 1.0
    rows = rows_of(change.target, trace)
    known = rows & (rooflines_ns(trace) != NOTHING)
    return float(duration[known].sum() / max(int(duration[rows].sum()), 1))


def find_predictions(trace: Trace, baseline: Baseline | None = None) -> list[Prediction]:
    """Predict what is worth asking of a recording, largest saving first.

    `baseline`, if the trace was replayed before.

    The kernels, operators and modules that would gain most at their roofline; launches in graphs;
    the causes of idle time that can be avoided; late ranks and communication of several ranks.
    What cannot be told stays, with its reason.
    """
    if not len(trace.kernels) or not trace.has_timeline:
        return []
    found = [*predict_across_ranks(trace), *_predict_by_replay(trace, baseline)]
    worth = [one for one in found if one.reason is not None or _saving(one) >= LEAST_SAVING]
    return sorted(worth, key=_saving, reverse=True)


def _predict_by_replay(trace: Trace, baseline: Baseline | None) -> list[Prediction]:
    if len(trace.kernels) > MOST_UNLESS_ASKED and not trace.is_host_only:
        many = Prediction("a step", "after any change", whole_ns(trace))
        reason = f"replaying {len(trace.kernels):,} activities takes long; ask with kprof whatif"
        return [replace(many, reason=reason)]
    baseline = baseline or find_baseline(trace)
    if baseline.refusal is not None:
        any_change = Prediction("a step", "after any change", baseline.step_ns)
        return [replace(any_change, reason=baseline.refusal)]
    return [predict([change], baseline) for change in _questions(baseline)]


def _saving(prediction: Prediction) -> float:
    """Return the share of the step that is saved; nothing where that is not known."""
    if prediction.predicted_step_ns is None:
        return 0.0
    return 1 - prediction.predicted_step_ns / max(prediction.step_ns, 1)


def _questions(baseline: Baseline) -> list[Change]:
    trace = baseline.trace
    duration = trace.kernels["duration_ns"].to_numpy(np.int64)
    roofline = rooflines_ns(trace)
    saved = np.where(roofline != NOTHING, np.maximum(duration - roofline, 0), 0)
    # On the host the activities are operators: each is asked about once, under its own name.
    sorts = ("op", "module") if trace.is_host_only else ("kernel", "op", "module")
    asked = [
        Change(ROOFLINE, Target(sort, name))
        for sort in sorts
        for name in largest_names(sort, saved, trace, NUM_TARGETS)
    ]
    if baseline.replay is None:
        return asked
    if (segments(baseline.replay, trace) != NOTHING).any():
        asked.append(Change(GRAPHED))
    return asked + [Change(WITHOUT, cause=cause) for cause in _avoidable(trace)]


def _avoidable(trace: Trace) -> list[str]:
    """Return the causes of idle time other than start-up that a change can take away.

    Longest first.
    """
    steady, _ = without_start_up(trace)
    groups = group_idle(inside_window(steady.idle))
    return [cause for cause in groups["cause"] if cause in AVOIDABLE]


def suggest(trace: Trace, baseline: Baseline | None = None) -> list[Change]:
    """Return changes that this trace can be asked about, one of each sort; none if none is told.

    Each names what takes most time. `baseline`, if the trace was replayed before; it is not
    replayed where a prediction is known.
    """
    if baseline is None and all(one.predicted_step_ns is None for one in trace.meta.what_if):
        baseline = find_baseline(trace)
    if baseline is not None and baseline.refusal is not None:
        return []
    took = trace.kernels["duration_ns"].to_numpy(np.int64)
    how = FASTER if (rooflines_ns(trace) == NOTHING).all() else ROOFLINE
    sorts = {"op": FASTER} if trace.is_host_only else {"kind": FASTER, "module": how, "op": REMOVED}
    found = [
        Change(what, Target(sort, name), 2.0)
        for sort, what in sorts.items()
        for name in largest_names(sort, took, trace, 1)
    ]
    if trace.is_host_only or not trace.has_timeline:
        return found
    found += [Change(WITHOUT, cause=cause) for cause in _avoidable(trace)[:1]]
    return [*found, Change(GRAPHED)] if trace.kernels["launch_row"].notna().any() else found
