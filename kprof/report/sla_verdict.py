"""Sections of an SLA verdict: the targets, the distributions, the time to the first N tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kprof.analyze.sla.curves import Curves, TokenCurve, curves_of, distribution, token_curve
from kprof.analyze.sla.doubts import lag_of
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.sla.independence import RUNS_DIFFER
from kprof.analyze.sla.rates import find_window
from kprof.analyze.sla.responses import Responses
from kprof.analyze.sla.target_verdict import Judgement, condition_of
from kprof.errors import counted
from kprof.report.figures import (
    BLUE,
    GREEN,
    GREY,
    LEGEND_ABOVE,
    ORANGE,
    RED,
    Drawn,
    axis,
    curve,
    literal,
    margins,
    mark_level,
    mark_place,
)
from kprof.report.section import Column, Facts, Figure, Part, Section, Table, Text
from kprof.report.units import MISSING, UNKNOWN, format_count, format_share, format_time

LIMIT_COLOUR, BOUND_COLOUR = RED, GREY
LEVEL_COLOURS = (GREEN, ORANGE, BLUE)


def draw_distribution(
    judgement: Judgement, points: list[tuple[float, float]], bound: float | None
) -> Figure:
    """Draw the share of the requests that are at or below each time, and the limit."""
    target = judgement.target
    x = [round(time / 1e6, 4) for time, _ in points]
    y = [round(100 * share, 4) for _, share in points]
    line = curve("share of the requests", x, y, BLUE, width=2, shape="hv")
    shapes = [mark_place(target.limit / 1e6, LIMIT_COLOUR, width=2, dash="dash")]
    notes = [_note(target.limit, f"limit {format_time(target.limit)}")]
    if bound is not None and math.isfinite(bound):
        shapes.append(mark_place(bound / 1e6, BOUND_COLOUR, width=2, dash="dot"))
    if target.quantile is not None:
        shapes.append(mark_level(100 * float(target.quantile), BOUND_COLOUR, width=1))
    layout: Drawn = {
        "margin": margins(left=64, top=24),
        "xaxis": axis("ms", rangemode="tozero"),
        "yaxis": axis("% at or below", range=[0, 101]),
        "shapes": shapes,
        "annotations": notes,
        "showlegend": False,
    }
    caption = (
        f"{target.text}: {judgement.verdict.lower()}. Dashed: the limit; dotted: the 99 % bound of "
        "the percentile. Failed requests never arrive, so the curve may end below 100 %."
    )
    return Figure([line], layout, caption, height_px=320)


def _note(time_ns: float, text: str) -> Drawn:
    place = {"x": time_ns / 1e6, "y": 1, "yref": "paper", "yanchor": "bottom"}
    return {**place, "text": literal(text), "showarrow": False}


def draw_token_curve(curve: TokenCurve) -> Figure:
    """Draw the percentiles of the time to the first N tokens over N."""
    lines = [
        _token_line(curve.num_tokens, points, name, colour)
        for (name, points), colour in zip(curve.by_level.items(), LEVEL_COLOURS, strict=True)
    ]
    bound = _token_line(curve.num_tokens, curve.high_p99, "p99, 99 % bound", BOUND_COLOUR)
    bound["line"] = {"color": BOUND_COLOUR, "width": 1.5, "dash": "dot"}
    layout: Drawn = {
        "margin": margins(left=64, top=24),
        "xaxis": axis("first N tokens"),
        "yaxis": axis("ms", rangemode="tozero"),
        "legend": LEGEND_ABOVE,
    }
    short = curve.share_short[-1]
    caption = (
        "How long the first N tokens take. Answers complete with fewer than N are left out of a "
        f"point: {format_share(short)} of the requests at N = {curve.num_tokens[-1]}. A line ends "
        "where too many failed, the bound where samples are too few."
    )
    return Figure([*lines, bound], layout, caption)


def _token_line(
    places: Sequence[int], points: Sequence[float | None], name: str, colour: str
) -> Drawn:
    y = [None if point is None else round(point / 1e6, 4) for point in points]
    return curve(name, list(places), y, colour, width=2, shape="hv")


SCHEMA = 1
TITLE, NOTES = "Service level", "Notes"
ORDER = 5
PERCENTILES = "inverted CDF"
METHOD = (
    "Percentiles by inverted CDF (nearest rank), bounds one-sided at 99 %. A time is met if its "
    "upper bound keeps the limit, and missed if its lower one breaks it. Failed and cancelled "
    "requests count as slower than any limit."
)
SENTENCES = {
    "MET": "Every target is proven met.",
    "MISSED": "At least one target is proven missed.",
    "NOT PROVEN": "The targets are neither proven met nor proven missed.",
}


@dataclass(frozen=True)
class Judged:
    """An assessment with the requests that it rests on; none of a recorded run."""

    source: str
    assessment: Assessment
    runs: tuple[Responses, ...] = ()
    curves: Curves | None = None
    """Summary of the requests, where the requests themselves are missing."""


def sections_of_sla(judged: Judged, *, for_page: bool = False) -> list[Section]:
    """Render the verdict, the requests, what to know, and for the page the curves."""
    assessment = judged.assessment
    tone = {"MET": "good"}.get(assessment.verdict, "warning")
    lead = Text(sentence_of(assessment), tone)
    parts: list[Part] = [lead, _table(assessment.judgements), *_reasons(assessment.judgements)]
    sections = [Section(TITLE, ORDER, (*parts, Text(METHOD, "muted")))]
    if judged.runs:
        sections.append(Section("Requests", ORDER, (_requests(judged),)))
    by_run = _by_run(judged)
    if by_run is not None:
        sections.append(Section("From run to run", ORDER, (by_run,)))
    if for_page and judged.runs:
        sections += _curves(judged)
    if assessment.doubts:
        notes = tuple(Text(_sentence(doubt.text)) for doubt in assessment.doubts)
        sections.append(Section(NOTES, ORDER, notes))
    return sections


def sentence_of(assessment: Assessment) -> str:
    """Say the verdict in a sentence, with the assumption that it rests on."""
    sentence = SENTENCES[assessment.verdict]
    if assessment.verdict != "MET":
        return sentence
    return f"{sentence.rstrip('.')}{condition_of(assessment.spell_s)}."


def _table(judgements: Sequence[Judgement]) -> Table:
    columns = (
        Column("Target", "name"),
        Column("Verdict"),
        Column("Measured", "right"),
        Column("99 % bound", "right"),
        Column("Samples", "right"),
        Column("Left out", "right", essential=False),
    )
    rows = tuple(
        (
            judgement.target.text,
            judgement.verdict.lower(),
            _value(judgement, judgement.estimate),
            _value(judgement, _bound(judgement)),
            f"{judgement.num_samples:,}" if judgement.num_samples else MISSING,
            f"{judgement.num_left_out:,}" if judgement.num_left_out else "",
        )
        for judgement in judgements
    )
    return Table(columns, rows, terminal_rows=len(rows))


def _bound(judgement: Judgement) -> float | None:
    """Return the bound that decides: the worse one, or of what is missed the better one."""
    is_high = (judgement.target.metric.relation == "<=") is not (judgement.verdict == "MISSED")
    return judgement.high if is_high else judgement.low


def _value(judgement: Judgement, value: float | None) -> str:
    if value is None:
        return MISSING
    if math.isinf(value):
        return "no answer"
    kind = judgement.target.metric.kind
    if kind == "time":
        return format_time(value)
    if kind == "share":
        return format_share(value)
    per_gpu = "/gpu" if judgement.target.is_per_gpu else ""
    return f"{value:,.4g} {judgement.target.metric.counts}/s{per_gpu}"


def _reasons(judgements: Sequence[Judgement]) -> list[Text]:
    reasons = []
    for judgement in judgements:
        needed = judgement.samples_needed
        where = ", of more runs," if judgement.why_fewer == RUNS_DIFFER else ""
        more = (
            f"; about {counted(needed, 'sample')} like these{where} would prove it"
            if needed
            else ""
        )
        if judgement.load_s_needed:
            more += f"; about {format_time(1e9 * judgement.load_s_needed)} of such load, or a "
            more += "shorter --spell that you know to be true, would prove it"
        if judgement.verdict not in ("MET", "MISSED"):
            reasons.append(Text(f"{judgement.target.text}: {judgement.why}{more}."))
        if judgement.num_left_out and judgement.num_samples:
            share = judgement.num_left_out / (judgement.num_left_out + judgement.num_samples)
            reasons.append(
                Text(
                    f"{judgement.target.text}: {format_share(share)} of the answers are "
                    f"{judgement.why_left_out} and have no such time; they are left out of it."
                )
            )
    return reasons


def _requests(judged: Judged) -> Facts:
    rows = [row for run in judged.runs for row in run.rows]
    outcomes = Counter(row.outcome for row in rows)
    loads = list(dict.fromkeys(f"{run.load.name} ({run.load.kind} loop)" for run in judged.runs))
    lag = lag_of(judged.runs)
    windows = [find_window(run) for run in judged.runs]
    steady = [window.duration_s for window in windows if window is not None]
    tools = ", ".join(dict.fromkeys(run.tool for run in judged.runs))
    gpus = judged.assessment.num_gpus
    return Facts(
        (
            ("Sent", f"{len(rows):,}", f"{tools}, {format_count(len(judged.runs), 'run')}"),
            ("Answered", f"{outcomes['answered']:,}", ""),
            ("Failed", f"{outcomes['failed']:,}", _first_error(judged.runs)),
            ("Cancelled", f"{outcomes['cancelled']:,}", "the client stopped waiting"),
            ("Load", ", ".join(loads), ""),
            ("Sent late", UNKNOWN if lag is None else format_time(lag), "p99, after it was due"),
            ("Steady state", format_time(1e9 * sum(steady)) if steady else UNKNOWN, "of the rates"),
            ("GPUs", f"{gpus}" if gpus else UNKNOWN, "as given" if gpus else "give --gpus"),
        )
    )


def _first_error(runs: Sequence[Responses]) -> str:
    errors = Counter(row.error for run in runs for row in run.rows if row.outcome == "failed")
    if not errors:
        return ""
    error, _ = errors.most_common(1)[0]
    return "most often: " + " ".join(error.split())[:80]


def _by_run(judged: Judged) -> Table | None:
    judgements = [j for j in judged.assessment.judgements if j.by_run]
    if not judgements:
        return None
    columns = (Column("Target", "name"), Column("Least", "right"), Column("Most", "right"))
    rows = tuple(
        (j.target.text, _value(j, min(j.by_run)), _value(j, max(j.by_run))) for j in judgements
    )
    return Table(columns, rows, "What each run alone measured.", terminal_rows=len(rows))


def _curves(judged: Judged) -> list[Section]:
    drawn = [
        draw_distribution(judgement, points, _bound(judgement))
        for judgement in judged.assessment.judgements
        if judgement.target.metric.kind == "time" and judgement.num_samples
        if (points := distribution(judgement.target, judged.runs))
    ]
    sections = [Section("Distributions", ORDER, tuple(drawn))] if drawn else []
    curve = token_curve(judged.runs)
    if curve is not None:
        parts = (draw_token_curve(curve), _token_table(curve))
        sections.append(Section("Time to the first N tokens", ORDER, parts))
    return sections


def _token_table(curve: TokenCurve) -> Table:
    columns = ("N", *curve.by_level, "p99, 99 % bound", "Shorter answers")
    chosen = [i for i, n in enumerate(curve.num_tokens) if n & (n - 1) == 0]
    rows = [
        (
            f"{curve.num_tokens[i]}",
            *(format_time(points[i]) for points in curve.by_level.values()),
            format_time(curve.high_p99[i]),
            format_share(curve.share_short[i]),
        )
        for i in chosen
    ]
    return Table(tuple(Column(name, "right") for name in columns), tuple(rows))


def _sentence(text: str) -> str:
    word = text.partition(" ")[0]
    begun = text[0].upper() + text[1:] if word.isalpha() else text  # A target keeps its spelling.
    return begun + ("" if text.endswith(".") else ".")


def result_of_sla(judged: Judged) -> dict[str, object]:
    """Return the verdict as plain data: ns, per second, shares of one; unknown as None."""
    assessment = judged.assessment
    rows = [row for run in judged.runs for row in run.rows]
    outcomes = Counter(row.outcome for row in rows)
    return {
        "schema": SCHEMA,
        "source": judged.source,
        "verdict": assessment.verdict,
        "percentiles": PERCENTILES,
        "confidence": 0.99,
        "spell_s": assessment.spell_s,
        "targets": [_judgement(judgement) for judgement in assessment.judgements],
        "requests": {
            "sent": len(rows),
            **{name: outcomes[name] for name in ("answered", "failed", "cancelled")},
        }
        if judged.runs
        else None,
        "runs": [
            {"source": run.source, "tool": run.tool, "loop": run.load.kind, "load": run.load.name}
            for run in judged.runs
        ],
        "late_p99_ns": lag_of(judged.runs),
        "gpus": assessment.num_gpus,
        "doubts": [asdict(doubt) for doubt in assessment.doubts],
        "curves": _curves_kept(judged),
    }


def _curves_kept(judged: Judged) -> dict[str, Any] | None:
    """Return what of the requests can be drawn again; None: there were none."""
    if not judged.runs:
        return None
    targets = [judgement.target for judgement in judged.assessment.judgements]
    return asdict(curves_of(judged.runs, targets))


def _judgement(judgement: Judgement) -> dict[str, object]:
    """Return a judgement; a percentile that failed requests reach is "never"."""
    target = judgement.target
    unit = {"time": "ns", "share": "", "rate": f"{target.metric.counts}/s"}[target.metric.kind]
    return {
        "target": target.text,
        "metric": target.metric.name,
        "percentile": None if target.quantile is None else 100 * float(target.quantile),
        "limit": target.limit,
        "unit": unit + ("/gpu" if target.is_per_gpu else ""),
        "verdict": judgement.verdict,
        "why": judgement.why,
        "estimate": _plain(judgement.estimate),
        "low": _plain(judgement.low),
        "high": _plain(judgement.high),
        "samples": judgement.num_samples,
        "independent_samples": judgement.num_independent,
        "left_out": judgement.num_left_out,
        "why_left_out": judgement.why_left_out if judgement.num_left_out else "",
        "samples_needed": judgement.samples_needed,
        "load_s_needed": judgement.load_s_needed,
        "by_run": [_plain(value) for value in judgement.by_run],
    }


def _plain(value: float | None) -> float | str | None:
    return "never" if value is not None and math.isinf(value) else value
