"""Curves of a service level: the time to the first N tokens with its bound, the distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kprof.analyze.sla.curves import TokenCurve
from kprof.analyze.sla.target_verdict import Judgement
from kprof.report.partner.drawings import Limits, Line, Scale, both, chart
from kprof.report.partner.parts import Picture, Symbol
from kprof.report.partner.wording import exact_time, time_within
from kprof.report.section import Column, Table
from kprof.report.sla_verdict import Judged
from kprof.report.units import MISSING, format_count, format_share

NS_PER_MS = 1e6
MOST_DISTRIBUTIONS = 3
LATER = 1.1
"""From this ratio to the time before on, a first token that comes later is worth saying."""
HALF, TAIL, BOUND = "half of the requests", "99 % of the requests", "99 % of them, at worst"
TOKENS = (
    "How long the first N tokens take. At worst: the 99 % bound, the largest time that the "
    "measurements still allow; where it is missing they are too few to tell, or slow ones come in "
    "clumps. Lines that leave the chart at its top go on."
)
DISTRIBUTION = (
    "The share of all requests that had an answer within a time. Failed requests never had one. "
    "The target is met where the line passes the limit above the share that the target names."
)


def pictures_of(stages: Sequence[tuple[str, Judged]]) -> list[Picture]:
    """Return the curves of the service before and after, as far as they were kept."""
    drawn = [one for one in (_tokens(stages),) if one is not None]
    judgements = stages[-1][1].assessment.judgements
    times = [_distribution(stages, j) for j in judgements if j.target.num_tokens is None]
    return [*drawn, *[one for one in times if one is not None][:MOST_DISTRIBUTIONS]]


def later_in_words(stages: Sequence[tuple[str, Judged]]) -> str:
    """Say that the first token comes later after the change; empty where it does not."""
    firsts = [
        dict(zip(curve.num_tokens, curve.by_level.get("p50", ()), strict=False)).get(1)
        for _, judged in stages
        if judged.curves is not None and (curve := judged.curves.tokens) is not None
    ]
    if len(firsts) < 2 or firsts[0] is None or firsts[-1] is None:
        return ""
    if firsts[-1] <= LATER * firsts[0]:
        return ""
    before, after = time_within(firsts[0], 0.01), time_within(firsts[-1], 0.01)
    return (
        f"The first token comes later than before: after {after} instead of {before}, for half of "
        "the requests."
    )


def _tokens(stages: Sequence[tuple[str, Judged]]) -> Picture | None:
    curves = [
        (when, judged.curves.tokens, _is_bounded(judged))
        for when, judged in stages
        if judged.curves is not None and judged.curves.tokens is not None
    ]
    if not curves:
        return None
    named = [
        (f"{name}, {when}" if len(stages) > 1 else name, points, curve, style, symbol)
        for (when, curve, is_bounded), style in zip(reversed(curves), ("k0", "k7"), strict=False)
        for name, points, symbol in _levels(curve, is_bounded=is_bounded)
    ]
    lines = [
        Line(name, _milliseconds(curve.num_tokens, points), style, symbol)
        for name, points, curve, style, symbol in named
    ]
    drawn = [line for line in lines if line.points]
    limit = next((j for j in stages[-1][1].assessment.judgements if j.target.num_tokens), None)
    limits = Limits("")
    if limit is not None:
        promised = f"limit for {format_count(limit.target.num_tokens or 0, 'token')}"
        limits = Limits(promised, height=limit.target.limit / NS_PER_MS)
    scales = Scale("first N tokens"), Scale("time since the request", " ms")
    wide, narrow = both(lambda width: chart(drawn, width, *scales, limits))
    table = _token_table([(name, curve, points) for name, points, curve, *_ in named])
    legend = tuple(line.legend for line in drawn)
    return Picture("Time to the first N tokens", wide, narrow, TOKENS, table, legend=legend)


def _levels(
    curve: TokenCurve, *, is_bounded: bool
) -> list[tuple[str, tuple[float | None, ...], Symbol]]:
    return [
        (HALF, curve.by_level.get("p50", ()), "circle"),
        (TAIL, curve.by_level.get("p99", ()), "square"),
        (BOUND, curve.high_p99 if is_bounded else (), "triangle"),
    ]


def _is_bounded(judged: Judged) -> bool:
    """Tell whether the bound of the curve holds, which counts every request as independent.

    Where the slow ones of a target on tokens come in clumps, its verdict counts fewer, and what
    the curve says of its N would contradict that.
    """
    return all(
        judgement.num_independent >= judgement.num_samples
        for judgement in judged.assessment.judgements
        if judgement.target.num_tokens is not None
    )


def _milliseconds(
    places: Sequence[int], times_ns: Sequence[float | None]
) -> tuple[tuple[float, float], ...]:
    pairs = zip(places, times_ns, strict=False)
    return tuple((float(place), time / NS_PER_MS) for place, time in pairs if time is not None)


def _token_table(rows: Sequence[tuple[str, TokenCurve, tuple[float | None, ...]]]) -> Table:
    """Return the times at powers of two, and at the end."""
    places = sorted({n for _, curve, _ in rows for n in (*_powers(curve), curve.num_tokens[-1])})
    shown = []
    for name, curve, points in rows:
        times = dict(zip(curve.num_tokens, points, strict=False))
        shown.append((name, *(time_within(times.get(n)) for n in places)))
    columns = [Column("Time to the first"), *(Column(f"{n}", "right") for n in places)]
    return Table(tuple(columns), tuple(shown), "Times to the first N tokens.")


def _powers(curve: TokenCurve) -> list[int]:
    return [n for n in curve.num_tokens if n & (n - 1) == 0]


def _distribution(stages: Sequence[tuple[str, Judged]], judgement: Judgement) -> Picture | None:
    target = judgement.target
    found = [
        (when, judged.curves.by_target[target.text])
        for when, judged in stages
        if judged.curves is not None and target.text in judged.curves.by_target
    ]
    if not found or target.metric.kind != "time":
        return None
    looks: tuple[tuple[str, Symbol], ...] = (("k0", "circle"), ("k7", "diamond"))
    lines = [
        Line(when, tuple((time / NS_PER_MS, 100 * share) for time, share in points), *look)
        for (when, points), look in zip(reversed(found), looks, strict=False)
    ]
    lines += _bounds(stages, judgement)
    limits = Limits(f"limit {exact_time(target.limit)}", place=target.limit / NS_PER_MS)
    scales = Scale(target.metric.means, " ms"), Scale("answered within it", " %", 100.0)
    wide, narrow = both(lambda width: chart(lines, width, *scales, limits))
    table = _shares_table(found)
    title = f"How long it takes: {target.metric.means}"
    legend = tuple(line.legend for line in lines)
    return Picture(title, wide, narrow, DISTRIBUTION, table, legend=legend)


def _bounds(stages: Sequence[tuple[str, Judged]], judgement: Judgement) -> list[Line]:
    """Return the bound of the target's percentile as a point of its own."""
    target, lines = judgement.target, []
    for (when, judged), style in zip(reversed(stages), ("k0", "k7"), strict=False):
        same = [j for j in judged.assessment.judgements if j.target.text == target.text]
        bound = same[0].high if same else None
        if target.quantile is not None and bound is not None and math.isfinite(bound):
            point = (bound / NS_PER_MS, 100 * float(target.quantile))
            lines.append(Line(f"99 % bound, {when}", (point,), style, "triangle"))
    return lines


def _shares_table(found: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> Table:
    """Return the times within which so many were answered."""
    shares = (0.5, 0.9, 0.95, 0.99, 1.0)
    rows = []
    for when, points in found:
        times = [next((t for t, share in points if share >= wanted), None) for wanted in shares]
        rows.append((when, *(MISSING if t is None else time_within(t) for t in times)))
    columns = (Column("When"), *(Column(format_share(share), "right") for share in shares))
    return Table(columns, tuple(rows), "So many were answered within a time.")
