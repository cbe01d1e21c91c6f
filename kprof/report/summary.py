"""The summary of a report as data: what ran, where its time goes, its limit, the best changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from kprof.analyze.attribution.kinds import OTHER
from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.attribution.steps import (
    COLLECTIVE,
    IMBALANCE,
    denominator,
    find_lead,
    find_steps,
    split_steps,
)
from kprof.analyze.capture_quality.audit import Verdict, audit
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.findings.diagnose import saves_alone
from kprof.analyze.findings.one_offs import start_up_by_cause
from kprof.analyze.findings.queries import matches, whole_of
from kprof.analyze.findings.unexplained import LARGE_SHARE
from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.analyze.roofline.utilisation import measure_utilisation
from kprof.errors import KprofError
from kprof.findings import Diagnosis, Finding, Grade, Saving
from kprof.report.kernel_names import readable
from kprof.report.playbooks import all_playbooks
from kprof.trace import Trace

NUM_CHANGES = 3
# The worst first.
VERDICTS: tuple[Verdict, ...] = ("bad", "limited", "unknown", "good")
# An activity of the kind `other` that takes so much of it tells more than the kind.
MOSTLY = 0.5
DOUBTFUL = ("bad", "limited")

LimitKind = Literal["bound", "communication", "host copies", "idle", "imbalance", "start-up"]
# Copies between the host's memory and the GPU's: the link limits them, or the host.
HOST_COPY = r"\b(HtoD|DtoH|HtoA|AtoH)\b"
# What limits activities that have no bound.
BOUNDLESS: dict[object, LimitKind] = {COLLECTIVE: "communication", "host copies": "host copies"}


@dataclass(frozen=True)
class TimePart:
    """The time of one kind of activity, or of one cause of idle time, each instant once."""

    name: str | None
    """A kind or a cause; None: not known."""
    is_idle: bool
    time_ns: int
    """Of the steps of all GPUs together."""
    share: float


@dataclass(frozen=True)
class LimitPart:
    """The time in which one thing limits the step, each instant once."""

    kind: LimitKind
    name: str | None
    """A bound or a cause of idle time; None: not known."""
    time_ns: int
    share: float
    mostly: str | None = None
    """The kind of activity that takes most of it; of the kind `other`, the one that
    takes half of it."""


@dataclass(frozen=True)
class BestChange:
    """A change that a finding proposes."""

    rule: str
    change: str
    """The change in words, of the rule's playbook."""
    claim: str
    saving: Saving
    confidence: Grade
    command: str
    """The next command: it proves the gain, or explains the change."""


@dataclass(frozen=True)
class LargeCost:
    """A large cost whose saving, or whose change, is not known."""

    rule: str
    claim: str
    saving: Saving | None
    command: str
    """The next command."""


@dataclass(frozen=True)
class Summary:
    """The answer of a report, on which its first screen is built."""

    workload: str
    """The command, or the name of a trace that does not hold it."""
    devices: tuple[str, ...]
    is_host_only: bool
    num_ranks: int
    num_steps: int
    """Recorded steps of all ranks together."""
    whole: str
    """The denominator: a step, the window, or the device time."""
    whole_ns: int
    """How long that is."""
    unrecorded_ns: int | None
    """How long it is without recording, where recording noticeably slows it down."""
    busy_share: float | None
    roofline_share: float | None
    roofline_is_least: bool
    total_ns: int
    """The steps of all GPUs together: the sum of `time`, and of `limits`."""
    time: tuple[TimePart, ...]
    """Where the time goes, longest first."""
    limits: tuple[LimitPart, ...]
    """The same time by what limits it, longest first."""
    large_cost: LargeCost | None
    """The first finding, where it is a large cost that none of the changes is known to save."""
    changes: tuple[BestChange, ...]
    """The changes with the largest savings, weighed by their certainty, largest first."""
    num_changes: int
    """The changes that alone would save time, these among them."""
    together: Saving | None
    """All of them at once."""
    unexplained: tuple[str, ...]
    """Claims about time for which no rule finds a change."""
    quality: dict[Verdict, int]
    """How many checks of the recording have each verdict, the worst first."""
    doubts: tuple[str, ...]
    """The names of those that are bad or limited."""


def summarize(trace: Trace) -> Summary:
    """Return the summary of an analyzed trace."""
    utilisation, cost = measure_utilisation(trace), measure_cost(trace)
    diagnosis = trace.diagnosis or Diagnosis()
    split = split_steps(trace)
    total_ns = int(split["time_ns"].sum())
    proposed, checks = _proposed(diagnosis), audit(trace)
    verdicts = [check.verdict for check in checks]
    return Summary(
        workload=trace.meta.command_line or trace.meta.source,
        devices=tuple(gpu.name for gpu in trace.gpus),
        is_host_only=trace.is_host_only,
        num_ranks=trace.meta.num_ranks,
        num_steps=len(find_steps(trace)),
        whole=whole_of(trace),
        whole_ns=denominator(trace).step_ns if len(trace.kernels) else 0,
        unrecorded_ns=round(cost.unrecorded_ns) if cost and cost.is_noticeable else None,
        busy_share=utilisation.busy.value,
        roofline_share=utilisation.roofline.value,
        roofline_is_least=utilisation.roofline.is_lower_bound,
        total_ns=total_ns,
        time=_time(split, total_ns),
        limits=_limits(trace, split, total_ns),
        large_cost=_large_cost(diagnosis),
        changes=_changes(proposed[:NUM_CHANGES]),
        num_changes=len(proposed),
        together=diagnosis.together,
        unexplained=tuple(one.claim for one in diagnosis.findings if one.rule == UNEXPLAINED),
        quality={one: verdicts.count(one) for one in VERDICTS if one in verdicts},
        doubts=tuple(check.name for check in checks if check.verdict in DOUBTFUL),
    )


def _time(split: pd.DataFrame, total_ns: int) -> tuple[TimePart, ...]:
    sums: pd.DataFrame = (
        split.groupby(["part", "is_idle"], dropna=False)["time_ns"].sum().reset_index()
    )
    ordered = sums.sort_values("time_ns", ascending=False, kind="stable")
    return tuple(
        TimePart(_known(name), bool(is_idle), int(time_ns), int(time_ns) / total_ns)
        for name, is_idle, time_ns in ordered[["part", "is_idle", "time_ns"]].to_numpy().tolist()
    )


def _limits(trace: Trace, split: pd.DataFrame, total_ns: int) -> tuple[LimitPart, ...]:
    """Return the same time by the bound of the activity that owns it, or by the cause of idling."""
    busy_ns = np.where(find_lead(trace).kernels, 0, allotted_time(trace))
    kind = trace.kernels["kind"].astype(object)
    bound = trace.kernels["bound"].astype(object).where(kind != COLLECTIVE, COLLECTIVE)
    is_host_copy = matches(trace.kernels["name"], HOST_COPY) & bound.isna().to_numpy()
    bound = bound.mask(is_host_copy, "host copies")
    activity = trace.kernels["name"].astype("category")
    table = pd.DataFrame({"name": bound, "kind": kind, "time_ns": busy_ns, "activity": activity})
    found = []
    for name, rows in table.groupby("name", dropna=False, sort=False):
        mostly = _largest(rows, "kind")
        if mostly == OTHER:
            mostly = _largest(rows[rows["kind"] == OTHER], "activity", least=MOSTLY)
        what = BOUNDLESS.get(name, "bound")
        found.append((what, _known(name), int(rows["time_ns"].sum()), mostly))
    idle = split[split["is_idle"].astype(bool)].groupby("part", dropna=False)["time_ns"].sum()
    once, all_once_ns = start_up_by_cause(trace), 0
    for cause, time_ns in idle.items():
        what = "imbalance" if cause == IMBALANCE else "idle"
        once_ns = min(once.get(_known(cause), 0), int(time_ns))
        found.append((what, _known(cause), int(time_ns) - once_ns, None))
        all_once_ns += once_ns
    # What happened once limits no other step, whatever its cause.
    found.append(("start-up", None, all_once_ns, None))
    limits = [LimitPart(*one[:3], one[2] / total_ns, one[3]) for one in found if one[2]]
    return tuple(sorted(limits, key=lambda limit: -limit.time_ns))


def _largest(rows: pd.DataFrame, by: str, least: float = 0.0) -> str | None:
    """Return what takes most of the rows' time, if it takes the share `least` of it."""
    sums = rows.groupby(by, sort=False, observed=True)["time_ns"].sum()
    if not len(sums) or sums.max() < least * sums.sum():
        return None
    return readable(str(sums.idxmax()))


def _known(name: Any) -> str | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(name) else str(name)


def _proposed(diagnosis: Diagnosis) -> list[Finding]:
    """Return the findings whose change alone would save time, in their order."""
    return [
        one
        for one in diagnosis.findings
        if one.rule != UNEXPLAINED
        and one.saving is not None
        and one.saving.high_ns
        and saves_alone(one)
    ]


def _large_cost(diagnosis: Diagnosis) -> LargeCost | None:
    """Return the first finding where it comes before those that would save time, being large."""
    if not diagnosis.findings or (first := diagnosis.findings[0]) in _proposed(diagnosis):
        return None
    if first.rule != UNEXPLAINED and (first.cause_ns or 0) <= LARGE_SHARE * diagnosis.whole_ns:
        return None
    return LargeCost(first.rule, first.claim, first.saving, _next_command(first))


def _next_command(finding: Finding) -> str:
    return finding.command or f"kprof playbook {finding.playbook}"


def _changes(findings: list[Finding]) -> tuple[BestChange, ...]:
    words = _words_of_changes() if findings else {}
    return tuple(
        BestChange(
            one.rule,
            words.get(one.rule, one.rule),
            one.claim,
            one.saving,
            one.confidence,
            _next_command(one),
        )
        for one in findings
        if one.saving is not None
    )


def _words_of_changes() -> dict[str, str]:
    try:
        return {page.name: page.change for page in all_playbooks()}
    except KprofError:
        # Installed without playbooks: the rule's name has to do.
        return {}
