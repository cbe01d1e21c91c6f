"""Doubts about a difference in time: results that were kept, or a changed GPU clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kprof.analyze.verdict.ranks import walsh_averages
from kprof.comparison import Claim, Pair, Plan

SUSPICIOUS = 0.1
"""B's time over A's below which the claim is accompanied by a warning."""
LAUNCH_NS = 1_000.0
"""A step or a call that launches a kernel takes longer than this: the CUDA runtime needs about
2 µs for a launch, and the GPU about 1 µs for an empty kernel."""
CALL_NS = 100.0
"""A step of Python takes longer than this, which is about two empty calls."""
WRITTEN_OVER_PEAK = 4.0
"""Memory is written at most so many times as fast as DRAM's peak: small outputs stay in caches."""
HOST_BYTES_PER_S = 5e12
"""More than the caches of any host take up."""


def reason_below_floor(pairs: Sequence[Pair], floor_ns: float, of_what: str) -> str:
    """Return why times of the first metric, in ns, are no times of that work, or nothing."""
    values = [value for pair in pairs if not pair.problem for value in (pair.a[0], pair.b[0])]
    least = min((value for value in values if value > 0), default=floor_ns)
    if least >= floor_ns:
        return ""
    return (
        f"A sample took {least:,.4g} ns, less than the {floor_ns:,.4g} ns that {of_what} needs at "
        "least: not all the work was done, or not all of it was timed."
    )


def doubt_ratio(claim: Claim) -> str:
    """Return a warning where B takes less than a tenth of A's time; empty otherwise."""
    if claim.verdict != "FASTER" or claim.metric.better != "lower" or claim.interval is None:
        return ""
    ratio = claim.interval.ratio
    if ratio >= SUSPICIOUS:
        return ""
    return (
        f"B takes 1/{1 / ratio:,.0f} of A's {claim.metric.name}. A gain of this size often means "
        "that work is skipped, cached or not waited for: check that B computes its result each "
        "time."
    )


def find_power_effect(plan: Plan, pairs: Sequence[Pair]) -> str | None:
    """Return the effect of the GPU's clock on a difference in time; None where it has none.

    A variant that draws more power gets a lower clock. It costs time as more work does, but it is
    not a property of the code, and may be absent on another card.
    """
    known = [pair for pair in pairs if not pair.problem and None not in pair.clocks_mhz]
    if len(known) < len(pairs) / 2 or not known:
        return None
    clocks = np.array([pair.clocks_mhz for pair in known], dtype=float)
    change = float(np.exp(np.median(walsh_averages(np.log(clocks[:, 1]) - np.log(clocks[:, 0])))))
    if abs(change - 1) < plan.smallest_effect:
        return None
    return (
        f"While B ran the GPU's clock was {100 * abs(change - 1):.1f} % "
        f"{'higher' if change > 1 else 'lower'} than under A: part of the difference in time is "
        "the power that the two draw, not the work that they do."
    )
