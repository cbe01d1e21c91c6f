"""Where to look: the operator, module and Python line behind each piece of idle time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import Host
from kprof.analyze.idle.pieces import CODES, LATE, Evidence, Pieces
from kprof.analyze.intervals import NOTHING
from kprof.analyze.nesting import nearest, parents

# A function of a file, as torch's profiler names it, and what is Python's or torch's own.
FUNCTION = re.compile(r"\.py\(\d+\): ")
NOT_THE_WORKLOADS = re.compile(
    r"site-packages|dist-packages|^torch/|/torch/|^<|kprof_recorder|sitecustomize"
    r"|^(?:abc|contextlib|copy|functools|inspect|queue|selectors|threading|typing)\.py"
    r"|^(?:asyncio|collections|concurrent|encodings|importlib|json|logging|multiprocessing)/"
)


@dataclass(frozen=True)
class Places:
    """Of each piece its evidence in `ranges` and the names of what is around it."""

    row: np.ndarray
    place: pd.Categorical
    module: pd.Categorical
    line: pd.Categorical


def find_places(evidence: Evidence, pieces: Pieces) -> Places:
    """Find where each piece's cause lies.

    Where a call proves the cause, that call's operator; where the host was merely late, what ran
    on its thread in the middle of the piece.
    """
    host, ranges = evidence.host, evidence.trace.ranges
    if not len(ranges):
        nothing = np.full(len(pieces.row), NOTHING)
        return Places(nothing, *(_names(ranges, nothing) for _ in range(3)))
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    is_late = pieces.cause == LATE
    middle = pieces.start + (pieces.end - pieces.start) // 2
    of_thread = evidence.thread_row()[pieces.gap]
    tells = np.flatnonzero(ranges["kind"].isin(["op", "module", "range", "phase", "step"]))
    running = innermost(host, tells, parent, np.where(is_late, of_thread, NOTHING), middle)
    row = np.where(is_late & (running != NOTHING), running, pieces.row)
    # A wait is asked about where it began: how the host got there.
    asks = is_late | (row == NOTHING)
    thread, moment = np.where(asks, of_thread, row), np.where(asks, middle, host.start[row])
    # What the device needs for itself has no place on the host.
    thread = np.where(pieces.cause == CODES[causes.BETWEEN_KERNELS], NOTHING, thread)
    is_module = (ranges["kind"] == "module").to_numpy(bool)
    return Places(
        row,
        _names(ranges, _named(ranges, parent, row)),
        _names(ranges, nearest(row, parent, is_module)),
        _names(ranges, _workloads_function(host, thread, moment)),
    )


def _named(ranges: pd.DataFrame, parent: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return what to name: the operator around a call, or the call itself; no step."""
    kind = ranges["kind"]
    is_call, is_step = (np.append((kind == k).to_numpy(bool), False) for k in ("runtime", "step"))
    tells = kind.isin(["op", "module", "range", "phase"]).to_numpy(bool)
    around = nearest(
        np.where(is_call[row], np.append(parent, NOTHING)[row], NOTHING), parent, tells
    )
    named = np.where(around == NOTHING, row, around)
    return np.where(is_step[named], NOTHING, named)


def _workloads_function(host: Host, thread: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Return the innermost Python function of the workload itself at each moment on a thread."""
    ranges = host.trace.ranges
    rows = np.flatnonzero((ranges["kind"] == "python").to_numpy(bool))
    if not len(rows):
        return np.full(len(thread), NOTHING)
    parent = parents(ranges, rows)
    names = [str(name) for name in ranges["name"].cat.categories]
    is_own = [bool(FUNCTION.search(n)) and not NOT_THE_WORKLOADS.search(n) for n in names]
    wanted = np.append(np.array(is_own, dtype=bool), False)[ranges["name"].cat.codes.to_numpy()]
    return nearest(innermost(host, rows, parent, thread, moment), parent, wanted)


def innermost(
    host: Host, rows: np.ndarray, parent: np.ndarray, thread: np.ndarray, moment: np.ndarray
) -> np.ndarray:
    """Return which of `rows` was open innermost at each moment on a thread, or `NOTHING`.

    `thread` holds rows of `ranges` on the thread that is asked about, or `NOTHING`.
    """
    result = np.full(len(moment), NOTHING, dtype=np.int64)
    asked = np.flatnonzero(thread != NOTHING)
    pairs = [(host.rank[of], host.thread[of]) for of in (rows, thread[asked])]
    for rank, each in np.unique(np.vstack(pairs[1]), axis=1).T.tolist():
        part = rows[(pairs[0][0] == rank) & (pairs[0][1] == each)]
        part = part[np.lexsort([-host.end[part], host.start[part]])]
        mine = asked[(pairs[1][0] == rank) & (pairs[1][1] == each)]
        at = np.searchsorted(host.start[part], moment[mine], side="right") - 1
        result[mine] = np.append(part, NOTHING)[at]
    climbing = asked[result[asked] != NOTHING]
    while len(climbing):
        climbing = climbing[host.end[result[climbing]] <= moment[climbing]]
        result[climbing] = parent[result[climbing]]
        climbing = climbing[result[climbing] != NOTHING]
    return result


def _names(ranges: pd.DataFrame, rows: np.ndarray) -> pd.Categorical:
    """Return the names of rows; that of `NOTHING` is missing."""
    names = ranges["name"].cat
    codes = np.append(names.codes.to_numpy(), NOTHING)[rows]
    column: pd.Categorical = pd.Categorical.from_codes(codes, names.categories)
    used: pd.Categorical = column.remove_unused_categories()
    return used
