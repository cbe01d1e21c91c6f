"""The verdict on a target: met, missed, or not proven, with the numbers it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from kprof.analyze.sla.independence import LEAST_SPELLS, RUNS_DIFFER, Independent, Spells
from kprof.analyze.sla.percentiles import (
    MOST_SAMPLES,
    ShareBounds,
    bound_share,
    is_provable,
    least_samples,
    ranks_of,
    samples_to_pass,
)
from kprof.analyze.sla.rates import LEAST_SLICES, Rate
from kprof.analyze.sla.samples import Sample, Values, independent_at
from kprof.analyze.sla.targets import Target
from kprof.errors import counted

Verdict = Literal["MET", "MISSED", "NOT PROVEN", "NOT MEASURED"]
Marked = npt.NDArray[np.bool_]
OPEN = "the file does not hold the times that it takes, only bounds on either side of the limit"
MISSED = "even the better 99 % bound breaks the limit"


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
    load_s_needed: float | None = None
    """How long a load like this would have to last, where it is too short for the longest spell."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a percentile, and for which independent samples they hold.

    The high bound may rest on fewer: on those that a slow spell leaves independent.
    """

    low: float | None
    estimate: float
    high: float | None
    independent: Independent
    independent_high: Independent


def judge_times(
    target: Target, samples: Sequence[Sample], spells: Spells | None = None
) -> Judgement:
    """Judge a percentile of times: all runs together, the runs' own estimates beside.

    `spells`: the slow spells that the load may have held; missing: none is assumed.
    """
    assert target.quantile is not None
    low = np.concatenate([sample.low for sample in samples])
    high = np.concatenate([sample.high for sample in samples])
    num_left_out = sum(sample.num_left_out for sample in samples)
    why_left_out = next((sample.why_left_out for sample in samples), "")
    if not np.isfinite(high).any() and not (low > 0).any():
        return not_measured(target, _nothing(num_left_out, why_left_out))
    bounds = bound_percentile(samples, target.quantile, spells)
    verdict: Verdict = "NOT PROVEN"
    if _is_met(bounds, target) and not (spells and spells.is_too_short):
        verdict = "MET"
    elif bounds.low is not None and bounds.low > target.limit:
        verdict = "MISSED"
    if verdict == "NOT PROVEN" and _is_open(target, low, high, samples):
        return not_measured(target, OPEN)
    missed = float(np.mean(high > target.limit))
    found = Judgement(
        target,
        verdict,
        _why(verdict, target, bounds, high > target.limit, spells),
        bounds.estimate,
        bounds.low,
        bounds.high,
        len(high),
        num_left_out=num_left_out,
        why_left_out=why_left_out,
    )
    by_run = [_estimate(sample, target.quantile) for sample in samples if len(sample.high)]
    independent = bounds.independent if verdict == "MISSED" else bounds.independent_high
    found = _weighed(found, independent, target.quantile, missed, spells)
    return replace(found, by_run=tuple(by_run) if len(samples) > 1 else ())


def _is_open(target: Target, low: Values, high: Values, samples: Sequence[Sample]) -> bool:
    """Tell whether no number of samples decides, as the percentile lies in ranges of the file."""
    assert target.quantile is not None
    rank = ranks_of(len(low), target.quantile).estimate - 1
    is_across = np.sort(low)[rank] <= target.limit < np.sort(high)[rank]
    return bool(is_across) and any(sample.num_unknown for sample in samples)


def _is_met(bounds: Bounds, target: Target) -> bool:
    return bounds.high is not None and bounds.high <= target.limit


def _weighed(
    found: Judgement,
    independent: Independent,
    quantile: Fraction,
    share_missed: float,
    spells: Spells | None,
) -> Judgement:
    """Return a judgement with what its samples count as, and how many would prove it."""
    samples, load_s = None, None
    if found.verdict == "NOT PROVEN" and is_provable(quantile):
        needed = samples_to_pass(quantile, share_missed)
        if needed and spells and (spells.is_too_short or spells.num <= independent.num):
            load_s = max(needed, LEAST_SPELLS) * spells.longest_s
        elif needed:
            # Clustered events carry less evidence each; gaps of one answer count as one.
            samples = -(-needed * found.num_samples // independent.num)
    return replace(
        found,
        num_independent=independent.num,
        why_fewer=independent.why_fewer,
        samples_needed=samples,
        load_s_needed=load_s,
    )


def bound_percentile(
    samples: Sequence[Sample], quantile: Fraction, spells: Spells | None = None
) -> Bounds:
    """Bound a percentile of all runs' times together."""
    low = np.sort(np.concatenate([sample.low for sample in samples]))
    high = np.sort(np.concatenate([sample.high for sample in samples]))
    estimate = float(high[ranks_of(len(high), quantile).estimate - 1])
    independent = independent_at(samples, [estimate])
    at_most_independent = spells.limit(independent) if spells else independent
    low_rank = ranks_of(independent.num, quantile).low
    high_rank = ranks_of(at_most_independent.num, quantile).high
    # Of `num` equal parts of the values, the first one of the low rank's and the last of the high.
    at_least, at_most = None, None
    if low_rank is not None:
        at_least = float(low[(low_rank - 1) * len(low) // independent.num])
    if high_rank is not None:
        at_most = float(high[-(-high_rank * len(high) // at_most_independent.num) - 1])
    return Bounds(at_least, estimate, at_most, independent, at_most_independent)


def judge_share(
    target: Target,
    bounds: ShareBounds,
    num_samples: int,
    independent: Independent,
    spells: Spells | None = None,
) -> Judgement:
    """Judge a share of all requests."""
    verdict = _compare(target, bounds.low, bounds.high, spells)
    shown = (bounds.estimate, bounds.low, bounds.high)
    is_kept = target.metric.relation == ">="
    kept = target.limit if is_kept else 1 - target.limit
    quantile = Fraction(repr(kept))
    why = _why_compared(
        verdict, f"the bounds of {counted(num_samples, 'request')}", spells, quantile
    )
    missed = 1 - bounds.estimate if is_kept else bounds.estimate
    found = Judgement(target, verdict, why, *shown, num_samples)
    return _weighed(found, independent, quantile, missed, spells)


def _compare(target: Target, low: float, high: float, spells: Spells | None) -> Verdict:
    """Return the verdict on a share or a rate."""
    if target.metric.relation == ">=":
        low, high, limit = -high, -low, -target.limit
    else:
        limit = target.limit
    if high <= limit and not (spells and spells.is_too_short):
        return "MET"
    return "MISSED" if low > limit else "NOT PROVEN"


def _why_compared(
    verdict: Verdict, bounds: str, spells: Spells | None, quantile: Fraction | None = None
) -> str:
    if verdict == "MISSED":
        return MISSED
    if verdict == "MET":
        return _why_met(spells)
    if spells and spells.is_too_short:
        return _too_short(spells, quantile)
    return f"the limit lies between {bounds}"


def _why_met(spells: Spells | None) -> str:
    return f"the 99 % bound keeps the limit{condition_of(spells.longest_s if spells else None)}"


def condition_of(longest_s: float | None) -> str:
    """Return the assumption on which "met" rests, as the end of a sentence."""
    return f", if no slow spell lasts longer than {longest_s:g} s" if longest_s else ""


def _too_short(spells: Spells, quantile: Fraction | None = None) -> str:
    least = LEAST_SPELLS
    if quantile is not None and is_provable(quantile):
        least = max(least, least_samples(quantile))
    return (
        f"the load lasts {spells.load_s:,.3g} s, and a slow spell may last {spells.longest_s:g} s: "
        f"it takes {least * spells.longest_s:,g} s at least"
    )


def _times(ratio: float) -> str:
    """Write how many times as much is enough: as much again would be none."""
    return f"{math.ceil(ratio) if ratio >= 10 else math.ceil(10 * ratio) / 10:,g}"


def judge_rate(target: Target, rate: Rate, spells: Spells | None = None) -> Judgement:
    """Judge a rate from its bounds over slices of the steady state.

    A slow spell may stop the service, and a load may hold fewer of them than there are.
    """
    low, longer_s = rate.low, None
    if spells:
        low = min(low, _low_with_spells(rate, spells.num))
    verdict = _compare(target, low, rate.high, spells)
    why = _why_compared(verdict, "the bounds", spells)
    why += f", over {counted(rate.num_slices, 'slice')} of the steady state"
    reach, margin = rate.estimate - rate.low, rate.estimate - target.limit
    bounds: tuple[float | None, float | None] = (low, rate.high)
    if np.isinf(reach):
        bounds, longer = (None, None), math.ceil(LEAST_SLICES / rate.num_independent)
        why = (
            f"the run is too short: its rate goes one way all along; measure {longer} times as long"
        )
    elif verdict == "NOT PROVEN" and margin > 0:
        longer_s = _load_needed(rate, target.limit, spells)
        if rate.low < target.limit:
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
        load_s_needed=longer_s,
    )


def _low_with_spells(rate: Rate, num_spells: int) -> float:
    """Return the least rate, if slow spells may take the whole of what they last.

    Of n spells' time, the share that went at the fastest rate is bounded as that of n answers is.
    """
    fastest = max(rate.fastest or 0.0, rate.estimate)
    if fastest <= 0:
        return rate.low
    return fastest * bound_share(rate.estimate, fastest, max(num_spells, 1)).low


def _load_needed(rate: Rate, limit: float, spells: Spells | None) -> float | None:
    """Return how long a load has to last until spells that it did not hold keep a limit."""
    if spells is None or _low_with_spells(rate, spells.num) >= limit:
        return spells.longest_s * LEAST_SPELLS if spells and spells.is_too_short else None
    most = max(spells.num, LEAST_SPELLS)
    while _low_with_spells(rate, most) < limit:
        most *= 2
        if most > MOST_SAMPLES:
            return None
    least = most // 2
    while most - least > max(1, most // 1000):
        middle = (least + most) // 2
        least, most = (least, middle) if _low_with_spells(rate, middle) >= limit else (middle, most)
    return spells.longest_s * max(most, LEAST_SPELLS)


def not_measured(target: Target, why: str) -> Judgement:
    """Return the judgement on what the measurement does not tell."""
    return Judgement(target, "NOT MEASURED", why)


def _nothing(num_left_out: int, why_left_out: str) -> str:
    if num_left_out:
        return f"every answer is {why_left_out}"
    return "the file does not hold the times that it takes"


def _why(
    verdict: Verdict, target: Target, bounds: Bounds, missed: Marked, spells: Spells | None
) -> str:
    assert target.quantile is not None
    num_samples, share_missed = len(missed), float(np.mean(missed))
    least, n = least_samples(target.quantile), bounds.independent_high.num
    if verdict == "MET":
        return _why_met(spells)
    if verdict == "MISSED":
        return MISSED
    if spells and spells.is_too_short and _is_met(replace(bounds, high=bounds.estimate), target):
        return _too_short(spells, target.quantile)
    if n < least:
        why_fewer = bounds.independent_high.why_fewer
        if not why_fewer:
            return f"unprovable with {counted(n, 'sample')}, it takes {least:,} at least"
        return (
            f"unprovable with {counted(num_samples, 'sample')}, which count as "
            f"{counted(n, 'independent one')} "
            f"because {why_fewer}; it takes {least:,} of those at least"
        )
    if bounds.estimate > target.limit:
        return "the percentile breaks the limit, which may be chance"
    if share_missed == 0:
        return "the bound breaks the limit"
    return "the percentile keeps the limit, which may be chance"


def _estimate(sample: Sample, quantile: Fraction) -> float:
    rank = ranks_of(len(sample.high), quantile).estimate
    return float(np.sort(sample.high)[rank - 1])
