"""Calls that a site has decided about: torch's own functions leave what runs for them alone.

What a site replaces, and others' code that runs there, calls functions of torch's that a swap of
the whole process decides about, too. One decision about a call is enough, and is counted once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Decided(threading.local):
    """Whether what runs now in this thread runs for such a call."""

    is_on = False


decided = _Decided()


def standing_aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function during whose calls those of torch's are not decided about again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, decided.is_on = decided.is_on, True
        try:
            return function(*args, **kwargs)
        finally:
            decided.is_on = before

    return call
