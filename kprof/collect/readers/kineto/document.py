"""A whole trace file: the columns of its events, with everything around them."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from kprof.collect.readers.kineto.columns import Block, BlockDecoder
from kprof.collect.readers.kineto.cuts import (
    BARE_EVENTS,
    BARE_LIST,
    BLOCK_BYTES,
    LIST_OF_EVENTS,
    Cuts,
    cuts_of,
)
from kprof.collect.readers.kineto.damage import (
    UNREADABLE,
    DamageError,
    NotATraceError,
    damage_of_json,
)
from kprof.collect.readers.kineto.repair import repaired, repaired_parts, valid_json
from kprof.collect.readers.kineto.workers import (
    MAX_PROCESSES,
    PARALLEL_FROM_BYTES,
    Share,
    decode_blocks,
    read_list,
)
from kprof.collect.trace_file import mapped, size_of

_EVENTS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Document:
    """Decoded events as shares of blocks, and the other keys of the file as plain values."""

    shares: list[Share]
    around: dict[str, Any]
    damage: str | None = None
    """Where the file is no valid JSON, and how; None where it is."""


def read_document(
    text: IO[bytes], *, block_bytes: int = BLOCK_BYTES, num_processes: int | None = None
) -> Document:
    """Decode a trace in blocks, or as a whole where blocks cannot be cut.

    Where the text is damaged, each event is read apart, and what cannot be read is counted.

    Raises:
        DamageError: no event can be read.
        NotATraceError: there is no list of events.
    """
    cuts = cuts_of(mapped(text), block_bytes)
    if cuts is not None and len(cuts.blocks) > 1:
        try:
            return read_blocks(
                text, cuts, num_processes or num_processes_for(text, len(cuts.blocks))
            )
        except UNREADABLE:
            pass  # a cut inside an event, or damage; reading the whole tells which
    try:
        return read_whole(mapped(text))
    except UNREADABLE as error:
        return read_damaged(mapped(text), damage_of_json(mapped(text), error), block_bytes)


def read_blocks(text: IO[bytes], cuts: Cuts, num_processes: int) -> Document:
    """Decode a trace block by block, in bounded memory.

    Raises:
        msgspec.DecodeError: a block is no list of events.
    """
    # The last block and the head make a small document of the same shape.
    *spans, last = cuts.blocks
    head = os.pread(text.fileno(), cuts.head_end, 0)
    top = _top_of(head + bytes(read_list(text.fileno(), last))[1:-1])
    shares = decode_blocks(text, spans, num_processes)
    decoder = BlockDecoder()
    tail = decoder.decode(bytes(top.pop("traceEvents")))
    around, lost = _plain(top)
    tail.counts.update(lost)
    return Document([*shares, Share(decoder.words, {len(spans): tail})], around)


def _top_of(text: bytes | mmap.mmap) -> dict[str, msgspec.Raw]:
    if bytes(text[:64]).lstrip().startswith(b"["):
        return {"traceEvents": msgspec.json.decode(text, type=msgspec.Raw)}
    return msgspec.json.decode(text, type=dict[str, msgspec.Raw])


def _plain(top: dict[str, msgspec.Raw]) -> tuple[dict[str, Any], Counter[str]]:
    """Return the values that can be decoded, and how many cannot."""
    plain, lost = {}, Counter[str]()
    for key, value in top.items():
        try:
            plain[key] = msgspec.json.decode(value)
        except UNREADABLE:
            lost["damaged_keys"] += 1
    return plain, lost


def num_processes_for(text: IO[bytes], num_blocks: int) -> int:
    """Return how many processes are worth their start."""
    if size_of(text) < PARALLEL_FROM_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)), num_blocks, MAX_PROCESSES)


def read_whole(text: mmap.mmap) -> Document:
    """Decode a trace without cutting its text; slower.

    Raises:
        msgspec.DecodeError: the text is no valid JSON.
        NotATraceError: there is no list of events.
    """
    top = _top_of(text)
    if "traceEvents" not in top:
        raise NotATraceError("the keys " + ", ".join(list(top)[:5]) if top else "nothing")
    try:
        events = msgspec.json.decode(top.pop("traceEvents"), type=list[msgspec.Raw])
    except msgspec.ValidationError:
        raise NotATraceError("something else under that key") from None
    around, lost = _plain(top)
    decoder, blocks = BlockDecoder(), {}
    for number, begin in enumerate(range(0, len(events) or 1, _EVENTS_AT_ONCE)):
        some = events[begin : begin + _EVENTS_AT_ONCE]
        blocks[number] = _block_of(decoder, b",".join(some))
    blocks[0].counts.update(lost)
    if events and not any(block.counts["events"] for block in blocks.values()):
        raise NotATraceError("a list of something else under that key")
    return Document([Share(decoder.words, blocks)], around)


def _block_of(decoder: BlockDecoder, text: bytes) -> Block:
    """Decode events between commas; where one of them is no event, all but it."""
    try:
        return decoder.decode(b"[" + text + b"]")
    except UNREADABLE:
        found = repaired(text)
    block = decoder.decode(found.text)
    block.counts.update(found.counts)
    return block


def read_damaged(text: mmap.mmap, damage: DamageError, block_bytes: int = BLOCK_BYTES) -> Document:
    """Decode what can be read of a text that is no valid JSON, event by event.

    Raises:
        DamageError: no event can be read.
    """
    start = BARE_LIST.match(text) or LIST_OF_EVENTS.search(text) or BARE_EVENTS.match(text)
    if start is None:
        raise damage
    around, lost = _around_of(text[: start.end()])
    decoder, blocks = BlockDecoder(), {}
    for number, found in enumerate(repaired_parts(text, start.end(), block_bytes)):
        blocks[number] = decoder.decode(found.text)
        blocks[number].counts.update(found.counts)
        if found.tail is not None:
            later, also_lost = _around_of(b"{" + found.tail.lstrip(b" \t\r\n,"))
            around, lost = later | around, lost + also_lost
    if not any(block.counts["events"] for block in blocks.values()):
        raise damage
    blocks[0].counts.update(lost)
    return Document([Share(decoder.words, blocks)], around, damage.problem)


def _around_of(part: bytes) -> tuple[dict[str, Any], Counter[str]]:
    """Return the keys in the head or the tail of a damaged document, as far as they are valid."""
    if not part.strip() or part.lstrip().startswith(b"["):
        return {}, Counter()
    for end in (b"]}", b""):
        for whole in (part + end, valid_json(part + end)):
            try:
                top = _top_of(whole)
            except UNREADABLE:
                continue
            top.pop("traceEvents", None)
            return _plain(top)
    return {}, Counter(damaged_keys=1)
