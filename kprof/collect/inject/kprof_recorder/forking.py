"""What Python would say of the recorder when the workload forks."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from .ending import main_thread
from .native import THREADS
from .others import Others, Ours

# From here on, a fork warns where there is more than one thread.
WARNS = (3, 12)
FILTER = ("ignore", re.compile("This process "), DeprecationWarning, None, 0)


class ForkWarning:
    """Keeps Python from warning of threads at a fork where the workload itself has but one.

    The other is the one that torch's profiler starts and keeps, and the recorder was the first to
    use that. The list of filters is exchanged, and not by a function of `warnings`: those make
    Python show once more what it has shown already.
    """

    def __init__(self) -> None:
        self._theirs: Any = None
        self._ours: Any = None

    def before_fork(self) -> None:
        """Silence the warning that is to come, if it is of the recorder's making."""
        if sys.version_info >= WARNS and _is_alone_but_for_ours():
            self._theirs = warnings.filters
            self._ours = warnings.filters = [FILTER, *self._theirs]

    def in_parent(self) -> None:
        """Let warnings be heard again, once this thread goes on: some Pythons warn after this."""
        if warnings.filters is self._ours:
            main_thread.call(self._restore)

    def in_child(self) -> None:
        """Let warnings be heard again; whatever threads the child will have are its own."""
        main_thread.forget()
        self._restore()
        Ours.has_begun = False

    def _restore(self) -> None:
        if warnings.filters is self._ours:
            warnings.filters = self._theirs


def _is_alone_but_for_ours() -> bool:
    if not Ours.has_begun or Others.was_seen:
        return False
    try:
        return sum(1 for _ in THREADS.iterdir()) == 2
    except OSError:
        return False
