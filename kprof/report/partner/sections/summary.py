"""The executive summary: before, after, difference, SLA targets, money, next steps."""

from __future__ import annotations

from statistics import median

from kprof.analyze.attribution.steps import time_steps
from kprof.analyze.energy import measure_step_energy
from kprof.analyze.roofline.utilisation import measure_utilisation
from kprof.comparison import Claim, Comparison
from kprof.errors import counted
from kprof.report.partner.evidence import Evidence, first_and_last
from kprof.report.partner.mixed import gpu_of
from kprof.report.partner.money import (
    is_cheaper,
    is_credited,
    load_in_words,
    money_in,
    negated,
    worth_in_words,
    written,
)
from kprof.report.partner.outcome import medians_in_words, next_steps
from kprof.report.partner.parts import Block, Chapter, Steps
from kprof.report.partner.sections.quality import tone_of
from kprof.report.partner.sections.service_level import limit_of, value_of
from kprof.report.partner.sections.time import idle_share
from kprof.report.partner.wording import (
    SLA_VERDICTS,
    change_in_words,
    gain_range,
    marked,
    share_in_words,
    time_within,
    without_letters,
)
from kprof.report.section import Column, Table, Text
from kprof.report.sla_verdict import Judged
from kprof.report.units import MISSING, format_count
from kprof.trace import Trace

TITLE = "Summary"

Row = tuple[str, str, str, str, str]
EMPTY = ("", MISSING)
TONES = {"FASTER": "good", "SAME": "good", "SLOWER": "warning"}
WORDS = {
    "FASTER": "better",
    "SAME": "the same",
    "SLOWER": "worse",
    "INCONCLUSIVE": "inconclusive",
    "INVALID": "not valid",
}
MONEY_WORDS = {
    True: ("good", "cheaper"),
    False: ("warning", "dearer"),
    None: ("plain", "inconclusive"),
}
SLA_TONES = {"MET": "good", "MISSED": "warning"}


def render(evidence: Evidence) -> Chapter:
    """Render warnings, a table of a few rows, and the next steps."""
    rows = [*_measured(evidence), *_targets(evidence), *_gated(evidence)]
    rows += [*_paid(evidence), *_used_energy(evidence)]
    blocks: list[Block] = [Text(warning, "warning") for warning in _warnings(evidence)]
    if rows:
        blocks.append(_table(rows))
    blocks += [Text(told, "muted") for told in (step_of(evidence), _load(evidence)) if told]
    blocks.append(Text("Next steps", "heading"))
    blocks.append(Steps(tuple(next_steps(evidence))))
    return Chapter(TITLE, tuple(blocks))


def _table(rows: list[Row]) -> Table:
    headers = ("What", "Before", "After", "Difference", "Result")
    columns = [Column(name) for name in headers]
    kept = [i for i in range(len(headers)) if i in (0, 2) or any(r[i] not in EMPTY for r in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    columns = [Column("Now") if i == 2 and 1 not in kept else columns[i] for i in kept]
    caption = "In brackets: the range of each value." if 3 in kept else ""
    return Table(tuple(columns), shown, caption)


def _measured(evidence: Evidence) -> list[Row]:
    comparison = evidence.headline
    if comparison is not None:
        return [_claim(comparison, claim) for claim in comparison.claims]
    rows = []
    for name, measure in (
        ("Time of a step, median", _step),
        ("Idle", _idle),
        ("Share of the hardware limit", _used),
    ):
        before, after = first_and_last([measure(run) for run in evidence.runs])
        if (before or MISSING) != MISSING or (after or MISSING) != MISSING:
            rows.append((name, before or MISSING, after or MISSING, "", ""))
    if evidence.runs and (could := _possible(evidence)):
        rows.append(("Predicted saving", "", could, "", "? not proven"))
    return rows


def step_of(evidence: Evidence) -> str:
    """Return the definition of a step that the measurement used; empty where it used none."""
    comparison = evidence.headline
    runs = [run.meta.recording.step_rule for run in evidence.runs[-1:] if run.meta.recording]
    found = [comparison.facts.get("step", "")] if comparison else runs
    return next((text for text in found if text), "")


def _load(evidence: Evidence) -> str:
    """Return the load that the costs assume; empty without costs."""
    return load_in_words(evidence.costs[-1]) if money_in(evidence) else ""


def _used_energy(evidence: Evidence) -> list[Row]:
    """Return the energy of a step in each run, where a comparison has not measured it already."""
    comparison = evidence.headline
    if comparison is not None and any(claim.metric.unit == "J" for claim in comparison.claims):
        return []
    before, after = first_and_last([measure_step_energy(run).joules for run in evidence.runs])
    if before is None and after is None:
        return []
    old, new = (MISSING if j is None else f"{format_joules(j)} J" for j in (before, after))
    result = "? one recording each" if len(evidence.runs) > 1 else ""
    return [("Energy of a recorded step", old, new, "", result)]


def format_joules(joules: float) -> str:
    """Write an amount of energy in two digits, or whole joules: more a counter does not know."""
    return f"{joules:.2g}" if joules < 100 else f"{joules:,.0f}"


def _step(run: Trace) -> str:
    times = time_steps(run)
    steps = times.unrecorded_ns or times.recorded_ns
    if not steps:
        return MISSING
    return f"{time_within(median(steps), 0.01)}{'' if times.unrecorded_ns else ', recorded'}"


def _idle(run: Trace) -> str:
    share = idle_share(run)
    return MISSING if share is None else f"{share_in_words(share)} of the time"


def _used(run: Trace) -> str:
    used = measure_utilisation(run).roofline
    if used.value is None:
        return MISSING
    return f"{'at least ' if used.is_lower_bound else ''}{share_in_words(used.value)}"


def _possible(evidence: Evidence) -> str:
    diagnosis = evidence.runs[-1].diagnosis
    together = diagnosis.together if diagnosis else None
    if diagnosis is None or together is None or not together.high_ns:
        return ""
    step = max(together.step_ns, 1)
    share = f"{gain_range((together.low_ns or 0) / step, together.high_ns / step)} of the time"
    worth, _, basis = worth_in_words(together, diagnosis.price, False, evidence).partition(";")
    told = f"{share}: {worth}{', at list prices' if basis else ''}"
    return told if worth.count("$") else share


def _claim(comparison: Comparison, claim: Claim) -> Row:
    name = f"{claim.metric.name[:1].upper()}{claim.metric.name[1:]}"
    medians = medians_in_words(comparison, claim)
    result = marked(TONES.get(claim.verdict, "plain"), WORDS[claim.verdict])
    if medians is None:
        return (name, MISSING, MISSING, "", result)
    change = change_in_words(claim.interval, claim.metric) if claim.interval else MISSING
    return (name, *medians, change, result)


def _targets(evidence: Evidence) -> list[Row]:
    before, after = first_and_last(evidence.service_levels)
    if after is None:
        return []
    result = after.assessment.verdict
    tone = SLA_TONES.get(result, "plain")
    told = [_level(before) if before else MISSING, _level(after)]
    return [("Service level", told[0], told[1], "", marked(tone, SLA_VERDICTS[result].lower()))]


def _level(judged: Judged) -> str:
    """Format the value of a single target, else how many targets are proven."""
    judgements = judged.assessment.judgements
    if len(judgements) == 1 and judgements[0].estimate is not None:
        measured = value_of(judgements[0], judgements[0].estimate)
        return f"{measured} (limit {limit_of(judgements[0])})"
    verdicts = [judgement.verdict for judgement in judgements]
    return f"{verdicts.count('MET')} of {format_count(len(verdicts), 'target')} proven"


def _gated(evidence: Evidence) -> list[Row]:
    if not evidence.gates:
        return []
    tones = [tone_of(gate) for gate in evidence.gates]
    tone = next(one for one in ("warning", "plain", "good") if one in tones)
    words = {"warning": "rejected", "plain": "not shown yet", "good": "shown"}[tone]
    told = f"{tones.count('good')} of {counted(len(tones), 'replacement')} shown equivalent"
    return [("Quality of results", "", told, "", marked(tone, words))]


def _paid(evidence: Evidence) -> list[Row]:
    rows: list[Row] = []
    for line in money_in(evidence):
        before, after, saved = line.written()
        if not is_credited(evidence):
            rows.append((line.name, MISSING, after if line.before is None else before, "", ""))
            continue
        if line.saved is None:
            rows.append((line.name, before, after, "", ""))
            continue
        if line.saved.is_known and not line.saved.mid:
            rows.append((line.name, before, after, "none", marked("plain", "the same")))
            continue
        is_less = line.saved.mid >= 0
        told = f"saves {saved}" if is_less else f"costs {written(negated(line.saved))} more"
        result = marked(*MONEY_WORDS[is_cheaper(line.saved)])
        rows.append((line.name, before, after, told, result))
    return rows


def _warnings(evidence: Evidence) -> list[str]:
    """Return the warnings that qualify the numbers, at most three."""
    comparison = evidence.headline
    found = [without_letters(one.text) for one in comparison.doubts[:2]] if comparison else []
    if evidence.costs and not is_credited(evidence):
        found.append("The difference is not proven, so no saving is credited to the change.")
    found += [warning for costs in evidence.costs for warning in costs.warnings[:1]]
    on_gpu = comparison is not None and gpu_of(comparison)
    if evidence.runs and evidence.runs[-1].is_host_only and not on_gpu:
        found.append("No GPU was used: times are those of the host's operators.")
    return list(dict.fromkeys(found))[:3]
