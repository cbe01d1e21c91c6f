"""The damage of a trace: its kind, its place, and the fix."""

from __future__ import annotations

import mmap
import re

import msgspec

# All that decoding says of a bad text: invalid, not UTF-8, or nested without end.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_CHUNK_BYTES = 16 << 20
_NAME = re.compile(rb'"name"\s*:\s*"([^"]*)')
_REASON_AND_PLACE = re.compile(r": ([^:]+) \(byte (\d+)\)")
_NOT_JSON_NUMBER = re.compile(rb"-?(?:NaN|Infinity)")
_COPY_AGAIN = (
    "copy the file again in full; if it is being recorded, wait until that has ended, and see that "
    "nothing stopped the workload while it wrote"
)
_ESCAPE = (
    'put a backslash before each quote that is part of a name in that line ("a \\"b\\" c"), or '
    "record again without quotes in the names given to record_function: PyTorch does not escape "
    "them"
)
_FIX = "copy the file again; if it is damaged at its source too, record it again"
_LEAVE_OUT = "record it again, or take that event out of the file"


class DamageError(ValueError):
    """A trace of which nothing can be read, together with the fix."""

    def __init__(self, problem: str, *, fix: str = _LEAVE_OUT) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


class NotATraceError(ValueError):
    """Valid JSON that holds no list of events; says what it holds instead."""


def damage_of_json(text: mmap.mmap, error: Exception) -> DamageError:
    """Return where the JSON is invalid, in which event, and the likely cause."""
    if not isinstance(error, msgspec.DecodeError):
        return DamageError(f"the text cannot be decoded: {error}", fix="record it again")
    found = _REASON_AND_PLACE.search(str(error))
    if found is None:
        last = _one_line(text[max(0, len(text) - 60) :])
        return DamageError(
            f"the JSON is cut off at its end, byte {len(text):,}, after {last!r}", fix=_COPY_AGAIN
        )
    reason, place = found[1], int(found[2])
    where = _where(text, place)
    if number := _NOT_JSON_NUMBER.match(text[max(0, place - 1) : place + 9].lstrip(b" :,[")):
        said = number[0].decode()
        return DamageError(f"the JSON is invalid at {where}: {said} is no number there")
    near = _one_line(text[max(0, place - 30) : place + 30])
    # A comma, a colon or a key must follow a quote; anything else shows an unescaped quote.
    is_quote = reason.startswith(("expected", "object keys"))
    return DamageError(
        f"the JSON is invalid at {where} near {near!r}: {reason}",
        fix=_ESCAPE if is_quote else _FIX,
    )


def _one_line(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())


def _where(text: mmap.mmap, place: int) -> str:
    """Return a place in the text as byte, line and event."""
    names = _NAME.findall(text[max(0, place - 4096) : place])
    event = f", in the event named {_one_line(names[-1])!r}" if names else ""
    return f"byte {place:,}, line {_line_of(text, place):,}{event}"


def _line_of(text: mmap.mmap, place: int) -> int:
    """Return the number of a line without holding the whole text."""
    begins = range(0, place, _CHUNK_BYTES)
    return 1 + sum(text[b : min(b + _CHUNK_BYTES, place)].count(b"\n") for b in begins)
