"""Savings: how much shorter a step gets after the fixes of findings, as an interval.

A fix is replayed twice, as if it succeeded fully and modestly. The replay's own error, the
spread of the full gain over the recorded steps, and all readings of what the recording does not
hold, widen the interval. No saving exceeds the time of its cause. Where nothing can be replayed,
that time is an upper bound, and nothing a lower one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kprof.analyze.attribution.steps import whole_ns
from kprof.analyze.findings.patterns import MODEST
from kprof.analyze.findings.queries import matches
from kprof.analyze.findings.recoverable import perhaps_once
from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.analyze.idle.causes import MIGRATION, PAGEABLE_COPY, SYNCHRONIZATION
from kprof.analyze.whatif.baseline import Baseline, find_baseline
from kprof.analyze.whatif.cause_time import NO_ROWS, CauseTime
from kprof.analyze.whatif.changes import (
    AVOIDABLE,
    FILLED,
    GRAPHED,
    WITHOUT,
    Change,
    apply,
    in_turns,
    with_durations,
    without_rows,
)
from kprof.analyze.whatif.replay import Replay, gain_error_ns
from kprof.findings import Finding, Fix, Saving
from kprof.trace import Trace

# Launching a kernel from Python takes the host up to as long as so many of torch's own launches.
HOSTS_COST = 3

DIFFERS = 0.01
# Of a large recording one takes tens of MB.
REPLAYS_KEPT = 4
ENDS = ("low_ns", "high_ns")
UNKNOWN = "the recording does not show its cost"
REPLAYED = (
    "replayed with the fix succeeding fully and modestly, widened by the replay's error and by how "
    "much the recorded steps differ"
)
STREAMS = "; which stream waits for which was not recorded, so all readings of it count"
RESULTS = "; the host may need the results that it waits for, and then these waits stay"
ONCE = "; a wait that is far longer than all others may be start-up, and is left out"
UNLAUNCHED = "; some launches were not recorded, and the host may hold up what they launched"
STALLED = "at most the device's wait for it: the host's work then may be needed"
WAITED = "the other ranks' wait for these, half of it if the fix succeeds modestly"
BOUNDED = "at most the time of its cause; it was not replayed, because "


class Gain(NamedTuple):
    """The gain of a change in the mean step of a replay."""

    ns: float
    error_ns: float
    """By how much the mean may differ in other steps than the recorded ones."""

    @property
    def most_ns(self) -> float:
        """The most that it may gain."""
        return self.ns + self.error_ns


class _Rows(NamedTuple):
    """What fixes make of the rows of `kernels`."""

    after_ns: np.ndarray
    """How long each would take."""
    is_gone: np.ndarray


@dataclass(frozen=True)
class _Fixes:
    """The fixes of some findings, and what they make of the rows."""

    findings: Sequence[Finding]
    trace: Trace

    @cached_property
    def best(self) -> _Rows:
        """The rows if the fixes succeed fully."""
        return _new_durations(self.findings, self.trace, is_best=True)

    @cached_property
    def modest(self) -> _Rows:
        """The rows if they succeed modestly."""
        return _new_durations(self.findings, self.trace, is_best=False)

    @cached_property
    def unlaunched(self) -> np.ndarray:
        """Whether each row would change whose launch was not recorded."""
        took_ns = self.trace.kernels["duration_ns"].to_numpy(np.int64)
        changes = self.best.is_gone | (self.best.after_ns != took_ns)
        return np.asarray(changes & self.trace.kernels["launch_row"].isna().to_numpy(bool))


@dataclass(frozen=True)
class Pricer:
    """Prices the findings of one trace."""

    trace: Trace
    baseline: Baseline | None
    """None where nothing tells what ran when."""
    _changed: dict[tuple[int, tuple[Change, ...], bytes], Replay] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The last few changed replays, whose durations are those of their fixes."""

    @property
    def refusal(self) -> str | None:
        """Say why nothing is replayed, or None."""
        if self.trace.meta.untimed is not None:
            return self.trace.meta.untimed
        if self.trace.is_host_only:
            return "a host's operators run one after another"
        return self.baseline.refusal if self.baseline is not None else "nothing was timed"

    @property
    def step_ns(self) -> int:
        """The denominator of savings: a step without recording, where such steps were timed."""
        if self.baseline is not None and self.baseline.step_ns > 0:
            return self.baseline.step_ns
        return whole_ns(self.trace)

    def price(self, findings: Sequence[Finding]) -> Saving:
        """Return what the fixes of all these findings save together, in one replay.

        A row that several of them would change counts for the first of them alone.
        """
        known = [one for one in findings if one.fix != Fix() and not self._is_once(one)]
        if not known:
            return Saving(self.step_ns, None, None, UNKNOWN)
        waited_ns = sum(one.fix.waited_ns or 0 for one in known)
        if waited_ns:
            rest = self.price([one for one in known if one.fix.waited_ns is None])
            low_ns, high_ns = (rest.low_ns or 0) + waited_ns // 2, (rest.high_ns or 0) + waited_ns
            low_ns, high_ns = min(low_ns, self.step_ns), min(high_ns, self.step_ns)
            return Saving(self.step_ns, low_ns, high_ns, WAITED)
        fixes = _Fixes(known, self.trace)
        most_ns = min(self._most_ns(fixes), self.step_ns)
        if self.refusal is not None or self.baseline is None:
            return Saving(self.step_ns, 0, most_ns, BOUNDED + str(self.refusal))
        # A quicker host may make the step that was measured: a change of the device's time, or of
        # a wait, gains more with it.
        readings = (*self._replays(), *self.baseline.quick)
        best = [self._gained(fixes, replay, is_best=True) for replay in readings]
        modest = [self._modestly_gained(fixes, replay) for replay in self._replays()]
        cautious = self._cautiously_gained(fixes)
        missed = self.baseline.uncertainty_ns
        # How modest a success may be is a choice: its own spread would tell nothing more.
        least = min(min(one.ns, most_ns) - one.error_ns for one in (*best, *cautious))
        least = min(least, *(one.ns for one in modest))
        most = max(*(one.most_ns for one in (*best, *modest)), 0)
        # Where the replay gains more than its cause holds, it is no surer than its error.
        low = max(min(least, most_ns) - missed, 0)
        high = min(most + missed, most_ns)
        if self._has_migrations(known):
            # They end with the kernel whose faults they serve, which a replay cannot tell.
            high = most_ns
        if len(known) == 1 and (_stalls(known) or known[0].rule == UNEXPLAINED):
            return Saving(self.step_ns, 0, round(high), STALLED)
        basis = (
            REPLAYED
            + STREAMS * _differ(best[: len(modest)], modest)
            + RESULTS * self._needs_results(known)
            + ONCE * self._has_once(known)
            + UNLAUNCHED * bool(fixes.unlaunched.any())
        )
        return Saving(self.step_ns, round(low), round(high), basis)

    def may_save(self, least_ns: float, finding: Finding) -> bool:
        """Tell whether the fix may save so much, alone or with others: its cause has that time."""
        if finding.fix == Fix() or finding.fix.waited_ns or self._is_once(finding):
            return True
        return self._most_ns(_Fixes([finding], self.trace)) >= least_ns

    def _has_migrations(self, findings: Sequence[Finding]) -> bool:
        """Tell whether pages of unified memory moved while a changed activity ran."""
        moves = np.flatnonzero(matches(self.trace.kernels["name"], MIGRATION))
        if not len(moves):
            return False
        start = self.trace.kernels["start_ns"].to_numpy(np.int64)
        changed = _joined(one.rows for one in findings if one.fix.best_ns is not None)
        begin = np.sort(start[moves])
        first = np.searchsorted(begin, start[changed])
        after = np.searchsorted(begin, start[changed] + self._took()[changed])
        return bool((after > first).any())

    def _is_once(self, finding: Finding) -> bool:
        """Tell whether a finding is about nothing but what may be start-up."""
        rows, fix = finding.idle_rows, finding.fix
        is_idle = fix.best_ns is None and (fix.idle_cause is not None or fix.graphs)
        if not is_idle or not rows:
            return False
        # Mostly none is, and its rows need not be looked at.
        once = perhaps_once(self.trace)
        return bool(len(once)) and bool(np.isin(_array_of(rows), once).all())

    def _has_once(self, findings: Sequence[Finding]) -> bool:
        """Tell whether any idle time that findings are about may be start-up."""
        once = perhaps_once(self.trace)
        return bool(len(once)) and any(
            np.isin(once, _array_of(one.idle_rows)).any() for one in findings
        )

    def cause_ns(self, finding: Finding) -> int | None:
        """Return what a finding costs of a step, on the GPU on which it costs most.

        The device's time in its rows, and the idle time that it is about; where launches go, also
        the idle time before these, or that the host's time in them explains; where recording was
        taken off, the lead that waits take from a host that is not recorded. Activities at the same
        time cost no more than the step. None: it is not about time.
        """
        fix = finding.fix
        is_work = fix.best_ns is not None or fix.waited_ns is not None
        is_work |= finding.rule == UNEXPLAINED and bool(finding.rows)
        if not is_work and not finding.idle_rows:
            return None
        rows, busy_ns = list(finding.rows if is_work else ()), np.zeros_like(self._took())
        busy_ns[rows] = self._took()[rows]
        return min(self._costs_ns([finding], busy_ns, is_recoverable=False), self.step_ns)

    def _most_ns(self, fixes: _Fixes) -> int:
        """Return how much of what the findings cost their fixes could take away."""
        busy_ns = self._took() - fixes.best.after_ns
        return self._costs_ns(fixes.findings, busy_ns, is_recoverable=True)

    def _took(self) -> np.ndarray:
        return self.trace.kernels["duration_ns"].to_numpy(np.int64)

    def _costs_ns(
        self, findings: Sequence[Finding], busy_ns: np.ndarray, *, is_recoverable: bool
    ) -> int:
        """Return the time `busy_ns` of all rows with the idle time that goes with the findings."""
        idle_rows = _joined(one.idle_rows for one in findings)
        if is_recoverable:
            idle_ns = self._time.recoverable(idle_rows)
        else:
            idle_ns = np.zeros(len(self.trace.idle), dtype=np.int64)
            idle_ns[idle_rows] = self.trace.idle["duration_ns"].to_numpy(np.int64)[idle_rows]
        launches = _joined(one.rows for one in findings if one.fix.launches is not None)
        held = self._time.held(busy_ns, idle_ns, launches)
        return max(held.ns, min(held.ns + held.late_ns, self._lead_ns(findings)))

    @cached_property
    def _time(self) -> CauseTime:
        return CauseTime(self.trace)

    def _lead_ns(self, findings: Sequence[Finding]) -> int:
        """Return what the waits of these findings cost an unrecorded step.

        There the host is ahead by more, and a wait takes that lead. The recorded host had none to
        lose: what it launched late after the wait it would have launched late anyway. 0 where
        recording was not taken off.
        """
        waits = [
            replace(one, rows=(), fix=Fix(idle_cause=one.fix.idle_cause))
            for one in findings
            if one.fix.idle_cause in AVOIDABLE
        ]
        baseline = self.baseline
        if not waits or self.refusal is not None or baseline is None or baseline.added_ns <= 0:
            return 0
        fixes = _Fixes(waits, self.trace)
        gains = [self._gained(fixes, one, is_best=True).most_ns for one in self._replays()]
        return int(max(gains))

    def _replays(self) -> list[Replay]:
        baseline = self.baseline
        assert baseline is not None
        assert baseline.replay is not None
        return [baseline.replay, *baseline.others]

    def _needs_results(self, findings: Sequence[Finding]) -> bool:
        """Tell whether any wait that would go is for a result that the host may need."""
        if all(one.fix.idle_cause != SYNCHRONIZATION for one in findings):
            return False
        replay = self._replays()[0]
        waits = Change(WITHOUT, cause=SYNCHRONIZATION)
        kept = replace(waits, keeps_results=True)
        all_gone, some_gone = (apply([one], replay, self.trace).edges for one in (waits, kept))
        return len(all_gone.kind) < len(some_gone.kind)

    def _gained(
        self,
        fixes: _Fixes,
        replay: Replay,
        *,
        is_best: bool,
        is_waiting: bool = False,
        keeps: np.ndarray | None = None,
    ) -> Gain:
        """Return what the replay of the changed recording gains on that of the unchanged one.

        With `is_waiting` the waits stay, and the launches as they are. Rows that are among `keeps`
        stay as they are.
        """
        before = replay
        rows = fixes.best if is_best else fixes.modest
        if keeps is not None:
            after_ns = np.where(keeps, self._took(), rows.after_ns)
            rows = _Rows(after_ns, rows.is_gone & ~keeps)
        changes = [] if is_waiting else _changes(fixes.findings, is_best=is_best)
        changed = self._with_rows(changes, replay, rows)
        return Gain(before.step_ns() - changed.step_ns(), gain_error_ns(before, changed))

    def _cautiously_gained(self, fixes: _Fixes) -> list[Gain]:
        """Return gains where something else that is not recorded holds the step up.

        The next wait takes the place of each one that goes; or the host holds up what it launched
        without a record.
        """
        found = []
        parts = in_turns(_changes(fixes.findings, is_best=False))
        for replay in self._replays() if parts else []:
            first = self._with_rows(parts[0], replay, fixes.modest)
            second = apply(parts[1], replay, self.trace)
            gained = 2 * replay.step_ns() - first.step_ns() - second.step_ns()
            found.append(Gain(gained, gain_error_ns(replay, first, second)))
        if fixes.unlaunched.any():
            found += [
                self._gained(fixes, one, is_best=False, keeps=fixes.unlaunched)
                for one in self._replays()
            ]
        return found

    def _with_rows(self, changes: list[Change], replay: Replay, rows: _Rows) -> Replay:
        """Return the replay after changes, with these durations.

        Findings of one step often share their changes, and differ in the durations alone.
        """
        key = id(replay), tuple(changes), rows.is_gone.tobytes()
        if key not in self._changed:
            changed = apply(changes, replay, self.trace)
            if rows.is_gone.any():
                changed = without_rows(rows.is_gone, changed, self.trace)
            for oldest in list(self._changed)[: 1 - REPLAYS_KEPT]:
                del self._changed[oldest]
            self._changed[key] = changed
        return with_durations(self._changed[key], rows.after_ns)

    def _modestly_gained(self, fixes: _Fixes, replay: Replay) -> Gain:
        gained = self._gained(fixes, replay, is_best=False)
        if any(_may_succeed_in_part(one.fix) for one in fixes.findings if one.rule != UNEXPLAINED):
            # A part of the waiting goes away: that part of the most that it may gain.
            waiting = self._gained(fixes, replay, is_best=False, is_waiting=True)
            return Gain(MODEST * gained.most_ns + (1 - MODEST) * waiting.most_ns, 0.0)
        return gained


def find_pricer(trace: Trace, baseline: Baseline | None = None) -> Pricer:
    """Replay a trace as it is, unless that was done, to price its findings by."""
    if not trace.has_timeline:
        return Pricer(trace, None)
    return Pricer(trace, find_baseline(trace) if baseline is None else baseline)


def together(pricer: Pricer, findings: Sequence[Finding]) -> Saving | None:
    """Return what all findings with a known saving save in one replay, None of fewer than two.

    Never less than the largest of them alone: a fix need not wait for another.
    """
    known = [one.saving for one in findings if one.saving and one.saving.high_ns is not None]
    if len(known) < 2:
        return None
    saving = pricer.price(
        [one for one in findings if one.saving and one.saving.high_ns is not None]
    )
    low, high = (max(getattr(one, end) or 0 for one in (*known, saving)) for end in ENDS)
    return replace(saving, low_ns=min(low, saving.step_ns), high_ns=min(high, saving.step_ns))


def _differ(*readings: Sequence[Gain]) -> bool:
    """Tell whether gains differ between readings of the recording, by more than a hundredth."""
    gains = [[one.ns for one in of] for of in readings]
    return any(np.ptp(of) > DIFFERS * max(*of, 1) for of in gains)


def _joined(parts: Iterable[tuple[int, ...]]) -> np.ndarray:
    """Return every row of several findings once."""
    return np.flatnonzero(np.bincount(np.concatenate([NO_ROWS, *map(_array_of, parts)])))


def _array_of(rows: tuple[int, ...]) -> np.ndarray:
    return np.fromiter(rows, np.int64, len(rows))


def _may_succeed_in_part(fix: Fix) -> bool:
    """Tell whether a fix may leave a part of the waiting, by what no recording holds.

    How fast other workers load, how much an allocator keeps, what a graph can hold. A host that no
    longer waits for the device, nor copies from memory that is not pinned, does not wait at all.
    """
    cause = fix.idle_cause
    return fix.graphs or (cause is not None and cause not in (SYNCHRONIZATION, PAGEABLE_COPY))


def _stalls(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings about idle time that only another program of the host would fill."""
    return [one for one in findings if one.fix.idle_cause not in (None, *AVOIDABLE)]


def _changes(findings: Sequence[Finding], *, is_best: bool) -> list[Change]:
    """Return what happens to waits and launches; loads and waits go before graphs are made."""
    found = {one.fix.idle_cause for one in findings if one.fix.idle_cause}
    changes = [
        Change(WITHOUT, cause=cause, keeps_results=not is_best)
        for cause in AVOIDABLE
        if cause in found
    ]
    if is_best and (rows := _joined(one.idle_rows for one in _stalls(findings))).size:
        changes.append(Change(FILLED, idle_rows=tuple(rows.tolist())))
    # Whether graphs would hold time that no rule explains is unknown.
    graphed = [one for one in findings if is_best or one.rule != UNEXPLAINED]
    return changes + [Change(GRAPHED)] * any(one.fix.graphs for one in graphed)


def _new_durations(findings: Sequence[Finding], trace: Trace, *, is_best: bool) -> _Rows:
    """Return how long each row would take, and which would be gone."""
    took = trace.kernels["duration_ns"].to_numpy(np.int64)
    start = trace.kernels["start_ns"].to_numpy(np.int64)
    after, gone = took.copy(), np.zeros(len(took), dtype=bool)
    is_free = np.ones(len(took), dtype=bool)
    for one in findings:
        fix, rows = one.fix, _array_of(one.rows)
        wanted_ns = fix.best_ns if is_best else fix.modest_ns
        mine = rows[is_free[rows]] if len(rows) else rows
        if wanted_ns is None or not len(mine):
            continue
        is_free[mine] = False
        # Python's integers: the product of two times of some seconds is beyond an int64.
        wanted = wanted_ns * int(took[mine].sum()) / max(int(took[rows].sum()), 1)
        kept = mine[np.argsort(start[mine], kind="stable")]
        launches = fix.launches
        if launches is not None and not is_best:
            launches *= HOSTS_COST
        if launches is not None and launches < len(rows) and (launches or not wanted):
            number = round(launches * len(mine) / len(rows))
            kept = kept[np.linspace(0, len(kept) - 1, number).astype(np.int64)]
        gone[mine], gone[kept] = True, False
        after[mine] = 0
        if len(kept):
            share = took[kept] / max(int(took[kept].sum()), 1)
            after[kept] = np.rint(wanted * share).astype(np.int64)
    return _Rows(after, gone)
