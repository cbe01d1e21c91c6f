"""Groupings of a trace's device time: by kind, phase, kernel, module, operator.

Everything here is a sum over rows of `kernels`; nothing is estimated. A group's `time_ns` is the
sum of its durations, except in `split_window`, which splits the elapsed time and so counts every
instant once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.attribution.ledger import num_launches
from kprof.analyze.attribution.overlap import Int64s, allotted_time, rows_by
from kprof.trace import Trace, once_per_table, pairs_in

# A part of a path that is a number, or torch's own `Linear_12` where no path is known.
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)|^(?P<type>[A-Z]\w*_)\d+$")


def measure_window(kernels: pd.DataFrame) -> int:
    """Return the elapsed time, from first start to last end, added up over the ranks."""
    return sum(elapsed_ns for elapsed_ns, _ in _windows(kernels))


def measure_elapsed(kernels: pd.DataFrame) -> int:
    """Return the elapsed time of the rank that took longest, from first start to last end."""
    return max((elapsed_ns for elapsed_ns, _ in _windows(kernels)), default=0)


def measure_capacity(kernels: pd.DataFrame) -> int:
    """Return the elapsed time of every GPU used: a rank's window once for each of its GPUs.

    It is the window of the ledger.
    """
    device = kernels["device"].to_numpy()
    return sum(ns * len(np.unique(device[rows])) for ns, rows in _windows(kernels))


def _windows(kernels: pd.DataFrame) -> list[tuple[int, np.ndarray]]:
    """Return the elapsed time of each rank, with its rows."""
    starts = kernels["start_ns"].to_numpy(np.int64)
    ends = starts + kernels["duration_ns"].to_numpy(np.int64)
    by_rank = rows_by(kernels, "rank")
    return [(int(ends[rows].max() - starts[rows[0]]), rows) for rows in by_rank]


@once_per_table
def gpus_used(kernels: pd.DataFrame) -> tuple[tuple[int, int], ...]:
    """Return rank and device of each GPU that was used; in host mode of each rank."""
    return pairs_in(kernels, "rank", "device")


def count_gpus(kernels: pd.DataFrame) -> int:
    """Return how many GPUs were used, a rank's own each; in host mode the number of ranks."""
    return len(gpus_used(kernels))


def split_window(
    trace: Trace,
    left_out: np.ndarray | None = None,
    idle_ns: np.ndarray | None = None,
    total_ns: int | None = None,
) -> pd.DataFrame:
    """Split every device's time by phase and by what it did: exact, adding up to the window.

    Columns: `phase` and `part` (a kind, or the cause of idle time; missing where unknown),
    `is_idle`, `time_ns`. Idle time belongs to the phase of the activity that ended it.
    `split_steps` gives the rows of `kernels` to leave out, how much of each row of `idle` counts,
    and the total.
    """
    kernels = trace.kernels
    allotted = allotted_time(trace)
    if left_out is not None:
        allotted = np.where(left_out, 0, allotted)
    if idle_ns is None:
        is_inside = trace.idle["edge"].isna().to_numpy(bool)
        idle_ns = np.where(is_inside, trace.idle["duration_ns"].to_numpy(np.int64), 0)
    if total_ns is None:
        total_ns = measure_capacity(kernels)
    unexplained_ns = total_ns - int(allotted.sum()) - int(idle_ns.sum())
    busy = _sum_time(kernels, ["phase", "kind"], allotted).rename(columns={"kind": "part"})
    gaps, gaps_ns = trace.idle[idle_ns > 0], idle_ns[idle_ns > 0]
    ended_by = gaps["kernel_row"].to_numpy(np.int64, na_value=-1)
    phases = kernels["phase"].cat
    by_phase = _from_codes(
        np.append(phases.codes.to_numpy(), -1)[ended_by], phases.categories.tolist(), gaps.index
    )
    named = pd.DataFrame({"phase": by_phase, "part": gaps["cause"]})
    idle = _sum_time(named, ["phase", "part"], gaps_ns)
    rest = pd.DataFrame({"phase": [None], "part": [None], "time_ns": [unexplained_ns]})
    pieces = [busy.assign(is_idle=False), idle.assign(is_idle=True), rest.assign(is_idle=True)]
    rows = pd.concat([piece.astype({"phase": object, "part": object}) for piece in pieces])
    groups = rows.groupby(["phase", "part", "is_idle"], dropna=False, as_index=False)
    split: pd.DataFrame = groups["time_ns"].sum()
    nonzero = split[split["time_ns"] != 0].reset_index(drop=True)
    # A key that is missing everywhere comes out of the grouping as a column of floats.
    plain: pd.DataFrame = nonzero.astype({"phase": object, "part": object})
    return plain


def _sum_time(kernels: pd.DataFrame, by: Sequence[str], time_ns: Int64s) -> pd.DataFrame:
    """Add up `time_ns`, one value a row, by the columns `by`; missing values form a group."""
    number, keys = number_groups(kernels, by)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, number, time_ns)
    added: pd.DataFrame = keys.assign(time_ns=sums)
    return added


def number_groups(table: pd.DataFrame, by: Sequence[str]) -> tuple[Int64s, pd.DataFrame]:
    """Return the group of each row by the columns `by`, and the values of these in each group."""
    number = number_rows(table, by)
    first = np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))
    return number, table[list(by)].iloc[first].reset_index(drop=True)


def number_rows(table: pd.DataFrame, by: Sequence[str]) -> Int64s:
    """Return the group of each row by the columns `by`; missing values form a group.

    Groups are numbered in the order in which they begin. Numbers of categories take less time to
    group than their names.
    """
    number = np.zeros(len(table), dtype=np.int64)
    for column in by:
        values = table[column]
        is_categorical = isinstance(values.dtype, pd.CategoricalDtype)
        codes = values.cat.codes.to_numpy(np.int64) if is_categorical else pd.factorize(values)[0]
        number = pd.factorize(number * (codes.max(initial=-1) + 2) + codes + 1)[0]
    return number


def group_kernels(kernels: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Add up the rows by the columns `by`, longest group first; missing values form a group.

    Columns: `calls`, `time_ns`, `share` (of all rows' time), `flops`, `bytes`, `limit_ns` (each
    missing where no row of the group has one), `limited_time_ns` (time of the rows that have a
    limit), `saving_ns` (time saved at the limit by the rows that have one; missing where none has),
    `is_least` (whether the limit of any of them rests on a minimum of the work: the limit is a
    minimum then, and the saving a maximum).
    """
    return longest_first(_sum_groups(kernels, by), by)


def _sum_groups(kernels: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Add up the rows by the columns `by`, in the order in which the groups begin."""
    time_ns = kernels["duration_ns"].to_numpy(np.int64)
    has_limit = kernels["limit_ns"].notna().to_numpy()
    over_ns = (kernels["duration_ns"].astype("Int64") - kernels["limit_ns"]).clip(lower=0)
    values = kernels[["flops", "bytes", "limit_ns"]].assign(
        calls=_count_calls(kernels),
        time_ns=time_ns,
        limited_time_ns=np.where(has_limit, time_ns, 0),
        saving_ns=over_ns,
        is_least=has_limit & (kernels["work_bound"] == "at least").to_numpy(bool),
    )
    number, keys = number_groups(kernels, by)
    groups = values.groupby(number, sort=False)
    sums: pd.DataFrame = groups[["calls", "time_ns", "limited_time_ns"]].sum()
    sums = sums.join(groups[["saving_ns", "flops", "bytes", "limit_ns"]].sum(min_count=1))
    sums["is_least"] = groups["is_least"].any()
    sums["share"] = sums["time_ns"] / max(int(time_ns.sum()), 1)
    with_keys: pd.DataFrame = pd.concat([keys, sums], axis=1)
    return with_keys


def _count_calls(kernels: pd.DataFrame) -> Int64s:
    """Return how many launches a row is; in host mode 1 for the first piece of an operator."""
    is_host = (kernels["activity"] == "host").to_numpy(bool)
    if not is_host.any():
        return num_launches(kernels)
    return np.where(is_host & kernels["op_row"].duplicated(), 0, num_launches(kernels))


def longest_first(groups: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Order groups by time, ties by their keys, not by which came first in the file."""
    named = groups.sort_values(list(by), key=lambda keys: keys.astype(str))
    ordered: pd.DataFrame = named.sort_values(
        "time_ns", ascending=False, kind="stable", ignore_index=True
    )
    return ordered


def find_dominant(kernels: pd.DataFrame, by: str, column: str) -> dict[Any, str]:
    """Return for each value of `by` the value of `column` in which most of its time lies."""
    sums = _sum_time(kernels, [by, column], kernels["duration_ns"].to_numpy(np.int64))
    sums = sums.dropna().sort_values("time_ns", kind="stable")
    return dict(zip(sums[by].tolist(), sums[column].tolist(), strict=True))


def collapse_layers(modules: pd.Series[Any]) -> pd.Series[Any]:
    """Return the names with every layer number replaced: `layers.3.mlp` becomes `layers.*.mlp`."""
    categories = [
        _LAYER_INDEX.sub(lambda found: (found["type"] or "") + "*", str(name))
        for name in modules.cat.categories
    ]
    names, positions = np.unique(np.array(categories, dtype=object), return_inverse=True)
    # A row without a module has code -1, which picks the entry appended at the end: -1 again.
    codes = np.append(positions, -1)[modules.cat.codes.to_numpy()]
    return _from_codes(codes, names.tolist(), modules.index)


def _from_codes(codes: Int64s, categories: list[str], index: pd.Index[Any]) -> pd.Series[Any]:
    """Return a categorical column; code -1 is a missing value."""
    column: pd.Series[Any] = pd.Series(
        pd.Categorical.from_codes(codes, pd.Index(categories)), index=index
    )
    return column


@once_per_table
def group_modules(kernels: pd.DataFrame) -> pd.DataFrame:
    """Add up the rows by module, longest first; rows without a module form a group.

    Columns as in `group_kernels`, and `forward_ns`, `backward_ns` (each missing where the phase of
    no row is known) and `op`, the operator in which most of the module's time lies.
    """
    sums = _sum_groups(kernels, ["module"])
    number, _ = number_groups(kernels, ["module"])
    for phase in ("forward", "backward"):
        time_ns = kernels["duration_ns"].astype("Int64").where(kernels["phase"] == phase, 0)
        told = time_ns.mask(kernels["phase"].isna())
        sums[f"{phase}_ns"] = told.groupby(number, sort=False).sum(min_count=1).array
    groups = longest_first(sums, ["module"])
    ops = find_dominant(kernels, "module", "op")
    groups["op"] = pd.Series([ops.get(name) for name in groups["module"].tolist()], dtype=object)
    return groups


def group_operators(trace: Trace) -> pd.DataFrame:
    """Add up the rows by kernel name, operator and the operator's input shapes, longest first.

    Columns as in `group_kernels`, and `shapes`, `kind` and `bound`.
    """
    kernels = trace.kernels
    shapes = trace.ranges["input_shapes"].cat
    op_row = kernels["op_row"].to_numpy(np.int64, na_value=-1)
    # The operators' shapes are looked up by code; a row without an operator has code -1.
    codes = np.append(shapes.codes.to_numpy(), -1)[op_row]
    signature = _from_codes(codes, shapes.categories.tolist(), kernels.index)
    by = ["name", "op", "shapes", "kind", "bound"]
    return group_kernels(kernels.assign(shapes=signature), by)
