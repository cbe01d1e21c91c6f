"""The verdict on a target: met, missed, or not proven, with the numbers it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import stats

from kprof.analyze.sla.bounds import (
    CONFIDENCE,
    ShareBounds,
    least_samples,
    ranks_of,
    samples_to_pass,
)
from kprof.analyze.sla.samples import Sample, Values
from kprof.analyze.sla.targets import Target

Verdict = Literal["MET", "MISSED", "NOT PROVEN", "NOT MEASURED"]

NUM_BLOCKS = (7, 14, 28)
LEAST_IN_BLOCK = 5
CHANCE_OF_CLUMPS = 0.05
"""Slow answers that clump more than this by chance are not taken as independent."""


@dataclass(frozen=True)
class Judgement:
    """A target and what the measurement says of it; times in ns, rates per second, shares of one.

    `low` and `high` are one-sided 99 % bounds of what is promised; missing: there is none.
    """

    target: Target
    verdict: Verdict
    why: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    num_samples: int = 0
    num_independent: int = 0
    num_left_out: int = 0
    why_left_out: str = ""
    samples_needed: int | None = None
    by_run: tuple[float, ...] = ()
    """The estimate of every run, where there are several."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a percentile, and for how many independent samples they hold."""

    low: float | None
    estimate: float
    high: float | None
    num_independent: int


def judge_times(target: Target, samples: Sequence[Sample]) -> Judgement:
    """Judge a percentile of times: all runs together, the runs' own estimates beside."""
    assert target.quantile is not None
    low = np.concatenate([sample.low for sample in samples])
    high = np.concatenate([sample.high for sample in samples])
    num_left_out = sum(sample.num_left_out for sample in samples)
    why_left_out = next((sample.why_left_out for sample in samples), "")
    if not np.isfinite(high).any() and not (low > 0).any():
        return not_measured(target, _nothing(num_left_out, why_left_out))
    bounds = bound_percentile(samples, target.quantile)
    verdict: Verdict = "NOT PROVEN"
    if bounds.high is not None and bounds.high <= target.limit:
        verdict = "MET"
    elif bounds.low is not None and bounds.low > target.limit:
        verdict = "MISSED"
    missed = float(np.mean(high > target.limit))
    needed = None if verdict in ("MET", "MISSED") else samples_to_pass(target.quantile, missed)
    if needed is not None:
        # What clumps carries less evidence each; gaps of one answer count as one.
        needed = -(-needed * len(high) // bounds.num_independent) if needed else None
    by_run = [_estimate(sample, target.quantile) for sample in samples if len(sample.high)]
    return Judgement(
        target,
        verdict,
        _why(verdict, target, bounds, missed),
        bounds.estimate,
        bounds.low,
        bounds.high,
        len(high),
        bounds.num_independent,
        num_left_out,
        why_left_out,
        needed,
        tuple(by_run) if len(samples) > 1 else (),
    )


def bound_percentile(samples: Sequence[Sample], quantile: Fraction) -> Bounds:
    """Bound a percentile of all runs' times together."""
    low = np.sort(np.concatenate([sample.low for sample in samples]))
    high = np.sort(np.concatenate([sample.high for sample in samples]))
    estimate = float(high[ranks_of(len(high), quantile).estimate - 1])
    num = sum(sample.num_independent for sample in samples)
    num = max(int(num / clumping(samples, estimate)), 1)
    ranks = ranks_of(num, quantile)
    return Bounds(
        _at(low, ranks.low, num, np.floor), estimate, _at(high, ranks.high, num, np.ceil), num
    )


def _at(ordered: Values, rank: int | None, of: int, round_off: np.ufunc) -> float | None:
    """Return the value at a rank among `of`, where there are as many or more values than that."""
    if rank is None:
        return None
    place = int(round_off(rank / of * len(ordered))) if of != len(ordered) else rank
    return float(ordered[min(max(place, 1), len(ordered)) - 1])


def clumping(samples: Sequence[Sample], threshold: float) -> float:
    """Return by how much the number of slower answers varies more than of independent ones.

    Over blocks of neighbours, the variance of their number over the binomial one, for blocks of
    several lengths the greatest that is more than chance explains; 1 where none is. It is known
    as well as the number of blocks allows, so Student's quantile takes the place of the normal.
    """
    greatest = 1.0
    for num_blocks in NUM_BLOCKS:
        blocks = [block for s in samples for block in _blocks(s, threshold, num_blocks)]
        if not blocks:
            continue
        counts, sizes = (np.array(column, np.float64) for column in zip(*blocks, strict=True))
        share, freedom = counts.sum() / sizes.sum(), len(blocks) - 1
        if not 0 < share < 1:
            continue
        squares = float(((counts - share * sizes) ** 2 / (sizes * share * (1 - share))).sum())
        by_chance, how_sure = _chance(freedom)
        if squares > by_chance:
            greatest = max(greatest, squares / freedom * how_sure**2)
    return greatest


@lru_cache
def _chance(freedom: int) -> tuple[float, float]:
    """Return the squares that chance still explains, and Student's quantile over the normal."""
    by_chance = stats.chi2.ppf(1 - CHANCE_OF_CLUMPS, freedom)
    return float(by_chance), float(stats.t.ppf(CONFIDENCE, freedom) / stats.norm.ppf(CONFIDENCE))


def _blocks(sample: Sample, threshold: float, num_blocks: int) -> list[tuple[int, int]]:
    """Return of every block of neighbours how many are slower, and of how many."""
    if sample.num_answers is not None or len(sample.high) < num_blocks * LEAST_IN_BLOCK:
        return []
    parts = np.array_split(sample.high > threshold, num_blocks)
    return [(int(part.sum()), len(part)) for part in parts]


def judge_share(target: Target, bounds: ShareBounds, num_samples: int) -> Judgement:
    """Judge a share of all requests."""
    verdict = _compare(target, bounds.low, bounds.high)
    why = {
        "MET": "the 99 % bound keeps the limit",
        "MISSED": "even the better 99 % bound breaks the limit",
        "NOT PROVEN": f"the limit lies between the bounds of {num_samples:,} requests",
    }[verdict]
    shown = (bounds.estimate, bounds.low, bounds.high)
    return Judgement(target, verdict, why, *shown, num_samples, num_samples)


def _compare(target: Target, low: float, high: float) -> Verdict:
    """Return the verdict on a promise of a share or a rate."""
    if target.metric.relation == ">=":
        low, high, limit = -high, -low, -target.limit
    else:
        limit = target.limit
    return "MET" if high <= limit else "MISSED" if low > limit else "NOT PROVEN"


def judge_rate(
    target: Target, low: float, estimate: float, high: float, num_slices: int
) -> Judgement:
    """Judge a rate from its bounds over slices of the steady state."""
    verdict = _compare(target, low, high)
    why = {
        "MET": "the 99 % bound keeps the limit",
        "MISSED": "even the better 99 % bound breaks the limit",
        "NOT PROVEN": "the limit lies between the bounds",
    }[verdict] + f", over {num_slices} slices of the steady state"
    return Judgement(target, verdict, why, estimate, low, high, num_slices, num_slices)


def not_measured(target: Target, why: str) -> Judgement:
    """Return the judgement on what the measurement does not tell."""
    return Judgement(target, "NOT MEASURED", why)


def _nothing(num_left_out: int, why_left_out: str) -> str:
    if num_left_out:
        return f"every answer is {why_left_out}"
    return "the file does not hold the times that it takes"


def _why(verdict: Verdict, target: Target, bounds: Bounds, share_missed: float) -> str:
    assert target.quantile is not None
    least, n = least_samples(target.quantile), bounds.num_independent
    if verdict == "MET":
        return "the 99 % bound keeps the limit"
    if verdict == "MISSED":
        return "even the better 99 % bound breaks the limit"
    if n < least:
        return f"unprovable with {n:,} samples, it takes {least:,} at least"
    if bounds.estimate > target.limit:
        return "the percentile breaks the limit, which may be chance"
    if share_missed == 0:
        return "the bound breaks the limit"
    return "the percentile keeps the limit, which may be chance"


def _estimate(sample: Sample, quantile: Fraction) -> float:
    rank = ranks_of(len(sample.high), quantile).estimate
    return float(np.sort(sample.high)[rank - 1])
