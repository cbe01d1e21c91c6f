"""Sections of a comparison of A with B: the verdict, its method, every pair in time order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from math import isfinite
from statistics import median

from kprof.analyze.verdict.per_token import per_token
from kprof.comparison import Claim, Comparison, Interval, Metric, Pair
from kprof.errors import three_digits
from kprof.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Drawn,
    axis,
    literal,
    margins,
    mark_level,
    shade_levels,
)
from kprof.report.section import Column, Facts, Figure, Part, Section, Table, Text
from kprof.report.units import MISSING, format_amount, format_count, format_time


def format_value(value: float, metric: Metric) -> str:
    """Format a value of a metric with its unit."""
    if metric.unit == "J" and 0 < abs(value) < 1:
        return format_amount(1000 * value, "mJ")
    return format_time(value) if metric.unit == "ns" else format_amount(value, metric.unit)


def format_change(ratio: float, metric: Metric) -> str:
    """Say what a ratio of B to A means: 'takes 3.1 % less', or 'takes 3.42 times as much'."""
    verb = "takes" if metric.better == "lower" else "reaches"
    if ratio >= 1.5 or ratio <= 1 / 1.5:
        return f"{verb} {three_digits(ratio)} times A's {metric.name}"
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


OF_A, OF_B, BAND, LEFT_OUT = BLUE, ORANGE, GREY, RED
SYMBOLS = {"A": "circle", "B": "diamond"}
WIDE = 3.0
"""From this ratio of the largest to the least on, a logarithmic axis has decades to mark."""
LEGEND = {"orientation": "h", "y": 1.12, "x": 0}


def section_of_pairs(comparison: Comparison) -> Section:
    """Render every pair of the first metric, what they were taken under, and the table of all."""
    parts: list[Part] = [
        _ratios(comparison),
        _samples(comparison),
        Text(conditions_of(comparison.pairs)),
    ]
    if clocks := _clocks(comparison):
        parts.append(clocks)
    return Section("Every pair", 40, (*parts, _table(comparison)), in_terminal=False)


def conditions_of(pairs: tuple[Pair, ...]) -> str:
    """Say what was read of the GPU around the samples, and which pairs that left out."""
    causes = Counter(pair.problem for pair in pairs if pair.problem)
    clocks = [clock for pair in pairs for clock in pair.clocks_mhz if clock is not None]
    said = [f"The GPU's clock: {min(clocks):,.0f} to {max(clocks):,.0f} MHz."] if clocks else []
    if not clocks:
        said.append("No sensor reported a GPU clock, so throttling was not checked.")
    elif not causes:
        said.append("No pair was left out: none had heat, a power brake or another process.")
    said += [f"{format_count(n, 'pair')} left out: {cause}." for cause, n in causes.most_common()]
    return " ".join(said)


def _numbered(comparison: Comparison) -> Iterator[tuple[int, Pair]]:
    """Yield the pairs that can be drawn, in the order of time, each with its number."""
    for number, pair in enumerate(comparison.pairs, 1):
        if all(isfinite(value) and value > 0 for value in (pair.a[0], pair.b[0])):
            yield number, pair


def _ratios(comparison: Comparison) -> Figure:
    data: list[Drawn] = []
    for is_good, name, colour in ((True, "pair", OF_A), (False, "left out", LEFT_OUT)):
        chosen = [(i, p) for i, p in _numbered(comparison) if bool(p.problem) != is_good]
        if not chosen:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [i for i, _ in chosen],
                "y": [round(pair.b[0] / pair.a[0], 6) for _, pair in chosen],
                "text": [literal(_told(comparison, pair)) for _, pair in chosen],
                "hovertemplate": "pair %{x}: %{y:.4f}<br>%{text}<extra></extra>",
                "marker": {"color": colour, "symbol": "circle" if is_good else "x"},
            }
        )
    what = comparison.headline.metric.name
    caption = (
        f"Each dot is a pair, in the order of time: B's {what} over A's, on a logarithmic scale. "
        "Solid: the estimate, in its interval; dotted: the smallest effect that matters."
    )
    layout: Drawn = {
        "margin": margins(),
        "showlegend": len(data) > 1,
        "legend": LEGEND,
        "xaxis": axis("pair", zeroline=False),
        "yaxis": axis(
            literal(f"B's {what} over A's"),
            type="log",
            **_ticks([pair.b[0] / pair.a[0] for _, pair in _numbered(comparison)]),
        ),
        "shapes": _marks(comparison),
    }
    return Figure(data, layout, caption, height_px=360)


def _ticks(ratios: list[float]) -> dict[str, object]:
    """Mark a wide range by 1, 2, 5, 10 and so on: plotly would write the digits between alone."""
    if not ratios or max(ratios) < WIDE * min(ratios):
        return {"nticks": 8}
    values = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [f"{value:,.6g}" for value in values]}


def _told(comparison: Comparison, pair: Pair) -> str:
    """Say what one pair was: its values, which came first, and why it does not count."""
    metric = comparison.headline.metric
    values = f"A {format_value(pair.a[0], metric)}, B {format_value(pair.b[0], metric)}"
    since_ns = pair.start_ns - comparison.pairs[0].start_ns
    when = f"{'A' if pair.is_a_first else 'B'} first, {format_time(since_ns)} after the first pair"
    return f"{values}; {when}" + (f"; left out: {pair.problem}" if pair.problem else "")


def _samples(comparison: Comparison) -> Figure:
    """Draw A's and B's own values, where what disturbs both shows as what they share."""
    metric = comparison.headline.metric
    scale, unit = (1e6, "ms") if metric.unit == "ns" else (1.0, metric.unit)
    numbered = list(_numbered(comparison))
    arms = (
        ("A", OF_A, [pair.a[0] / scale for _, pair in numbered]),
        ("B", OF_B, [pair.b[0] / scale for _, pair in numbered]),
    )
    caption = (
        "The samples themselves. A disturbance of both samples of a pair, such as heat, cancels in "
        "their ratio."
    )
    label = literal(f"{metric.name}, {unit}")
    return _of_both(arms, [i for i, _ in numbered], label, caption)


def _clocks(comparison: Comparison) -> Figure | None:
    known = [(i, p) for i, p in _numbered(comparison) if None not in p.clocks_mhz]
    if not known:
        return None
    arms = (
        ("A", OF_A, [float(pair.clocks_mhz[0] or 0) for _, pair in known]),
        ("B", OF_B, [float(pair.clocks_mhz[1] or 0) for _, pair in known]),
    )
    caption = "The clock of the GPU's multiprocessors during each sample, as NVML reads it."
    return _of_both(arms, [i for i, _ in known], "SM clock, MHz", caption)


def _of_both(
    arms: tuple[tuple[str, str, list[float]], ...], numbers: list[int], label: str, caption: str
) -> Figure:
    data: list[Drawn] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": numbers,
            "y": [float(f"{value:.6g}") for value in values],
            "marker": {"color": colour, "symbol": SYMBOLS[name]},
            "line": {"color": colour, "width": 1},
        }
        for name, colour, values in arms
    ]
    layout: Drawn = {
        "margin": margins(),
        "legend": LEGEND,
        "xaxis": axis("pair", zeroline=False),
        "yaxis": axis(label, zeroline=False),
    }
    return Figure(data, layout, caption, height_px=260)


def _marks(comparison: Comparison) -> list[Drawn]:
    effect = comparison.plan.smallest_effect
    marks = [mark_level(y, BAND, dash="dot") for y in (1 / (1 + effect), 1 + effect)]
    if interval := comparison.headline.interval:
        marks.append(shade_levels(interval.low, interval.high, OF_A, 0.18))
        marks.append(mark_level(interval.ratio, OF_A, width=1.5))
    return marks


def _table(comparison: Comparison) -> Table:
    others = range(1, len(comparison.plan.metrics))
    columns = (
        Column("Pair", "right"),
        Column("First"),
        Column("A", "right"),
        Column("B", "right"),
        Column("Change", "right"),
        *(Column(f"{comparison.plan.metrics[i].name}, change", "right") for i in others),
        Column("Clock of A, MHz", "right"),
        Column("Clock of B, MHz", "right"),
        Column("Left out", "prose"),
    )
    rows = [_row(i, pair, comparison) for i, pair in enumerate(comparison.pairs, 1)]
    # A column in which nothing is known of any pair would only push the others off the page.
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", MISSING) for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(columns[i] for i in kept), shown, terminal_rows=0)


def _row(number: int, pair: Pair, comparison: Comparison) -> tuple[str, ...]:
    metric = comparison.headline.metric
    clocks = [MISSING if clock is None else f"{clock:,.0f}" for clock in pair.clocks_mhz]
    changes = [_change(a, b) for a, b in zip(pair.a, pair.b, strict=True)]
    return (
        str(number),
        "A" if pair.is_a_first else "B",
        format_value(pair.a[0], metric),
        format_value(pair.b[0], metric),
        *changes,
        *clocks,
        pair.problem,
    )


def _change(a: float, b: float) -> str:
    return format_percent(b / a) if a > 0 and isfinite(b / a) else MISSING


TONES = {"FASTER": "good", "SLOWER": "warning", "SAME": "good"}
TESTS = {"fixed": "Wilcoxon's signed ranks", "sequence": "test that may stop at any pair"}


def sections_of_comparison(
    comparison: Comparison, calibration: Sequence[Part] = ()
) -> list[Section]:
    """Render the verdict, what speaks against it, every pair, and how it was done.

    `calibration` says how often this instrument errs on this machine.
    """
    found = [_verdict(comparison, calibration)]
    if comparison.pairs:
        found.append(section_of_pairs(comparison))
    return [*found, _method(comparison)]


def headline(claim: Claim) -> str:
    """Return the verdict on one metric in a sentence."""
    what = f"{claim.verdict} in {claim.metric.name}"
    if claim.interval is None:
        return f"{what}. {claim.why}".strip()
    chance = ", which may be chance" if claim.verdict == "INCONCLUSIVE" else ""
    change = format_change(claim.interval.ratio, claim.metric)
    return f"{what}: B {change}{chance}. {claim.why}".strip()


def _verdict(comparison: Comparison, calibration: Sequence[Part]) -> Section:
    first = comparison.headline
    parts: list[Part] = [Text(headline(first), TONES.get(first.verdict, "plain"))]
    parts.append(_facts(comparison, first))
    if len(comparison.claims) > 1 or per_token(comparison):
        parts.append(_claims(comparison))
    parts += [Text(doubt.text, "warning") for doubt in comparison.doubts]
    return Section("Verdict", 0, (*parts, *calibration))


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
        is_sequence = interval.kind == "sequence"
        kind = "valid whenever one stops" if is_sequence else "number of pairs set beforehand"
        how = f"{100 * interval.level:.3g} % confidence, {kind}"
        items.append(("Interval", format_interval(interval), how))
    if claim.mean is not None:
        how = f"{format_interval(claim.mean)}: B's mean against A's, which costs follow"
        items.append(("Mean", format_percent(claim.mean.ratio), how))
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
        Column("A → B", "right", essential=False),
        Column("Change", "right"),
        Column("From", "right"),
        Column("To", "right"),
        Column("Verdict"),
        Column("p", "right", essential=False),
    )
    derived = per_token(comparison)
    rows = [_claim(claim, *_medians(comparison, claim.metric)) for claim in comparison.claims]
    for one in derived:
        metric = one.claim.metric
        rows.append(_claim(one.claim, format_value(one.a, metric), format_value(one.b, metric)))
    caption = "FASTER: B is better. The error rate holds for all claims together."
    if derived:
        tokens = f"{comparison.tokens_per_step:,.6g}"
        caption += f" Claims per token follow from the step, which has {tokens} tokens."
    return Table(columns, tuple(rows), caption)


def _claim(claim: Claim, a: str, b: str) -> tuple[str, ...]:
    of = claim.interval
    changes = [format_percent(x) for x in (of.ratio, of.low, of.high)] if of else [MISSING] * 3
    p = MISSING if claim.p_value is None else f"{claim.p_value:.2g}"
    values = MISSING if MISSING in (a, b) else f"{a} → {b}"
    return (claim.metric.name, values, *changes, claim.verdict, p)


def _medians(comparison: Comparison, metric: Metric) -> tuple[str, str]:
    """Return the median of A's and of B's samples, formatted; of what is no number none."""
    place = comparison.plan.metrics.index(metric)
    good = [pair for pair in comparison.pairs if not pair.problem]
    known = [(p.a[place], p.b[place]) for p in good if isfinite(p.a[place] + p.b[place])]
    if not known:
        return MISSING, MISSING
    a, b = (median(values) for values in zip(*known, strict=True))
    return format_value(a, metric), format_value(b, metric)


def _method(comparison: Comparison) -> Section:
    plan = comparison.plan
    early = "stops as soon as the verdict stands" if plan.stops_early else "takes all pairs"
    rows = [
        ("Smallest effect that matters", f"{100 * plan.smallest_effect:g} %"),
        (
            "Error rate allowed",
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
    table = Table((Column("Plan and machine"), Column("", "prose")), tuple(rows))
    return Section("Method", 90, (Text(comparison.protocol), table), in_terminal=False)
