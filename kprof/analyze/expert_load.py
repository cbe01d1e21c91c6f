"""Load of experts: how many elements each rank of an expert-parallel group is sent to work on.

Before the experts, ranks send as many elements as they hold, and get as many as their experts were
chosen for; behind them the reverse. So the side on which ranks differ is the load.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.bus_bandwidth import messages
from kprof.analyze.rank_layout import EXPERT, collectives_along
from kprof.trace import ProcessGroup, Trace

ALL_TO_ALL = re.compile(r"_?all_?to_?all")


@dataclass(frozen=True)
class ExpertLoad:
    """Elements that the all-to-alls of one group bring to its ranks' experts."""

    group: str
    ranks: tuple[int, ...]
    load: tuple[float, ...]
    """Of each rank, as a multiple of the mean of all."""
    calls: int
    """All-to-alls that count."""

    @property
    def busiest(self) -> tuple[int, float]:
        """The rank with most to do, and its load."""
        most = max(self.load)
        return self.ranks[self.load.index(most)], most


def find_expert_load(trace: Trace) -> tuple[ExpertLoad, ...] | None:
    """Return the load of each expert-parallel group, the least balanced first.

    None where no message of an all-to-all is known of all ranks of such a group.
    """
    everyone = trace.all_ranks or trace
    groups, rows = collectives_along(everyone, EXPERT, ALL_TO_ALL)
    given, got = _elements(messages(everyone)[rows])
    columns: Any = ["rank", "group", "group_sequence", "start_ns"]
    calls = everyone.kernels.iloc[rows][columns].assign(given=given, got=got)
    found = [
        load
        for group in groups
        for name, own in calls[calls["rank"].isin(group.ranks)].groupby("group", observed=True)
        if (load := _load(group, str(name), own)) is not None
    ]
    return tuple(sorted(found, key=lambda one: -one.busiest[1])) or None


def _elements(message: pd.Categorical) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements that each call gives and gets; NaN where not recorded."""
    told = [json.loads(str(one))[1:3] for one in message.categories]
    pairs = [[float(n) if isinstance(n, int) else np.nan for n in one] for one in told]
    table = np.array([*pairs, [np.nan, np.nan]])
    given, got = table[message.codes].T
    return given, got


def _load(group: ProcessGroup, name: str, calls: pd.DataFrame) -> ExpertLoad | None:
    """Add up the side on which ranks differ, over the calls that all ranks of a group recorded."""
    ordered = calls.sort_values(["rank", "start_ns"], kind="stable")
    number = ordered["group_sequence"]
    if number.isna().any():
        number = ordered.groupby("rank").cumcount()
        if ordered.groupby("rank").size().nunique() > 1:
            return None
    keys = [number.to_numpy(np.int64), ordered["rank"].to_numpy(np.int64)]
    if pd.MultiIndex.from_arrays(keys).duplicated().any():
        return None
    sides = [
        pd.Series(ordered[side].to_numpy(), index=keys).unstack().reindex(columns=[*group.ranks])
        for side in ("given", "got")
    ]
    is_whole = sides[0].notna().all(axis=1) & sides[1].notna().all(axis=1)
    given, got = (side[is_whole].to_numpy(float) for side in sides)
    differs = np.ptp(given, axis=1) > np.ptp(got, axis=1)
    load = np.where(differs[:, None], given, got).sum(axis=0)
    if not load.sum() > 0:
        return None
    shares = tuple((load / load.mean()).tolist())
    return ExpertLoad(name, group.ranks, shares, int(is_whole.sum()))
