"""Evidence: the questions that rules ask of a trace."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.call_tree import NO_ROW, nearest
from kprof.analyze.attribution.steps import (
    count_steps_or_gpus,
    outside_steps,
    step_rows,
    whole_ns,
)
from kprof.analyze.capture_quality.unanswered import Unanswered
from kprof.analyze.groupings import number_rows
from kprof.analyze.idle.causes import ALLOCATING_CALL, SYNCHRONIZING_CALL
from kprof.analyze.idle.host_state import matching
from kprof.analyze.intervals import LAST_NS, Intervals, disjoint, length_in
from kprof.trace import Trace, once_per_trace

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]

# No tensor has more; a damaged file may say so.
MOST_ELEMENTS = 2**48


def in_categories(column: pd.Series[Any], chosen: Bools) -> Bools:
    """Tell which rows hold one of the chosen categories of a column; missing values do not."""
    return np.asarray(np.append(chosen, False)[column.cat.codes.to_numpy()], dtype=bool)


def is_one_of(column: pd.Series[Any], *values: str) -> Bools:
    """Tell which rows hold one of these values; one that ends in `*` stands for its beginning."""
    exact = {value for value in values if not value.endswith("*")}
    begins = tuple(value[:-1] for value in values if value.endswith("*"))
    names = [str(name) for name in column.cat.categories]
    chosen = [name in exact or (bool(begins) and name.startswith(begins)) for name in names]
    return in_categories(column, np.array(chosen, dtype=bool))


def matches(column: pd.Series[Any], pattern: str) -> Bools:
    """Tell which rows hold a name in which `pattern` occurs, asking once for each name."""
    compiled = re.compile(pattern)
    names = column.cat.categories
    return in_categories(column, np.array([bool(compiled.search(str(n))) for n in names], bool))


OF_TORCH = r"\b(?:at|c10|torch)::"


def is_of_torch(trace: Trace) -> bool:
    """Tell whether the program uses torch, by the profiler, its operators or its kernels.

    Nsight Systems records any program; the other profilers are torch's or Triton's.
    """
    if trace.meta.tool != "nsys" or (trace.ranges["kind"] == "op").any():
        return True
    return bool(matches(trace.kernels["name"], OF_TORCH).any())


def sizes_of(column: pd.Series[Any]) -> Int64s:
    """Return how many blocks grids have, or threads blocks; 0 where that was not recorded."""
    sizes = [_size(str(text)) for text in column.cat.categories]
    return np.asarray(np.array([*sizes, 0], dtype=np.int64)[column.cat.codes.to_numpy()])


def _size(dimensions: str) -> int:
    parts = dimensions.strip("[]() ").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        return 0
    return int(np.prod([min(int(part), 2**31) for part in parts], dtype=np.int64))


def durations(trace: Trace) -> Int64s:
    """Return how long each activity took."""
    return trace.kernels["duration_ns"].to_numpy(np.int64)


def limits(trace: Trace) -> Int64s:
    """Return each activity's time at the roofline; where that is not known, the time it took."""
    limit = trace.kernels["limit_ns"].to_numpy(np.int64, na_value=NO_ROW)
    took = durations(trace)
    return np.where(limit == NO_ROW, took, np.minimum(limit, took))


def exposed_ns(trace: Trace, chosen: Bools) -> Int64s:
    """Return for each chosen activity how long only such ran; each instant counts once."""
    kernels, took = trace.kernels, durations(trace)
    start = kernels["start_ns"].to_numpy(np.int64)
    device = number_rows(kernels, ["rank", "device"])
    total = np.zeros(len(kernels), dtype=np.int64)
    for one in np.unique(device[chosen]):
        mine = np.flatnonzero(chosen & (device == one))
        others = np.flatnonzero(~chosen & (device == one))
        union = disjoint(Intervals(start[mine], start[mine] + took[mine], mine))
        busy = disjoint(Intervals(start[others], start[others] + took[others], others))
        hidden = length_in(busy, union.start, union.end)
        np.add.at(total, union.row, union.end - union.start - hidden)
    return np.asarray(total[chosen])


def total_ns(trace: Trace, rows: Bools | Int64s) -> int:
    """Return the device time of some rows."""
    return int(durations(trace)[rows].sum())


def share_of_device(trace: Trace, rows: Bools | Int64s) -> float:
    """Return the share of the device time that lies in some rows."""
    spent = total_ns(trace, ~outside_steps(trace))
    return total_ns(trace, rows) / max(spent, 1)


def count_steps(trace: Trace) -> int:
    """Return how many steps were recorded, of all GPUs together; 1 of each where none is marked."""
    return count_steps_or_gpus(trace)


def count_host_steps(trace: Trace) -> int:
    """Return how many steps hosts took, of all ranks together; 1 of each where none is marked."""
    return len(step_rows(trace.ranges)) or max(int(trace.kernels["rank"].nunique()), 1)


def whole_of(trace: Trace) -> str:
    """Return what times are of: a step, else the window, or all device time where none is known."""
    if not trace.has_timeline:
        return "the device time"
    return "a step" if len(step_rows(trace.ranges)) else "the window"


def per_step(trace: Trace, time_ns: float) -> float:
    """Return the part of a time that falls on one step of one GPU."""
    return time_ns / count_steps(trace)


def share_of_whole(trace: Trace, time_ns: float) -> float:
    """Return a time of all GPUs as a share of a step, or of the window where none is marked."""
    return per_step(trace, time_ns) / max(whole_ns(trace), 1)


def idle_of(
    trace: Trace, cause: str, least_ns: int = 0, most_ns: int = LAST_NS
) -> tuple[Int64s, int]:
    """Return the pieces of idle time of a cause, and how long they are together.

    Only pieces in which the host was silent for at least `least_ns` and less than `most_ns` count.
    The ends of the steps count, where no activity has begun yet or all have ended: a step lasts
    from the host's entry into it.
    """
    idle = trace.idle
    took = idle["duration_ns"].to_numpy(np.int64)
    mine = np.flatnonzero((idle["cause"] == cause).to_numpy(bool))
    if least_ns > 0 or most_ns < LAST_NS:
        silent_ns = np.maximum(_silences_ns(trace, mine), took[mine])
        mine = mine[(silent_ns >= least_ns) & (silent_ns < most_ns)]
    return mine, int(took[mine].sum())


def _silences_ns(trace: Trace, rows: Int64s) -> Int64s:
    """Return how long the host made no call before the launch that ended each piece of idle time.

    Calls are launches and what waits or allocates, of any thread of the rank. A device may have
    been busy for a part of that time. 0 where no launch is known.
    """
    ended_by = trace.idle["kernel_row"].to_numpy(np.int64, na_value=NO_ROW)[rows]
    return np.asarray(_silences_before(trace)[ended_by])


@once_per_trace
def _silences_before(trace: Trace) -> Int64s:
    """Return the silence before the launch of each activity, and 0 in one more entry at the end."""
    ranges = trace.ranges
    launch = np.append(trace.kernels["launch_row"].to_numpy(np.int64, na_value=NO_ROW), NO_ROW)
    waiting = [matching(ranges, "runtime", p) for p in (SYNCHRONIZING_CALL, ALLOCATING_CALL)]
    calls = np.unique(np.concatenate([launch[launch != NO_ROW], *waiting]))
    begins = ranges["start_ns"].to_numpy(np.int64)
    ends = begins + ranges["duration_ns"].to_numpy(np.int64)
    rank = ranges["rank"].to_numpy(np.int64)
    silent_ns = np.zeros(len(launch), dtype=np.int64)
    for one in np.unique(rank[calls]):
        of = calls[rank[calls] == one]
        of = of[np.argsort(begins[of], kind="stable")]
        until = np.maximum.accumulate(ends[of])
        at = np.flatnonzero((launch != NO_ROW) & (rank[launch] == one))
        before = np.searchsorted(begins[of], begins[launch[at]], side="left") - 1
        silent = begins[launch[at]] - until[before]
        silent_ns[at] = np.where(before >= 0, np.maximum(silent, 0), 0)
    return silent_ns


def inside_op(trace: Trace, *names: str) -> Bools:
    """Tell which activities were launched within an operator of one of these names."""
    ranges = trace.ranges
    if not len(ranges):
        return np.zeros(len(trace.kernels), dtype=bool)
    wanted = is_one_of(ranges["name"], *names)
    if not wanted.any():
        return np.zeros(len(trace.kernels), dtype=bool)
    op = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NO_ROW)
    return np.asarray(nearest(op, parent, wanted) != NO_ROW)


def _decoded(text: str) -> list[object] | None:
    try:
        shapes = json.loads(text)
    except ValueError:
        return None
    return shapes if isinstance(shapes, list) else None


def by_shapes(
    trace: Trace,
    rows: Int64s,
    measure: Callable[[list[object]], Sequence[int]],
    width: int,
    column: str = "input_shapes",
) -> Int64s:
    """Return `width` numbers for each row from its operator's shapes; zeros where unknown.

    Each distinct text of shapes is measured once. Another column has other lists, as of strides.
    """
    op = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)[rows]
    texts = trace.ranges[column].cat
    codes = np.append(texts.codes.to_numpy(), -1)[op]
    table = np.zeros((len(texts.categories) + 1, width), dtype=np.int64)
    for code in np.unique(codes[codes >= 0]).tolist():
        shapes = _decoded(str(texts.categories[code]))
        if shapes is not None:
            table[code] = [min(number, MOST_ELEMENTS) for number in measure(shapes)]
    return np.asarray(table[codes])


def elements_of(trace: Trace, rows: Int64s) -> Int64s:
    """Return how many elements the first input of each row's operator has; 0 where unknown."""
    return np.asarray(by_shapes(trace, rows, lambda shapes: [count_elements(shapes)], 1)[:, 0])


def count_elements(shapes: list[object]) -> int:
    """Return the elements of the first of an operator's inputs, 0 where that is not known."""
    first = shape_of(shapes[0]) if shapes else ()
    return math.prod(first) if first else 0


def shape_of(recorded: object) -> tuple[int, ...]:
    """Return what was recorded of an input as its dimensions; empty where it is no tensor."""
    if not isinstance(recorded, list) or not all(type(n) is int and n >= 0 for n in recorded):
        return ()
    return tuple(recorded)


def why_no_device(trace: Trace) -> Unanswered | None:
    """Say why nothing can be told of a device: none was recorded."""
    if not trace.is_host_only:
        return None
    return Unanswered(
        "What does the GPU wait for, and which of its kernels are slow?",
        "no GPU activity was recorded",
        "record where the workload uses a GPU",
    )
