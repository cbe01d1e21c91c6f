"""Which range stands inside which: the call tree of every host thread, as parent rows."""

from __future__ import annotations

import numpy as np
import pandas as pd

NO_ROW = -1

# Of two ranges that begin and end together, the one named first here is the outer one.
OUTER_FIRST = ("step", "phase", "module", "range", "op", "runtime")


def nesting_order(ranges: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
    """Return `rows` sorted by thread and start, with enclosing ranges before enclosed ones."""
    kind_rank = np.array(
        [OUTER_FIRST.index(k) if k in OUTER_FIRST else 99 for k in ranges["kind"].cat.categories],
        dtype=np.int8,
    )
    kind = kind_rank[ranges["kind"].cat.codes.to_numpy()[rows]]
    start = ranges["start_ns"].to_numpy()[rows]
    duration = ranges["duration_ns"].to_numpy()[rows]
    thread = ranges["thread"].to_numpy()[rows]
    rank = ranges["rank"].to_numpy()[rows]
    return np.asarray(rows[np.lexsort([kind, -duration, start, thread, rank])])


def parents(ranges: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
    """Return for every row of `ranges` the row of the innermost range open when it begins.

    Only `rows` take part; runtime calls get a parent but are nobody's parent. A range that
    outlives the one it began in keeps it as its parent: host ranges may cross by some ns.
    Rows without a parent hold `NO_ROW`.
    """
    order = nesting_order(ranges, rows)
    runtime = ranges["kind"].cat.categories.get_indexer(pd.Index(["runtime"]))[0]
    start = ranges["start_ns"].to_numpy()[order]
    end = start + ranges["duration_ns"].to_numpy()[order]
    thread = ranges["thread"].to_numpy()[order]
    rank = ranges["rank"].to_numpy()[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (thread[1:] != thread[:-1]) | (rank[1:] != rank[:-1])

    # The last one before it on its thread that can enclose others, by its place in `order`.
    place = np.arange(len(order))
    encloses = ranges["kind"].cat.codes.to_numpy()[order] != runtime
    last = np.append(NO_ROW, place[encloses])[np.cumsum(encloses) - encloses]
    begin_of_thread = np.maximum.accumulate(np.where(is_new, place, 0))
    found = np.where(last >= begin_of_thread, last, NO_ROW)
    # What stands between a range that is over and the one found for it is over as well, since
    # starts ascend: each round skips from there on, twice as far as the round before.
    over = np.flatnonzero(found != NO_ROW)
    while len(over):
        over = over[end[found[over]] <= start[over]]
        found[over] = found[found[over]]
        over = over[found[over] != NO_ROW]

    result = np.full(len(ranges), NO_ROW, dtype=np.int64)
    result[order] = np.where(found == NO_ROW, NO_ROW, order[found])
    return result


def nearest(start: np.ndarray, parent: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each row in `start` itself or its nearest ancestor that is `wanted`, or `NO_ROW`.

    `parent` and `wanted` (bool) have an entry for every row of the table.
    """
    current: np.ndarray = start.copy()
    climbing = np.flatnonzero(current != NO_ROW)
    climbing = climbing[~wanted[current[climbing]]]
    while len(climbing):
        current[climbing] = parent[current[climbing]]
        climbing = climbing[current[climbing] != NO_ROW]
        climbing = climbing[~wanted[current[climbing]]]
    return current


def look_up(keys: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each wanted key the last of `rows` with that key, or `NO_ROW`."""
    if not len(keys):
        return np.full(len(wanted), NO_ROW, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    hit = (at >= 0) & (keys[order][at] == wanted) & (wanted != NO_ROW)
    return np.where(hit, rows[order][at], NO_ROW)
