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
from numpy.typing import NDArray

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.element_type import size_bytes
from kprof.analyze.idle.causes import collective_waits
from kprof.analyze.work.collective import TYPES
from kprof.trace import Trace, once_per_trace

Floats = NDArray[np.float64]

# A file may claim any size.
MOST = 2**53

_REDUCE_SCATTER = re.compile(r"_?reduce_?scatter")
_ALL_GATHER = re.compile(r"_?all_?gather")
_ALL_REDUCE = re.compile(r"_?all_?reduce")


def measure_collectives(trace: Trace) -> pd.DataFrame:
    """Add up collectives by process group and operation, those with most exposed time first.

    Columns: `group`, `collective`, `calls`, `time_ns`, `exposed_ns` and `hidden_ns` of all ranks;
    the medians of the columns of `transfers` that are numbers. Where some ranks are in detail and
    steps are marked, calls outside of steps are left out.
    """
    everyone = trace.all_ranks or trace
    calls = transfers(trace)
    row = calls["row"].to_numpy(np.int64)
    calls = calls.assign(
        time_ns=everyone.kernels["duration_ns"].to_numpy(np.int64)[row],
        exposed_ns=allotted_time(everyone)[row],
    )
    groups = calls.groupby(["group", "collective"], observed=True)
    sums = groups[["time_ns", "exposed_ns"]].sum()
    sums.insert(0, "calls", groups.size())
    sums["hidden_ns"] = sums["time_ns"] - sums["exposed_ns"]
    rates = ["algorithm_bytes_per_s", "bus_bytes_per_s", "ceiling_bytes_per_s"]
    table = sums.join(groups[["transfer_ns", *rates]].median()).reset_index()
    table = table.sort_values("exposed_ns", ascending=False, kind="stable", ignore_index=True)
    found: pd.DataFrame = table
    return found


@once_per_trace
def transfers(trace: Trace) -> pd.DataFrame:
    """Return every call of a collective on all ranks, how long its transfer took and how fast.

    The last rank to come does not wait, so the transfer takes as long as its kernel. Columns: `row`
    in the tables of all ranks, `group`, `collective`; `transfer_ns`, missing where the call was
    recorded on one rank; `algorithm_bytes_per_s` and `bus_bytes_per_s`, missing without a message
    or a rank of the group; `ceiling_bytes_per_s`, the bus bandwidth that was measured: of the same
    number of GPUs of one host, else missing.
    """
    everyone = trace.all_ranks or trace
    kernels = everyone.kernels
    rows = np.flatnonzero((kernels["collective"].notna() & kernels["group"].notna()).to_numpy(bool))
    calls = kernels.iloc[rows][["group", "collective"]].reset_index(drop=True)
    transfer_ns, num_ranks = np.full(len(kernels), np.nan), np.zeros(len(kernels), np.int64)
    ceiling = np.full(len(kernels), np.nan)
    waits = collective_waits(everyone)
    if waits is not None:
        row = waits["row"].to_numpy(np.int64)
        duration = kernels["duration_ns"].to_numpy(np.int64)[row]
        transfer_ns[row] = duration - waits["waiting_ns"].to_numpy(np.int64)
        together = waits.groupby(["group", "number", "collective"], observed=True)["rank"]
        num_ranks[row] = together.transform("nunique").to_numpy(np.int64)
        ceiling[row] = waits["group"].map(_ceilings(trace, waits)).to_numpy(float)
    algorithm, bus = _bytes_per_s(messages(everyone)[rows], transfer_ns[rows], num_ranks[rows])
    found: pd.DataFrame = calls.assign(
        row=rows,
        transfer_ns=transfer_ns[rows],
        algorithm_bytes_per_s=algorithm,
        bus_bytes_per_s=bus,
        ceiling_bytes_per_s=ceiling[rows],
    )
    return found


def messages(trace: Trace) -> pd.Categorical:
    """Return the message of the collective that each activity is; missing for all others."""
    kernels, ranges = trace.kernels, trace.ranges
    if "message" in kernels:
        return pd.Categorical(kernels["message"])
    if "op_row" not in kernels or not len(ranges):
        return pd.Categorical([None] * len(kernels), categories=pd.Index([], dtype=str))
    told = ranges["message"].cat
    operator = kernels["op_row"].to_numpy(np.int64, na_value=-1)
    is_told = (operator >= 0) & kernels["collective"].notna().to_numpy(bool)
    codes = np.where(is_told, told.codes.to_numpy()[operator], -1)
    return pd.Categorical.from_codes(codes, told.categories)


def _ceilings(trace: Trace, waits: pd.DataFrame) -> dict[str, float]:
    """Return the measured bus bandwidth of each process group whose links were measured."""
    links = trace.meta.device.links if trace.meta.device else None
    hosts = dict((trace.all_ranks or trace).meta.hosts)
    found = {}
    for group, ranks in waits.groupby("group", observed=True)["rank"].unique().items():
        own = {hosts.get(rank) for rank in ranks.tolist()}
        is_measured = links and len(ranks) == links.num_gpus and len(own) == 1 and None not in own
        found[str(group)] = links.bus_bytes_per_s if links and is_measured else np.nan
    return found


def _bytes_per_s(
    message: pd.Categorical, transfer_ns: Floats, num_ranks: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return algorithm and bus bandwidth of each call; NaN where either cannot be told.

    Where a rank of the group was not recorded, it may have been the last one to come.
    """
    # A row without a message has the code -1, which reads the last.
    table = np.array([*(_bytes_of(str(one)) for one in message.categories), (np.nan,) * 3])
    num_bytes, share, of_group = table[message.codes].T
    is_known = (of_group == num_ranks) & (transfer_ns > 0)
    rate = np.full(len(message), np.nan)
    rate[is_known] = num_bytes[is_known] / (transfer_ns[is_known] * 1e-9)
    return rate, rate * share


def _bytes_of(message: str) -> tuple[float, float, float]:
    """Return a message's bytes, the share of them that a link carries, and its number of ranks."""
    name, given, got, dtype, num_ranks = json.loads(message)
    missing = (np.nan, np.nan, np.nan)
    sizes = (given, got, num_ranks)
    if not all(isinstance(one, int) and 0 <= one < MOST for one in sizes) or not num_ranks:
        return missing
    if not (isinstance(name, str) and isinstance(dtype, str)) or dtype not in TYPES:
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
    return float(elements * size_bytes(TYPES[dtype])), share, float(num_ranks)
