"""Decoding of the blocks of a large trace by several processes."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np

import kprof
from kprof.collect.readers.kineto.columns import TABLES, Block, BlockDecoder, Columns, Vocabulary

# Below this a second process costs more than it saves.
PARALLEL_FROM_BYTES = 64 << 20
MAX_PROCESSES = 4
_NUMBER = struct.Struct("=i")
Span = tuple[int, int]


@dataclass
class Share:
    """The decoded part of one process: blocks by number, and the meaning of their codes."""

    words: dict[str, Vocabulary]
    blocks: dict[int, Block]


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def result(self) -> Share | None:
        """Wait for the process and return its share; None where it failed."""
        if self.process.wait() != 0:
            return None
        self.output.seek(0)
        words, packed = pickle.load(self.output)
        return Share(words, _unpacked(*packed))


def decode_blocks(text: IO[bytes], spans: list[Span], num_processes: int) -> list[Share]:
    """Decode each span of `text` as a list of events.

    Every process takes the next block as soon as it is free. The parent decodes as well, and
    also what a process left behind that could not start or was killed.

    Raises:
        msgspec.DecodeError: a span is no list of events.
        DamageError: an event is impossible.
    """
    claims, write_end = os.pipe()
    try:
        os.write(write_end, b"".join(_NUMBER.pack(i) for i in range(len(spans))))
    finally:
        os.close(write_end)
    decoder = BlockDecoder()
    try:
        with _processes(text, spans, claims, num_processes - 1) as children:
            mine = dict(claimed_blocks(decoder, text.fileno(), spans, claims))
            shares = [share for child in children if (share := child.result())]
    finally:
        os.close(claims)
    done = mine.keys() | {number for share in shares for number in share.blocks}
    for number in sorted(set(range(len(spans))) - done):
        mine[number] = decoder.decode(read_list(text.fileno(), spans[number]))
    return [Share(decoder.words, mine), *shares]


@contextmanager
def _processes(
    text: IO[bytes], spans: list[Span], claims: int, number: int
) -> Iterator[list[_Child]]:
    """Start decoding processes: fresh interpreters, which neither fork threads nor import main."""
    folder = str(Path(kprof.__file__).parents[1])
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", __package__, str(text.fileno()), str(claims)]
    children: list[_Child] = []
    with ExitStack() as stack:
        for _ in range(number):
            # Into files, so that no process waits for its reader; they have no name.
            stdin = stack.enter_context(tempfile.TemporaryFile(prefix="kprof-"))
            stdout = stack.enter_context(tempfile.TemporaryFile(prefix="kprof-"))
            pickle.dump(spans, stdin)
            stdin.seek(0)
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=(text.fileno(), claims),
            )
            children.append(_Child(process, stdout))
        try:
            yield children
        finally:
            for child in children:
                child.process.kill()
                child.process.wait()


def claimed_blocks(
    decoder: BlockDecoder, file: int, spans: list[Span], claims: int
) -> Iterator[tuple[int, Block]]:
    """Decode the next block that no process has taken, until there is none."""
    # One for all of them: new memory would first be filled with zeros.
    buffer = bytearray(max((end - begin + 2 for begin, end in spans), default=0))
    while claim := os.read(claims, _NUMBER.size):
        (number,) = _NUMBER.unpack(claim)
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
