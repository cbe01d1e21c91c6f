"""The evidence of each comparison: its verdicts, its pairs in the order of time."""

from __future__ import annotations

from kprof.analyze.verdict.per_token import per_token
from kprof.comparison import Comparison, Pair
from kprof.errors import counted
from kprof.report.comparison_sections import format_value
from kprof.report.partner.drawings import Band, Dot, both, pairs
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Block, Chapter, Folded, Missing, Picture
from kprof.report.partner.wording import (
    VERDICTS,
    change_in_words,
    changed_in_words,
    marked,
    rounded,
    verdict_in_words,
    without_letters,
)
from kprof.report.section import Column, Table, Text
from kprof.report.units import MISSING

TITLE = "Before and after"

TONES = {"FASTER": "good", "SAME": "good", "SLOWER": "warning"}
MEANING = (
    "Before and after were measured in pairs, in random order, so that disturbances of the machine "
    "affect both alike. The smallest difference that matters and the maximum number of pairs were "
    "set before the first measurement."
)
HOW = "kprof ab --env NAME=VALUE train.py, then name its folder"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render for every comparison its verdicts, its doubts, its pairs and how it was done."""
    if not evidence.comparisons:
        return Missing("Whether a change made a difference", HOW)
    blocks: list[Block] = [Text(MEANING)]
    for comparison in evidence.comparisons:
        if len(evidence.comparisons) > 1:
            blocks.append(Text(_heading(comparison), "heading"))
        blocks += _blocks(comparison)
    return Chapter(TITLE, tuple(blocks))


def _heading(comparison: Comparison) -> str:
    """Return the heading of a comparison: its name and change, the name once."""
    changed = changed_in_words(comparison.b)
    if comparison.name in changed:
        return f"{changed[:1].upper()}{changed[1:]}"
    return f"{comparison.name}: {changed}"


def _blocks(comparison: Comparison) -> list[Block]:
    claim = comparison.headline
    tone = TONES.get(claim.verdict, "plain")
    said = [marked(tone, VERDICTS[claim.verdict]) + "."]
    if claim.interval is not None:
        said.append(f"After needs {change_in_words(claim.interval, claim.metric)}.")
        if "times as fast" in said[-1]:
            said[-1] = said[-1].replace("After needs", "After is")
    if claim.why:
        said.append(claim.why)
    if claim.pairs_needed:
        said.append(f"About {counted(claim.pairs_needed, 'more pair')} would probably decide.")
    blocks: list[Block] = [Text(" ".join(said), tone)]
    blocks += [Text(without_letters(doubt.text), "warning") for doubt in comparison.doubts]
    blocks.append(_claims(comparison))
    if any(_change(pair) is not None for pair in comparison.pairs):
        blocks.append(_picture(comparison))
    blocks.append(Folded("Method", _method(comparison)))
    return blocks


def _claims(comparison: Comparison) -> Table:
    columns = (
        Column("Measured"),
        Column("Result"),
        Column("Difference", "prose"),
        Column("Confidence", "right"),
        Column("Pairs", "right"),
        Column("p-value", "right"),
    )
    rows = tuple(
        (
            claim.metric.name,
            marked(TONES.get(claim.verdict, "plain"), verdict_in_words(claim)),
            change_in_words(claim.interval, claim.metric) if claim.interval else MISSING,
            f"{100 * claim.interval.level:.3g} %" if claim.interval else MISSING,
            f"{claim.num_pairs:,}",
            MISSING if claim.p_value is None else f"{claim.p_value:.2g}",
        )
        for claim in (*comparison.claims, *(one.claim for one in per_token(comparison)))
    )
    caption = (
        "In brackets: the range in which the difference lies, with the confidence in that row. "
        "p-value: how likely a difference as clear as this is if there were none."
    )
    return Table(columns, rows, caption)


def _change(pair: Pair) -> float | None:
    """Return by how many percent B differs from A in a pair, in the first metric."""
    if pair.a and pair.a[0] > 0 and pair.b[0] > 0:
        return 100 * (pair.b[0] / pair.a[0] - 1)
    return None


def _picture(comparison: Comparison) -> Picture:
    metric = comparison.headline.metric
    dots = []
    for number, pair in enumerate(comparison.pairs, 1):
        change = _change(pair)
        if change is None:
            continue
        left_out = f", left out: {pair.problem}" if pair.problem else ""
        tip = f"pair {number}: {change:+.2f} %{left_out}"
        look = ("cross", "bad") if pair.problem else ("circle", "k0")
        dots.append(Dot(number, change, *look, tip))  # type: ignore[arg-type]
    interval = comparison.headline.interval
    band = None
    if interval is not None:
        ends = (100 * (ratio - 1) for ratio in (interval.low, interval.ratio, interval.high))
        band = Band(*ends)
    effect = comparison.plan.smallest_effect
    edges = (100 * effect, 100 * (1 / (1 + effect) - 1))
    label = f"difference of {metric.name}, after relative to before"
    wide, narrow = both(lambda width: pairs(dots, width, band, edges, label))
    caption = (
        "Each dot is one pair, in the order of time. The line is the estimate, the band its "
        "interval; between the dotted lines a difference is too small to matter."
    )
    if any(pair.problem for pair in comparison.pairs):
        caption += " A cross is a pair left out, by a rule that was set beforehand."
    title = f"Every pair of {comparison.name}"
    return Picture(title, wide, narrow, caption, _pairs(comparison))


def _pairs(comparison: Comparison) -> Table:
    metric = comparison.headline.metric
    columns = (
        Column("Pair", "right"),
        Column("First"),
        Column("Before", "right"),
        Column("After", "right"),
        Column("Difference", "right"),
        Column("Clock before, MHz", "right"),
        Column("Clock after, MHz", "right"),
        Column("Left out because", "prose"),
    )
    rows = []
    for number, pair in enumerate(comparison.pairs, 1):
        change = _change(pair)
        clocks = [MISSING if clock is None else f"{clock:,.0f}" for clock in pair.clocks_mhz]
        rows.append(
            (
                f"{number}",
                "before" if pair.is_a_first else "after",
                format_value(pair.a[0], metric),
                format_value(pair.b[0], metric),
                MISSING if change is None else f"{rounded(change, 2)} %",
                *clocks,
                pair.problem,
            )
        )
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", MISSING) for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(columns[i] for i in kept), shown, "Every pair, in the order of time.")


def _method(comparison: Comparison) -> Table:
    plan = comparison.plan
    early = "stops as soon as the verdict stands" if plan.stops_early else "takes all pairs"
    rows = [
        ("Before (A)", comparison.a),
        ("After (B)", comparison.b),
        ("Protocol", comparison.protocol),
        ("Smallest difference that matters", f"{100 * plan.smallest_effect:g} %"),
        ("Error rate allowed", f"{100 * plan.alpha:g} % for all verdicts together"),
        ("Pairs", f"at most {plan.max_pairs}; {early}"),
        ("Seed of the random order", f"{plan.seed}"),
        ("SHA-256 of the plan", plan.digest),
        *comparison.facts.items(),
    ]
    columns = (Column("Plan and machine"), Column("Value", "prose"))
    return Table(columns, tuple(rows), f"{comparison.name}: plan and machine.")
