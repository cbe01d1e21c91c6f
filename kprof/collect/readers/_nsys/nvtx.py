"""NVTX ranges, among them PyTorch's operators where `emit_nvtx` wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers._kineto.columns import Vocabulary
from kprof.collect.readers._kineto.events import MISSING
from kprof.collect.readers._marks import mark_in
from kprof.collect.readers._nsys.database import Database, Numbers

TABLE = "NVTX_EVENTS"
KINDS = ("capture", "graph", "module", "op", "phase", "range", "runtime", "step")
# Pushed and popped on one thread, or started and ended anywhere; also imported ones of both sorts.
_EVENT_TYPES = "(59, 60, 70, 71)"
_NUMBERS = ("start", "end", "globalTid", "endGlobalTid")


class Meaning(NamedTuple):
    """What the text of a range says: a number in `KINDS`, codes of name and shapes."""

    kind: int
    name: int
    sequence: int
    shapes: int


@dataclass
class Texts:
    """Takes texts apart, as bytes, which is faster; names and shapes get numbers."""

    names: Vocabulary = field(default_factory=Vocabulary)
    shapes: Vocabulary = field(default_factory=Vocabulary)
    _ranges: dict[bytes, Meaning] = field(default_factory=dict)
    _operators: dict[bytes, Meaning] = field(default_factory=dict)
    _shapes: dict[bytes, int] = field(default_factory=lambda: {b"": -1})

    def meaning_of(self, text: bytes) -> Meaning:
        """Return what a range with this text is."""
        known = self._ranges.get(text)
        if known is None:
            known = self._operator(text)
            # An operator's text has a number of its own, so it does not come again.
            if known is None:
                known = self._ranges[text] = self._named("range", text)
        return known

    def _operator(self, text: bytes) -> Meaning | None:
        """Take apart `aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]]`, as torch writes it.

        Every part but the name may be absent.
        """
        head, _, shapes = text.partition(b", sizes = ")
        head, has_id, _ = head.partition(b", op_id = ")
        name, has_sequence, sequence = head.partition(b", seq = ")
        if not (has_id or has_sequence or name.startswith(b"aten::")):
            return None
        known = self._operators.get(name)
        if known is None:
            known = self._operators[name] = self._named("op", name)
        number = int(sequence) if sequence.isdigit() and len(sequence) < 19 else MISSING
        return Meaning(known.kind, known.name, number, self._shapes_of(shapes))

    def _named(self, kind: str, text: bytes) -> Meaning:
        name = text.decode(errors="replace")
        kind, name = mark_in(name) or (kind, name)
        return Meaning(KINDS.index(kind), self.names[name], MISSING, -1)

    def _shapes_of(self, text: bytes) -> int:
        """Return the code of shapes as the JSON text in which other readers give them."""
        code = self._shapes.get(text)
        if code is None:
            try:
                json = msgspec.json.format(text.partition(b", input_op_ids = ")[0], indent=0)
                code = self.shapes[json.decode(errors="replace")]
            except msgspec.DecodeError:
                code = -1
            self._shapes[text] = code
        return code


@dataclass(frozen=True)
class Batch:
    """Some ranges of one thread each; `end` is `MISSING` where a range was still open."""

    start: Numbers
    end: Numbers
    thread: Numbers
    meanings: NDArray[np.int64]
    """A row of `Meaning` for each."""
    num_crossing: int
    """Ranges left out, since they were started on one thread and ended on another."""


def batches_of(database: Database, texts: Texts) -> Iterator[Batch]:
    """Yield all ranges, many at a time."""
    if not database.has(TABLE):
        return
    present = {name: database.has(TABLE, name) for name in ("endGlobalTid", "text", "textId")}
    numbers = [f"COALESCE({n}, {MISSING})" if present.get(n, True) else MISSING for n in _NUMBERS]
    words = [name if present[name] else "NULL" for name in ("text", "textId")]
    chosen = ", ".join(map(str, (*numbers, *words)))
    kept = f"eventType IN {_EVENT_TYPES} AND start IS NOT NULL"
    shared = {i: text.encode() for i, text in database.texts(TABLE, "textId").items()}
    for rows in database.batches(f"SELECT {chosen} FROM {TABLE} WHERE {kept} ORDER BY rowid"):
        rows, times = database.with_numbers(TABLE, rows, len(_NUMBERS))
        if not rows:
            continue
        *_, own, ids = zip(*rows, strict=True)
        spelled = (
            _as_bytes(text) if text is not None else shared.get(number, b"")
            for text, number in zip(own, ids, strict=True)
        )
        meanings = np.array(list(map(texts.meaning_of, spelled)), dtype=np.int64)
        yield _batch(times.T, meanings)


def _as_bytes(text: object) -> bytes:
    """Return a text, also one that is stored as a number."""
    return text if isinstance(text, bytes) else str(text).encode()


def _batch(numbers: NDArray[np.int64], meanings: NDArray[np.int64]) -> Batch:
    start, end, thread, end_thread = numbers
    stays = (end_thread == MISSING) | (end_thread == 0) | (end_thread == thread)
    return Batch(start[stays], end[stays], thread[stays], meanings[stays], int((~stays).sum()))
