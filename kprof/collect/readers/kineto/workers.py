"""Decoding of the blocks of a large trace by several processes."""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import IO

import numpy as np

from kprof.collect.processes import Child, children_of, claimed, claims_of
from kprof.collect.readers.kineto.columns import TABLES, Block, BlockDecoder, Columns, Vocabulary

# Below this a second process costs more than it saves.
PARALLEL_FROM_BYTES = 64 << 20
MAX_PROCESSES = 4
Span = tuple[int, int]


@dataclass
class Share:
    """The decoded part of one process: blocks by number, and the meaning of their codes."""

    words: dict[str, Vocabulary]
    blocks: dict[int, Block]


def decode_blocks(text: IO[bytes], spans: list[Span], num_processes: int) -> list[Share]:
    """Decode each span of `text` as a list of events.

    Every process takes the next block as soon as it is free. The parent decodes as well, and
    also what a process left behind that could not start or was killed.

    Raises:
        msgspec.DecodeError: a span is no list of events.
        DamageError: an event is impossible.
    """
    decoder = BlockDecoder()
    with claims_of(range(len(spans))) as claims:
        files = (text.fileno(), claims)
        with children_of(__name__, files, spans, num_processes - 1) as children:
            mine = dict(claimed_blocks(decoder, text.fileno(), spans, claims))
            shares = [share for child in children if (share := _share_of(child))]
    done = mine.keys() | {number for share in shares for number in share.blocks}
    for number in sorted(set(range(len(spans))) - done):
        mine[number] = decoder.decode(read_list(text.fileno(), spans[number]))
    return [Share(decoder.words, mine), *shares]


def _share_of(child: Child) -> Share | None:
    """Wait for a process and return its share; None where it failed."""
    if child.ended() != 0:
        return None
    words, packed = pickle.load(child.output)
    return Share(words, _unpacked(*packed))


def claimed_blocks(
    decoder: BlockDecoder, file: int, spans: list[Span], claims: int
) -> Iterator[tuple[int, Block]]:
    """Decode the next block that no process has taken, until there is none."""
    # One for all of them: new memory would first be filled with zeros.
    buffer = bytearray(max((end - begin + 2 for begin, end in spans), default=0))
    for number in claimed(claims):
        yield number, decoder.decode(read_list(file, spans[number], buffer))


def read_list(file: int, span: Span, buffer: bytearray | None = None) -> memoryview:
    """Return the bytes of `span` between brackets, read without copying them again.

    Into `buffer`, if one is given that is long enough; what is returned is a part of it.
    """
    begin, end = span
    text = memoryview(bytearray(end - begin + 2) if buffer is None else buffer)
    text = text[: end - begin + 2]
    view, done = text[1:-1], 0
    while done < len(view):
        done += os.preadv(file, [view[done:]], begin + done)
    text[0], text[-1] = b"[]"
    return text


def serve() -> None:
    """Decode blocks in a child process: numbers of the files as arguments, spans on stdin."""
    file, claims = map(int, sys.argv[1:3])
    spans = pickle.load(sys.stdin.buffer)
    decoder = BlockDecoder()
    blocks = dict(claimed_blocks(decoder, file, spans, claims))
    pickle.dump((decoder.words, _packed(blocks)), sys.stdout.buffer, protocol=5)


_Packed = tuple[list[int], list[Counter[str]], dict[str, tuple[Columns, list[int]]]]


def _packed(blocks: dict[int, Block]) -> _Packed:
    """Return blocks as a few long columns, which are sent in less time than many short ones."""
    counts = [block.counts for block in blocks.values()]
    parts = {rows: [getattr(block, rows) for block in blocks.values()] for rows in TABLES}
    return list(blocks), counts, {rows: _joined(parts[rows]) for rows in TABLES}


def _joined(parts: list[Columns]) -> tuple[Columns, list[int]]:
    lengths = [len(next(iter(part.values()))) for part in parts]
    names = list(parts[0]) if parts else []
    return {name: np.concatenate([part[name] for part in parts]) for name in names}, lengths


def _unpacked(
    numbers: list[int], counts: list[Counter[str]], tables: dict[str, tuple[Columns, list[int]]]
) -> dict[int, Block]:
    parts = {rows: _parted(*joined) for rows, joined in tables.items()}
    return {
        number: Block(counts=counts[i], **{rows: parts[rows][i] for rows in TABLES})
        for i, number in enumerate(numbers)
    }


def _parted(columns: Columns, lengths: list[int]) -> list[Columns]:
    spans = [slice(end - n, end) for end, n in zip(accumulate(lengths), lengths, strict=True)]
    return [{name: column[span] for name, column in columns.items()} for span in spans]
