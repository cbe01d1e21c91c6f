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

# Those of `kernels` that tell which collective ran, when and where.
COLUMNS = ("rank", "start_ns", "duration_ns", "collective", "group", "group_sequence")

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
    name = kernels["collective"].cat
    # A row without a name has the code -1, which reads the last.
    is_symmetric = np.array([*(bool(SYMMETRIC.match(str(n))) for n in name.categories), False])
    known = is_symmetric[name.codes.to_numpy()] & kernels["group"].notna().to_numpy()
    rows = kernels[list(COLUMNS)][known].sort_values(["rank", "start_ns"], kind="stable")
    groups = rows.groupby("group", observed=True, sort=True)
    return {str(group): _run(mine) for group, mine in groups}


def _run(rows: pd.DataFrame) -> Run:
    mine = rows[(rows["rank"] == rows["rank"].iloc[0]).to_numpy()]
    sequence = mine["group_sequence"]
    start_ns = mine["start_ns"].to_numpy(np.int64)
    return Run(
        mine["collective"].to_numpy(object),
        None if sequence.isna().any() else sequence.to_numpy(np.int64),
        start_ns,
        start_ns + mine["duration_ns"].to_numpy(np.int64),
    )


def by_number(first: Run, second: Run) -> Pair:
    """Return the collectives that have the same number and operation, each once, on both sides.

    Several kernels with one number, as coalesced collectives have, match none.
    """
    (of_first, at_first), (of_second, at_second) = (_numbered(run) for run in (first, second))
    found = of_second.get_indexer(of_first)
    return first.take(at_first[found >= 0]), second.take(at_second[found[found >= 0]])


def _numbered(run: Run) -> tuple[pd.MultiIndex, NDArray[np.intp]]:
    """Return number and operation of the collectives of which there is one, and their places."""
    keys = pd.MultiIndex.from_arrays([np.asarray(run.sequence), run.operation])
    places = np.flatnonzero(~keys.duplicated(keep=False))
    return keys[places], places


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
