"""Launches alike: the same kernel over the same grid, one with known work and one without.

A launch from before the recording began, or out of a CUDA graph, tells no operator. The same
kernel over as many blocks of as many threads, in about the same time, has the same work if all
known ones have that did: a product's inner length shows in its time only.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.nesting import NO_ROW

SAME_WORK = 0.05
"""How far apart the work of launches may be that count as having the same, as a share of it."""

SAME_TIME, SAME_TIME_NS = 0.1, 1000
"""How far from its own duration a launch looks for its like: a share of it, or so many ns."""

_KEY = ("name", "grid", "block")
_LONGEST_NS = 1 << 40


def find_alike(kernels: pd.DataFrame, is_known: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Return for each row without known work a row that is alike, `NO_ROW` where there is none.

    `is_known` tells which rows' work, `num_bytes`, is exact.
    """
    found = np.full(len(kernels), NO_ROW, dtype=np.int64)
    # A collective takes as long as the others make it wait, whatever its message.
    tells = (kernels["grid"].notna() & (kernels["kind"] != "collective")).to_numpy()
    asked, known = np.flatnonzero(~is_known & tells), np.flatnonzero(is_known & tells)
    if not len(asked) or not len(known):
        return found
    codes = pd.DataFrame({c: kernels[c].cat.codes.to_numpy() for c in _KEY})
    key = codes.groupby(list(_KEY), sort=False).ngroup().to_numpy()
    duration = np.minimum(kernels["duration_ns"].to_numpy(dtype=np.int64), _LONGEST_NS // 4)
    # One number orders by kernel and grid first, by time second.
    place = key * _LONGEST_NS + duration
    known = known[np.argsort(place[known], kind="stable")]
    reach_ns = np.maximum((SAME_TIME * duration[asked]).astype(np.int64), SAME_TIME_NS)
    shortest = place[asked] - np.minimum(reach_ns, duration[asked])
    low = np.searchsorted(place[known], shortest, side="left")
    high = np.searchsorted(place[known], place[asked] + reach_ns, side="right")
    has_near = low < high
    asked, low, last = asked[has_near], low[has_near], high[has_near] - 1
    change = _changes(num_bytes[known])
    has_like = change[low] == change[last]
    asked, low, last = asked[has_like], low[has_like], last[has_like]
    after = np.clip(np.searchsorted(place[known], place[asked]), low, last)
    before = np.maximum(after - 1, low)
    is_before = place[asked] - place[known[before]] < np.abs(place[known[after]] - place[asked])
    found[asked] = known[np.where(is_before, before, after)]
    return found


def _changes(values: np.ndarray) -> np.ndarray:
    """Count for each value how often two neighbours up to it were not about the same."""
    low, high = np.minimum(values[1:], values[:-1]), np.maximum(values[1:], values[:-1])
    return np.append(0, np.cumsum(high - low > SAME_WORK * high))
