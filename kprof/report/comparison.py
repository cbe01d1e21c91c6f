"""A comparison of A and B as sections, for the terminal and the page, and as plain data."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from statistics import median

from kprof.comparison import Claim, Comparison, Interval, Metric, Pair
from kprof.report.figures import literal
from kprof.report.section import Column, Facts, Figure, Section, Table, Text
from kprof.report.units import MISSING, format_amount, format_count, format_time

TONES = {"FASTER": "good", "SLOWER": "warning", "SAME": "good"}
TESTS = {"fixed": "Wilcoxon's signed ranks", "sequence": "test that may stop at any pair"}
LINE, BAND, LEFT_OUT = "#4c78a8", "#8c8c94", "#d8443c"


def sections_of_comparison(comparison: Comparison, calibration: str) -> list[Section]:
    """Render the verdict, what speaks against it, every pair, and how it was done.

    `calibration` is the sentence on how often this instrument errs on this machine.
    """
    found = [_verdict(comparison, calibration)]
    if comparison.pairs:
        found.append(_pairs(comparison))
    return [*found, _method(comparison)]


def headline(claim: Claim) -> str:
    """Return the verdict on one metric in a sentence."""
    what = f"{claim.verdict} in {claim.metric.name}"
    if claim.interval is None:
        return f"{what}. {claim.why}".strip()
    return f"{what}: B {format_change(claim.interval.ratio, claim.metric)}. {claim.why}".strip()


def format_change(ratio: float, metric: Metric) -> str:
    """Say what a ratio of B to A means: 'takes 3.1 % less', or 'takes 3.42 times as much'."""
    verb = "takes" if metric.better == "lower" else "reaches"
    if ratio >= 1.5 or ratio <= 1 / 1.5:
        return f"{verb} {ratio:.3g} times A's {metric.name}"
    if abs(ratio - 1) < 5e-5:
        return f"{verb} as much as A"
    return f"{verb} {format_percent(ratio).lstrip('+-')} {'more' if ratio > 1 else 'less'}"


def format_percent(ratio: float) -> str:
    """Return how far a ratio is from 1, in percent with its sign."""
    percent = 100 * (ratio - 1)
    digits = 2 if abs(percent) < 9.95 else 1
    return f"{percent:+.{digits}f} %"


def format_interval(interval: Interval) -> str:
    """Return an interval as changes in percent."""
    return f"{format_percent(interval.low)} to {format_percent(interval.high)}"


def _verdict(comparison: Comparison, calibration: str) -> Section:
    claims = comparison.claims
    first = comparison.headline
    parts: list[Text | Facts | Table] = [Text(headline(first), TONES.get(first.verdict, "plain"))]
    parts.append(_facts(comparison, first))
    if len(claims) > 1:
        parts.append(_claims(comparison))
    parts += [Text(doubt, "warning") for doubt in comparison.doubts]
    parts.append(Text(calibration))
    return Section("Verdict", 0, tuple(parts))


def _facts(comparison: Comparison, claim: Claim) -> Facts:
    interval = claim.interval
    values = _medians(comparison, claim.metric)
    items = [
        ("A", values[0], comparison.a),
        ("B", values[1], comparison.b),
    ]
    if interval is not None:
        what = "B's against A's, median over pairs of pairs (Hodges-Lehmann)"
        items.append(("Change", format_percent(interval.ratio), what))
        kind = "valid whenever one stops" if interval.kind == "sequence" else "pairs set before"
        how = f"{100 * interval.level:.3g} % confidence, {kind}"
        items.append(("Interval", format_interval(interval), how))
    if claim.p_value is not None and interval is not None:
        test = TESTS[interval.kind]
        items.append(("p", f"{claim.p_value:.2g}", f"{test}, two-sided, corrected"))
    items.append(("Pairs", str(claim.num_pairs), _pairs_in_words(comparison, claim)))
    return Facts(tuple(items))


def _pairs_in_words(comparison: Comparison, claim: Claim) -> str:
    plan = comparison.plan
    left_out = sum(bool(pair.problem) for pair in comparison.pairs)
    words = f"of at most {plan.max_pairs}"
    if left_out:
        words += f", {left_out} more left out"
    if claim.pairs_needed:
        words += f"; about {claim.pairs_needed} more would decide"
    return words


def _claims(comparison: Comparison) -> Table:
    columns = (
        Column("Metric", "prose"),
        Column("Verdict"),
        Column("Change", "right"),
        Column("From", "right"),
        Column("To", "right"),
        Column("p", "right", essential=False),
    )
    rows = []
    for claim in comparison.claims:
        of = claim.interval
        changes = [format_percent(x) for x in (of.ratio, of.low, of.high)] if of else [MISSING] * 3
        p = MISSING if claim.p_value is None else f"{claim.p_value:.2g}"
        rows.append((claim.metric.name, claim.verdict, *changes, p))
    return Table(columns, tuple(rows), caption="Together these claims err as often as one alone.")


def _medians(comparison: Comparison, metric: Metric) -> tuple[str, str]:
    """Return the median of A's and of B's samples, formatted."""
    place = comparison.plan.metrics.index(metric)
    good = [pair for pair in comparison.pairs if not pair.problem]
    if not good:
        return MISSING, MISSING
    a = median(pair.a[place] for pair in good)
    b = median(pair.b[place] for pair in good)
    return format_value(a, metric), format_value(b, metric)


def format_value(value: float, metric: Metric) -> str:
    """Format a value of a metric with its unit."""
    return format_time(value) if metric.unit == "ns" else format_amount(value, metric.unit)


def _pairs(comparison: Comparison) -> Section:
    metric = comparison.headline.metric
    caption = (
        "Each dot is a pair, in the order of time: B's value over A's, on a logarithmic scale. "
        "Solid: the estimate, in its interval; dotted: the least effect that matters."
    )
    columns = (
        Column("Pair", "right"),
        Column("First"),
        Column("A", "right"),
        Column("B", "right"),
        Column("Change", "right"),
        Column("Clock of A, MHz", "right"),
        Column("Clock of B, MHz", "right"),
        Column("Left out", "prose"),
    )
    rows = [_row(i, pair, metric) for i, pair in enumerate(comparison.pairs, 1)]
    # A column in which nothing is known of any pair would only push the others off the page.
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", MISSING) for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    table = Table(tuple(columns[i] for i in kept), shown, terminal_rows=0)
    parts = (_figure(comparison, caption), table)
    return Section("Every pair", 10, parts, in_terminal=False)


def _row(number: int, pair: Pair, metric: Metric) -> tuple[str, ...]:
    clocks = [MISSING if clock is None else f"{clock:,.0f}" for clock in pair.clocks_mhz]
    ratio = pair.b[0] / pair.a[0] if pair.a[0] > 0 else math.nan
    return (
        str(number),
        "A" if pair.is_a_first else "B",
        format_value(pair.a[0], metric),
        format_value(pair.b[0], metric),
        MISSING if math.isnan(ratio) else format_percent(ratio),
        *clocks,
        pair.problem,
    )


def _figure(comparison: Comparison, caption: str) -> Figure:
    data: list[dict[str, object]] = []
    for is_good, name, colour in ((True, "pair", LINE), (False, "left out", LEFT_OUT)):
        chosen = [
            (i, pair.b[0] / pair.a[0])
            for i, pair in enumerate(comparison.pairs, 1)
            if bool(pair.problem) != is_good and pair.a[0] > 0 and pair.b[0] > 0
        ]
        if chosen:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [i for i, _ in chosen],
                    "y": [round(ratio, 6) for _, ratio in chosen],
                    "marker": {"color": colour, "symbol": "circle" if is_good else "x"},
                }
            )
    title = f"B's {comparison.headline.metric.name} over A's"
    layout: dict[str, object] = {
        "margin": {"l": 70, "r": 20, "t": 10, "b": 46},
        "showlegend": len(data) > 1,
        "xaxis": {"title": {"text": "pair"}, "zeroline": False},
        "yaxis": {"title": {"text": literal(title)}, "type": "log", "nticks": 8},
        "shapes": _marks(comparison),
    }
    return Figure(data, layout, caption, height_px=360)


def _marks(comparison: Comparison) -> list[dict[str, object]]:
    across: dict[str, object] = {"xref": "paper", "x0": 0, "x1": 1}
    effect = comparison.plan.smallest_effect
    marks: list[dict[str, object]] = [
        {"type": "line", **across, "y0": y, "y1": y, "line": {"color": BAND, "dash": "dot"}}
        for y in (1 / (1 + effect), 1 + effect)
    ]
    if interval := comparison.headline.interval:
        band = {"type": "rect", "y0": interval.low, "y1": interval.high, "fillcolor": LINE}
        marks.append({**band, **across, "opacity": 0.18, "line": {"width": 0}, "layer": "below"})
        line = {"type": "line", "y0": interval.ratio, "y1": interval.ratio}
        marks.append({**line, **across, "line": {"color": LINE, "width": 1.5}})
    return marks


def _method(comparison: Comparison) -> Section:
    plan = comparison.plan
    early = "stops as soon as the verdict stands" if plan.stops_early else "takes all pairs"
    rows = [
        ("Least effect that matters", f"{100 * plan.smallest_effect:g} %"),
        (
            "Error allowed",
            f"{100 * plan.alpha:g} % over {format_count(len(plan.metrics), 'claim')}",
        ),
        ("Pairs", f"at most {plan.max_pairs}; {early}"),
        ("Seed of the order", str(plan.seed)),
        ("SHA-256 of the plan", plan.digest),
    ]
    if comparison.pairs:
        began = datetime.fromtimestamp(comparison.pairs[0].start_ns / 1e9, tz=timezone.utc)
        rows.append(("First sample", f"{began:%Y-%m-%d %H:%M} UTC"))
    rows += list(comparison.facts.items())
    table = Table((Column("Set beforehand, and the machine"), Column("", "prose")), tuple(rows))
    return Section("How it was done", 90, (Text(comparison.protocol), table), in_terminal=False)
