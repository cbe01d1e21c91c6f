"""The verdict on a target: met, missed, or not proven, with the numbers it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from kprof.analyze.sla.bounds import (
    ShareBounds,
    is_provable,
    least_samples,
    ranks_of,
    samples_to_pass,
)
from kprof.analyze.sla.independence import RUNS_DIFFER, Independent
from kprof.analyze.sla.rates import Rate
from kprof.analyze.sla.samples import Sample, independent_at
from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.wandering import LEAST_SLICES

Verdict = Literal["MET", "MISSED", "NOT PROVEN", "NOT MEASURED"]


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
    """As how many independent ones they count."""
    num_left_out: int = 0
    why_left_out: str = ""
    samples_needed: int | None = None
    by_run: tuple[float, ...] = ()
    """The estimate of every run, where there are several."""
    why_fewer: str = ""
    """Why the independent ones are fewer."""
    longest_spell: int | None = None
    """Of what is met and was never broken: of how many in a row that holds, if it ever is."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a percentile, and for which independent samples they hold."""

    low: float | None
    estimate: float
    high: float | None
    independent: Independent


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
    found = Judgement(
        target,
        verdict,
        _why(verdict, target, bounds, missed),
        bounds.estimate,
        bounds.low,
        bounds.high,
        len(high),
        num_left_out=num_left_out,
        why_left_out=why_left_out,
    )
    by_run = [_estimate(sample, target.quantile) for sample in samples if len(sample.high)]
    found = _weighed(found, bounds.independent, target.quantile, missed)
    return replace(found, by_run=tuple(by_run) if len(samples) > 1 else ())


def _weighed(
    found: Judgement, independent: Independent, quantile: Fraction, share_missed: float
) -> Judgement:
    """Return a judgement with what its samples count as, and how many would prove it."""
    needed, longest = None, None
    if found.verdict == "NOT PROVEN" and is_provable(quantile):
        needed = samples_to_pass(quantile, share_missed)
        # What clumps carries less evidence each; gaps of one answer count as one.
        needed = -(-needed * found.num_samples // independent.num) if needed else None
    if found.verdict == "MET" and is_provable(quantile) and not independent.is_seen:
        longest = max(independent.num // least_samples(quantile), 1)
    return replace(
        found,
        num_independent=independent.num,
        why_fewer=independent.why_fewer,
        longest_spell=longest,
        samples_needed=needed,
    )


def bound_percentile(samples: Sequence[Sample], quantile: Fraction) -> Bounds:
    """Bound a percentile of all runs' times together."""
    low = np.sort(np.concatenate([sample.low for sample in samples]))
    high = np.sort(np.concatenate([sample.high for sample in samples]))
    estimate = float(high[ranks_of(len(high), quantile).estimate - 1])
    independent = independent_at(samples, [estimate])
    num, ranks = independent.num, ranks_of(independent.num, quantile)
    # Of `num` equal parts of the values, the first one of the low rank's and the last of the high.
    at_least = None if ranks.low is None else float(low[(ranks.low - 1) * len(low) // num])
    at_most = None if ranks.high is None else float(high[-(-ranks.high * len(high) // num) - 1])
    return Bounds(at_least, estimate, at_most, independent)


def judge_share(
    target: Target, bounds: ShareBounds, num_samples: int, independent: Independent
) -> Judgement:
    """Judge a share of all requests."""
    verdict = _compare(target, bounds.low, bounds.high)
    why = {
        "MET": "the 99 % bound keeps the limit",
        "MISSED": "even the better 99 % bound breaks the limit",
        "NOT PROVEN": f"the limit lies between the bounds of {num_samples:,} requests",
    }[verdict]
    shown = (bounds.estimate, bounds.low, bounds.high)
    is_kept = target.metric.relation == ">="
    kept = target.limit if is_kept else 1 - target.limit
    missed = 1 - bounds.estimate if is_kept else bounds.estimate
    found = Judgement(target, verdict, why, *shown, num_samples)
    return _weighed(found, independent, Fraction(repr(kept)), missed)


def _compare(target: Target, low: float, high: float) -> Verdict:
    """Return the verdict on a promise of a share or a rate."""
    if target.metric.relation == ">=":
        low, high, limit = -high, -low, -target.limit
    else:
        limit = target.limit
    return "MET" if high <= limit else "MISSED" if low > limit else "NOT PROVEN"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def judge_rate(target: Target, rate: Rate) -> Judgement:
    """Judge a rate from its bounds over slices of the steady state."""
    verdict = _compare(target, rate.low, rate.high)
    why = {
        "MET": "the 99 % bound keeps the limit",
        "MISSED": "even the better 99 % bound breaks the limit",
        "NOT PROVEN": "the limit lies between the bounds",
    }[verdict] + f", over {rate.num_slices} slices of the steady state"
    reach, margin = rate.high - rate.estimate, rate.estimate - target.limit
    bounds: tuple[float | None, float | None] = (rate.low, rate.high)
    if np.isinf(reach):
        bounds, longer = (None, None), math.ceil(LEAST_SLICES / rate.num_independent)
        why = (
            f"the run is too short: its rate goes one way all along; measure {longer} times as long"
        )
    elif verdict == "NOT PROVEN" and margin > 0:
        more = "as many runs" if rate.why_fewer == RUNS_DIFFER else "as long"
        why += f"; about {_times((reach / margin) ** 2)} times {more} would prove it"
    return Judgement(
        target,
        verdict,
        why,
        rate.estimate,
        *bounds,
        rate.num_slices,
        rate.num_independent,
        why_fewer=rate.why_fewer,
    )


def not_measured(target: Target, why: str) -> Judgement:
    """Return the judgement on what the measurement does not tell."""
    return Judgement(target, "NOT MEASURED", why)


def _nothing(num_left_out: int, why_left_out: str) -> str:
    if num_left_out:
        return f"every answer is {why_left_out}"
    return "the file does not hold the times that it takes"


def _why(verdict: Verdict, target: Target, bounds: Bounds, share_missed: float) -> str:
    assert target.quantile is not None
    least, n = least_samples(target.quantile), bounds.independent.num
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
