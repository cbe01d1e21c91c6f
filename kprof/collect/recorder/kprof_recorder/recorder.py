"""Decides when to record: the first steps provisionally, then the window after the warm-up.

Hooks report what the workload does; the follower and the counter turn that into steps; the recorder
opens and closes captures at their edges. A script may end before its window opens, so a capture of
its first steps is kept until the window has a step of its own. The GPU's times of unrecorded steps
are taken by marks on its timeline, without waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from .capture import (
    PROFILER_ERRORS,
    Ahead,
    Capture,
    LightCapture,
    Others,
    can_start,
    is_capturing_a_graph,
    is_in_sight,
    new_capture,
    new_window,
    would_wake_a_gpu,
)
from .compiler import subclasses
from .memory import history
from .named_ranges import STEP, Models, Range
from .native import RLock, perf_counter_ns, time_ns
from .settings import Settings
from .softly import softly
from .step_counter import Rule, Source, StepCounter

# The provisional capture is bounded in steps, time and size: most scripts never need it.
EARLY_STEPS = 2
EARLY_NS = 20_000_000_000
EARLY_MODULE_CALLS = 25_000
# About 500 MB of trace; a window that grows beyond is cut.
WINDOW_MODULE_CALLS = 100_000

EPOCH_NS = time_ns() - perf_counter_ns()


def now() -> int:
    """Return ns since 1970 on a clock that never jumps."""
    return EPOCH_NS + perf_counter_ns()


class Stage(Enum):
    """Where the recorder is; stages follow each other in this order."""

    BEGINNING = "torch is imported, no step has begun"
    EARLY = "the first steps"
    IDLE = "nothing is to be recorded until somebody asks for it"
    WAITING = "warm-up"
    WINDOW = "the window"
    DONE = "after the window"


class LightStage(Enum):
    """Where the light pass is, which comes after the window."""

    NONE = "there is none to come"
    DUE = "to be prepared when the step under way ends"
    PREPARED = "prepared, and to begin when the step under way has ended"
    READY = "to begin with the next step"
    RUNNING = "under way"


@dataclass
class Recording:
    """A capture and the steps in it."""

    capture: Capture
    settings: Settings
    start_ns: int
    is_window: bool = True
    is_block: bool = False
    is_light: bool = False
    """Whether it is the light pass, which holds no ranges."""
    steps: list[int] = field(default_factory=list)
    num_module_calls: int = 0
    caveats: list[str] = field(default_factory=list)
    _step_range: Any = None

    def begin_step(self, index: int) -> None:
        """Open the range of a step of the workload.

        Not where a capture of one thread alone does not hear it: torch fails where such a range is
        left in a thread that it does hear.
        """
        if self.capture.can_be_stopped_here:
            name = f"{STEP}{index}"
            self._step_range = contextlib.nullcontext() if self.is_light else Range(name)
            self._step_range.__enter__()

    def end_step(self, index: int, *, is_completed: bool) -> None:
        """Close the range of a step, which is recorded if it lay in here from end to end."""
        if not self.capture.can_be_stopped_here:
            # It has ended where the capture hears nothing, and torch must not be told there.
            self._step_range = None
            return
        if self._step_range is not None and is_completed:
            self.steps.append(index)
        self.leave_step()

    def leave_step(self) -> None:
        """Close the range of a step, wherever it is."""
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None

    @property
    def has_all_steps(self) -> bool:
        """Whether it holds as many steps as it should; a block ends where its user ends it."""
        if self.is_block:
            return False
        few = max(1, min(EARLY_STEPS, self.settings.skip - 1))
        is_short = not self.is_window and not self.is_light
        return len(self.steps) >= (few if is_short else self.settings.steps)

    def find_overrun(self, now_ns: int) -> str | None:
        """Return why the recording has to end here and now, or None while it may go on."""
        elapsed_ns = now_ns - self.start_ns
        most = WINDOW_MODULE_CALLS if self.is_window else EARLY_MODULE_CALLS
        longest_ns = self.settings.longest_ns if self.is_window else EARLY_NS
        is_late = longest_ns is not None and elapsed_ns > longest_ns
        if self.num_module_calls <= most and not is_late:
            return None
        return (
            f"The recording was cut after {self.num_module_calls} module calls in "
            f"{elapsed_ns / 1e9:.1f} s, inside a step, to bound its size; record fewer steps "
            "with --steps, or for longer with --seconds."
        )


class Follower:
    """Follows the steps of this process; what that is good for says `_follow_counter`."""

    def __init__(self) -> None:
        self.counter = StepCounter()
        self.models = Models()
        self.lock = RLock()
        self.is_broken = False
        self.on_change: Callable[[], None] = lambda: None

    def is_busy(self) -> bool:
        """Whether a signal's handler, which calls this, has come amid the recorder's own work."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def activity(self) -> None:
        """Note that there is work: a batch is fetched or a model is called."""
        raise NotImplementedError

    def give_up(self, reason: str) -> None:
        """Do nothing more; the workload goes on."""
        raise NotImplementedError

    def _follow_counter(self) -> None:
        """Do what there is to do where a step begins or ends."""
        raise NotImplementedError

    def _look_at(self, source: Source) -> None:
        """Look at what a step may be counted by, before it is."""

    @softly
    def call_begins(self, source: Source, is_training: bool) -> None:
        """Note the beginning of an outermost call."""
        self.activity()
        self._look_at(source)
        self.counter.call_begins(source, now(), is_training=is_training)
        self._follow_counter()

    @softly
    def call_ends(self, source: Source) -> None:
        """Note the end of an outermost call."""
        self.counter.call_ends(source, now())
        self._follow_counter()

    @softly
    def backward(self) -> None:
        """Note a backward pass."""
        self.activity()
        self.counter.backward()

    @softly
    def optimizer_ends(self, source: Source) -> None:
        """Note the end of an optimizer's step."""
        self.activity()
        self._look_at(source)
        self.counter.optimizer_ends(source, now())
        self._follow_counter()

    @softly
    def range_begins(self) -> None:
        """Note the beginning of a range that the user named "step"."""
        self.activity()
        self.counter.range_begins(now())
        self._follow_counter()

    @softly
    def range_ends(self) -> None:
        """Note the end of a range that the user named "step"."""
        self.counter.range_ends(now())
        self._follow_counter()


class Listener(Protocol):
    """Receives the events of the hooks in one process; a listener to all of them counts its steps.

    A listener that changes the events it wants calls `on_change`, which the hooks set.
    """

    on_change: Callable[[], None]
    models: Models
    lock: RLock
    is_broken: bool
    """Whether nothing needs to be told any more."""

    @property
    def running(self) -> Recording | None:
        """The recording in progress, if there is one."""

    @property
    def is_capturing(self) -> bool:
        """Whether ranges reach a trace now."""

    @property
    def is_counting(self) -> bool:
        """Whether outermost calls still have to be told."""

    def give_up(self, reason: str) -> None:
        """Do nothing more; the workload goes on."""

    def activity(self) -> None:
        """Note that there is work: a batch is fetched or a model is called."""

    def call_begins(self, source: Source, is_training: bool) -> None:
        """Note the beginning of an outermost call."""

    def call_ends(self, source: Source) -> None:
        """Note the end of an outermost call."""

    def backward(self) -> None:
        """Note a backward pass."""

    def optimizer_ends(self, source: Source) -> None:
        """Note the end of an optimizer's step."""

    def cuda_is_ready(self) -> None:
        """Note that CUDA has been initialized."""

    def check_bounds(self) -> None:
        """Note that many modules were called within what is being recorded."""


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
        self.on_light: Callable[[Recording], None] = lambda recording: None
        self.on_elsewhere: Callable[[], None] = lambda: None
        self.on_own_steps: Callable[[], None] = lambda: None
        self.on_next_end: Callable[[], None] = lambda: None
        self._is_block = self._waits_for_cuda = self._has_tried_again = False
        self.ahead = Ahead(new_window)
        self.light = Ahead(LightCapture)
        self.light_stage = LightStage.NONE
        self.light_steps: list[int] = []
        history.find_models = self.models.describe.alive
        self._open_step: int | None = None

    @property
    def is_capturing(self) -> bool:
        """Whether ranges reach a trace now."""
        return self.running is not None and not self.running.is_light

    @property
    def is_counting(self) -> bool:
        """Whether outermost calls still have to be told."""
        return self.stage is not Stage.DONE or self.counter.rule is Rule.CALL

    @property
    def may_train(self) -> bool:
        """Whether steps are calls, and an optimizer that was made has not stepped yet."""
        return self.counter.rule is Rule.CALL and not self.counter.has_trained and has_optimizer()

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
        self.cancel_light_pass()
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
        self._forget_light_pass()

    @softly
    def rest(self) -> None:
        """Record nothing until a restart; a recording under way ends here."""
        self.end_capture()
        self._drop()
        self.kept = None
        self.stage = Stage.IDLE

    @softly
    def block_begins(self) -> None:
        """Record from here to `block_ends` and not by steps, instead of any other window."""
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
        if recording.is_light:
            self._end_light_pass(recording)
            return
        if recording.is_window and self._wants_light_pass(recording):
            self.light_stage = LightStage.DUE
        is_last = recording.is_window and not self._is_block
        try:
            recording.capture.stop(is_last=is_last and self.light_stage is LightStage.NONE)
        except RuntimeError as error:
            if self._has_tried_again or self._is_block or self.settings.trigger is not None:
                raise
            self._has_tried_again = True
            self.problems.append(f"The first recording was lost ({error}), so there was another.")
            self.stage = Stage.WAITING
            return
        self._keep(recording)

    def _keep(self, recording: Recording) -> None:
        """Keep what was recorded, and go on to the next stage."""
        if recording.steps or self.kept is None:
            self.kept = recording
        if recording.is_window:
            self.stage = Stage.DONE
            self.counter.is_settled = True
            self.on_finished(self.kept)
        elif self.stage is Stage.EARLY:
            self.stage = Stage.WAITING
        self.on_change()

    def _wants_light_pass(self, window: Recording) -> bool:
        is_whole = window.has_all_steps and not window.caveats
        return self.settings.light and window.capture.has_cuda and is_whole

    def _follow_light_pass(self) -> None:
        """Prepare it after the step that a dry run may take, a step before it begins."""
        if self.light_stage is LightStage.DUE:
            self.light.prepare(self.settings)
            self.light_stage = LightStage.PREPARED
        elif self.light_stage is LightStage.PREPARED:
            self.light_stage = LightStage.READY

    def _start_light_pass(self) -> None:
        self.light_stage = LightStage.NONE
        capture = self.light.take(self.settings)
        if not can_start():
            return
        capture.start()
        self.light_stage = LightStage.RUNNING
        self.running = Recording(capture, self.settings, now(), is_window=False, is_light=True)
        self.on_change()

    def _end_light_pass(self, recording: Recording) -> None:
        """Stop it, and keep it if it is whole."""
        self.light_stage = LightStage.NONE
        try:
            recording.capture.stop(is_last=True)
        except RuntimeError:
            return
        if recording.has_all_steps and not recording.capture.is_cut_short:
            self.light_steps = recording.steps
            self.on_light(recording)

    def cancel_light_pass(self) -> None:
        """Have none that has not begun: what was prepared for it is in another profiler's way."""
        self.light.cancel()
        self.light_stage = LightStage.NONE

    def _forget_light_pass(self) -> None:
        self.cancel_light_pass()
        self.light_steps = []

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
        if self.stage is Stage.DONE:
            self.on_next_end()
            self._follow_light_pass()
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
        if self.light_stage is LightStage.READY:
            self._start_light_pass()
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
            if not can_start():
                return
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
        self._forget_light_pass()
        if self.running is not None:
            self.running.leave_step()
            running, self.running = self.running, None
            running.capture.cancel()
        self.on_change()


def has_optimizer() -> bool:
    """Return whether an optimizer was made: torch then hooks its class's `step`."""
    return any(hasattr(one.step, "hooked") for one in subclasses(torch.optim.Optimizer))


# Enough to compare recorded steps with unrecorded ones; an event is never freed before the end.
MOST_STEPS = 256


@dataclass
class Marks:
    """Events on the GPU at a step's edges; the second is missing while the step is under way."""

    begin: torch.cuda.Event
    end: torch.cuda.Event | None = None


class DeviceClock:
    """Marks the edges of steps on the GPU's own timeline.

    The host runs ahead of the GPU, so that the host's clock alone can show the launching of a
    step where its work still waits.
    """

    def __init__(self) -> None:
        self._marks: dict[int, Marks] = {}

    def begin(self, index: int) -> None:
        """Mark where step `index` begins."""
        if len(self._marks) < MOST_STEPS and _can_mark():
            self._marks[index] = Marks(_mark())

    def end(self, index: int) -> None:
        """Mark where step `index` ends."""
        marks = self._marks.get(index)
        if marks is not None and marks.end is None and _can_mark():
            marks.end = _mark()

    def durations_ns(self) -> dict[int, int]:
        """Return the time between the marks of every step that the GPU has finished.

        Nothing comes from a GPU that failed under the workload.
        """
        try:
            return {
                index: round(marks.begin.elapsed_time(marks.end) * 1e6)
                for index, marks in self._marks.items()
                if marks.end is not None and marks.end.query()
            }
        except RuntimeError:
            return {}


def _can_mark() -> bool:
    """Whether a mark is safe and shows in no other profiler as the workload's."""
    return not Others.is_active and torch.cuda.is_initialized() and not is_capturing_a_graph()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
