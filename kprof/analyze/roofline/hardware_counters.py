"""Hardware counters of a launch: its traffic, the load of memory, SMs, tensor cores.

Counters see all traffic of a kernel that ran alone: repeated reads count again, and cache hits do
not count. So they tell what bounds a kernel, but not its minimum traffic. Counters sampled in time
are split over the activities that ran meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.attribution.overlap import own_instants
from kprof.analyze.intervals import length_before
from kprof.trace import Trace

NOT_COUNTED = -1


def is_counted(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows counters say anything of."""
    has_share = kernels["dram_percent"].notna() | kernels["sm_percent"].notna()
    return np.asarray(has_share.to_numpy(bool) | (counted_bytes(kernels) != NOT_COUNTED))


def counted_bytes(kernels: pd.DataFrame) -> np.ndarray:
    """Return the traffic of each row with the device's memory, -1 where it was not counted."""
    read, written = (
        kernels[f"dram_{way}_bytes"].to_numpy(np.int64, na_value=NOT_COUNTED)
        for way in ("read", "written")
    )
    is_known = (read != NOT_COUNTED) & (written != NOT_COUNTED)
    return np.asarray(np.where(is_known, read + written, NOT_COUNTED))


def counted_shares(kernels: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of their peaks that memory and arithmetic reached, NaN where not counted.

    Arithmetic is the busier of the SMs and the tensor cores; the latter are not always counted.
    """
    memory, sm, tensor = (
        kernels[f"{unit}_percent"].to_numpy(np.float64) / 100 for unit in ("dram", "sm", "tensor")
    )
    return memory, np.fmax(sm, np.where(np.isnan(sm), np.nan, tensor))


SOURCE = "counters"
SM = "sm_active_cycles"
# Each counts its own cycles (H200: a product that fills them counts four in one cycle of an SM).
TENSOR_CORES_OF_SM = 4


@dataclass(frozen=True)
class Shared:
    """A sampled quantity by activity; both parts add up to all that was sampled."""

    by_row: np.ndarray
    """Part of each row of `kernels`."""
    beside: float
    """Samples taken while nothing ran, as far as the recording shows."""


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

    Where activities overlap, an instant belongs to one of them (`overlap`). An activity shorter
    than a sample gets the rate of its neighbours in it.
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
    alone = own_instants(kernels, np.argsort(kernels["start_ns"].to_numpy(np.int64), kind="stable"))
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


def sampled_by(trace: Trace, label: pd.Series[str]) -> pd.DataFrame:
    """Return what was sampled by label, longest first; `label` has one for each row of `kernels`.

    Columns: `label` (missing where there is none), `number` of activities, `time_ns`,
    `read_bytes`, `written_bytes`, `sm_share` of the cycles that all SMs have, and `tensor_share`
    of the cycles in which SMs were active; shares are NaN where they were not sampled.
    """
    values = pd.DataFrame(
        {
            "label": label.set_axis(trace.kernels.index),
            "number": 1,
            "time_ns": trace.kernels["duration_ns"],
            "read_bytes": share_out(trace, "dram_read_bytes").by_row,
            "written_bytes": share_out(trace, "dram_written_bytes").by_row,
            "sm": share_out(trace, SM).by_row,
            "tensor": share_out(trace, "tensor_active_cycles").by_row,
        }
    )
    groups = values.groupby("label", observed=True, dropna=False).sum()
    ordered = groups.sort_values("time_ns", ascending=False, kind="stable").reset_index()
    all_cycles = ordered["time_ns"] * _cycles_per_ns(trace)
    shares: pd.DataFrame = ordered.assign(
        sm_share=_share_of(ordered["sm"], all_cycles),
        tensor_share=_share_of(ordered["tensor"] / TENSOR_CORES_OF_SM, ordered["sm"]),
    ).drop(columns=["sm", "tensor"])
    return shares


def _cycles_per_ns(trace: Trace) -> float:
    """Return the cycles of all SMs in a nanosecond: those of the busiest sample."""
    samples = trace.samples
    chosen = (samples["source"] == SOURCE) & (samples["quantity"] == SM)
    highest = samples.loc[chosen.to_numpy(bool), "value"].max()
    return float(highest) / max(interval_ns(trace), 1)


def _share_of(part: pd.Series[float], whole: pd.Series[float]) -> pd.Series[float]:
    share: pd.Series[float] = part / whole.where(whole > 0)
    return share
