"""The diagnosis: the findings of all rules, priced, in order of their savings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Literal

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import outside_steps, whole_ns, without_lead
from kprof.analyze.capture_quality.unanswered import Unanswered, why_no_timeline
from kprof.analyze.findings.claims import percent
from kprof.analyze.findings.one_offs import count_steps_of_window, without_start_up, work_once
from kprof.analyze.findings.queries import is_one_of, whole_of, why_no_device
from kprof.analyze.findings.savings import Pricer, find_pricer, together
from kprof.analyze.findings.unexplained import LARGE_SHARE, find_unexplained, find_work_once
from kprof.analyze.roofline.bound import beats_ceiling
from kprof.analyze.whatif.baseline import Baseline
from kprof.errors import modules_in
from kprof.findings import Diagnosis, Finding, Fix, Grade, NotApplicable, Saving
from kprof.trace import Trace

RULES = "kprof.analyze.findings.rules"
# Less than this share of the step, even where the fix succeeds fully, is not worth a card.
LEAST_SAVING = 0.005
# So many rows open a claim into its evidence; the counts beside them tell how many there were.
MOST_ROWS = 500
# Share of the sum of savings; a smaller difference needs no reason.
SAME_SUM = 0.01
# How much of an expected saving counts where findings are ranked.
SURE: dict[Grade, float] = {"high": 1.0, "medium": 0.7, "low": 0.4}
# Share of a finding's time that may beat its ceiling; as many percent as a kernel itself may.
MOST_BEATEN = 0.05
# Without steps, waits and copies are as in a loop where there are so many, and so large a share of
# their time lies in each half of the window.
MANY, IN_EACH_HALF = 10, 0.2
LESS_SURE: dict[Grade, Grade] = {"high": "medium", "medium": "low", "low": "low"}

Why = Callable[[Trace], Unanswered | None]


def diagnose(trace: Trace, baseline: Baseline | None = None) -> Diagnosis:
    """Ask every rule of an analyzed trace; price the findings, alone and together.

    `baseline`, if the trace was replayed before. Rules do not see what happened once; it is listed
    apart. Nor do they see what was launched in no step, where steps are marked.
    """
    if trace.kernels.empty:
        return Diagnosis()
    steady, start_up = without_start_up(trace)
    seen = _without(outside_steps(trace) | work_once(trace), without_lead(steady))
    found: list[Finding] = []
    not_applicable: list[NotApplicable] = []
    # General rules skip rows that more particular rules explain.
    for rule in sorted(modules_in(RULES), key=is_general):
        why = why_not(rule, trace)
        if why is not None:
            not_applicable.append(NotApplicable(name_of(rule), why.because, why.fix))
        else:
            found += rule.check(_unexplained(seen, found) if is_general(rule) else seen)
    pricer = find_pricer(steady, baseline)
    found = [_as_in_a_loop(_within_ceilings(one, trace), steady) for one in found]
    ranked = rank_findings(found, pricer) if found else []
    largest = [
        replace(
            _within_ceilings(one, trace), saving=pricer.price([one]), cause_ns=pricer.cause_ns(one)
        )
        for one in (*find_unexplained(seen, ranked), *find_work_once(trace))
    ]
    told = _merged(largest, ranked)
    all_saved = together(pricer, told)
    return Diagnosis(
        tuple(_with_telling_rows(one, trace) for one in told),
        all_saved,
        _why_no_sum(all_saved, told),
        start_up,
        together(pricer, [one for one in ranked if one.swap is not None]),
        tuple(not_applicable),
        whole_of(trace),
        whole_ns(trace),
    )


def _merged(lines: list[Finding], ranked: list[Finding]) -> list[Finding]:
    """Put lines without a fix before findings, but after those of unknown saving that cost more."""
    told = list(ranked)
    for line in reversed(lines):
        costs = line.cause_ns
        larger = [
            place
            for place, one in enumerate(told)
            if one.saving is not None
            and one.saving.middle_ns is None
            and one.rule != line.rule
            and costs is not None
            and (one.cause_ns or 0) > costs
        ]
        told.insert(larger[-1] + 1 if larger else 0, line)
    return told


def _within_ceilings(finding: Finding, trace: Trace) -> Finding:
    """Return the finding, less certain where much of its time beats the ceiling of the device.

    Nothing does: the work, the type, the ceiling or the time that the finding builds on is wrong.
    """
    share = beaten_share(finding, trace)
    if share <= MOST_BEATEN:
        return finding
    told = f"{percent(share)} of its time beats the ceiling: work, type, ceiling or time is wrong"
    confidence = LESS_SURE[finding.confidence]
    return replace(finding, confidence=confidence, details=(*finding.details, told))


def _as_in_a_loop(finding: Finding, trace: Trace) -> Finding:
    """Return the finding, less certain if its waits and copies may be those of a first use.

    That is so in a window without steps, unless they go on through it. Kernels alone are no wait.
    """
    if finding.confidence != "high" or trace.is_host_only or count_steps_of_window(trace):
        return finding
    tables = (trace.idle, finding.idle_rows), (trace.kernels, _copies(trace, finding))
    columns = ["start_ns", "duration_ns"]
    pieces = pd.concat([table[columns].iloc[list(rows)] for table, rows in tables])
    if pieces.empty:
        return finding
    starts = trace.kernels["start_ns"]
    middle_ns = (int(starts.min()) + int((starts + trace.kernels["duration_ns"]).max())) // 2
    in_first_half = pieces["start_ns"] < middle_ns
    first_ns, all_ns = (int(one["duration_ns"].sum()) for one in (pieces[in_first_half], pieces))
    goes_on = min(first_ns, all_ns - first_ns) >= IN_EACH_HALF * all_ns
    if goes_on and len(pieces) >= MANY:
        return finding
    return replace(finding, confidence=LESS_SURE[finding.confidence])


def _copies(trace: Trace, finding: Finding) -> list[int]:
    rows = np.array(finding.rows, dtype=np.int64)
    return list(rows[is_one_of(trace.kernels["activity"], "memcpy", "memset")[rows]])


def beaten_share(finding: Finding, trace: Trace) -> float:
    """Return the share of the time of a finding's activities that beats its ceiling."""
    rows = list(finding.rows)
    duration_ns = trace.kernels["duration_ns"].to_numpy(np.int64)[rows]
    beaten_ns = duration_ns[beats_ceiling(trace.kernels)[rows]]
    return int(beaten_ns.sum()) / max(int(duration_ns.sum()), 1)


def _without(rows: np.ndarray, trace: Trace) -> Trace:
    """Return the trace in which these activities have neither a name nor a kind."""
    if not rows.any():
        return trace
    kernels = trace.kernels
    return trace.with_kernels(name=kernels["name"].mask(rows), kind=kernels["kind"].mask(rows))


def _why_no_sum(
    all_saved: Saving | None, findings: list[Finding]
) -> Literal["", "overlap", "shared limit"]:
    """Say why savings do not add up: they overlap, or share a limit that one alone leaves."""
    if all_saved is None or all_saved.high_ns is None:
        return ""
    total = sum(one.saving.high_ns or 0 for one in findings if one.saving is not None)
    if abs(all_saved.high_ns - total) <= SAME_SUM * total:
        return ""
    return "overlap" if all_saved.high_ns < total else "shared limit"


def name_of(rule: ModuleType) -> str:
    """Return the name of a rule: its module's."""
    return rule.__name__.rpartition(".")[2]


def why_not(rule: ModuleType, trace: Trace) -> Unanswered | None:
    """Say why a rule cannot be asked of a trace, or None.

    A rule names what it needs in `NEEDS`; without, activities of a device and their times.
    """
    needs: tuple[Why, ...] = getattr(rule, "NEEDS", (why_no_device, why_no_timeline))
    return next((why for need in needs if (why := need(trace)) is not None), None)


def is_general(rule: ModuleType) -> bool:
    """Tell whether what more particular rules say of the same activities is more to the point."""
    return bool(getattr(rule, "IS_GENERAL", False))


def _unexplained(trace: Trace, found: list[Finding]) -> Trace:
    """Return the trace without the kinds of activities that findings with a fix are about."""
    is_told = np.zeros(len(trace.kernels), dtype=bool)
    for one in found:
        if one.fix.best_ns is not None:
            is_told[list(one.rows)] = True
    return trace.with_kernels(kind=trace.kernels["kind"].where(~is_told))


def rank_findings(findings: list[Finding], pricer: Pricer) -> list[Finding]:
    """Price each finding alone; leave out what would save next to nothing, also with the others.

    While the host limits the step, faster kernels save nothing; they do once it is fixed. No
    finding saves more than its cause holds: where that is next to nothing, nothing is replayed.
    """
    least_ns = LEAST_SAVING * pricer.step_ns
    priced = [
        replace(one, saving=pricer.price([one]), cause_ns=pricer.cause_ns(one))
        for one in findings
        if pricer.may_save(least_ns, one)
    ]
    worth = [one for one in priced if saves_alone(one)]
    before = pricer.price(worth) if worth else None
    if before is not None:
        rest = [one for one in priced if not saves_alone(one)]
        worth += [one for one in rest if _adds(pricer.price([*worth, one]), before)]
    return sorted(worth, key=lambda one: _expected(one, pricer), reverse=True)


def _expected(finding: Finding, pricer: Pricer) -> float:
    """Return what a finding may be expected to save: the middle, weighed by how sure it is.

    Where that is unknown, and it costs a large part of the step, it comes before all others.
    """
    middle_ns = finding.saving.middle_ns if finding.saving is not None else None
    if middle_ns is None:
        large = LARGE_SHARE * whole_ns(pricer.trace)
        return float("inf") if (finding.cause_ns or 0) > large else 0.0
    return middle_ns * SURE[finding.confidence]


def _adds(saving: Saving | None, before: Saving) -> bool:
    """Tell whether a saving is larger than one before, by more than next to nothing."""
    if saving is None or saving.high_ns is None or before.high_ns is None:
        return False
    return saving.high_ns - before.high_ns >= LEAST_SAVING * saving.step_ns


def saves_alone(finding: Finding) -> bool:
    """Tell whether a finding may save more than next to nothing if no other fix is made."""
    saving = finding.saving
    if saving is None or saving.high_ns is None or finding.fix == Fix():
        return True
    return saving.high_ns >= LEAST_SAVING * saving.step_ns


def _with_telling_rows(finding: Finding, trace: Trace) -> Finding:
    """Keep of very many rows those that took longest, and how many there were."""
    return replace(
        finding,
        rows=_longest(finding.rows, trace.kernels),
        idle_rows=_longest(finding.idle_rows, trace.idle),
        range_rows=_longest(finding.range_rows, trace.ranges),
        num_rows=len(finding.rows),
        num_idle_rows=len(finding.idle_rows),
    )


def _longest(rows: tuple[int, ...], table: pd.DataFrame) -> tuple[int, ...]:
    if len(rows) <= MOST_ROWS:
        return rows
    at = np.array(rows, dtype=np.int64)
    took = table["duration_ns"].to_numpy(np.int64)[at]
    return tuple(np.sort(at[np.argsort(-took, kind="stable")[:MOST_ROWS]]).tolist())
