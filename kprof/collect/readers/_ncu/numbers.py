"""Numbers as Nsight Compute writes them: in the language of the machine, with a unit beside."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

SEPARATORS = ".,"
# What else separates thousands: spaces of several widths, and the Swiss apostrophe.
_FURTHER = re.compile("[\\s\u00a0\u2009\u202f'\u2019]")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?")

# Powers of ten: Nsight Compute's K is 1,000.
_PREFIXES = {"": 0, "K": 3, "M": 6, "G": 9, "T": 12}
_BYTES = re.compile(r"([KMGT]?)(?:byte|B)s?")
_SECONDS = {"": 0, "m": -3, "u": -6, "µ": -6, "n": -9}
_TIME = re.compile(r"([munµ]?)(?:second|s)s?")


def find_decimal_mark(texts: Iterable[str]) -> str | None:
    """Return the mark before the decimals in these numbers, `.` or `,`.

    `1,234` alone may be either; another number beside it tells. A dot where none does, and None
    where they contradict one another.
    """
    marks = {mark for text in texts if (mark := _told(text)) is not None}
    return None if len(marks) > 1 else next(iter(marks), ".")


def _told(text: str) -> str | None:
    """Return the decimal mark that one number gives away, or None."""
    text = _FURTHER.sub("", text).lstrip("+-")
    used = [character for character in text if character in SEPARATORS]
    if not used or not _NUMBER.fullmatch(text):
        return None
    last, other = used[-1], SEPARATORS.replace(used[-1], "")
    if len(set(used)) == 2:
        return last
    if len(used) > 1:
        return other
    before, _, after = text.partition(last)
    is_group = len(after) == 3 and 1 <= len(before) <= 3 and not before.startswith("0")
    return None if is_group else last


def number_in(text: str, decimal_mark: str) -> Decimal | None:
    """Return the number that a text says, or None for `n/a` and the like."""
    text = _FURTHER.sub("", text)
    if not _NUMBER.fullmatch(text):
        return None
    group = SEPARATORS.replace(decimal_mark, "")
    return Decimal(text.replace(group, "").replace(decimal_mark, "."))


def in_bytes(number: Decimal, unit: str) -> int | None:
    """Return whole bytes; None where the unit is not one of bytes."""
    found = _BYTES.fullmatch(unit)
    return None if found is None else round(number.scaleb(_PREFIXES[found[1]]))


def in_ns(number: Decimal, unit: str) -> int | None:
    """Return whole nanoseconds; None where the unit is not one of time."""
    found = _TIME.fullmatch(unit)
    return None if found is None else round(number.scaleb(_SECONDS[found[1]] + 9))
