"""A sign of life on stderr from work that takes longer than two seconds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as Bar

PATIENCE_S = 2.0
# The stages of opening a trace, in their order, each with its share of the time: measured with a
# trace of 2 million events (11.1, 3.4, 0.9 and 0.5 s).
STAGES = {"reading": 0.70, "analyzing": 0.21, "saving": 0.06, "drawing": 0.03}


class Progress:
    """Call it with the name of each stage as it begins; nothing shows for the first two seconds.

    Where stderr is no terminal there is no bar, and `otherwise` hears of every stage: at once, or
    with `is_patient` after two seconds.
    """

    def __init__(
        self, otherwise: Callable[[str], None] | None = None, *, is_patient: bool = False
    ) -> None:
        self._otherwise, self._is_patient = otherwise, is_patient
        self._lock = threading.Lock()
        self._stage = next(iter(STAGES))
        self._began_s = time.monotonic()
        self._timer: threading.Timer | None = None
        self._bar: Bar | None = None
        self._is_shown = self._is_closed = False

    def __call__(self, stage: str) -> None:
        """Say that `stage` begins."""
        if self._otherwise is not None and not self._is_patient and not _is_terminal():
            self._otherwise(stage)
            return
        with self._lock:
            self._stage = stage
            if self._timer is None:
                self._began_s = time.monotonic()
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
            if self._is_closed:
                return
            self._is_shown = True
            if console.is_terminal:
                self._bar = Bar(console=console, transient=True, redirect_stdout=False)
                # The number of other stages is unknown: the bar moves without a share.
                total = 1.0 if self._stage in STAGES else None
                self._bar.add_task(self._stage, total=total)
                self._bar.start()
            self._update()

    def _update(self) -> None:
        if not self._is_shown:
            return
        left_s = self._left_s()
        line = (
            self._stage if left_s is None else f"{self._stage}, about {max(left_s, 1):.0f} s left"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._share(), description=line)
        elif self._otherwise is not None and (left_s is None or left_s >= PATIENCE_S):
            self._otherwise(line)

    def _share(self) -> float:
        """Return the share of the time that the stages before take; 0 where it is not known."""
        if self._stage not in STAGES:
            return 0.0
        names = list(STAGES)
        return sum(STAGES[name] for name in names[: names.index(self._stage)])

    def _left_s(self) -> float | None:
        """Return how long the rest takes, by the time of the stages before; None: not known."""
        done = self._share()
        return (time.monotonic() - self._began_s) * (1 - done) / done if done else None


def _is_terminal() -> bool:
    from rich.console import Console

    return Console(stderr=True).is_terminal
