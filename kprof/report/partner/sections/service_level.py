"""The service level: each SLA target, its measured value, its 99 % bound."""

from __future__ import annotations

import math

from kprof.analyze.sla.target_verdict import Judgement
from kprof.report.partner.drawings import Range, both, ranges
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Block, Chapter, Missing, Picture
from kprof.report.partner.service_curves import later_in_words, pictures_of
from kprof.report.partner.wording import SLA_VERDICTS, exact_time, marked, time_within
from kprof.report.section import Column, Table, Text
from kprof.report.sla_verdict import Judged, sentence_of
from kprof.report.units import MISSING, format_share

TITLE = "Service level"

METHOD = (
    "A bound is the worst value that the measurements allow with 99 % confidence; for a missed "
    "target it is the best value. A target counts as met only if its bound meets it; a measured "
    "value within the limit is not enough."
)
TONES = {"MET": "good", "MISSED": "warning"}
HOW = "kprof sla RESULTS --target 'ttft_p95<=200ms' --json > sla.json, then name sla.json"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render every target before and after, with its bound, and a drawing over the limits."""
    if not evidence.service_levels:
        return Missing("Whether the service meets its SLA targets", HOW)
    last = evidence.service_levels[-1]
    verdict = last.assessment.verdict
    tone = TONES.get(verdict, "plain")
    lead = marked(tone, sentence_of(last.assessment))
    blocks: list[Block] = [Text(lead, tone), *_reasons(last)]
    blocks += [_table(evidence), Text(METHOD, "muted")]
    if picture := _picture(evidence):
        blocks.append(picture)
    blocks += pictures_of(_stages(evidence))
    if later := later_in_words(_stages(evidence)):
        blocks.append(Text(later, "warning"))
    return Chapter(TITLE, tuple(blocks))


def _reasons(judged: Judged) -> list[Text]:
    """Return the reason for every target that has no verdict."""
    return [
        Text(f"{_capital(target_in_words(j))}. {_capital(j.why)}.")
        for j in judged.assessment.judgements
        if j.verdict not in ("MET", "MISSED")
    ]


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _stages(evidence: Evidence) -> list[tuple[str, Judged]]:
    levels = evidence.service_levels
    if len(levels) == 1:
        return [("now", levels[0])]
    return [("before", levels[0]), ("after", levels[-1])]


def target_in_words(judgement: Judgement) -> str:
    """Say a target in words: what, of how many, at most how much."""
    target = judgement.target
    metric = target.metric
    what = metric.means
    if target.num_tokens is not None:
        number = target.num_tokens
        what = f"time to the first {f'{number} tokens' if number > 1 else 'token'}"
    if target.quantile is None:
        relation = "at most" if metric.relation == "<=" else "at least"
        return f"{what}: {relation} {limit_of(judgement)}"
    percent = f"{100 * float(target.quantile):g}"
    of_what = "steps" if metric.name == "step" else "gaps" if metric.is_pooled else "requests"
    return f"{what}: at most {limit_of(judgement)} for {percent} % of {of_what}"


def limit_of(judgement: Judgement) -> str:
    """Write the limit as it was set: it is no measurement, and is exact."""
    target = judgement.target
    if target.metric.kind == "time":
        return exact_time(target.limit)
    if target.metric.kind == "share":
        return f"{100 * target.limit:g} %"
    per = " for each GPU" if target.is_per_gpu else ""
    return f"{target.limit:,.12g} {target.metric.counts}/s{per}"


def value_of(judgement: Judgement, value: float | None) -> str:
    """Write a value of a target's metric with its unit and no more than three digits."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "no answer"
    metric = judgement.target.metric
    if metric.kind == "time":
        return time_within(value)
    if metric.kind == "share":
        return format_share(value)
    per = " for each GPU" if judgement.target.is_per_gpu else ""
    return f"{value:,.3g} {metric.counts}/s{per}"


def bound_of(judgement: Judgement) -> float | None:
    """Return the bound that decides: the worse one, or of what is broken the better one."""
    is_high = (judgement.target.metric.relation == "<=") is not (judgement.verdict == "MISSED")
    return judgement.high if is_high else judgement.low


def _table(evidence: Evidence) -> Table:
    columns = (
        Column("SLA target", "prose"),
        Column("When"),
        Column("Measured", "right"),
        Column("99 % bound", "right"),
        Column("Result"),
        Column("Measurements", "right"),
    )
    rows = [
        (
            target_in_words(judgement),
            when,
            value_of(judgement, judgement.estimate),
            value_of(judgement, bound_of(judgement)),
            marked(TONES.get(judgement.verdict, "plain"), SLA_VERDICTS[judgement.verdict]),
            f"{judgement.num_samples:,}" if judgement.num_samples else MISSING,
        )
        for when, judged in _stages(evidence)
        for judgement in judged.assessment.judgements
    ]
    order = list(dict.fromkeys(row[0] for row in rows))
    ordered = tuple(sorted(rows, key=lambda row: order.index(row[0])))
    return Table(columns, ordered, "Every SLA target, the measured value, and its bound.")


def _picture(evidence: Evidence) -> Picture | None:
    rows, numbers = [], []
    for when, judged in _stages(evidence):
        for judgement in judged.assessment.judgements:
            limit = judgement.target.limit
            found = [judgement.estimate, judgement.low, judgement.high]
            if not limit or judgement.estimate is None or math.isinf(judgement.estimate):
                continue
            middle, low, high = (None if v is None else 100 * v / limit for v in found)
            style = "k0" if when != "before" else "k7"
            symbol = "circle" if when != "before" else "diamond"
            shown = f"{middle:.0f} %"
            name = f"{judgement.target.text}, {when}"
            rows.append(Range(name, shown, middle, low, high, style, symbol))  # type: ignore[arg-type]
            ends = [
                MISSING if v is None else "no answer" if math.isinf(v) else f"{v:.0f} %"
                for v in (low, high)
            ]
            numbers.append((judgement.target.text, when, ends[0], shown, ends[1]))
    if not rows:
        return None
    columns = ("Target", "When", "Lower bound", "Measured", "Upper bound")
    table = Table(
        tuple(Column(c, "left" if i < 2 else "right") for i, c in enumerate(columns)),
        tuple(numbers),
        "In percent of the limit.",
    )
    wide, narrow = both(lambda width: ranges(rows, width, "%", 100.0, "limit"))
    caption = (
        "Each target in percent of its limit. The mark is the measured value; the band reaches "
        "from bound to bound and is cut at three times the limit. Times must stay left of the "
        "limit, rates right of it."
    )
    return Picture("Targets against their limits", wide, narrow, caption, table)
