"""What readers of result files share: decoding, units, and the errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kprof.errors import KprofError
from kprof.responses import Times

LONGEST_NS = 2.0**61
"""Longer than any time, and short enough that two of them can be added."""
RECORD_AGAIN = "copy the file again, or record it again"

T = TypeVar("T")
V = TypeVar("V")


class ResultError(KprofError):
    """A result file that cannot be read, or from which no request can be told."""


def decode(text: bytes, path: Path, kind: type[T], tool: str) -> T:
    """Decode JSON of a file; what is not asked for is skipped."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise damaged(path, tool, str(error)) from error


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
        raise ResultError(problem, fix="check the path, and that you may read it") from error


def damaged(path: Path, tool: str, why: str) -> ResultError:
    """Return the error on a file that is not what its beginning says."""
    problem = f"{path.name} is a damaged result of {tool}: {why}"
    return ResultError(problem, fix=RECORD_AGAIN)


def without_details(path: Path, tool: str, option: str) -> ResultError:
    """Return the error on a summary, from which no percentile can be proven."""
    return ResultError(f"{path.name} holds no single requests of {tool}", fix=option)


def in_ns(amount: object, unit_ns: float = 1e9) -> int:
    """Return whole nanoseconds of an amount in a unit, seconds unless told otherwise."""
    return round(_amount_ns(amount, unit_ns))


def took_ns(amount: object, unit_ns: float = 1e9) -> int:
    """Return a duration in whole nanoseconds, rounded up: a limit that it breaks stays broken.

    A picosecond is put to the arithmetic of floats: 0.1 s + 0.2 s are 0.3 s.
    """
    return math.ceil(round(_amount_ns(amount, unit_ns), 3))


def _amount_ns(amount: object, unit_ns: float) -> float:
    if not isinstance(amount, int | float) or not abs(amount) * unit_ns < LONGEST_NS:
        raise ResultError(f"{amount!r} stands where a time belongs", fix=RECORD_AGAIN)
    return amount * unit_ns


def arrivals(first_ns: int, gaps: object, unit_ns: float = 1e9) -> Times:
    """Return when chunks arrived: the first, and the others after the gaps between them."""
    if not isinstance(gaps, list) or not all(isinstance(gap, int | float) for gap in gaps):
        raise ResultError(f"{gaps!r} stands where a list of gaps belongs", fix=RECORD_AGAIN)
    if abs(first_ns) >= LONGEST_NS:
        raise ResultError(f"{first_ns} ns stands where a time belongs", fix=RECORD_AGAIN)
    after_ns = [took_ns(total, unit_ns) for total in accumulate(gaps, initial=0.0)]
    return first_ns + np.array(after_ns, np.int64)


def at(column: Sequence[V] | None, place: int) -> V | None:
    """Return the value at a place of a list that may be missing or too short."""
    return column[place] if column is not None and place < len(column) else None
