"""The recorder's output: one folder per process, with the trace and recorder.json."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .capture import PROFILER_ERRORS, Others, hears_all_threads
from .compiled import FILE, CompilerNotes
from .graphs import Graphs
from .ranks import (
    gpu_uuids,
    local_rank,
    node,
    process_groups,
    rank,
    started_by,
    world_size,
)
from .recorder import LightStage, Recorder, Recording
from .settings import NSIGHT
from .step_counter import Rule

DRAINED = (
    "The GPU was drained at the edges of the recording, so its first step lacks the head start "
    "that the host otherwise has over the GPU."
)
CUT_SHORT = (
    "The profiler's buffers were full before the recording ended, so the last activities of the "
    "GPU are missing. Record fewer steps: --steps 1."
)
COMPILED = (
    "Modules inside a compiled model have no ranges of their own. Its kernels are named by what "
    "the compiler noted of them, those that fuse several modules by the innermost that holds them "
    "all, and those without a note by the compiled model as a whole."
)
CUT_OFF = (
    "The process ended without Python's own exit (os._exit, SIGKILL or a crash) before its window "
    "was complete. The trace of Nsight Systems ends there, if there is one."
)
UNFINISHED = (
    "The process ended without Python's own exit (os._exit, SIGKILL or a crash), or where no more "
    "files can be written (a full disk, too many open files), before its recording was complete, "
    "so nothing of it is left. Record sooner: --skip 0 --steps 1."
)
OTHERS = (
    "The script ran torch's profiler itself during every step that was to be recorded, and one "
    "profiler at a time can record. Switch the script's own off, or open its trace: "
    "kprof open TRACE."
)

OTHER_THREADS = (
    "The model was called in other threads than the main one, which torch cannot record before "
    "version 2.7."
)
NO_MEMORY = (
    "Allocations are not in the trace, because the model was called in another thread than the "
    "main one, where torch records either all threads or the memory."
)


class Outcome:
    """Writes one process's folder; the folder says what became of the recording at every time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.exported: Recording | None = None
        self._folder: Path | None = None
        self.window_ns: list[int] = []
        """When the window was opened, and when its trace was written, in ns since 1970.

        Empty where the recording is of the beginning.
        """
        # An order to record a service may skip more, but that is none of its warm-up.
        self.warm_up = recorder.settings.skip
        self.rank = 0
        self.world_size = 1
        self.process_groups: list[dict[str, Any]] = []
        self.is_count_final = True
        """Whether the process takes no steps after those counted, or its recorder was not asked."""
        self.notes = CompilerNotes(recorder.models)
        self.graphs = Graphs(recorder)
        recorder.on_finished = self.export

    def restart(self) -> None:
        """Forget everything written, for a recording into another folder."""
        self.exported = self._folder = None
        self.window_ns = []

    def note_rank(self) -> None:
        """Remember rank and groups while they exist; a script may destroy them at its end."""
        self.rank = max(self.rank, rank())
        self.world_size = max(self.world_size, world_size())
        self.process_groups = process_groups() or self.process_groups

    @property
    def folder(self) -> Path:
        """The folder of this process, named for its rank at the time it was first written."""
        if self._folder is None:
            self.note_rank()
            self._folder = self.recorder.settings.raw / f"rank{self.rank}-pid{os.getpid()}"
        return self._folder

    @property
    def is_announced(self) -> bool:
        """Whether the folder of this process exists, or did."""
        return self._folder is not None

    @property
    def window(self) -> Path:
        """The trace of this process."""
        return self.folder / "window-0.json"

    @property
    def light_pass(self) -> Path:
        """The trace of the light pass."""
        return self.folder / "light-0.json"

    def announce(self) -> None:
        """Say that the process has begun its work, in case it never comes to its end."""
        is_nsight = self.recorder.settings.tracer == NSIGHT
        self.describe(problems=[CUT_OFF if is_nsight else UNFINISHED], is_complete=False)

    def open_window(self) -> None:
        """Say that the window has begun, for who waits for it."""
        self.window_ns = [time.time_ns()]
        if self.is_announced:
            self.announce()

    def export(self, recording: Recording) -> None:
        """Write the trace of `recording` in place of any earlier one, then say what it is."""
        self.note_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.light_pass.unlink(missing_ok=True)
        try:
            recording.capture.export(self.window)
        except PROFILER_ERRORS as error:
            self.recorder.problems.append(
                f"The trace could not be written to {self.folder} ({error}), so it is lost."
            )
        else:
            self.exported = recording
            self.notes.write(self.folder)
            self.graphs.write(self.folder)
        if self.window_ns:
            self.window_ns = [self.window_ns[0], time.time_ns()]
        self.describe(problems=self.recorder.problems)

    def export_light_pass(self, recording: Recording) -> None:
        """Write the trace of the light pass beside the window's."""
        try:
            recording.capture.export(self.light_pass)
        except PROFILER_ERRORS:
            self.recorder.light_steps = []
        self.describe(problems=self.recorder.problems)

    def note_count(self) -> None:
        """Write how many steps there were into what says so already; wait for nothing."""
        self._conclude()
        path = self.folder / "recorder.json"
        counter = self.recorder.counter
        told = json.loads(path.read_text())
        told |= {
            "step_rule": counter.describe(),
            "num_steps_seen": counter.num_counted,
            "is_count_final": True,
        }
        _replace(path, json.dumps(told))

    def _conclude(self) -> None:
        self.is_count_final = True
        self.recorder.counter.conclude()

    def finish(self) -> None:
        """Write what there is when the process ends, and nothing if it only helped another."""
        recorder = self.recorder
        self._conclude()
        recorder.end_capture()
        recording = recorder.kept
        is_new = recording is not None and recording is not self.exported
        if recording is not None and is_new and self._is_worth_it(recording):
            self.export(recording)
            if not recording.steps and self.exported and not _has_operators(self.window):
                self.window.unlink()
                (self.folder / FILE).unlink(missing_ok=True)
                self.exported = None
        problems = [*recorder.problems]
        is_nsight = recorder.settings.tracer == NSIGHT
        if self.exported and not is_nsight and not self.window.exists():
            problems.append("Its trace was deleted while the workload ran.")
            self.exported = None
        if recorder.counter.num_counted and not self.exported:
            problems += self._why_nothing(is_told=bool(problems))
        if self.exported or problems:
            self.describe(problems)
        elif self.folder.is_dir():
            (self.folder / "recorder.json").unlink(missing_ok=True)
            self.folder.rmdir()

    def describe(self, problems: list[str], *, is_complete: bool = True) -> None:
        """Write recorder.json, whole or not at all; `is_complete` says that nothing is to come."""
        path = self.folder / "recorder.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {**self._description(), "is_complete": is_complete, "problems": problems}
        _replace(path, json.dumps(told))

    def _is_worth_it(self, recording: Recording) -> bool:
        """Whether a process without steps is more than a helper of another."""
        if torch.utils.data.get_worker_info() is not None:
            return False
        if recording.steps or self.recorder.counter.num_counted:
            return True
        return started_by() is None or "RANK" in os.environ

    def _description(self) -> dict[str, Any]:
        recorder, recording = self.recorder, self.exported
        settings, counter = recorder.settings, recorder.counter
        recorded = recording.steps if recording else []
        latest = recorder.running or recording
        return {
            "schema": 1,
            "pid": os.getpid(),
            "started_by": started_by(),
            "host": platform.node(),
            "node": node(),
            "gpu_uuids": gpu_uuids(),
            "rank": self.rank,
            "world_size": self.world_size,
            "process_groups": self.process_groups,
            "local_rank": local_rank(),
            "argv": sys.argv,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device_name": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
            "step_rule": counter.describe(),
            "clock": "ns since 1970",
            "num_steps_seen": counter.num_counted,
            "is_count_final": self.is_count_final,
            "steps": self._steps(recorded),
            "is_light_pass_due": recorder.light_stage is not LightStage.NONE,
            "skip": self.warm_up,
            "window": [recorded[0], recorded[-1]] if recorded else None,
            "optimizer": counter.leader.name if counter.rule is Rule.OPTIMIZER else None,
            "window_ns": self.window_ns,
            "is_block": latest is not None and latest.is_block,
            "may_train": recorder.may_train,
            "is_bar_open": is_bar_open(),
            "caveats": self._caveats(),
            "shapes": settings.shapes,
            "stacks": settings.stacks,
            "memory": settings.memory,
        }

    def _steps(self, recorded: list[int]) -> list[dict[str, Any]]:
        """Return the steps: on the host's clock, and where a GPU took part its own time as well."""
        device_ns = self.recorder.device_clock.durations_ns()
        return [
            {
                "index": step.index,
                "start_ns": step.start_ns,
                "end_ns": step.end_ns,
                "recorded": step.index in recorded,
                **({"light": True} if step.index in self.recorder.light_steps else {}),
                **({"device_ns": device_ns[step.index]} if step.index in device_ns else {}),
            }
            for step in self.recorder.counter.steps
        ]

    def _caveats(self) -> list[str]:
        recorder, recording = self.recorder, self.exported
        caveats = [*recorder.problems]
        if recording is None:
            return caveats
        caveats += recording.caveats
        if not recording.is_window:
            caveats.append(self._why_from_the_beginning())
        elif len(recording.steps) < self._num_wanted(recording) and not recording.caveats:
            caveats.append(
                f"{len(recording.steps)} of {recorder.settings.steps} steps were recorded, "
                "because the script ended within the window."
            )
        if recording.capture.is_cut_short:
            caveats.append(CUT_SHORT)
        if recording.capture.has_cuda:
            caveats.append(DRAINED)
        if recorder.settings.memory and recording.capture.is_of_all_threads:
            caveats.append(NO_MEMORY)
        if recorder.models.has_compiled or self.notes.has_code:
            caveats.append(COMPILED)
        return [*caveats, *self.notes.caveats(), *self.graphs.caveats()]

    def _why_nothing(self, *, is_told: bool) -> list[str]:
        """Return why no step was recorded, if there is more to say than was told already."""
        why = [OTHERS] if Others.was_seen else []
        if self.recorder.settings.tracer == NSIGHT:
            return [*why, self._why_without_window()]
        if not (why or is_told or hears_all_threads()):
            return [OTHER_THREADS]
        return why

    def _why_without_window(self) -> str:
        num_steps, skip = self.recorder.counter.num_counted, self.recorder.settings.skip
        if num_steps <= skip:
            return (
                f"The script ended after {num_steps} steps, before a window opened for Nsight "
                f"Systems; record sooner, with --skip less than {num_steps}."
            )
        return "No step after the warm-up used CUDA, so that Nsight Systems had nothing to trace."

    def _num_wanted(self, recording: Recording) -> int:
        return 0 if recording.is_block else self.recorder.settings.steps

    def _why_from_the_beginning(self) -> str:
        num_steps, skip = self.recorder.counter.num_counted, self.recorder.settings.skip
        if num_steps == 0:
            return "Recorded from the beginning, warm-up included, because no step was seen."
        if num_steps > skip:
            return (
                "Recorded from the beginning, warm-up included, and no step apart, because the "
                f"script ended after {num_steps} calls of its model and no optimizer step: too few "
                "to tell sooner that each is a step."
            )
        return (
            "Recorded from the beginning, warm-up included, because the script ended after "
            f"{num_steps} steps (fewer than --skip {skip} + 1)."
        )


def is_bar_open() -> bool:
    """Whether a progress bar of tqdm stands on the last line of stderr, which does not end."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return bool(getattr(tqdm, "_instances", ()))


def _replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)


def _has_operators(path: Path) -> bool:
    if not path.exists():
        return True  # Unknown: Nsight Systems holds it.
    with path.open(encoding="utf-8", errors="replace") as lines:
        return any('"cat": "cpu_op"' in line or '"cat": "kernel"' in line for line in lines)
