"""A whole trace file: the columns of its events, and everything around them."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from kprof.collect.readers._kineto.columns import BlockDecoder
from kprof.collect.readers._kineto.cuts import BLOCK_BYTES, Cuts, cuts_of
from kprof.collect.readers._kineto.damage import (
    UNREADABLE,
    DamageError,
    NotATraceError,
    damage_of_events,
    damage_of_json,
)
from kprof.collect.readers._kineto.source import mapped, size_of
from kprof.collect.readers._kineto.workers import (
    MAX_PROCESSES,
    PARALLEL_FROM_BYTES,
    Share,
    decode_blocks,
    read_list,
)

_EVENTS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Document:
    """Decoded events as shares of blocks, and the other keys of the file as plain values."""

    shares: list[Share]
    around: dict[str, Any]


def read_document(
    text: IO[bytes], *, block_bytes: int = BLOCK_BYTES, num_processes: int | None = None
) -> Document:
    """Decode a trace in blocks, or as a whole where blocks cannot be cut.

    Raises:
        DamageError: an event is impossible, or the JSON is invalid.
        NotATraceError: there is no list of events.
    """
    cuts = cuts_of(mapped(text), block_bytes)
    if cuts is not None and len(cuts.blocks) > 1:
        try:
            return read_blocks(
                text, cuts, num_processes or num_processes_for(text, len(cuts.blocks))
            )
        except (*UNREADABLE, DamageError):
            pass  # a cut inside an event, or damage; reading the whole tells which
    return read_whole(mapped(text))


def num_processes_for(text: IO[bytes], num_blocks: int) -> int:
    """Return how many processes are worth their start."""
    if size_of(text) < PARALLEL_FROM_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)), num_blocks, MAX_PROCESSES)


def read_blocks(text: IO[bytes], cuts: Cuts, num_processes: int) -> Document:
    """Decode a trace block by block, in bounded memory.

    Raises:
        msgspec.DecodeError: a block is no list of events.
        DamageError: an event is impossible.
    """
    # The last block and the head make a small document of the same shape.
    *spans, last = cuts.blocks
    head = os.pread(text.fileno(), cuts.head_end, 0)
    top = _top_of(head + bytes(read_list(text.fileno(), last))[1:-1])
    shares = decode_blocks(text, spans, num_processes)
    decoder = BlockDecoder()
    tail = decoder.decode(bytes(top.pop("traceEvents")))
    return Document([*shares, Share(decoder.words, {len(spans): tail})], _plain(top))


def read_whole(text: mmap.mmap) -> Document:
    """Decode a trace without cutting its text; slower, and exact about where it is damaged.

    Raises:
        DamageError: an event is impossible, or the JSON is invalid.
        NotATraceError: there is no list of events.
    """
    try:
        top = _top_of(text)
        if "traceEvents" not in top:
            raise NotATraceError("the keys " + ", ".join(list(top)[:5]) if top else "nothing")
        events = msgspec.json.decode(top.pop("traceEvents"), type=list[msgspec.Raw])
        around = _plain(top)
    except msgspec.ValidationError:
        raise NotATraceError("something else under that key") from None
    except UNREADABLE as error:
        raise damage_of_json(text, error) from None
    decoder, blocks = BlockDecoder(), {}
    for number, begin in enumerate(range(0, len(events) or 1, _EVENTS_AT_ONCE)):
        some = events[begin : begin + _EVENTS_AT_ONCE]
        try:
            blocks[number] = decoder.decode(b"[" + b",".join(some) + b"]")
        except UNREADABLE as error:
            raise damage_of_events(some, begin, error) from None
    return Document([Share(decoder.words, blocks)], around)


def _top_of(text: bytes | mmap.mmap) -> dict[str, msgspec.Raw]:
    if bytes(text[:64]).lstrip().startswith(b"["):
        return {"traceEvents": msgspec.json.decode(text, type=msgspec.Raw)}
    return msgspec.json.decode(text, type=dict[str, msgspec.Raw])


def _plain(top: dict[str, msgspec.Raw]) -> dict[str, Any]:
    plain = {}
    for key, value in top.items():
        try:
            plain[key] = msgspec.json.decode(value)
        except UNREADABLE as error:
            problem = f"the value of {key!r} cannot be decoded: {error}"
            raise DamageError(problem, fix="mend or remove it, or record again") from None
    return plain
