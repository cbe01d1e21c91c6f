"""Counters of a second run, joined to the launches of the first by kernel, size, order."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from kprof.collect.readers.ncu.launches import Launch, counted_columns
from kprof.collect.readers.ncu.program import EXPORT
from kprof.collect.readers.ncu.table import read_table
from kprof.trace import Caveat, Trace

COUNTED_ELSEWHERE = (
    "Counters are of another run of the same command, in which Nsight Compute ran each kernel "
    "alone, with caches flushed before it and clocks left alone; times are of the recording."
)

_ANONYMOUS = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")
Key = tuple[str, str, str]


def with_counters(trace: Trace, raw: Path) -> Trace:
    """Give the launches of a recording what Nsight Compute counted in another run of it, if any.

    A launch's place is its number among those of the same function over the same grid and block:
    demanglers spell templates differently, so they do not count.
    """
    if not (raw / EXPORT).is_file():
        return trace
    launches = list(read_table(raw / EXPORT).launches)
    rows, places = match(trace.kernels, launches)
    columns = {}
    for name, values in counted_columns(launches).items():
        column = trace.kernels[name].copy()
        column.iloc[rows] = values.iloc[places].array
        columns[name] = column
    caveats = [*trace.meta.caveats, Caveat("counted_elsewhere", COUNTED_ELSEWHERE)]
    if lost := len(launches) - len(rows):
        unmatched = (
            f"Launches that were counted, but have no counterpart in the recording: {lost:,} of "
            f"{len(launches):,}."
        )
        caveats.append(Caveat("unmatched_counts", unmatched))
    meta = replace(trace.meta, caveats=tuple(caveats))
    return replace(trace.with_kernels(**columns), meta=meta)


def match(kernels: pd.DataFrame, launches: list[Launch]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of `kernels`, and the launches that are the same ones in the other run."""
    waiting: dict[Key, deque[int]] = defaultdict(deque)
    for place, launch in enumerate(launches):
        key = function_in(launch.name), launch.grid or "", launch.block or ""
        waiting[key].append(place)
    order = np.argsort(kernels["start_ns"].to_numpy(), kind="stable")
    rows, places = [], []
    for row, key in zip(order.tolist(), _keys(kernels.iloc[order]), strict=True):
        if waiting[key]:
            rows.append(row)
            places.append(waiting[key].popleft())
    return np.array(rows, dtype=np.int64), np.array(places, dtype=np.int64)


def function_in(name: str) -> str:
    """Return the bare name of a kernel's function: no namespace, template, type or argument.

    `void at::native::reduce<4, Op<float>>(int)` is `reduce`.
    """
    name = _ANONYMOUS.sub("", name)
    depth, kept = 0, []
    for character in name:
        if character == "(" and not depth:
            break
        if character == "<":
            depth += 1
        if not depth:
            kept.append(character)
        if character == ">":
            depth -= 1
    return "".join(kept).rpartition("::")[2].split(" ")[-1]


def _keys(ordered: pd.DataFrame) -> Iterable[Key]:
    functions = {name: function_in(str(name)) for name in ordered["name"].cat.categories}
    sizes = (ordered[what].astype(object).fillna("") for what in ("grid", "block"))
    return zip((functions[name] for name in ordered["name"]), *sizes, strict=True)
