"""Launches in the same place of a sequence that repeats: what a stream does in every step.

A recording often begins amid a step whose launches it has not seen. Where the launches of a stream
that were seen repeat exactly, kernel by kernel with the same work, at least once as a whole, those
right before and after them are taken to go on in the same way, as far as their names and grids do.
Where a recorder takes grids from the launch, one that was not seen has none.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.nesting import NO_ROW

_PLACE = ("rank", "device", "stream")
_KERNEL = ("name", "grid", "block")
_MOST_TRIED = 64


def find_recurring(kernels: pd.DataFrame, is_seen: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Return for each row that was not seen a row in the same place, `NO_ROW` where none is.

    `is_seen` tells whose launch was recorded; `num_bytes` is their work, negative where unknown.
    """
    found = np.full(len(kernels), NO_ROW, dtype=np.int64)
    if is_seen.all() or not is_seen.any():
        return found
    codes = pd.DataFrame({c: kernels[c].cat.codes.to_numpy() for c in _KERNEL})
    kernel = codes.to_numpy().T
    work = codes.assign(work=num_bytes).groupby([*_KERNEL, "work"], sort=False).ngroup().to_numpy()
    order = np.argsort(kernels["start_ns"].to_numpy(), kind="stable")
    place = kernels[list(_PLACE)].iloc[order].groupby(list(_PLACE), sort=False).ngroup().to_numpy()
    for stream in np.unique(place[~is_seen[order]]):
        rows = order[place == stream]
        begin, end = _longest_run(is_seen[rows])
        period = find_period(work[rows[begin:end]])
        if period is not None:
            like = _continued(kernel[:, rows], begin, end, period)
            goes_on = like != NO_ROW
            found[rows[goes_on]] = rows[like[goes_on]]
    return found


def find_period(values: np.ndarray) -> int | None:
    """Return after how many the values repeat, the least that fits twice; None if they do not."""
    if not len(values):
        return None
    _, member, number = np.unique(values, return_inverse=True, return_counts=True)
    # Every value comes again after a period: the rarest leaves the fewest to try.
    places = np.flatnonzero(member == np.argmin(number))
    for period in (places[1 : _MOST_TRIED + 1] - places[0]).tolist():
        if 2 * period <= len(values) and np.array_equal(values[period:], values[:-period]):
            return int(period)
    return None


def _longest_run(is_seen: np.ndarray) -> tuple[int, int]:
    """Return where the longest run of true values begins, and where it has ended."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_seen, [False]]).astype(np.int8)))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest])


def _continued(kernel: np.ndarray, begin: int, end: int, period: int) -> np.ndarray:
    """Return the place in the run of what lies around it, as far as kernels go on like it.

    A row of `kernel` for the codes of names, of grids and of blocks; negative where missing.
    """
    place = np.arange(kernel.shape[1])
    like = begin + (place - begin) % period
    other = kernel[:, like]
    differs = ((kernel != other) & (kernel >= 0) & (other >= 0)).any(axis=0)
    before, after = np.flatnonzero(differs[:begin]), np.flatnonzero(differs[end:])
    first = before[-1] + 1 if len(before) else 0
    last = end + after[0] if len(after) else len(place)
    is_outside = (place < begin) | (place >= end)
    return np.where(is_outside & (place >= first) & (place < last), like, NO_ROW)
