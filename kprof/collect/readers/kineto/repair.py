"""Valid JSON from damaged text: each event that can be read, no other."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kprof.collect.readers.kineto.cuts import LIST_OF_EVENTS
from kprof.collect.readers.kineto.damage import UNREADABLE
from kprof.collect.readers.kineto.events import Event, ExactEvent

# Between two events; the next one may begin with any key.
BORDER = re.compile(
    rb'\}(\s*,?\s*)\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*:', re.DOTALL
)
# A cut inside a list of objects that look like events leaves an event in at most so many parts.
MOST_PARTS = 16

_LIST_ENDS = re.compile(rb'\]\s*(?:\}|,\s*"|\Z)')
_EVENT_BEGINS = re.compile(rb'\{\s*"ph"\s*:\s*"')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_SPACES = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
# A text that ends at the first quote that can end one, with quotes before it left unescaped.
_TEXT_WITH_QUOTES = r'"(?:[^"\\]|\\.|"(?!\s*[,:}\]]))*"(?=\s*[,:}\]])'
_TEXT = r'"(?:[^"\\]|\\.)*"'
_NO_NUMBER = r"[-+]?(?:nan|inf(?:inity)?)\b(?:\([a-z0-9]*\))?"
_HUGE = r"-?\d+(?:\.\d+)?[eE][-+]?\d{3,}"
_TRAILING_COMMA = r",(?=\s*[}\]])"
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r'|u[0-9a-fA-F]{4}|["\\/bfnrt]|(.?))',
    re.DOTALL,
)
_FIELDS = {
    "ph": str,
    "cat": str,
    "name": str,
    "pid": int | float | str | None,
    "tid": int | float | str | None,
    "ts": int | float | str | None,
    "dur": int | float | str | None,
    "args": dict[str, msgspec.Raw] | None,
}


@dataclass
class Repaired:
    """The readable part of a damaged list of events."""

    events: list[bytes] = field(default_factory=list)
    """Each event as valid JSON."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many events were left out (`damaged_events`) and how many read on (`repaired_events`)."""
    tail: bytes | None = None
    """The text after the list, where it ends in this part."""

    @property
    def text(self) -> bytes:
        """The events as a JSON list."""
        return b"[" + b",".join(self.events) + b"]"


def repaired_parts(text: mmap.mmap, begin: int, block_bytes: int) -> Iterator[Repaired]:
    """Yield the events from `begin` on, and those of another document that follows the first."""
    while begin < len(text):
        border = BORDER.search(text, begin + block_bytes)
        end = border.start(1) if border else len(text)
        found = repaired(text[begin:end])
        begin = border.end(1) if border else len(text)
        if found.tail is not None:
            following = LIST_OF_EVENTS.search(text, end - len(found.tail))
            begin = following.end() if following else len(text)
            found.tail = b"}" if following else text[end - len(found.tail) :]
        yield found


def repaired(text: bytes) -> Repaired:
    """Read a part of a list of events, each event apart, so that damage stays where it is."""
    if all(_is_valid(b"[" + text + b"]", form) for form in (list[ExactEvent], list[Event])):
        return Repaired([text] if text.strip() else [])
    found, spans, at = Repaired(), _spans_of(text), 0
    parts = [text[begin:end] for begin, end in spans]
    while at < len(parts) and found.tail is None:
        at += _add_next(found, parts, at)
    if found.tail is not None:
        # Parts of another document may follow the one in which the list ends.
        found.tail = text[spans[at - 1][1] - len(found.tail) :]
    return found


def _is_valid(text: bytes, form: object) -> bool:
    try:
        msgspec.json.decode(text, type=form)
    except UNREADABLE:
        return False
    return True


def _spans_of(text: bytes) -> list[tuple[int, int]]:
    begins = [0, *(border.end(1) for border in BORDER.finditer(text))]
    ends = [*(border.start(1) for border in BORDER.finditer(text)), len(text)]
    return list(zip(begins, ends, strict=True))


def _add_next(found: Repaired, parts: list[bytes], at: int) -> int:
    """Add the event that begins with this part, and return how many parts it took."""
    if _add_event(found, parts[at]):
        return 1
    if not parts[at].strip(b" \t\r\n\0,"):
        return 1
    for number in range(2, MOST_PARTS):
        whole = b",".join(parts[at : at + number])
        if at + number <= len(parts) and _is_event(whole):
            found.events.append(whole)
            return number
    _add_objects(found, parts[at])
    return 1


def _add_event(found: Repaired, text: bytes) -> bool:
    """Add an event as it is, or as it can be read; False where it cannot."""
    if _is_event(text):
        found.events.append(text)
        return True
    event = _readable(text)
    if event is not None:
        found.events.append(event)
        found.counts["repaired_events"] += 1
    return event is not None


def _is_event(text: bytes) -> bool:
    """Tell whether an event can be read, also with times as doubles, which 1e400 is not."""
    return _is_valid(text, ExactEvent) and _is_valid(text, Event)


def _readable(text: bytes) -> bytes | None:
    """Return one event with what can be read of it, as valid JSON; None where that is nothing."""
    forms = [valid_json(text), valid_json(text, has_bare_quotes=True)]
    for one in ([text] if _is_utf_8(text) else []) + forms:
        try:
            fields = msgspec.json.decode(one, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            return None
        except UNREADABLE:
            continue
        event = _with_right_types(fields)
        if _is_event(event):
            return event
    return None


def valid_json(text: bytes, *, has_bare_quotes: bool = False) -> bytes:
    """Return JSON with the damage that writers do to it undone, as far as it can be told.

    Bytes that are not UTF-8 count as Latin-1; control characters as spaces; half a surrogate pair
    as a replacement character; a number that is none (NaN, Infinity) as null. A comma before a
    closing bracket goes. With `has_bare_quotes` a quote inside a text is escaped.
    """
    plain = _as_text(text.translate(_SPACES))
    form = _TEXT_WITH_QUOTES if has_bare_quotes else _TEXT
    token = re.compile(f"({form})|({_NO_NUMBER}|{_HUGE})|({_TRAILING_COMMA})", re.IGNORECASE)
    return token.sub(_valid_token, plain).encode("utf-8", "replace")


def _as_text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        text = content.decode("utf-8", "surrogateescape")
        return "".join(
            chr(ord(letter) - 0xDC00) if "\udc80" <= letter <= "\udcff" else letter
            for letter in text
        )


def _valid_token(token: re.Match[str]) -> str:
    if (text := token[1]) is not None:
        inner = re.sub(r'(\\.)|"', lambda part: part[1] or '\\"', text[1:-1], flags=re.DOTALL)
        return f'"{_ESCAPE.sub(_valid_escape, inner)}"'
    return "null" if token[2] else ""


def _valid_escape(escape: re.Match[str]) -> str:
    if escape[1]:
        return r"\ufffd"
    return escape[0] if escape[2] is None else "\\\\" + escape[2]


def _is_utf_8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _with_right_types(fields: dict[str, msgspec.Raw]) -> bytes:
    """Return an event without the fields whose values are of no type that they may have."""
    kept = []
    for name, value in fields.items():
        try:
            if name in _FIELDS:
                msgspec.json.decode(value, type=_FIELDS[name])
        except UNREADABLE:
            continue
        kept.append(msgspec.json.encode(name) + b":" + bytes(value))
    return b"{" + b",".join(kept) + b"}"


def _add_objects(found: Repaired, text: bytes) -> None:
    """Add the events in a part that holds several, the end of the list, or half an event."""
    waiting = [text]
    while waiting and found.tail is None:
        text = waiting.pop()
        spans, end = _objects_in(text)
        done, within = 0, list[bytes]()
        for begin, after in spans:
            found.counts["damaged_events"] += _num_others(text[done:begin])
            if not _add_event(found, text[begin:after]):
                within.append(text[begin:after])
            done = after
        found.counts["damaged_events"] += _num_others(text[done:end])
        # Where a quote is lost, brackets in texts count and others do not: they tell nothing then.
        if not within and _LIST_ENDS.match(text, end):
            found.tail = text[end + 1 :]
        elif text[end:].translate(_SPACES).strip():
            within.append(text[end:])
        found.counts["damaged_events"] += len(within)
        # Half an event may hold whole ones.
        begins = [_EVENT_BEGINS.search(one, 1) for one in within]
        waiting += [one[at.start() :] for one, at in zip(within, begins, strict=True) if at][::-1]


def _objects_in(text: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return where the outermost objects lie, and where the list ends or the last one is cut."""
    spans: list[tuple[int, int]] = []
    begin = depth = 0
    for token in _TOKEN.finditer(text):
        mark = text[token.start() : token.start() + 1]
        if mark in b"{[":
            begin = begin if depth else token.start()
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth < 0:
                return spans, token.start()
            if depth == 0:
                spans.append((begin, token.end()))
    return spans, begin if depth else len(text)


def _num_others(text: bytes) -> int:
    """Count what stands between events and is none."""
    return sum(bool(other.strip()) for other in text.translate(_SPACES).split(b","))
