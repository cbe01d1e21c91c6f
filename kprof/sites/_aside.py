"""Calls that a swap has decided about: torch's own functions leave what runs for them alone.

What a site replaces, and others' code that runs there, calls functions of torch's that a swap of
the whole process decides about, too. One decision of a swap about a call is enough, and is counted
once; another swap decides for itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Decided(threading.local):
    """Which swaps have decided about what runs now in this thread; each by what is its own."""

    by: tuple[object, ...] = ()


_decided = _Decided()


def has_decided(swap: object) -> bool:
    """Tell whether this swap has decided about what runs now."""
    return any(one is swap for one in _decided.by)


def standing_aside(function: Callable[..., Any], swap: object) -> Callable[..., Any]:
    """Return a function about whose calls of torch's functions a swap does not decide again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _decided.by
        _decided.by = (*before, swap)
        try:
            return function(*args, **kwargs)
        finally:
            _decided.by = before

    return call
