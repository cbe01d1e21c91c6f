"""Autograd: which forward operator made the node that a backward operator runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.nesting import NO_ROW, look_up

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
