"""Host mode: the self time of host operators as the activity, where no device was recorded."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.nesting import nesting_order
from kprof.trace import Trace, empty


def add_host_activity(trace: Trace) -> Trace:
    """Fill `kernels` from the operators' self time if the trace has no device rows.

    A row is one uninterrupted piece of an operator's own time, so the pieces of a thread never
    overlap and add up to the time in which any operator ran there. Traces with device rows
    come back as they are.
    """
    if len(trace.kernels):
        return trace
    ranges = trace.ranges
    ops = np.flatnonzero((ranges["kind"] == "op").to_numpy())
    row, start_ns, end_ns = _self_time(ranges, nesting_order(ranges, ops))
    table = empty("kernels").reindex(range(len(row)))
    table["name"] = ranges["name"].take(row).reset_index(drop=True)
    table["activity"] = pd.Categorical(["host"]).repeat(len(row))
    table["rank"] = ranges["rank"].to_numpy()[row]
    table["device"] = np.full(len(row), -1, dtype=np.int32)
    table["stream"] = ranges["thread"].to_numpy()[row]
    table["start_ns"] = start_ns
    table["duration_ns"] = end_ns - start_ns
    table["op_row"] = row
    return Trace(table, ranges, trace.samples, trace.meta)


def _self_time(
    ranges: pd.DataFrame, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, start and end of every piece of self time, walking each thread once."""
    start = ranges["start_ns"].to_numpy()[order]
    end = start + ranges["duration_ns"].to_numpy()[order]
    thread = ranges["thread"].to_numpy()[order]
    rank = ranges["rank"].to_numpy()[order]
    pieces: list[tuple[int, int, int]] = []
    open_ops: list[tuple[int, int]] = []
    clock = 0

    def run_until(moment: int | None) -> None:
        """Close what ends by `moment` and give the time up to it to the innermost open one."""
        nonlocal clock
        while open_ops and (moment is None or open_ops[-1][1] <= moment):
            op, op_end = open_ops.pop()
            if op_end > clock:
                pieces.append((op, clock, op_end))
                clock = op_end
        if open_ops and moment is not None and moment > clock:
            pieces.append((open_ops[-1][0], clock, moment))

    last: tuple[int, int] | None = None
    for op, begin, finish, on in zip(
        order.tolist(),
        start.tolist(),
        end.tolist(),
        zip(rank.tolist(), thread.tolist(), strict=True),
        strict=True,
    ):
        if on != last:
            run_until(None)
            last, clock = on, begin
        run_until(begin)
        clock = max(clock, begin)
        open_ops.append((op, finish))
    run_until(None)
    if not pieces:
        nothing = np.array([], dtype=np.int64)
        return nothing, nothing, nothing
    table = np.array(pieces, dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2]
