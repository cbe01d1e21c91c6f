"""Where the text of a trace can be cut into blocks that are decoded apart."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass

import msgspec

from kprof.collect.readers.kineto.damage import UNREADABLE

# The decoded events of a block, several times its text, fit in the cache of a core.
BLOCK_BYTES = 1 << 20
# The numbers of all blocks must fit in a pipe at once; see workers.py.
MAX_BLOCKS = 4096

BARE_LIST = re.compile(rb"\s*\[")
LIST_OF_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# An event a line, without a list.
BARE_EVENTS = re.compile(rb'\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args)"\s*:)')
_FIRST_KEY = re.compile(rb'\s*\{\s*("[^"\\]*")\s*:')


@dataclass(frozen=True)
class Cuts:
    """Byte ranges: the head, and blocks of whole events, the last with the tail of the file."""

    head_end: int
    blocks: tuple[tuple[int, int], ...]


def cuts_of(text: mmap.mmap, block_bytes: int = BLOCK_BYTES) -> Cuts | None:
    """Return blocks of about `block_bytes` each, or None where no list of events begins.

    A cut is made before an object that begins with the same key as the first event does. In valid
    JSON that never lies inside a text, where its quotes would be escaped. It may lie inside
    another list of objects; then the blocks on both sides are not valid, and decoding says so.
    """
    start = BARE_LIST.match(text) or LIST_OF_EVENTS.search(text)
    if start is None or not _is_outermost(text[: start.end()]):
        return None
    first_key = _FIRST_KEY.match(text, start.end())
    if first_key is None:
        return None
    border = re.compile(rb"\}(\s*,\s*)\{\s*" + re.escape(first_key[1]) + rb"\s*:")
    size = len(text)
    step = max(block_bytes, size // MAX_BLOCKS + 1)
    blocks, begin = [], start.end()
    while (found := border.search(text, begin + step)) is not None:
        blocks.append((begin, found.start(1)))
        begin = found.end(1)
        # A search maps the pages around it, too, which would add up to most of the file.
        text.madvise(mmap.MADV_DONTNEED)
    return Cuts(start.end(), (*blocks, (begin, size)))


def _is_outermost(head: bytes) -> bool:
    """Say whether the list that opens at the end of `head` is the document or a key of it."""
    if head.lstrip().startswith(b"["):
        return True
    try:
        top = msgspec.json.decode(head + b"]}", type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return False
    return bytes(top.get("traceEvents", b"")) == b"[]"
