"""Counters that were sampled in time, shared out to what ran meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.intervals import Intervals, disjoint, length_before
from kprof.trace import Trace

SOURCE = "counters"


@dataclass(frozen=True)
class Shared:
    """A sampled quantity by activity; both parts add up to all that was sampled."""

    by_row: np.ndarray
    """Part of each row of `kernels`."""
    beside: float
    """What was sampled while nothing ran, as far as the recording tells."""


def has_samples(trace: Trace) -> bool:
    """Whether counters were sampled during the recording."""
    return bool((trace.samples["source"] == SOURCE).any())


def interval_ns(trace: Trace) -> int:
    """Return how far samples lie apart."""
    times = trace.samples.loc[(trace.samples["source"] == SOURCE).to_numpy(bool), "time_ns"]
    apart = np.diff(np.unique(times.to_numpy(np.int64)))
    return int(np.median(apart)) if len(apart) else 0


def share_out(trace: Trace, quantity: str) -> Shared:
    """Share each sample out over what ran in it, by time.

    Where activities overlap, an instant belongs to the one that started first. An activity
    shorter than a sample gets the rate of its neighbours in it.
    """
    by_row, beside = np.zeros(len(trace.kernels)), 0.0
    samples = trace.samples
    chosen = (samples["source"] == SOURCE) & (samples["quantity"] == quantity)
    length = interval_ns(trace)
    for (rank, device), of_device in samples[chosen.to_numpy(bool)].groupby(["rank", "device"]):
        mine = (trace.kernels["rank"] == rank) & (trace.kernels["device"] == device)
        rows = np.flatnonzero(mine.to_numpy(bool))
        parts, outside = _share(trace.kernels.iloc[rows], of_device, length)
        np.add.at(by_row, rows, parts)
        beside += outside
    return Shared(by_row, beside)


def _share(kernels: pd.DataFrame, samples: pd.DataFrame, length: int) -> tuple[np.ndarray, float]:
    """Return the parts of one device's activities, and what belongs to none."""
    ordered = samples.sort_values("time_ns")
    values = ordered["value"].to_numpy(np.float64)
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    alone = disjoint(Intervals(start, end, np.arange(len(start))))
    begins = ordered["time_ns"].to_numpy(np.int64)
    busy = length_before(alone, begins + length) - length_before(alone, begins)
    total = np.concatenate([[0.0], np.cumsum(values)])

    def until(moment: np.ndarray) -> np.ndarray:
        """Return how much had been sampled by each moment, as time was worked."""
        place = np.searchsorted(begins, moment, side="right") - 1
        at = np.maximum(place, 0)
        worked = length_before(alone, np.minimum(moment, begins[at] + length))
        part = (worked - length_before(alone, begins[at])) / np.maximum(busy[at], 1)
        return np.where(place < 0, 0.0, total[at] + values[at] * part)

    parts = np.zeros(len(kernels))
    np.add.at(parts, alone.row, until(alone.end) - until(alone.start))
    return parts, float(values.sum() - parts.sum())


def traffic_of_modules(trace: Trace) -> pd.DataFrame:
    """Return what each module read and wrote by sampled counters, longest first.

    Columns: `module` (missing where there is none), `time_ns`, `read_bytes`, `written_bytes`.
    """
    values = trace.kernels[["module"]].assign(
        time_ns=trace.kernels["duration_ns"],
        read_bytes=share_out(trace, "dram_read_bytes").by_row,
        written_bytes=share_out(trace, "dram_written_bytes").by_row,
    )
    groups = values.groupby("module", observed=True, dropna=False).sum()
    ordered = groups.sort_values("time_ns", ascending=False, kind="stable")
    named: pd.DataFrame = ordered.reset_index()
    return named
