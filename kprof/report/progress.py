"""A progress bar on stderr for work that takes longer than two seconds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as Bar

PATIENCE_S = 2.0
STAGES = ("reading", "analyzing", "saving", "drawing")


class Progress:
    """Call it with the name of each stage as it begins; nothing shows for the first two seconds.

    Where stderr is no terminal there is no bar; `otherwise` then hears of every stage at once.
    """

    def __init__(self, otherwise: Callable[[str], None] | None = None) -> None:
        self._otherwise = otherwise
        self._lock = threading.Lock()
        self._stage = STAGES[0]
        self._timer: threading.Timer | None = None
        self._bar: Bar | None = None
        self._is_closed = False

    def __call__(self, stage: str) -> None:
        """Say that `stage` begins."""
        if self._otherwise is not None and not _is_terminal():
            self._otherwise(stage)
            return
        with self._lock:
            self._stage = stage
            if self._timer is None:
                self._timer = threading.Timer(PATIENCE_S, self._show)
                self._timer.daemon = True
                self._timer.start()
            self._update()

    def close(self) -> None:
        """Remove the bar."""
        with self._lock:
            # The timer may have fired, and wait for the lock.
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with self._lock:
            console = Console(stderr=True)
            if self._is_closed or not console.is_terminal:
                return
            self._bar = Bar(console=console, transient=True, redirect_stdout=False)
            # The number of other stages is unknown: the bar moves without a share.
            total = len(STAGES) if self._stage in STAGES else None
            self._bar.add_task(self._stage, total=total)
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._bar is not None:
            done = STAGES.index(self._stage) if self._stage in STAGES else 0
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, description=self._stage)


def _is_terminal() -> bool:
    from rich.console import Console

    return Console(stderr=True).is_terminal
