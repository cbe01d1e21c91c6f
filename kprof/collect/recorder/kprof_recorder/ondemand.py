"""Recordings of a process that never ends: one bounded window for every order."""

from __future__ import annotations

from .ending import Deadline
from .native import RLock
from .output import Outcome
from .recorder import Recorder
from .recording import Recording
from .settings import Settings
from .trigger import Trigger


class OnDemand:
    """The recorder of a service: it rests until an order comes, and after every window."""

    def __init__(self, recorder: Recorder, outcome: Outcome, settings: Settings) -> None:
        self.recorder = recorder
        self.outcome = outcome
        self._trigger = Trigger(settings)
        self._deadline: Deadline | None = None
        self._has_recorded = False

    def look(self) -> None:
        """Follow an order that has come, or that was withdrawn."""
        if not self._trigger.has_changed():
            return
        self.recorder.rest()
        if self._trigger.order is not None:
            self.outcome.restart()
            counter = self.recorder.counter.counting_anew()
            self.recorder.restart(self._trigger.order, counter)

    def window_opens(self, recording: Recording) -> None:
        """Say that this process takes part, and see to it that the window ends in time."""
        self._has_recorded = True
        self.outcome.announce()
        seconds = self.recorder.settings.seconds
        if seconds is not None:
            self._deadline = Deadline(
                seconds,
                lambda: self.time_is_over(recording),
                self._trigger.is_withdrawn,
                self.recorder.is_busy,
                is_for_any_thread=recording.capture.is_of_all_threads,
            )

    def window_ends(self) -> None:
        """Rest, now that the window is written."""
        self.forget_deadline()
        self.outcome.restart()
        self.recorder.rest()

    def time_is_over(self, recording: Recording) -> None:
        """End a window while the process does nothing that would end it."""
        recorder = self.recorder
        if recorder.is_broken:
            self.outcome.describe(recorder.problems)
        elif recorder.running is recording and recording.capture.can_be_stopped_here:
            recorder.end_capture()

    def forget_deadline(self) -> None:
        """Let the thread of the deadline end."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def finish(self) -> None:
        """Write a window that is open when the process ends."""
        self.forget_deadline()
        if not self.recorder.is_broken:
            self.recorder.rest()
        elif self.outcome.is_announced:
            self.outcome.describe(self.recorder.problems)

    def follow_child(self) -> bool:
        """Go on in a forked child, unless its parent has used torch's profiler; say whether."""
        if self._has_recorded or self.outcome.graphs.has_recorded:
            return False
        self.recorder.lock = RLock()
        return True
