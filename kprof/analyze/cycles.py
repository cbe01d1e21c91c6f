"""Whether a difference in time is one of work, or of the clock that a GPU chose for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kprof.analyze.verdict.ranks import walsh_averages
from kprof.comparison import Pair, Plan


def find_power_effect(plan: Plan, pairs: Sequence[Pair]) -> str | None:
    """Return what the GPU's clock has to do with a difference in time; None where it has nothing.

    A variant that draws more power gets a lower clock. For whoever pays for the time that is as
    real as more work; it is not a merit of the code, and on another card it may be gone.
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
