"""Idle time added up: by cause, and by the place that each cause lies at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.intervals import Intervals, disjoint, length_in
from kprof.analyze.summary import collapse_layers
from kprof.trace import Trace


def inside_window(idle: pd.DataFrame) -> pd.DataFrame:
    """Return the pieces between the first and the last activity of each rank."""
    inside: pd.DataFrame = idle[idle["edge"].isna().to_numpy(bool)]
    return inside


def group_idle(idle: pd.DataFrame) -> pd.DataFrame:
    """Add up pieces by cause, longest first; those of unknown cause form a group.

    Columns: `cause`, `time_ns`, `share` (of the time in `idle`), `recoverable_ns` (missing where
    nobody knows), `pieces` (their number), `longest_ns`. The recoverable times of two causes never
    overlap: they may be added.
    """
    groups = _by(idle, ["cause"])
    groups["share"] = groups["time_ns"] / max(int(groups["time_ns"].sum()), 1)
    columns = ["cause", "time_ns", "share", "recoverable_ns", "pieces", "longest_ns"]
    ordered: pd.DataFrame = groups[columns]
    return ordered


def worst_places(idle: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return for each cause the `number` places that cost most, as `group_idle` adds up.

    Layers of one kind count as one place. The device's own time between kernels has none.
    """
    placed = idle[(idle["place"].notna() | idle["line"].notna()).to_numpy(bool)]
    layers = {name: collapse_layers(placed[name]) for name in ("place", "module")}
    placed = placed.assign(**layers)
    groups = _by(placed, ["cause", "place", "module", "line"])
    by_cause = groups.groupby("cause", observed=True, dropna=False, sort=False)
    worst: pd.DataFrame = by_cause.head(number).reset_index(drop=True)
    return worst


def _by(idle: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    groups = idle.groupby(keys, observed=True, dropna=False, sort=False)
    sums = pd.DataFrame(
        {
            "time_ns": groups["duration_ns"].sum(),
            "recoverable_ns": groups["recoverable_ns"].sum(min_count=1),
            "pieces": groups["duration_ns"].size(),
            "longest_ns": groups["duration_ns"].max(),
        }
    )
    ordered: pd.DataFrame = sums.sort_values(
        "time_ns", ascending=False, kind="stable"
    ).reset_index()
    return ordered


@dataclass(frozen=True)
class ExposedWait:
    """Time in which a rank's collectives ran, but only waited for a rank that came later."""

    rank: int
    waiting_ns: int
    exposed_ns: int
    """The part of it in which nothing else ran on the device."""
    num_collectives: int


def find_exposed_waits(trace: Trace) -> list[ExposedWait] | None:
    """Find how long collectives of each rank waited for the last rank to begin the same one.

    This time counts as busy, not as idle. None where one rank was recorded, or the collectives
    carry no numbers to tell which belong together.
    """
    kernels = trace.kernels
    is_collective = kernels["group_sequence"].notna() & kernels["collective"].notna()
    # Sends and receives of a group share no number with their peers.
    is_collective &= ~kernels["collective"].astype(str).str.contains("send|recv", case=False)
    rows = np.flatnonzero(is_collective.to_numpy(bool))
    calls = kernels.iloc[rows]
    keys = [calls[name] for name in ("group", "group_sequence", "collective")]
    together = calls.groupby(keys, observed=True, sort=False)
    is_shared = (together["rank"].transform("nunique") > 1).to_numpy(bool)
    if not is_shared.any():
        return None
    latest = together["start_ns"].transform("max").to_numpy(np.int64)[is_shared]
    rows = rows[is_shared]
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    until = np.minimum(np.maximum(latest, start[rows]), end[rows])
    is_other = ((kernels["kind"] != "collective") & kernels["collective"].isna()).to_numpy(bool)
    rank, device = kernels["rank"].to_numpy(), kernels["device"].to_numpy()
    exposed = until - start[rows]
    for place in sorted(set(zip(rank[rows].tolist(), device[rows].tolist(), strict=True))):
        on_it = (rank == place[0]) & (device == place[1])
        others = np.flatnonzero(on_it & is_other)
        busy = disjoint(Intervals(start[others], end[others], others))
        mine = np.flatnonzero(on_it[rows])
        hidden = length_in(busy, start[rows[mine]], until[mine])
        exposed[mine] -= hidden
    waiting = until - start[rows]
    return [
        ExposedWait(
            int(one),
            int(waiting[rank[rows] == one].sum()),
            int(exposed[rank[rows] == one].sum()),
            int((rank[rows] == one).sum()),
        )
        for one in np.unique(rank[rows])
    ]
