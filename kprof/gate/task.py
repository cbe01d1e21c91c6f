"""L5: does the model still answer as many items of a task rightly?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

from kprof.gate.result import Level, Measure, judge, not_run

RECOVERY = 0.99
STRICT_RECOVERY = 0.999
CONFIDENCE = 0.95
SURE = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
NUM_HALVINGS = 60
TINY = 1e-9


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
    accuracy, num_right = fmean(replaced), sum(replaced)
    lost, won = discordant(replaced, new)
    kept = (num_right - lost + won) / num_right
    low, high = kept_within(lost, won, num_right)
    own = fmean(again) / accuracy
    # What the model loses by itself, or wins by the same luck, is nothing to ask of the swap.
    least = min(recovery, own, 1 / own if own else recovery)
    measure = Measure("right answers kept, at least", low, least, own, "share", "higher")
    p_value = mcnemar(lost, won)
    note = (
        f"kept {kept:.2%} ({low:.2%} to {high:.2%}); {lost} items lost, {won} won, "
        f"McNemar p = {p_value:.3g}"
    )
    looked_at = f"{len(replaced):,} items"
    if low < least <= high:
        needed = _needed(lost, won, num_right, len(replaced), least)
        why = f"the interval lies on both sides of {least:.2%}; {needed}"
        return Level("L5", "undecided", why, (measure,), looked_at, notes=(note,))
    return judge("L5", (measure,), looked_at, notes=(note,))


def discordant(one: Sequence[bool], other: Sequence[bool]) -> tuple[int, int]:
    """Return how many items only the first, and only the second answered rightly."""
    pairs = list(zip(one, other, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def kept_within(lost: int, won: int, num_right: int) -> tuple[float, float]:
    """Return between which shares of the right answers are kept, at 95 % confidence.

    The score interval of the ratio of two paired shares, of Nam and Blackwelder (2002): those
    shares that the counts are within 1.96 standard deviations of. Also with few items lost and
    won, where an interval from the counts' own deviation is too narrow.
    """
    kept = (num_right - lost + won) / num_right
    return _find_end(lost, won, num_right, 0.0, kept), _find_end(lost, won, num_right, None, kept)


def _find_end(lost: int, won: int, num_right: int, far: float | None, near: float) -> float:
    """Return where the counts become too unlikely, by halving what lies between."""
    if far is None:
        far = near + 1.0
        while abs(deviations(lost, won, num_right, far)) < SURE:
            far *= 2
    elif near == far:
        return far
    for _ in range(NUM_HALVINGS):
        middle = (far + near) / 2
        if abs(deviations(lost, won, num_right, middle)) < SURE:
            near = middle
        else:
            far = middle
    return far


def deviations(lost: int, won: int, num_right: int, kept: float) -> float:
    """Return by how many standard deviations more are right than if this share were kept.

    The deviation is that of the likeliest numbers of items lost and won by which just this share
    is kept; the former is the larger root of a quadratic equation.
    """
    total = num_right + won
    linear = num_right * (1 - kept**2) + lost + won
    root = math.sqrt(max(linear**2 - 4 * (1 + kept) * (1 - kept) * lost * total, 0.0))
    variance = (linear + root) / 2 - total * (1 - kept)
    surplus = num_right - lost + won - kept * num_right
    if variance <= TINY:
        return math.copysign(math.inf, surplus) if abs(surplus) > TINY else 0.0
    return surplus / math.sqrt(variance)


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided p-value that items are lost and won alike."""
    num = lost + won
    tail: float = sum(math.comb(num, k) for k in range(min(lost, won) + 1)) / 2**num
    return min(1.0, 2 * tail)


def _needed(lost: int, won: int, num_right: int, num_items: int, least: float) -> str:
    """Say how many items would decide, if the rest were like these."""
    far = abs(deviations(lost, won, num_right, least))
    if far <= TINY:
        return "no number of items would decide"
    return f"about {math.ceil(num_items * (SURE / far) ** 2):,} items would decide"
