"""Starts the recorder's parts in a process that has imported torch.

It also swaps kernels into a recorded workload, after a step of its own code, or makes a dry run of
such a swap in the step after the window. In a process that never ends, it records one bounded
window for every order.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .capture import PROFILER_ERRORS, watch_others
from .compiler import keep_from_compiler, num_compiled
from .ending import Deadline, Ending, ForkWarning, leave_without_destructors, main_thread, on_fork
from .hooks import Hooks, listen_to_engines
from .native import RLock, perf_counter_ns
from .output import Outcome
from .quiet import hide_from_tracebacks, hush
from .ranks import started_by
from .recorder import EARLY_NS, Recorder, Recording
from .settings import DRY_RUN, Settings
from .step_counter import Source, StepCounter
from .trigger import Trigger

REPORT = "swap.json"


class Swapping:
    """The swap of this process: made before a step, told after the window and at the end."""

    def __init__(self, names: str, folder: Path, problems: list[str]) -> None:
        """Prepare the swap of `names`; its report goes into the folder, what fails to `problems`.

        Ranks write the same report: they run the same model.
        """
        self._names, self._path, self._problems = names, folder / REPORT, problems
        self._is_tried = False
        self._swap: Any = None

    def make(self) -> None:
        """Swap the kernels into all existing models, the first time."""
        if self._is_tried:
            return
        self._is_tried = True
        try:
            # Imported from the workload's environment: without a swap, it need not be there.
            swap = import_module("kprof.kernels.swap.swapping").all_models(
                self._names, str(self._path)
            )
            swap.__enter__()
        except Exception as error:  # noqa: BLE001 - no failure here may be the workload's
            self._problems.append(
                f"{self._names} could not be swapped in ({type(error).__name__}: {error}), so the "
                "workload ran as it is."
            )
            return
        self._swap = swap
        atexit.register(self.tell)

    def tell(self) -> None:
        """Write what became of the swap so far."""
        if self._swap is not None:
            self._swap.tell()


class DryRun:
    """The dry run of a swap in the step after the window: for the findings, nothing is swapped."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._watch: Any = None

    def begin(self, folder: Path) -> None:
        """Watch the calls of this process from here on, where kernels could run."""
        if self._path is not None or not _can_run_kernels():
            return
        self._path = folder / DRY_RUN
        if num_compiled():
            # A swap, even a dry one, changes what the compiler's guards see.
            self._tell("parts of the workload are compiled, and a check would compile them anew")
            return
        try:
            # Imported from the workload's environment, as for a swap.
            began_ns = perf_counter_ns()
            begin = import_module("kprof.kernels.swap.dry_run").begin
            self._watch = begin(str(self._path), began_ns)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the workload's
            self._tell(getattr(error, "problem", f"{type(error).__name__}: {error}"))
            return
        atexit.register(self.end)

    def end(self) -> None:
        """Watch no longer, and write what was found."""
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        atexit.unregister(self.end)
        try:
            watch.end()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the workload's
            self._tell(f"{type(error).__name__}: {error}")

    def forget(self) -> None:
        """Watch nothing, and write nothing: this is a forked child."""
        self._watch = None

    def _tell(self, why_not: str) -> None:
        with contextlib.suppress(OSError):
            self._path.write_text(json.dumps({"why_not": why_not}))  # type: ignore[union-attr]


def _can_run_kernels() -> bool:
    """Whether there is a GPU in use, or Triton's interpreter takes its place."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.cuda.is_initialized() or is_interpreted


FORKED = (
    "This process was forked after torch had been imported, and trained without being recorded: "
    "torch's profiler does not survive a fork. Start it with the method spawn."
)


class Session:
    """The recorder of this process with all that belongs to it."""

    def __init__(self, settings: Settings) -> None:
        self.recorder = Recorder(settings)
        self.outcome = Outcome(self.recorder)
        self.hooks = Hooks(self.recorder)
        # First: a replay that begins a step, and so the window, belongs to it.
        self.outcome.graphs.listen()
        self.hooks.install()
        self.outcome.notes.listen()
        keep_from_compiler(__package__)
        watch_others(self.make_way)
        self.deadline: Deadline | None = None
        self.on_demand: OnDemand | None = None
        self.ending: Ending | None = None
        self.is_following = False
        self.inherited: Recording | None = None
        self.fork_warning = ForkWarning()
        self.swapping: Swapping | None = None
        self.dry_run: DryRun | None = None

    def follow_the_process(self) -> None:
        """Record from here to the process's end."""
        self.is_following = True
        hide_from_tracebacks()
        self.ending = Ending(self.finish, self.recorder.is_busy, self.leave)
        self.outcome.is_count_final = self.recorder.settings.trigger is not None
        on_fork(
            before=self.before_fork,
            in_parent=self.fork_warning.in_parent,
            in_child=self.in_forked_child,
        )
        self.recorder.on_activity = self.begin
        self.recorder.on_window, self.recorder.on_finished = self.window_opens, self.window_ends
        self.recorder.on_light = self.outcome.export_light_pass
        settings = self.recorder.settings
        if settings.swap:
            self.swapping = Swapping(settings.swap, settings.raw.parent, self.recorder.problems)
            self.recorder.on_own_steps = self.swapping.make
        elif settings.trigger is None:
            self.dry_run = DryRun()
            self.recorder.on_next_end = self.dry_run.end
        if settings.trigger is not None:
            self.on_demand = OnDemand(self.recorder, self.outcome, self.recorder.settings)
            return
        if started_by() is None:
            self.ending.listen()
        self.recorder.on_begun = self.bound_beginning
        self.recorder.on_elsewhere = lambda: main_thread.call(self.recorder.drop_beginning)
        self.recorder.begin()

    def restart(self, settings: Settings) -> None:
        """Record as `settings` say from here on, counting steps anew."""
        self.recorder.restart(settings, StepCounter())
        self.outcome.restart()

    def block_begins(self) -> None:
        """Record from here to `block_ends`, as the workload itself asks for."""
        self.outcome.note_rank()
        self.recorder.block_begins()

    def block_ends(self) -> None:
        """Write the recording of the block."""
        self.recorder.block_ends()
        self.outcome.describe(self.recorder.problems)

    def window_opens(self, recording: Recording) -> None:
        """Take care that a window outlives SIGTERM; multiprocessing's children must die of it."""
        if self.ending is not None and started_by() is None:
            self.ending.listen()
        if self.on_demand is not None:
            self.on_demand.window_opens(recording)
        else:
            self.outcome.open_window()

    def window_ends(self, recording: Recording) -> None:
        """Write the window, after which there is nothing to lose."""
        self.outcome.export(recording)
        if self.swapping is not None:
            self.swapping.tell()
        if self.dry_run is not None:
            self.dry_run.begin(self.outcome.folder)
        if self.on_demand is not None:
            self.on_demand.window_ends()
        if self.ending is not None:
            self.ending.rest()

    def begin(self) -> None:
        """Note what is known once the workload has begun its work."""
        listen_to_engines(self.hooks)
        if self.on_demand is not None:
            self.recorder.on_activity = self.on_demand.look
            self.on_demand.look()
            return
        self.recorder.on_activity = lambda: None
        self.forget_deadline()
        self.outcome.announce()

    def bound_beginning(self) -> None:
        """Let what is recorded before any work end after a while."""
        self.forget_deadline()
        self.deadline = Deadline(
            EARLY_NS / 1e9, self.recorder.end_capture, is_busy=self.recorder.is_busy
        )

    def forget_deadline(self) -> None:
        """Let the provisional recording be bounded by the hooks alone."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        if self.on_demand is not None:
            self.on_demand.forget_deadline()

    def before_fork(self) -> None:
        """Take what threads there are out of sight of the fork."""
        self.forget_deadline()
        self.fork_warning.before_fork()

    def in_forked_child(self) -> None:
        """Record nothing of a forked child, except in a service that has not been recorded yet."""
        self.fork_warning.in_child()
        if self.on_demand is not None and self.on_demand.follow_child():
            return
        self.inherited = self.recorder.running or self.inherited
        leave_without_destructors()
        if self.inherited is not None and not self.inherited.capture.is_of_all_threads:
            # A profiler started in this thread complains at its end if it was not stopped.
            atexit.register(hush)
        if self.ending is not None:
            self.ending.forget()
        if self.dry_run is not None:
            self.dry_run.forget()
        self.recorder.abandon()
        self.hooks.on_step = self.say_forked
        torch.autograd._enable_record_function(False)

    def make_way(self) -> None:
        """Let the workload start torch's profiler itself; a forked child has it as it was."""
        self.recorder.make_way()
        if self.inherited is not None:
            recording, self.inherited = self.inherited, None
            with contextlib.suppress(*PROFILER_ERRORS):
                recording.capture.stop()
        torch.autograd._enable_record_function(True)

    def say_forked(self, source: Source) -> None:
        """Warn that a forked child trains a model and is not recorded."""
        self.hooks.on_step = lambda source: None
        with contextlib.suppress(OSError):
            Outcome(Recorder(self.recorder.settings)).describe([FORKED])

    def leave(self) -> None:
        """Write how many steps there were, where `os._exit` ends the process; wait for nothing."""
        recorder = self.recorder
        is_due = self.outcome.is_announced and self.on_demand is None and not recorder.is_broken
        if is_due and recorder.lock.acquire(blocking=False):
            try:
                with contextlib.suppress(*PROFILER_ERRORS):
                    self.outcome.note_count()
            finally:
                recorder.lock.release()

    def finish(self) -> None:
        """Write the recording; the workload's own end goes on in any case."""
        self.forget_deadline()
        if self.dry_run is not None:
            # No step comes after a window that the end of the process closes.
            self.dry_run.end()
            self.dry_run = None
        if self.recorder.is_broken and not self.recorder.problems:
            return
        with contextlib.suppress(*PROFILER_ERRORS):
            (self.on_demand or self.outcome).finish()


session: Session | None = None


def start(settings: Settings) -> Session:
    """Return the one recorder of this process, installed if there was none."""
    global session
    if session is None:
        session = Session(settings)
    return session


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
