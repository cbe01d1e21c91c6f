"""A launch's bound by its work, compared with its bound by hardware counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.roofline.bound import BOUND_SHARE, BOUNDS, bound_by_counters
from kprof.analyze.roofline.hardware_counters import NOT_COUNTED, counted_bytes, counted_shares

BORDER = 0.05
"""How near to a border between two bounds a launch belongs to neither for sure."""

KEPT = 0.9
"""Share of the minimum traffic below which the memory did not see all of a launch's traffic."""


@dataclass(frozen=True)
class Agreement:
    """Verdicts on launches of which both the work and the counters tell one."""

    num_agreeing: int
    num_differing: int
    num_borderline: int
    """Launches that counters put within 5 points of a border."""

    @property
    def share(self) -> float | None:
        """Return the share of the launches off the borders on which both agree."""
        number = self.num_agreeing + self.num_differing
        return self.num_agreeing / number if number else None


def compare_bounds(kernels: pd.DataFrame, verdict: np.ndarray | None = None) -> Agreement:
    """Compare both verdicts on every launch that has two; `verdict` is `by_work` unless given."""
    counted = bound_by_counters(kernels)
    verdict = by_work(kernels) if verdict is None else verdict
    has_both = (counted >= 0) & (verdict >= 0)
    clear = has_both & ~is_borderline(kernels)
    agrees = counted == verdict
    return Agreement(
        int((clear & agrees).sum()),
        int((clear & ~agrees).sum()),
        int((has_both & ~clear).sum()),
    )


def by_work(kernels: pd.DataFrame) -> np.ndarray:
    """Return places in `BOUNDS` by the work of each row, -1 where counters alone tell a bound.

    Of the run in which counters were read, where there was one; else of the recorded run.
    """
    counted = _places(kernels["counted_bound"])
    return np.where(counted >= 0, counted, as_recorded(kernels))


def as_recorded(kernels: pd.DataFrame) -> np.ndarray:
    """Return places in `BOUNDS` by the work of each row in the recorded run, as kprof shows it."""
    by_counters = (kernels["work_from"] == "counters").to_numpy(bool)
    return np.where(by_counters, -1, _places(kernels["bound"]))


def _places(bounds: pd.Series[str]) -> np.ndarray:
    place = {name: number for number, name in enumerate(BOUNDS)}
    # Counters do not tell apart for what the SMs are busy.
    place["issue"] = place["compute"]
    named = bounds.astype("category").cat
    known = np.array([place.get(str(name), -1) for name in named.categories] + [-1])
    return np.asarray(known[named.codes.to_numpy()])


def is_borderline(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows counters put within 5 points of a border between two bounds."""
    memory, compute = counted_shares(kernels)
    highest = np.fmax(memory, compute)
    near_threshold = _is_near(highest, BOUND_SHARE)
    near_each_other = (highest > BOUND_SHARE) & _is_near(memory, compute)
    return np.asarray(near_threshold | near_each_other)


def _is_near(one: np.ndarray, other: np.ndarray | float) -> np.ndarray:
    # Shares of one carry an error that percents, as they were written, do not.
    return np.asarray(np.round(np.abs(one - other), 9) <= BORDER)


def is_kept_in_cache(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows moved less through the memory than their minimum traffic.

    The rest came out of a cache, or stayed there, to be written when the launch was over. So how
    busy the memory was in the meantime does not tell what bounds them.
    """
    # Nothing is less than what is not known.
    return np.asarray(traffic_ratio(kernels) < KEPT)


def traffic_ratio(kernels: pd.DataFrame) -> np.ndarray:
    """Return measured over minimum traffic of each row's work, NaN where one is unknown."""
    counted = counted_bytes(kernels)
    least = kernels["bytes"].to_numpy(np.float64, na_value=np.nan)
    has_work = (kernels["work_from"] != "counters").to_numpy(bool)
    is_known = (counted != NOT_COUNTED) & has_work & (least > 0)
    return np.where(is_known, counted / np.where(is_known, least, 1.0), np.nan)
