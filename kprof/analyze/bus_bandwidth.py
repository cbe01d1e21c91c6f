"""Bandwidth of collectives, as nccl-tests defines it, and how much of them computation hides.

Algorithm bandwidth is the message over the time of the transfer; bus bandwidth is that times the
share of the message that each link carries, so that operations and numbers of ranks compare:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.element_type import size_bytes
from kprof.analyze.idle.causes import collective_waits
from kprof.analyze.work.collective import TYPES
from kprof.trace import Trace

_REDUCE_SCATTER = re.compile(r"_?reduce_?scatter")
_ALL_GATHER = re.compile(r"_?all_?gather")
_ALL_REDUCE = re.compile(r"_?all_?reduce")


def measure_collectives(trace: Trace) -> pd.DataFrame:
    """Add up collectives by process group and operation, those with most exposed time first.

    Columns: `group`, `collective`, `calls`, `time_ns`, `exposed_ns` and `hidden_ns` of all ranks in
    detail; `transfer_ns`, `algorithm_bytes_per_s` and `bus_bytes_per_s`: the medians of calls that
    several ranks recorded. The last rank to come does not wait, so the transfer takes as long as
    its kernel. Bandwidths are missing without a message or a rank of the group.
    """
    kernels = trace.kernels
    rows = np.flatnonzero((kernels["collective"].notna() & kernels["group"].notna()).to_numpy(bool))
    calls = kernels.iloc[rows][["group", "collective"]].reset_index(drop=True)
    duration = kernels["duration_ns"].to_numpy(np.int64)[rows]
    calls["time_ns"], calls["exposed_ns"] = duration, allotted_time(trace)[rows]
    calls["transfer_ns"], num_ranks = (column[rows] for column in _transfers(trace))
    messages = _messages(trace, rows)
    rates = [
        _bytes_per_s(*one) for one in zip(messages, calls["transfer_ns"], num_ranks, strict=True)
    ]
    calls["algorithm_bytes_per_s"], calls["bus_bytes_per_s"] = np.array(rates).reshape(-1, 2).T
    groups = calls.groupby(["group", "collective"], observed=True)
    sums = groups[["time_ns", "exposed_ns"]].sum()
    sums.insert(0, "calls", groups.size())
    sums["hidden_ns"] = sums["time_ns"] - sums["exposed_ns"]
    medians = groups[["transfer_ns", "algorithm_bytes_per_s", "bus_bytes_per_s"]].median()
    table = sums.join(medians).reset_index()
    table = table.sort_values("exposed_ns", ascending=False, kind="stable", ignore_index=True)
    found: pd.DataFrame = table
    return found


def _transfers(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return how long each collective took without its wait, and on how many ranks it is recorded.

    NaN and 0 where that is unknown.
    """
    transfer, number = np.full(len(trace.kernels), np.nan), np.zeros(len(trace.kernels), np.int64)
    # Ranks in detail alone do not tell who came last.
    waits = collective_waits(trace) if trace.all_ranks is None else None
    if waits is not None:
        row = waits["row"].to_numpy(np.int64)
        duration = trace.kernels["duration_ns"].to_numpy(np.int64)[row]
        transfer[row] = duration - waits["waiting_ns"].to_numpy(np.int64)
        together = waits.groupby(["group", "number", "collective"], observed=True)["rank"]
        number[row] = together.transform("nunique").to_numpy(np.int64)
    return transfer, number


def _messages(trace: Trace, rows: np.ndarray) -> list[str | None]:
    """Return the message of each of some collectives, as recorded by the operator around it."""
    if "op_row" not in trace.kernels:
        return [None] * len(rows)
    messages = trace.ranges["message"].to_numpy(object)
    operators = trace.kernels["op_row"].to_numpy(np.int64, na_value=-1)[rows]
    found = [messages[row] if row >= 0 else None for row in operators]
    return [one if isinstance(one, str) else None for one in found]


def _bytes_per_s(message: str | None, transfer_ns: float, num_ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth; NaN where either cannot be told.

    Where a rank of the group was not recorded, it may have been the last one to come.
    """
    missing = (np.nan, np.nan)
    if message is None or not transfer_ns > 0:
        return missing
    name, given, got, dtype, of_group = json.loads(message)
    if dtype not in TYPES or of_group != num_ranks:
        return missing
    if not isinstance(given, int) or not isinstance(got, int):
        return missing
    # Each element crosses a link on its way to every other rank; reduced ones come back.
    of_links = (num_ranks - 1) / num_ranks
    if _ALL_REDUCE.match(name):
        elements, share = given, 2 * of_links
    elif _ALL_GATHER.match(name):
        elements, share = got, of_links
    elif _REDUCE_SCATTER.match(name):
        elements, share = given, of_links
    else:
        return missing
    rate = float(elements * size_bytes(TYPES[dtype]) / (transfer_ns * 1e-9))
    return rate, rate * share
