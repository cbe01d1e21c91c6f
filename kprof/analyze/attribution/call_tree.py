"""The call tree of every host thread: parents of ranges, forward operators of nodes."""

from __future__ import annotations

import numpy as np
import pandas as pd

NO_ROW = -1

# If two ranges begin and end together, the kind named first is the outer one.
OUTER_FIRST = ("step", "phase", "module", "range", "op", "runtime", "system")
# Calls, which enclose no other range.
CALLS = ("runtime", "system")


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
    order = np.lexsort([start, thread, rank])
    # Few begin at one moment: only these are put in order by the other keys.
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in (start, thread, rank):
        same &= key[order[1:]] == key[order[:-1]]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    at = order[tied]
    keys = [kind[at], -duration[at], start[at], thread[at], rank[at]]
    order[tied] = at[np.lexsort(keys)]
    return np.asarray(rows[order])


def parents(ranges: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
    """Return for every row of `ranges` the row of the innermost range open when it begins.

    Only `rows` take part; calls get a parent but are no range's parent. A range that
    outlives the one it began in keeps it as its parent: host ranges may cross by some ns.
    Rows without a parent hold `NO_ROW`.
    """
    order = nesting_order(ranges, rows)
    calls = ranges["kind"].cat.categories.get_indexer(pd.Index(CALLS))
    start = ranges["start_ns"].to_numpy()[order]
    end = start + ranges["duration_ns"].to_numpy()[order]
    thread = ranges["thread"].to_numpy()[order]
    rank = ranges["rank"].to_numpy()[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (thread[1:] != thread[:-1]) | (rank[1:] != rank[:-1])

    # The last one before it on its thread that can enclose others, by its place in `order`.
    place = np.arange(len(order))
    codes = ranges["kind"].cat.codes.to_numpy()[order]
    encloses = (codes != calls[0]) & (codes != calls[1])
    last = np.append(NO_ROW, place[encloses])[np.cumsum(encloses) - encloses]
    begin_of_thread = np.maximum.accumulate(np.where(is_new, place, 0))
    found = np.where(last >= begin_of_thread, last, NO_ROW)
    # What stands between a range that is over and the one found for it is over as well, since
    # starts ascend: each round skips from there on, twice as far as the round before.
    over = np.flatnonzero(found != NO_ROW)
    at = found[over]
    while len(over):
        is_over = end[at] <= start[over]
        over, at = over[is_over], found[at[is_over]]
        found[over] = at
        has_one = at != NO_ROW
        over, at = over[has_one], at[has_one]

    result = np.full(len(ranges), NO_ROW, dtype=np.int64)
    result[order] = np.where(found == NO_ROW, NO_ROW, order[found])
    return result


def nearest(start: np.ndarray, parent: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each row in `start` itself or its nearest ancestor that is `wanted`, or `NO_ROW`.

    `parent` and `wanted` (bool) have an entry for every row of the table.
    """
    found: np.ndarray = np.full(len(start), NO_ROW, dtype=start.dtype)
    climbing = np.flatnonzero(start != NO_ROW) if wanted.any() else np.empty(0, dtype=np.intp)
    current = start[climbing]
    while len(climbing):
        is_found = wanted[current]
        found[climbing[is_found]] = current[is_found]
        climbing, current = climbing[~is_found], parent[current[~is_found]]
        has_parent = current != NO_ROW
        climbing, current = climbing[has_parent], current[has_parent]
    return found


def holding(rows: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Tell of every range whether one of `rows` stands in it, or is it."""
    found = np.zeros(len(parent), dtype=bool)
    while len(rows):
        rows = rows[rows != NO_ROW]
        rows = rows[~found[rows]]
        # Rows in order of time stand next to others of the same range.
        rows = rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]
        found[rows] = True
        rows = parent[rows]
    return found


def look_up(keys: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each wanted key the last of `rows` with that key, or `NO_ROW`."""
    if not len(keys):
        return np.full(len(wanted), NO_ROW, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    hit = (at >= 0) & (keys[order][at] == wanted) & (wanted != NO_ROW)
    return np.where(hit, rows[order][at], NO_ROW)


# What the engine calls the evaluation of every node, also of one that accumulates a gradient,
# which has neither number nor forward thread.
EVALUATION = "autograd::engine::evaluate_function"


def is_node(ranges: pd.DataFrame) -> np.ndarray:
    """Tell which operators autograd ran for a forward one: they name its thread and number."""
    thread = ranges["forward_thread"].fillna(0).to_numpy(dtype=np.int64)
    return np.asarray((thread > 0) & ranges["sequence"].notna().to_numpy())


def is_evaluation(ranges: pd.DataFrame) -> np.ndarray:
    """Tell which ranges are the engine's own."""
    name = ranges["name"].cat
    starts = np.array([str(n).startswith(EVALUATION) for n in name.categories] + [False])
    return np.asarray(starts[name.codes.to_numpy()])


def made_by(ranges: pd.DataFrame, nodes: np.ndarray) -> np.ndarray:
    """Return for each row of `ranges` the forward operator that made its node, or `NO_ROW`.

    Every forward thread counts its own numbers, and a node names its thread by an id of
    autograd's that no forward operator shows. So an id stands for the thread that made most of
    the numbers asked for; of equal ones for the first, as ids are given in that order.
    """
    result = np.full(len(ranges), NO_ROW, dtype=np.int64)
    sequence = ranges["sequence"].fillna(NO_ROW).to_numpy(dtype=np.int64)
    is_op = (ranges["kind"] == "op").to_numpy(dtype=bool)
    start, rank = ranges["start_ns"].to_numpy(), ranges["rank"].to_numpy()
    thread = ranges["thread"].to_numpy()
    thread_id = ranges["forward_thread"].fillna(0).to_numpy(dtype=np.int64)
    forward = np.flatnonzero(is_op & ~nodes & (sequence != NO_ROW))
    # Operators before the one that made the node may show its number too: the latest made it.
    forward = forward[np.argsort(start[forward], kind="stable")]
    for one in np.unique(rank[nodes]):
        of_rank = forward[rank[forward] == one]
        free = list(dict.fromkeys(thread[of_rank].tolist()))
        for asked_id in np.unique(thread_id[nodes & (rank == one)]):
            asked = np.flatnonzero(nodes & (rank == one) & (thread_id == asked_id))
            best = np.full(len(asked), NO_ROW, dtype=np.int64)
            chosen = None
            for candidate in free:
                made = of_rank[thread[of_rank] == candidate]
                found = look_up(sequence[made], made, sequence[asked])
                found = np.where(start[found] < start[asked], found, NO_ROW)
                if (found != NO_ROW).sum() > (best != NO_ROW).sum():
                    best, chosen = found, candidate
            result[asked] = best
            if chosen is not None:
                free.remove(chosen)
    return result
