"""Findings: what the rules say is wrong, what proves it, what a fix would save."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from kprof.analyze.attribution.steps import count_gpu_steps, denominator
from kprof.analyze.findings.diagnose import saves_alone
from kprof.analyze.findings.one_offs import start_up_ns
from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.analyze.groupings import collapse_layers, count_gpus
from kprof.findings import Diagnosis, Finding, Saving
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import (
    MISSING,
    UNKNOWN,
    format_count,
    format_range,
    format_share,
    format_time,
    format_worth,
    or_missing,
)
from kprof.trace import Trace

TITLE = "Findings"
ORDER = 27

# Findings that a terminal shows in words; the page shows all.
NUM_TOLD = 3
MONTH = "A month"
ROWS_OF_EVIDENCE = 5
PROOF = (
    Column("What", "name"),
    Column("Operator"),
    Column("Module"),
    Column("Times", "right"),
    Column("Time", "right"),
)
ANSWERS_MISSING = (Column("Not known, because", "prose"), Column("To find out", "prose"))
# A claim is about the mean GPU, and a cost about what holds the step up.
ON_WHICH = " on the GPU with most of it"
NOT_ASKED = (
    "This run was analyzed by a version without rules. To apply them: kprof open RUN --force."
)


def render(trace: Trace) -> Section:
    """Render the findings, the best first in words, and the evidence of each."""
    diagnosis = trace.diagnosis
    if diagnosis is None:
        return Section(TITLE, ORDER, (Text(NOT_ASKED),), in_terminal=False)
    if not diagnosis.findings:
        parts = [
            Text(_why_none(diagnosis)),
            *_start_up(trace, diagnosis),
            *_not_applicable(diagnosis),
        ]
        return Section(TITLE, ORDER, tuple(parts))
    where = ON_WHICH if count_gpus(trace.kernels) > 1 else ""
    told = [
        _card(number, one, diagnosis, where) for number, one in enumerate(diagnosis.findings, 1)
    ]
    parts = [Text(_lead(diagnosis)), *_start_up(trace, diagnosis)]
    parts += [Text(text) for text in told[:NUM_TOLD]]
    if more := Counter(one.rule for one in diagnosis.findings[NUM_TOLD:]):
        named = [
            rule if number == 1 else f"{rule} ({number} times)" for rule, number in more.items()
        ]
        parts.append(Text(f"{more.total()} more in the report's tables: {', '.join(named)}."))
    parts += [_savings(diagnosis, where), _claims(diagnosis), _evidence(trace, diagnosis)]
    parts += _not_applicable(diagnosis)
    return Section(TITLE, ORDER, tuple(parts))


def _why_none(diagnosis: Diagnosis) -> str:
    number = format_count(len(diagnosis.not_applicable), "rule")
    skipped = f"; {number} not applicable to this recording" if diagnosis.not_applicable else ""
    return f"No rule found a change that would save time{skipped}."


def _lead(diagnosis: Diagnosis) -> str:
    number = format_count(len(diagnosis.findings), "finding")
    if diagnosis.together is None:
        return f"{number}."
    first = diagnosis.findings[0].saving
    is_known = first is not None and first.high_ns is not None
    saving = "largest expected saving first"
    order = saving if is_known else f"large costs without a known saving, then {saving}"
    lead = (
        f"{number}: {order}. All fixes together would save "
        f"{format_saving(diagnosis.together)} of {saved_of(diagnosis.together, diagnosis)}"
    )
    if not diagnosis.differs_by:
        return f"{lead}."
    known = [one.saving.high_ns or 0 for one in diagnosis.findings if one.saving is not None]
    than = f"than the sum of the savings, {format_time(sum(known))}"
    if diagnosis.differs_by == "overlap":
        return f"{lead}: less {than}, because some overlap."
    return f"{lead}: more {than}, because they share a limit that no single fix lifts."


def saved_of(saving: Saving | None, diagnosis: Diagnosis) -> str:
    """Return what a saving is a share of; one without recording is named so."""
    is_recorded = saving is None or saving.step_ns == diagnosis.whole_ns
    if is_recorded or not diagnosis.whole_ns:
        return diagnosis.whole
    return f"{diagnosis.whole} without recording"


def _start_up(trace: Trace, diagnosis: Diagnosis) -> list[Part]:
    """Return the idle time that happened once: no saving includes it."""
    if not diagnosis.start_up:
        return []
    lead = start_up_in_words(trace, diagnosis)
    rows = tuple(
        (one.what, or_missing(one.place), format_time(one.time_ns), f"{one.num_pieces:,}")
        for one in diagnosis.start_up
    )
    columns = (
        *(Column("Start-up"), Column("Where", "name")),
        *(Column("Time", "right"), Column("Pieces", "right")),
    )
    caption = "Idle time that happened once in the window. No saving includes it."
    return [Text(lead), Table(columns, rows, caption, terminal_rows=0)]


def start_up_in_words(trace: Trace, diagnosis: Diagnosis, *, least_share: float = 0.0) -> str:
    """Return how much idle time happened once, and its largest part; empty where it is less."""
    total_ns = start_up_ns(trace)
    share = total_ns / max(denominator(trace).time_ns, 1)
    if not diagnosis.start_up or share < least_share:
        return ""
    largest = diagnosis.start_up[0]
    where = f", at {largest.place}" if largest.place else ""
    whole = "all steps" if count_gpu_steps(trace) else "the window"
    return (
        f"Start-up: {format_time(total_ns)} of idle time happened once, {format_share(share)} of "
        f"{whole}, and no saving includes it. The largest part is {largest.what}{where}, "
        f"{format_time(largest.time_ns)}."
    )


def format_saving(saving: Saving | None) -> str:
    """Format the interval of a saving in time and as a share, or as unknown."""
    if saving is None or saving.high_ns is None:
        return UNKNOWN
    time, share = saving_interval(saving)
    return f"{time} ({share})"


def saving_interval(saving: Saving | None) -> tuple[str, str]:
    """Return a saving's interval in time, and as a share of the step."""
    if saving is None or saving.high_ns is None:
        return UNKNOWN, MISSING
    low_ns, high_ns, step_ns = saving.low_ns or 0, saving.high_ns, max(saving.step_ns, 1)
    time, share = format_time(high_ns), format_share(high_ns / step_ns)
    if low_ns <= 0:
        return f"up to {time}", f"up to {share}"
    low_time, low_share = format_time(low_ns), format_share(low_ns / step_ns)
    return format_range(low_time, time), format_range(low_share, share)


# Something else limits the step, such as the host.
ONLY_TOGETHER = "Alone, a fix saves next to nothing; it saves once the other fixes are made."


def _card(number: int, finding: Finding, diagnosis: Diagnosis, where: str) -> str:
    how = f"How: kprof playbook {finding.playbook}"
    if finding.dry_run and not finding.command:
        how = f"Of kprof's kernels, {finding.dry_run}. {how}"
    if finding.rule == UNEXPLAINED:
        details = ". ".join(finding.details)
        if finding.saving is not None and finding.saving.high_ns is not None:
            details += f". A fix saves {format_saving(finding.saving)} of {diagnosis.whole}"
        return f"{number}. {finding.claim}. {details}. {how}"
    if finding.saving is None or finding.saving.high_ns is None:
        return f"{number}. {finding.claim}. The saving is not known. {how}"
    saves = f"{format_saving(finding.saving)} of {saved_of(finding.saving, diagnosis)}"
    if finding.saving.worth is not None:
        saves += f", {format_worth(finding.saving.worth)} a month at list prices"
    costs = f"It costs {_cost(finding, diagnosis)}{where}"
    if not saves_alone(finding):
        return f"{number}. {finding.claim}. {costs}. {ONLY_TOGETHER} {how}"
    return f"{number}. {finding.claim}. {costs}. A fix saves {saves}. {how}"


def _cost(finding: Finding, diagnosis: Diagnosis) -> str:
    """Return what a finding costs of a step: the upper limit of its saving."""
    if finding.cause_ns is None or not diagnosis.whole_ns:
        return UNKNOWN
    share = format_share(finding.cause_ns / diagnosis.whole_ns)
    idle = " with the idle time around it" if finding.fix.launches is not None else ""
    return f"{format_time(finding.cause_ns)} of {diagnosis.whole} ({share}){idle}"


def _savings(diagnosis: Diagnosis, where: str) -> Table:
    columns = (
        Column("Finding"),
        Column(f"Cost, of {diagnosis.whole}"),
        Column("Saves"),
        Column(f"Of {saved_of(diagnosis.findings[0].saving, diagnosis)}"),
        Column(MONTH),
        Column("Confidence"),
        Column("Effort"),
        Column("Swap"),
    )
    rows = tuple(
        (
            one.rule,
            _cost_cell(one, diagnosis),
            *saving_interval(one.saving),
            format_worth(one.saving.worth if one.saving else None),
            one.confidence,
            one.effort,
            one.swap or MISSING,
        )
        for one in diagnosis.findings
    )
    money = f"A month: in dollars, of {diagnosis.price}. " if diagnosis.price else ""
    costs = f"Costs are those{where}. " if where else ""
    caption = (
        "Cost: with the idle time around fused operators. Saves: predicted by replaying the "
        "recording, from a partial to a full fix, widened by the replay's error and by everything "
        f"that the recording leaves open. Savings overlap and do not add up. {costs}{money}Each "
        "finding has a playbook: `kprof playbook NAME`."
    )
    kept = [i for i in range(len(columns)) if diagnosis.price or columns[i].header != MONTH]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(columns[i] for i in kept), shown, caption, terminal_rows=0)


def _claims(diagnosis: Diagnosis) -> Table:
    columns = (
        Column("Finding"),
        Column("Claim", "prose"),
        Column("Where", "prose"),
        Column("Kernel", "prose"),
        Column("To prove the gain", "prose"),
    )
    rows = tuple(
        (
            one.rule,
            f"{one.claim}.",
            "; ".join(one.details) or MISSING,
            one.dry_run or MISSING,
            one.command or MISSING,
        )
        for one in diagnosis.findings
    )
    return Table(columns, rows, "Claims of the findings, and their places.", terminal_rows=0)


def _evidence(trace: Trace, diagnosis: Diagnosis) -> Table:
    """Return for each finding the activities, or pieces of idle time, that prove it."""
    columns = (Column("Finding"), *PROOF)
    rows = [(one.rule, *row) for one in diagnosis.findings for row in _proofs(trace, one)]
    caption = "Evidence: kernels by name, idle time by place, layers of one kind together."
    if count_gpu_steps(trace):
        caption += " Times and time are of all steps, not of one."
    return Table(columns, tuple(rows), caption, terminal_rows=0)


def evidence_of(trace: Trace, finding: Finding) -> Table:
    """Return the evidence of one finding."""
    return Table(PROOF, tuple(_proofs(trace, finding)), "Evidence.", terminal_rows=0)


def _proofs(trace: Trace, finding: Finding) -> list[tuple[str, ...]]:
    kernels = trace.kernels.iloc[list(finding.rows)]
    layers = collapse_layers(kernels["module"])
    found = _grouped(kernels.assign(module=layers), "")
    idle = trace.idle.iloc[list(finding.idle_rows)]
    place, layers = (collapse_layers(idle[name]) for name in ("place", "module"))
    found += _grouped(idle.assign(name=idle["cause"], op=place, module=layers), "idle: ")
    if not found:
        ranges = trace.ranges.iloc[list(finding.range_rows)]
        found = _grouped(ranges.assign(op=None, module=None), "host: ")
    return found


def _grouped(rows: pd.DataFrame, before: str) -> list[tuple[str, ...]]:
    keys = [rows[name].astype(object) for name in ("name", "op", "module")]
    groups = rows["duration_ns"].groupby(keys, dropna=False, sort=False).agg(["size", "sum"])
    longest = groups.sort_values("sum", ascending=False, kind="stable").head(ROWS_OF_EVIDENCE)
    return [
        (
            f"{before}{or_missing(key[0])}",
            or_missing(key[1]),
            or_missing(key[2]),
            f"{times:,}",
            format_time(took),
        )
        for key, times, took in zip(longest.index, longest["size"], longest["sum"], strict=True)
    ]


def _not_applicable(diagnosis: Diagnosis) -> list[Part]:
    if not diagnosis.not_applicable:
        return []
    columns = (Column("Rules", "prose"), *ANSWERS_MISSING)
    rules: dict[tuple[str, str], list[str]] = {}
    for one in diagnosis.not_applicable:
        rules.setdefault((one.because, one.fix), []).append(one.rule)
    rows = tuple((", ".join(names), *why) for why, names in rules.items())
    number = format_count(len(diagnosis.not_applicable), "rule")
    folded = f"{number} not applicable to this recording"
    return [Table(columns, rows, f"{folded}.", terminal_rows=0, folded=folded)]


def _cost_cell(finding: Finding, diagnosis: Diagnosis) -> str:
    """Return what a finding costs, short enough for a column."""
    if finding.cause_ns is None or not diagnosis.whole_ns:
        return UNKNOWN
    share = format_share(finding.cause_ns / diagnosis.whole_ns)
    return f"{format_time(finding.cause_ns)} ({share})"
