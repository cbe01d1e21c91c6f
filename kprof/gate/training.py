"""L6: does a model train as it did?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from kprof.gate.result import Level, Measure, judge, not_run, unjudged
from kprof.gate.subject import Curve

NUM_SEEDS = 3
NUM_EARLY = 32
"""Steps that are compared one by one; later ones part by chaos alone."""
EARLY = {"float32": 2e-5, "float64": 2e-5}
EARLY_LOW_PRECISION = 5e-2
NUM_LONG = 100
"""From so many steps on, where a run ends counts as well."""
FINAL_GAP = 0.0025
MOST_AGAIN = 4
"""Runs of the replaced code from the same start, where fewer cannot tell a gap from their scatter.
"""
SURE = {1: 63.66, 2: 9.925, 3: 5.841, MOST_AGAIN: 4.604}
"""Student's t at 99 %, by degrees of freedom: by that much, a run is none of so many and one."""
FINAL = "final loss: gap"
NORM_BAND = 0.02


def check_training(
    replaced: Curve,
    again: Sequence[Curve],
    new: Curve,
    seeds: Sequence[Curve],
    *,
    dtype: str = "bfloat16",
) -> Level:
    """Compare training runs from the same start (L6); `seeds` are runs of the replaced code, too.

    The first steps are compared one by one; a long run by where it ends: 0.25 % from the replaced
    code's, and no further than other seeds lie from one another. Runs of the same code part as
    well where gradients are added up in any order. So a run may end twice as far off as the first
    of `again`; one that ends further off, but within the scatter of all of them, is undecided.
    """
    if len(seeds) + 1 < NUM_SEEDS:
        return not_run("L6", f"{len(seeds) + 1} seeds are too few for a band: give {NUM_SEEDS}")
    runs = (replaced, *again, new, *seeds)
    if len({len(run.losses) for run in runs}) > 1 or len(replaced.losses) < NUM_EARLY:
        return not_run("L6", f"the runs must have the same {NUM_EARLY} steps at least")
    gaps = (_gaps(replaced, run) for run in (*again, *seeds))
    own = [max(together) for together in zip(*gaps, strict=True)]
    level = unjudged("L6", _gaps(replaced, new), own, "steps")
    if level:
        return level
    # More of them tell a failure from scatter, and make nothing pass.
    second = again[0]
    early, own_early = (max(_gaps(replaced, run)[:NUM_EARLY]) for run in (new, second))
    bound = EARLY.get(dtype, EARLY_LOW_PRECISION)
    name = f"loss, first {NUM_EARLY} steps: largest gap"
    measures = [Measure(name, early, max(bound, 2 * own_early), own_early)]
    if len(replaced.losses) >= NUM_LONG:
        measures += _final_measures(replaced, second, new, seeds)
    if replaced.gradient_norms and new.gradient_norms:
        measures.append(_norms(replaced, second, new))
    looked_at = f"{len(replaced.losses)} steps, {len(seeds) + 1} seeds"
    level = judge("L6", measures, looked_at)
    broken = [one.name for one in measures if not one.is_met]
    return _within_scatter(level, replaced, again, new) if broken == [FINAL] else level


def _within_scatter(level: Level, replaced: Curve, again: Sequence[Curve], new: Curve) -> Level:
    """Return the level as undecided, where the end of a run may be one of the replaced code's."""
    # Runs to the same bits are one run.
    ends = sorted({_end(run) for run in (replaced, *again)})
    if len(ends) == 1:
        return level
    scatter = stdev(ends) * math.sqrt(1 + 1 / len(ends))
    if abs(_end(new) - fmean(ends)) > SURE[min(len(ends) - 1, MOST_AGAIN)] * scatter:
        return level
    apart = _relative(min(ends), max(ends))
    why = f"{level.why}; yet {len(ends)} runs of the replaced code end up to {apart:.2g} apart"
    return replace(level, state="undecided", why=f"{why}: nobody can tell it from them")


def _gaps(one: Curve, other: Curve) -> list[float]:
    """Return the relative gap of every loss; infinite where one of them is not finite."""
    gaps = [_relative(a, b) for a, b in zip(one.losses, other.losses, strict=True)]
    return [gap if math.isfinite(gap) else math.inf for gap in gaps]


def _final_measures(
    replaced: Curve, again: Curve, new: Curve, seeds: Sequence[Curve]
) -> list[Measure]:
    ends = [_end(run) for run in (replaced, *seeds)]
    gap, own = (_relative(ends[0], _end(run)) for run in (new, again))
    band = _relative(ends[0], ends[0] + max(ends) - min(ends))
    return [
        Measure(FINAL, gap, max(FINAL_GAP, 2 * own), own),
        # The run whose seed it shares may lie at the band's edge: the band's width is what counts.
        Measure("final loss: gap within the seeds' band", gap, max(band, own), own),
    ]


def _end(run: Curve) -> float:
    """Return the mean loss over the last tenth."""
    return fmean(run.losses[-max(len(run.losses) // 10, 1) :])


def _norms(replaced: Curve, again: Curve, new: Curve) -> Measure:
    """Return how far the mean gradient norm is from the replaced code's, as a share."""
    standard = fmean(replaced.gradient_norms[:NUM_EARLY])
    gap, own = (
        _relative(standard, fmean((run.gradient_norms or replaced.gradient_norms)[:NUM_EARLY]))
        for run in (new, again)
    )
    threshold = max(NORM_BAND, 2 * own) if math.isfinite(own) else math.inf
    return Measure("gradient norm: gap", gap, threshold, own)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), 1e-12)
