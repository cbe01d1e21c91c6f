"""Decides when to record: the first steps provisionally, then the window after the warm-up.

Hooks report what the workload does; the counter turns that into steps; the recorder opens and
closes captures at their edges. A script may end before its window opens, so a capture of its first
steps is kept until the window has a step of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .capture import (
    PROFILER_ERRORS,
    Ahead,
    Capture,
    can_start,
    is_capturing_a_graph,
    would_wake_a_gpu,
)
from .deviceclock import DeviceClock
from .follower import Follower
from .nsight import is_in_sight, new_capture, new_window
from .recording import Recording, Stage, now
from .settings import Settings
from .softly import softly
from .step_counter import Rule, StepCounter


class Recorder(Follower):
    """The state of recording in this process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.device_clock = DeviceClock()
        self.stage = Stage.BEGINNING
        self.problems: list[str] = []
        self.kept: Recording | None = None
        self.running: Recording | None = None
        self.window_rule: Rule | None = None
        self.on_begun: Callable[[], None] = lambda: None
        self.on_activity: Callable[[], None] = lambda: None
        self.on_window: Callable[[Recording], None] = lambda recording: None
        self.on_finished: Callable[[Recording], None] = lambda recording: None
        self.on_elsewhere: Callable[[], None] = lambda: None
        self.on_own_steps: Callable[[], None] = lambda: None
        self._is_block = self._waits_for_cuda = self._has_tried_again = False
        self.ahead = Ahead(new_window)
        self._open_step: int | None = None

    @property
    def is_capturing(self) -> bool:
        """Whether ranges reach a trace now."""
        return self.running is not None

    @property
    def is_counting(self) -> bool:
        """Whether outermost calls still have to be told."""
        return self.stage is not Stage.DONE or self.counter.rule is Rule.CALL

    @softly
    def begin(self) -> None:
        """Record provisionally from here, or from CUDA's initialization on if this would be it."""
        if would_wake_a_gpu():
            self._waits_for_cuda = True
        else:
            self._begin()

    @softly
    def cuda_is_ready(self) -> None:
        """Begin the provisional capture, or begin it again, now that it can see the GPU."""
        is_awaited, self._waits_for_cuda = self._waits_for_cuda, False
        if self.stage is Stage.BEGINNING and (is_awaited or self.running is not None):
            self._drop()
            self._begin()
        elif self.stage is Stage.EARLY and self.running is not None:
            self._drop()
            self._start(new_capture(self.settings), is_window=False)

    @softly
    def activity(self) -> None:
        """Note that there is work: a batch is fetched or a model is called."""
        if self.stage is Stage.BEGINNING and torch.utils.data.get_worker_info() is not None:
            self.give_up("")
            return
        self.on_activity()
        if self.stage is Stage.BEGINNING:
            self._leave_beginning()
        self.check_bounds()

    @softly
    def check_bounds(self) -> None:
        """End a recording that has grown too large."""
        if not self._can_stop_here():
            return
        if self.running is not None and (overrun := self.running.find_overrun(now())):
            self.running.caveats.append(overrun)
            self.end_capture()

    @softly
    def make_way(self) -> None:
        """Stop recording, because the workload starts torch's profiler itself."""
        self.ahead.cancel()
        if not self._can_stop_here():
            raise RuntimeError("another thread has started the recording and cannot be asked")
        if self.stage is Stage.WINDOW and self.running is not None and not self.running.steps:
            self._drop()
            self.stage = Stage.WAITING
        elif self.running is not None:
            self.running.caveats.append(
                "The recording ended where the workload started torch's profiler itself."
            )
            self.end_capture()

    def restart(self, settings: Settings, counter: StepCounter) -> None:
        """Record as `settings` say from here on, counting steps with `counter`."""
        self.settings = settings
        self.counter = counter
        self.device_clock = DeviceClock()
        self.stage = Stage.WAITING
        self.kept = self._open_step = None

    @softly
    def rest(self) -> None:
        """Record nothing until a restart; a recording under way ends here."""
        self.end_capture()
        self._drop()
        self.kept = None
        self.stage = Stage.IDLE

    @softly
    def block_begins(self) -> None:
        """Record from here to `block_ends`, whatever the steps, instead of any other window."""
        self._drop()
        self.kept = None
        self._is_block = True
        self.counter.is_settled = False
        self._open_window()

    @softly
    def block_ends(self) -> None:
        """Stop recording the block."""
        self.end_capture()
        self._is_block = False

    @softly
    def end_capture(self) -> None:
        """Stop the capture that is running and keep what it recorded."""
        recording = self.running
        if recording is None or is_capturing_a_graph() or not self._can_stop_here():
            return
        recording.leave_step()
        self.running = None
        self.on_change()
        try:
            recording.capture.stop(is_last=recording.is_window and not self._is_block)
        except RuntimeError as error:
            if self._has_tried_again or self._is_block or self.settings.trigger is not None:
                raise
            self._has_tried_again = True
            self.problems.append(f"The first recording was lost ({error}), so there was another.")
            self.stage = Stage.WAITING
            return
        if recording.steps or self.kept is None:
            self.kept = recording
        if recording.is_window:
            self.stage = Stage.DONE
            self.counter.is_settled = True
            self.on_finished(self.kept)
        elif self.stage is Stage.EARLY:
            self.stage = Stage.WAITING
        self.on_change()

    def give_up(self, reason: str) -> None:
        """Record nothing more; the workload goes on without the recorder."""
        self.problems += [reason] if reason else []
        running = self.running
        self.abandon()
        if running is not None and not is_capturing_a_graph():
            # Else torch's profiler would go on to fill the memory.
            with contextlib.suppress(*PROFILER_ERRORS):
                running.capture.cancel()

    def abandon(self) -> None:
        """Record nothing more, without touching what may be another process's."""
        self.is_broken = True
        self.running = None
        self.on_change()

    @softly
    def drop_beginning(self) -> None:
        """Forget what was recorded before any work, which another thread than this has begun."""
        if self.stage is Stage.BEGINNING:
            self._drop()

    def _can_stop_here(self) -> bool:
        return self.running is None or self.running.capture.can_be_stopped_here

    def _begin(self) -> None:
        self._start(new_capture(self.settings), is_window=False)
        if self.running is not None:
            self.on_begun()

    def _leave_beginning(self) -> None:
        self._drop()
        if not self._can_stop_here():
            self.on_elsewhere()
            return
        self.kept = None
        self.stage = Stage.IDLE if self.settings.trigger else Stage.EARLY
        if self.settings.trigger:
            return
        if self.settings.skip:
            self._start(new_capture(self.settings), is_window=False)
        else:
            self._open_window()

    def _follow_counter(self) -> None:
        counter = self.counter
        under_way = counter.index if counter.is_under_way else None
        if under_way == self._open_step:
            return
        is_completed = counter.last_completed == self._open_step
        if self._open_step is not None:
            self.device_clock.end(self._open_step)
            self._step_has_ended(self._open_step, is_completed)
        self._open_step = under_way
        if under_way is not None:
            self._step_has_begun(under_way)
            # The recorder's own work just before is not part of the step.
            counter.rebase(now())
            self.device_clock.begin(under_way)

    def _step_has_ended(self, index: int, is_completed: bool) -> None:
        if self.running is not None:
            self.running.end_step(index, is_completed=is_completed)
            if index in self.running.steps:
                self.counter.keep_last()
            if self.running.is_window and self.running.steps:
                self.kept = None
        if self.stage in (Stage.WINDOW, Stage.DONE) and not self._is_block:
            self._training_wins()
        if self.running is not None and self.running.has_all_steps:
            self.end_capture()
        if self.stage is Stage.WAITING and self.counter.num_counted == self.settings.skip - 1:
            self.ahead.prepare(self.settings)

    def _step_has_begun(self, index: int) -> None:
        if self.counter.num_counted:
            self.on_own_steps()
        is_warm = self.counter.num_counted >= self.settings.skip
        if self.stage in (Stage.EARLY, Stage.WAITING) and self.counter.rule and is_warm:
            self._open_window()
        if self.running is not None:
            self.running.begin_step(index)

    def _training_wins(self) -> None:
        """Wait for another window if this one holds evaluation before the training."""
        if self.counter.rule is Rule.OPTIMIZER and self.window_rule is Rule.CALL:
            self._drop()
            self.stage = Stage.WAITING
            self.counter.is_settled = False
            self.on_change()

    def _open_window(self) -> None:
        if not can_start() or not is_in_sight(self.settings):
            return
        if self.running is not None:
            self.end_capture()
        capture = self.ahead.take(self.settings)
        self.models.name_known()
        self.window_rule = self.counter.rule
        self.stage = Stage.WINDOW
        self._start(capture, is_window=True)

    def _start(self, capture: Capture, *, is_window: bool) -> None:
        if not can_start() or not (is_window or capture.can_be_provisional):
            return
        capture.start()
        self.running = Recording(
            capture, self.settings, now(), is_window=is_window, is_block=self._is_block
        )
        self.on_change()
        if is_window:
            self.on_window(self.running)

    def _drop(self) -> None:
        if is_capturing_a_graph() or not self._can_stop_here():
            return
        self.ahead.cancel()
        if self.running is not None:
            self.running.leave_step()
            running, self.running = self.running, None
            running.capture.cancel()
        self.on_change()
