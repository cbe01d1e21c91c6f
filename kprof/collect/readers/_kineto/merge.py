"""The blocks of all shares as one column a name, whoever decoded them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers._kineto.workers import Share

Rows = Literal["host", "device", "memory"]
Codes = NDArray[np.int32]


class Merger:
    """Joins blocks in the order of the file; equal words get equal codes."""

    def __init__(self, shares: list[Share]) -> None:
        self._vocabularies = [share.words for share in shares]
        owned = [(n, owner) for owner, share in enumerate(shares) for n in share.blocks]
        self._blocks = [(shares[owner].blocks[n], owner) for n, owner in sorted(owned)]

    def counts(self) -> Counter[str]:
        """Return the sums of what the blocks counted."""
        total: Counter[str] = Counter()
        for block, _ in self._blocks:
            total.update(block.counts)
        return total

    def numbers(self, rows: Rows, column: str) -> NDArray[np.int64]:
        """Return a column of integers."""
        return np.concatenate([getattr(block, rows)[column] for block, _ in self._blocks])

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
        return np.concatenate(codes), texts
