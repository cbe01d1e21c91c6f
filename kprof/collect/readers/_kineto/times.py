"""Kineto's decimal microseconds as exact integer nanoseconds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers._kineto.events import MISSING

# Half a unit in the last place of a double is below 0.49 ns up to here, so that its nearest
# whole nanosecond is the one that was written; from here on only the text of a fraction will do.
EXACT_BELOW_US = 2.0**43
# The largest whole microseconds (146 years) that leave room in an int64 of nanoseconds for the end
# of what starts then.
LIMIT_US = (2**62 - 1) // 1000


class NeedsTextError(ValueError):
    """A fraction so large that its double has lost nanoseconds: decode it as a Decimal."""


class NotATimeError(ValueError):
    """A value that is no number of microseconds; `position` is its place in the sequence."""

    def __init__(self, position: int) -> None:
        super().__init__(f"value {position} is no time")
        self.position = position


def exact_ns(microseconds: Sequence[Any]) -> NDArray[np.int64]:
    """Return whole nanoseconds, a thousandth of a microsecond at a time, without rounding errors.

    Digits beyond the third decimal are rounded to the nearest nanosecond.

    Raises:
        NeedsTextError: a float is too large to be exact.
        NotATimeError: a value is missing, not a number, or beyond 64 bits.
    """
    try:
        values = np.asarray(array("d", microseconds), dtype=np.float64)
    except (TypeError, OverflowError):
        return _one_by_one(microseconds)
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    if not np.abs(values).max() < EXACT_BELOW_US:  # also where one of them is not a number
        return _one_by_one(microseconds)
    # An array takes `true` and `false` for 1 and 0.
    places = np.flatnonzero((values == 0) | (values == 1)).tolist()
    if any(isinstance(microseconds[place], bool) for place in places):
        return _one_by_one(microseconds)
    whole = np.floor(values)
    rest_ns: np.ndarray = np.rint((values - whole) * 1000)
    return np.asarray(whole.astype(np.int64) * 1000 + rest_ns.astype(np.int64))


def known_ns(microseconds: Sequence[Any]) -> NDArray[np.int64]:
    """Return whole nanoseconds as `exact_ns` does, and `MISSING` for what is no time.

    Raises:
        NeedsTextError: a float is too large to be exact.
    """
    try:
        return exact_ns(microseconds)
    except NotATimeError:
        return np.array([_ns_or_missing(value) for value in microseconds], dtype=np.int64)


def _ns_or_missing(value: object) -> int:
    try:
        return _ns(value, 0)
    except NotATimeError:
        return MISSING


def _one_by_one(microseconds: Sequence[Any]) -> NDArray[np.int64]:
    if all(type(value) is int for value in microseconds):
        whole = np.array(microseconds)
        if whole.dtype == np.int64 and np.abs(whole).max() <= LIMIT_US:
            return whole * 1000
    return np.array([_ns(value, i) for i, value in enumerate(microseconds)], dtype=np.int64)


def _ns(value: object, position: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise NotATimeError(position)
    try:
        # Some writers give numbers as texts.
        number = Decimal(value)
        if not abs(number) <= LIMIT_US:
            raise NotATimeError(position)
        if isinstance(value, float) and abs(value) >= EXACT_BELOW_US:
            raise NeedsTextError
        return int((number * 1000).to_integral_value(rounding=ROUND_HALF_EVEN))
    except InvalidOperation:  # NaN has no order
        raise NotATimeError(position) from None
