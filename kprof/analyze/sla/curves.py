"""Curves of a service for the page: the time to N tokens for every N, and distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kprof.analyze.sla.percentiles import ranks_of
from kprof.analyze.sla.responses import Response, Responses, Times
from kprof.analyze.sla.samples import (
    NEVER,
    Values,
    samples_of,
    time_to_tokens,
    tokens_by_chunk,
    total_tokens,
)
from kprof.analyze.sla.targets import Target

MOST_TOKENS = 256
MOST_POINTS = 500
# Maximum points stored with a verdict; the engineer's own page draws more.
FEW_POINTS = 64
LEVELS = (Fraction(1, 2), Fraction(95, 100), Fraction(99, 100))


@dataclass(frozen=True)
class TokenCurve:
    """Percentiles of the time to the first N tokens, ns; None: beyond, or failed too often."""

    num_tokens: tuple[int, ...]
    by_level: dict[str, tuple[float | None, ...]]
    high_p99: tuple[float | None, ...]
    """The 99 % bound of p99; None: too few samples."""
    share_short: tuple[float, ...]
    """Share of the requests whose answers were complete with fewer tokens."""


@dataclass(frozen=True)
class Curves:
    """Curves that need no requests to be drawn: few points, times in ns."""

    tokens: TokenCurve | None
    by_target: dict[str, tuple[tuple[float, float], ...]]
    """By a target's text: times, and the share of all samples at or below each."""


def curves_of(runs: Sequence[Responses], targets: Sequence[Target]) -> Curves:
    """Return the curves of the requests, and for each target on a time its distribution."""
    found = token_curve(runs)
    times = [one for one in targets if one.metric.kind == "time" and one.metric.name != "step"]
    drawn = {one.text: tuple(distribution(one, runs, FEW_POINTS)) for one in times}
    return Curves(
        found and _thinned(found), {text: points for text, points in drawn.items() if points}
    )


def _thinned(curve: TokenCurve) -> TokenCurve:
    last = len(curve.num_tokens) - 1
    kept = np.unique(np.linspace(0, last, min(last + 1, FEW_POINTS)).astype(int)).tolist()
    return TokenCurve(
        tuple(curve.num_tokens[i] for i in kept),
        {name: tuple(points[i] for i in kept) for name, points in curve.by_level.items()},
        tuple(curve.high_p99[i] for i in kept),
        tuple(curve.share_short[i] for i in kept),
    )


def token_curve(runs: Sequence[Responses], most: int = MOST_TOKENS) -> TokenCurve | None:
    """Return the curve, up to the longest answer; None: no answer has a number of tokens."""
    rows = [row for run in runs for row in run.rows]
    longest = max((total_tokens(row) or 0 for row in rows), default=0)
    if not longest or not any(len(row.chunk_ns) for row in rows):
        return None
    places = np.arange(1, min(longest, most) + 1)
    table = np.array([_late_times(row, places) for row in rows])
    by_level: dict[str, list[float | None]] = {f"p{float(100 * q):g}": [] for q in LEVELS}
    high, short = [], []
    for column in table.T:
        values = np.sort(column[~np.isnan(column)])
        short.append(1 - len(values) / len(rows))
        for level, points in zip(LEVELS, by_level.values(), strict=True):
            points.append(_at(values, ranks_of(len(values), level).estimate))
        high.append(_at(values, ranks_of(len(values), LEVELS[-1]).high))
    levels = {name: tuple(points) for name, points in by_level.items()}
    return TokenCurve(tuple(places.tolist()), levels, tuple(high), tuple(short))


def distribution(
    target: Target, runs: Sequence[Responses], most: int = MOST_POINTS
) -> list[tuple[float, float]]:
    """Return (time in ns, share of the samples at or below it), thinned out to draw.

    What failed has no time, so the shares end below one where something did.
    """
    values = np.sort(np.concatenate([sample.high for sample in samples_of(target, runs)]))
    finite = values[np.isfinite(values)]
    if not len(finite):
        return []
    places = np.unique(np.linspace(0, len(finite) - 1, min(len(finite), most)).astype(int))
    return [(float(finite[i]), (i + 1) / len(values)) for i in places.tolist()]


def _late_times(row: Response, places: Times) -> Values:
    """Return for many N at once how long the first N tokens take at most; NaN: it has fewer."""
    if row.outcome == "failed":
        return np.full(len(places), NEVER)
    least, _ = tokens_by_chunk(row)
    late = np.searchsorted(least, places)
    # After the last chunk nothing comes, unless it is not known how much had come.
    last = time_to_tokens(row, int(least[-1]) + 1 if len(least) else 1)
    since_due = np.append(row.chunk_ns - row.due_ns, last.high if last else np.nan)
    times: Values = since_due[np.minimum(late, len(row.chunk_ns))].astype(np.float64)
    total = total_tokens(row)
    if row.outcome == "answered" and total is not None:
        times[places > total] = np.nan
    return times


def _at(ordered: Values, rank: int | None) -> float | None:
    if rank is None or not 1 <= rank <= len(ordered) or np.isinf(ordered[rank - 1]):
        return None
    return float(ordered[rank - 1])
