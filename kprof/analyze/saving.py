"""Savings: what a step would take after the remedies of findings, with an interval.

A remedy is replayed twice, as if it succeeded fully and modestly, and the replay's own error widens
the interval on both sides. Where nothing can be replayed, what the device spends on it, or waits
for it, is an upper bound, and nothing a lower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kprof.analyze.evidence import count_steps
from kprof.analyze.idle.causes import NO_WORK
from kprof.analyze.summary import count_gpus, measure_elapsed
from kprof.analyze.what_if.baseline import Baseline, find_baseline
from kprof.analyze.what_if.changes import (
    AVOIDABLE,
    GRAPHED,
    SILENCE_NS,
    WITHOUT,
    Change,
    apply,
    with_durations,
    without_rows,
)
from kprof.finding import Finding, Remedy, Saving
from kprof.trace import Trace

# A replay of so many takes a tenth of a second, and each finding two or three of them.
MOST_REPLAYED = 30_000

# Launching a kernel from Python takes the host up to as long as so many of torch's own launches.
HOSTS_COST = 3

UNKNOWN = "nothing in the recording tells what it costs"
REPLAYED = "replayed: fully and modestly mended, give or take what the replay itself misses"
STALLED = "at most what the device waits for it"
BOUNDED = "at most what the device spends on it or waits for it; it was not replayed, because "


@dataclass(frozen=True)
class Pricer:
    """Prices the findings of one trace."""

    trace: Trace
    baseline: Baseline | None
    """None where there is too much to replay."""

    @property
    def refusal(self) -> str | None:
        """Say why nothing is replayed, or None."""
        if self.trace.meta.untimed is not None:
            return self.trace.meta.untimed
        if self.baseline is None:
            return f"{len(self.trace.kernels):,} activities are many"
        if self.trace.is_host_only:
            return "a host's operators run one after another"
        return self.baseline.refusal

    def price(self, findings: Sequence[Finding]) -> Saving:
        """Return what the remedies of all these findings save together.

        A row that several of them would change counts for the first of them alone.
        """
        known = [one for one in findings if one.remedy != Remedy()]
        step_ns = self._step_ns()
        if not known:
            return Saving(step_ns, None, None, UNKNOWN)
        if self.refusal is not None or self.baseline is None:
            bound = min(self._bound(known), step_ns)
            return Saving(step_ns, 0, bound, BOUNDED + str(self.refusal))
        waits = any(one.remedy.idle_cause or one.remedy.graphs for one in known)
        stalls = self._stalls_ns(known)
        best = self._gained(known, is_best=True, is_waiting=True) + stalls
        modest = self._gained(known, is_best=False, is_waiting=True)
        if waits:
            # Of the waiting, half goes away.
            modest = (modest + self._gained(known, is_best=False, is_waiting=False)) / 2
        missed = self.baseline.uncertainty_ns
        if stalls and len(known) == 1:
            return Saving(step_ns, 0, min(round(stalls), step_ns), STALLED)
        low = max(min(modest, best) - missed, 0)
        high = min(max(best, modest, 0) + missed, step_ns)
        return Saving(step_ns, round(low), round(high), REPLAYED)

    def _step_ns(self) -> int:
        if self.baseline is not None and self.baseline.step_ns > 0:
            return self.baseline.step_ns
        num_gpus = max(count_gpus(self.trace.kernels), 1)
        return measure_elapsed(self.trace.kernels) * num_gpus // count_steps(self.trace)

    def _gained(self, findings: Sequence[Finding], *, is_best: bool, is_waiting: bool) -> float:
        """Return what the replay of the changed recording gains on that of the unchanged one."""
        baseline = self.baseline
        assert baseline is not None
        assert baseline.replay is not None
        after, gone = _new_durations(findings, self.trace, is_best=is_best)
        replay = baseline.replay
        if is_waiting:
            replay = apply(_changes(findings), replay, self.trace)
        if gone.any():
            replay = without_rows(gone, replay, self.trace)
        return baseline.replayed_ns - with_durations(replay, after).step_ns()

    def _stalls_ns(self, findings: Sequence[Finding]) -> float:
        """Return the idle time of a step that no replay can take away: the host's long silences.

        Of short ones nothing is left where launches come in graphs.
        """
        stalls = [one for one in findings if one.remedy.idle_cause not in (None, *AVOIDABLE)]
        least_ns = SILENCE_NS if any(one.remedy.graphs for one in findings) else 0
        return self._lost_ns(stalls, least_ns) / count_steps(self.trace)

    def _lost_ns(self, findings: Sequence[Finding], least_ns: int = 0) -> int:
        """Return what could be gained of the idle time that findings are about, once each piece."""
        rows = sorted({row for one in findings for row in one.idle_rows})
        idle = self.trace.idle.iloc[rows]
        idle = idle[idle["duration_ns"] >= least_ns]
        lost = idle["recoverable_ns"].to_numpy(np.int64, na_value=0)
        # That nothing was to be done takes a rule to deny.
        is_denied = (idle["cause"] == NO_WORK).to_numpy(bool)
        return int(np.where(is_denied, idle["duration_ns"].to_numpy(np.int64), lost).sum())

    def _bound(self, findings: Sequence[Finding]) -> int:
        """Return the device time and idle time that the remedies could take away, of one step."""
        trace = self.trace
        after, _ = _new_durations(findings, trace, is_best=True)
        saved = trace.kernels["duration_ns"].to_numpy(np.int64) - after
        devices = trace.kernels.groupby(["rank", "device"], sort=False).ngroup().to_numpy()
        sums = np.bincount(devices, saved)
        num_gpus = max(count_gpus(trace.kernels), 1)
        return (int(sums.max()) * num_gpus + self._lost_ns(findings)) // count_steps(trace)


def find_pricer(trace: Trace) -> Pricer:
    """Replay a trace as it is, unless it is too large, to price its findings by."""
    is_small = len(trace.kernels) <= MOST_REPLAYED or trace.is_host_only
    return Pricer(trace, find_baseline(trace) if is_small and trace.has_timeline else None)


def _changes(findings: Sequence[Finding]) -> list[Change]:
    """Return what happens to waits and launches; loads and waits go before graphs are made."""
    found = {one.remedy.idle_cause for one in findings if one.remedy.idle_cause}
    changes = [Change(WITHOUT, cause=cause) for cause in AVOIDABLE if cause in found]
    return changes + [Change(GRAPHED)] * any(one.remedy.graphs for one in findings)


def _new_durations(
    findings: Sequence[Finding], trace: Trace, *, is_best: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return how long each row would take, and which would be gone."""
    took = trace.kernels["duration_ns"].to_numpy(np.int64)
    start = trace.kernels["start_ns"].to_numpy(np.int64)
    after, gone = took.copy(), np.zeros(len(took), dtype=bool)
    is_free = np.ones(len(took), dtype=bool)
    for one in findings:
        remedy, rows = one.remedy, np.array(one.rows, dtype=np.int64)
        wanted_ns = remedy.best_ns if is_best else remedy.modest_ns
        mine = rows[is_free[rows]] if len(rows) else rows
        if wanted_ns is None or not len(mine):
            continue
        is_free[mine] = False
        # Python's integers: the product of two times of some seconds is beyond an int64.
        wanted = wanted_ns * int(took[mine].sum()) / max(int(took[rows].sum()), 1)
        kept = mine[np.argsort(start[mine], kind="stable")]
        launches = remedy.launches
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
    return after, gone
