"""How many pairs a verdict takes at the least, known before the first of them."""

from __future__ import annotations

import numpy as np

from kprof.analyze.verdict.rule import FEWEST_PAIRS, levels_of, look_always
from kprof.analyze.verdict.sequence import Course
from kprof.comparison import Plan


def fewest_pairs(plan: Plan) -> int:
    """Return after how many pairs sampling can end, were all of them as clear as can be."""
    if not plan.stops_early:
        return plan.max_pairs
    clearest = Course.of(np.ones(plan.max_pairs), plan.max_pairs)
    has_decided = look_always(clearest, levels_of(plan)).has_decided
    first = int(np.argmax(has_decided)) + 1 if has_decided.any() else plan.max_pairs
    return min(max(first, FEWEST_PAIRS), plan.max_pairs)
