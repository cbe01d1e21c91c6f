"""L5: does the model still answer as many items of a task rightly?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

from kprof.gate.result import Level, Measure, judge, not_run

RECOVERY = 0.99
STRICT_RECOVERY = 0.999
CONFIDENCE = 0.95


def check_task(
    replaced: Sequence[bool],
    again: Sequence[bool],
    new: Sequence[bool],
    *,
    recovery: float = RECOVERY,
) -> Level:
    """Compare which items were answered rightly, item by item (L5).

    Passes when the whole interval of the share of right answers kept lies above `recovery` (or
    above what A/A keeps, where that is less), fails when all of it lies below, and is undecided
    in between: too few items.
    """
    if not len(replaced) == len(again) == len(new):
        return not_run("L5", "the runs differ in how many items they answered")
    if not any(replaced):
        return not_run("L5", "the replaced code answers nothing rightly: there is nothing to keep")
    accuracy = fmean(replaced)
    low, kept, high = (1 + one / accuracy for one in difference(replaced, new))
    own = fmean(again) / accuracy
    # What the model loses by itself, or wins by the same luck, is nothing to ask of the swap.
    least = min(recovery, own, 1 / own if own else recovery)
    measure = Measure("right answers kept, at least", low, least, own, "share", "higher")
    lost, won = discordant(replaced, new)
    p_value = mcnemar(lost, won)
    note = (
        f"kept {kept:.2%} ({low:.2%} to {high:.2%}); {lost} items lost, {won} won, "
        f"McNemar p = {p_value:.3g}"
    )
    looked_at = f"{len(replaced):,} items"
    if low < least <= high:
        why = f"the interval lies on both sides of {least:.2%}; {_needed(replaced, new, least)}"
        return Level("L5", "undecided", why, (measure,), looked_at, notes=(note,))
    return judge("L5", (measure,), looked_at, notes=(note,))


def discordant(one: Sequence[bool], other: Sequence[bool]) -> tuple[int, int]:
    """Return how many items only the first, and only the second answered rightly."""
    pairs = list(zip(one, other, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def difference(one: Sequence[bool], other: Sequence[bool]) -> tuple[float, float, float]:
    """Return the paired difference of the accuracies: low, estimate, high.

    Bonett and Price (2012): Wald's interval with one item added to each discordant cell.
    """
    lost, won = discordant(one, other)
    num = len(one) + 2
    p_lost, p_won = (lost + 1) / num, (won + 1) / num
    estimate = p_won - p_lost
    deviation = math.sqrt((p_lost + p_won - estimate**2) / num)
    reach = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * deviation
    return estimate - reach, (won - lost) / len(one), estimate + reach


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided p-value that items are lost and won alike."""
    num = lost + won
    tail: float = sum(math.comb(num, k) for k in range(min(lost, won) + 1)) / 2**num
    return min(1.0, 2 * tail)


def _needed(one: Sequence[bool], other: Sequence[bool], least: float) -> str:
    """Say how many items would decide, if the rest were like these."""
    low, estimate, _ = difference(one, other)
    room = abs(estimate / fmean(one) + 1 - least)
    if room == 0:
        return "no number of items would decide"
    half_width = (estimate - low) / fmean(one)
    return f"about {math.ceil(len(one) * (half_width / room) ** 2):,} items would decide"
