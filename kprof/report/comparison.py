"""The verdict of a comparison of A and B, and how it was reached, in words and tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from math import isfinite
from statistics import median

from kprof.analyze.per_token import per_token
from kprof.comparison import Claim, Comparison, Metric
from kprof.report.changes import format_change, format_interval, format_percent, format_value
from kprof.report.comparison_pairs import section_of_pairs
from kprof.report.section import Column, Facts, Part, Section, Table, Text
from kprof.report.units import MISSING, format_count

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
    parts += [Text(doubt, "warning") for doubt in comparison.doubts]
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
    caption = "FASTER: B is better. Together these claims err as often as one alone."
    if derived:
        tokens = f"{comparison.tokens_per_step:,.6g}"
        caption += f" What is said of tokens follows from the step, which has {tokens} of them."
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
