"""The blocks of all processes that decoded a file, as one column a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers.kineto.columns import Block, Columns, Vocabulary
from kprof.collect.readers.kineto.events import MISSING
from kprof.collect.readers.kineto.workers import Share

Rows = Literal["host", "device", "memory"]
Codes = NDArray[np.int32]


class Merger:
    """Joins blocks in the order of the file; equal words get equal codes."""

    def __init__(self, shares: list[Share]) -> None:
        self._vocabularies = [share.words for share in shares]
        owned = [(n, owner) for owner, share in enumerate(shares) for n in share.blocks]
        self._blocks = [(shares[owner].blocks[n], owner) for n, owner in sorted(owned)]
        if any(len(block.edges["row"]) for block, _ in self._blocks):
            self._pair_edges()
        self._put: dict[tuple[Rows, str], NDArray[np.int64]] = {}
        self._kept: dict[Rows, NDArray[np.bool_]] = {}

    def counts(self) -> Counter[str]:
        """Return the sums of what the blocks counted."""
        total: Counter[str] = Counter()
        for block, _ in self._blocks:
            total.update(block.counts)
        return total

    def _pair_edges(self) -> None:
        """Turn begins and ends into rows, each begin with the end that follows it on its thread."""
        blocks = [block for block, _ in self._blocks]
        paired = _Pairs(blocks, [self._vocabularies[owner] for _, owner in self._blocks])
        self._blocks = [
            (_with_rows(block, *durations), owner)
            for (block, owner), durations in zip(self._blocks, paired.durations, strict=True)
        ]
        self._blocks[0][0].counts.update(paired.counts)

    def numbers(self, rows: Rows, column: str) -> NDArray[np.int64]:
        """Return a column of integers."""
        put = self._put.get((rows, column))
        if put is not None:
            return put
        parts = [getattr(block, rows)[column] for block, _ in self._blocks]
        return self._of_kept(rows, np.concatenate(parts))

    def put(self, rows: Rows, column: str, values: NDArray[np.int64]) -> None:
        """Give rows other values of a column, or a further column."""
        self._put[rows, column] = values

    def keep(self, rows: Rows, is_kept: NDArray[np.bool_]) -> None:
        """Leave out the rows that are not kept."""
        self._kept[rows] = is_kept

    def has(self, rows: Rows, column: str) -> bool:
        """Tell whether a further column was given."""
        return (rows, column) in self._put

    def _of_kept(self, rows: Rows, values: NDArray[Any]) -> NDArray[Any]:
        return values[self._kept[rows]] if rows in self._kept else values

    def words(
        self, rows: Rows, column: str, vocabulary: str, spelled: Callable[[object], str | None]
    ) -> tuple[Codes, list[str]]:
        """Return a column as codes into the sorted texts that `spelled` makes of its words.

        The code is -1 where `spelled` answers None, and where there is no word.
        """
        spellings = [
            [spelled(word) for word in words[vocabulary].values_in_order()]
            for words in self._vocabularies
        ]
        texts = sorted({text for texts in spellings for text in texts if text is not None})
        code_of: dict[str | None, int] = {text: code for code, text in enumerate(texts)}
        # The code -1 reads the last entry of a table.
        tables = [
            np.array([*(code_of.get(text, -1) for text in texts), -1], dtype=np.int32)
            for texts in spellings
        ]
        codes = [tables[owner][getattr(block, rows)[column]] for block, owner in self._blocks]
        return self._of_kept(rows, np.concatenate(codes)), texts


class _Pairs:
    """The durations of the rows that begin at the edges of all blocks; `MISSING` without an end."""

    def __init__(self, blocks: list[Block], words: list[dict[str, Vocabulary]]) -> None:
        self.durations = [
            (block.begun_host["duration_ns"].copy(), block.begun_device["duration_ns"].copy())
            for block in blocks
        ]
        self.counts: Counter[str] = Counter()
        self._blocks = blocks
        latest_ns = max(map(_latest_ns, blocks), default=0)
        time_ns = np.concatenate([block.edges["time_ns"] for block in blocks])
        owner = np.repeat(range(len(blocks)), [len(block.edges["row"]) for block in blocks])
        place = np.concatenate([np.arange(len(block.edges["row"])) for block in blocks])
        texts = [
            {
                what: [str(word) for word in of_share[vocabulary].values_in_order()]
                for what, vocabulary in _WORDS.items()
            }
            for of_share in words
        ]
        open_edges: dict[tuple[str, str], list[tuple[str, int, int, int]]] = {}
        for at in np.argsort(time_ns, kind="stable").tolist():
            block, row = int(owner[at]), int(place[at])
            edges = blocks[block].edges
            pid, tid, name = (
                texts[block][what][code] if (code := int(edges[what][row])) >= 0 else ""
                for what in ("pid", "tid", "name")
            )
            begun = open_edges.setdefault((pid, tid), [])
            if edges["is_begin"][row]:
                begun.append((name, block, row, int(time_ns[at])))
            elif (index := _begin_of(begun, name)) is None:
                self.counts["unmatched_edges"] += 1
            else:
                self._close(begun.pop(index), int(time_ns[at]))
        for begun in open_edges.values():
            for edge in begun:
                edges = blocks[edge[1]].edges
                if edges["is_device"][edge[2]] or edges["row"][edge[2]] < 0:
                    self.counts["unmatched_edges"] += 1
                else:
                    self.counts["open_ranges"] += 1
                    self._close(edge, max(latest_ns, edge[3]))

    def _close(self, edge: tuple[str, int, int, int], end_ns: int) -> None:
        _, block, place, begin_ns = edge
        edges = self._blocks[block].edges
        row, is_device = int(edges["row"][place]), int(edges["is_device"][place])
        if row >= 0:
            self.durations[block][is_device][row] = end_ns - begin_ns


_WORDS = {"pid": "pid", "tid": "tid", "name": "host_name"}


def _begin_of(begun: list[tuple[str, int, int, int]], name: str) -> int | None:
    """Return which of the open begins an end closes: the last, or the last of its name."""
    if not name:
        return len(begun) - 1 if begun else None
    return next((i for i in range(len(begun) - 1, -1, -1) if begun[i][0] == name), None)


def _latest_ns(block: Block) -> int:
    ends = [
        rows["start_ns"].astype(np.int64) + rows["duration_ns"].astype(np.int64)
        for rows in (block.host, block.device)
        if len(rows["start_ns"])
    ]
    times = [*ends, *([block.edges["time_ns"]] if len(block.edges["row"]) else [])]
    return max((int(time.max()) for time in times), default=0)


def _with_rows(block: Block, host_ns: Codes, device_ns: Codes) -> Block:
    """Return a block with the rows that begin at its edges, those without an end left out."""
    return replace(
        block,
        host=_with_begun(block.host, block.begun_host, host_ns),
        device=_with_begun(block.device, block.begun_device, device_ns),
    )


def _with_begun(rows: Columns, begun: Columns, duration_ns: Codes) -> Columns:
    is_paired = duration_ns != MISSING
    begun = {**begun, "duration_ns": duration_ns}
    return {name: np.concatenate([rows[name], begun[name][is_paired]]) for name in rows}
