"""The collectives of a recording, matched across its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.trace import Trace

# Those in which every rank waits for all: no broadcast, no send, no all-to-all with empty parts.
SYMMETRIC = re.compile(r"_?(?:all_?reduce|all_?gather|reduce_?scatter|barrier)")

# Without numbers, so many more may be missing at one end than at the other.
MOST_MISSED = 256


@dataclass(frozen=True)
class Run:
    """Symmetric collectives on one rank, in the order of their starts."""

    operation: NDArray[np.object_]
    sequence: NDArray[np.int64] | None
    """Their numbers in their process group; None where the file does not tell them all."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: NDArray[np.intp] | slice) -> Run:
        """Return the collectives at these places."""
        sequence = None if self.sequence is None else self.sequence[rows]
        return Run(self.operation[rows], sequence, self.start_ns[rows], self.end_ns[rows])


Pair = tuple[Run, Run]


def runs_of(trace: Trace) -> dict[str, Run]:
    """Return the symmetric collectives of every process group that the recording names.

    A recording of several ranks has one clock already: the first rank in a group speaks for it.
    """
    kernels = trace.kernels
    name, group = kernels["collective"].cat, kernels["group"].cat
    # A row without a name has the code -1, which reads the last.
    is_symmetric = np.array([*(bool(SYMMETRIC.match(str(n))) for n in name.categories), False])
    of_group = group.codes.to_numpy()
    rows = np.flatnonzero(is_symmetric[name.codes.to_numpy()] & (of_group >= 0))
    rank, start_ns, duration_ns = (
        kernels[column].to_numpy(np.int64)[rows] for column in ("rank", "start_ns", "duration_ns")
    )
    operation = name.categories.to_numpy(object)[name.codes.to_numpy()[rows]]
    sequence = kernels["group_sequence"].to_numpy(np.int64, na_value=0)[rows]
    is_untold = kernels["group_sequence"].isna().to_numpy(bool)[rows]
    order, of_group = np.lexsort([start_ns, rank]), of_group[rows]
    found = {}
    for code in np.unique(of_group).tolist():
        mine = order[of_group[order] == code]
        mine = mine[rank[mine] == rank[mine[0]]]
        found[str(group.categories[code])] = Run(
            operation[mine],
            None if is_untold[mine].any() else sequence[mine],
            start_ns[mine],
            start_ns[mine] + duration_ns[mine],
        )
    return found


def by_number(first: Run, second: Run) -> Pair:
    """Return the collectives that have the same number and operation, each once, on both sides.

    Several kernels with one number, as coalesced collectives have, match none.
    """
    sequence, _ = pd.factorize(np.concatenate([np.asarray(r.sequence) for r in (first, second)]))
    operation, names = pd.factorize(np.concatenate([first.operation, second.operation]))
    keys = sequence.astype(np.int64) * max(len(names), 1) + operation
    (single, at_first), (others, at_second) = map(_single, np.split(keys, [len(first)]))
    _, mine, other = np.intersect1d(single, others, assume_unique=True, return_indices=True)
    mine, other = at_first[mine], at_second[other]
    order = np.argsort(mine)
    return first.take(mine[order]), second.take(other[order])


def _single(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return the keys of which there is one, and their places."""
    found, places, times = np.unique(keys, return_index=True, return_counts=True)
    return found[times == 1], places[times == 1]


def by_order(first: Run, second: Run) -> Iterator[Pair]:
    """Yield each way in which the two can be the same run, with some missing at the ends.

    At least half of the shorter must lie beside the other, operation for operation. Those that
    leave out the fewest come first.
    """
    surplus = len(second) - len(first)
    least = max((min(len(first), len(second)) + 1) // 2, 1)
    skips = range(min(surplus, 0) - MOST_MISSED, max(surplus, 0) + MOST_MISSED + 1)
    for skip in sorted(skips, key=lambda skip: abs(skip) + abs(skip - surplus)):
        begin, end = max(0, -skip), min(len(first), len(second) - skip)
        if end - begin >= least:
            mine, others = slice(begin, end), slice(begin + skip, end + skip)
            if (first.operation[mine] == second.operation[others]).all():
                yield first.take(mine), second.take(others)
