"""CUDA graphs of the workload: recorded at capture, since a replay shows no operator."""

# ruff: noqa: ANN401 - what passes through here is the workload's own, of any type.

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .capture import PROFILER_ERRORS, Capture, can_start
from .named_ranges import CAPTURE, GRAPH, Known, Range
from .native import RLock
from .recorder import Recorder, Recording, Stage, now
from .settings import NSIGHT
from .softly import softly

# An engine may capture thousands, one for every size of a batch and part of its model.
MOST_GRAPHS = 32


class Graphs:
    """The graphs that this process has captured, each with a recording of its capture.

    Nothing runs while a graph is captured, and no kernel shows. But its operators do, and the
    calls which put its nodes into it, in the order in which a replay runs them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.is_broken = False
        self.trouble = ""
        self._numbers = Known(functools.partial(_next, itertools.count()))
        self._captures: dict[int, Capture] = {}
        self._replayed: set[int] = set()
        self._written: dict[int, Path] = {}
        self._open: Recording | None = None
        self._range: Any = None
        self._has_borrowed = False
        self._num_left_out = 0
        self._failures: list[str] = []

    @property
    def lock(self) -> RLock:
        """The recorder's own: both change what is being recorded."""
        return self.recorder.lock

    @property
    def has_recorded(self) -> bool:
        """Whether torch's profiler was used for any of them."""
        return bool(self._captures or self._written or self._open)

    def give_up(self, reason: str) -> None:
        """Record no more captures; all else goes on."""
        self.is_broken = True
        what = "What CUDA graphs hold is not known"
        self.trouble = reason.replace("The recorder stopped", what)

    def listen(self) -> None:
        """Replace the methods of a graph."""
        graph = torch.cuda.CUDAGraph
        for name, around in (
            ("capture_begin", self._around_begin),
            ("capture_end", self._around_end),
            ("replay", self._around_replay),
        ):
            if hasattr(graph, name):
                setattr(graph, name, around(getattr(graph, name)))

    def caveats(self) -> list[str]:
        """Return what of the graphs could not be recorded, as sentences for the report."""
        caveats = [self.trouble] if self.trouble else []
        if self._num_left_out:
            caveats.append(
                f"What {self._num_left_out} CUDA graphs hold is not known, because they were "
                f"captured after {MOST_GRAPHS} others or under another profiler."
            )
        if self._failures:
            caveats.append(
                f"What {len(self._failures)} CUDA graphs hold is not known, because torch's "
                f"profiler failed where they were captured ({self._failures[0]})."
            )
        return caveats

    def write(self, folder: Path) -> None:
        """Write the captures of the graphs that were replayed while something was recorded."""
        for number in sorted(self._replayed):
            path = folder / f"graph-{number}.json"
            if number in self._captures:
                self._captures.pop(number).export(path)
                self._written[number] = path
            elif number in self._written:
                _copy(self._written[number], path)
        self._replayed.clear()

    def _around_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.begin(graph)
            return original(graph, *args, **kwargs)

        return capture_begin

    def _around_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self.end(graph)

        return capture_end

    def _around_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.is_capturing or self.is_broken:
                return original(graph, *args, **kwargs)
            number = self._numbers(graph)
            self._replayed.add(number)
            with Range(f"{GRAPH}{number}"):
                return original(graph, *args, **kwargs)

        return replay

    @softly
    def begin(self, graph: Any) -> None:
        """Record what is captured from here on; what was recorded provisionally ends here."""
        recorder, number = self.recorder, self._numbers(graph)
        if recorder.settings.tracer == NSIGHT or self._range is not None:
            return
        if len(self._captures) >= MOST_GRAPHS or recorder.is_broken or not can_start():
            self._num_left_out += 1
            return
        if recorder.stage is not Stage.WINDOW:
            recorder.end_capture()
        if recorder.running is None and not self._start():
            return
        self._range = Range(f"{CAPTURE}{number}")
        self._range.__enter__()

    def _start(self) -> bool:
        """Start the recording of a capture; one that fails leaves those of other graphs alone."""
        recorder = self.recorder
        capture = Capture(recorder.settings)
        recorder.cancel_light_pass()
        # Parts that were prepared for the window would interfere.
        self._has_borrowed = recorder.ahead.hand_over(capture)
        try:
            capture.start()
        except PROFILER_ERRORS as error:
            self._note(error)
            with contextlib.suppress(*PROFILER_ERRORS):
                capture.cancel()
            return False
        self._open = Recording(capture, recorder.settings, now(), is_window=False)
        recorder.running = self._open
        recorder.on_change()
        return True

    def _note(self, error: Exception) -> None:
        self._failures.append(f"{type(error).__name__}: {error}")

    @softly
    def end(self, graph: Any) -> None:
        """Stop recording the capture and keep what it shows."""
        mark, self._range = self._range, None
        if mark is None:
            return
        mark.__exit__(None, None, None)
        recording, self._open = self._open, None
        if recording is None:
            return
        if self.recorder.running is recording:
            self.recorder.running = None
            self.recorder.on_change()
        recording.leave_step()
        try:
            recording.capture.stop()
        except PROFILER_ERRORS as error:
            self._note(error)
            return
        self._captures[self._numbers(graph)] = recording.capture
        if self._has_borrowed:
            self.recorder.ahead.prepare(self.recorder.settings)


def _copy(written: Path, path: Path) -> None:
    """Copy what an earlier window of a service has, as it was written or compressed since."""
    for suffix in ("", ".gz"):
        source = written.with_name(written.name + suffix)
        if source.is_file() and source.parent != path.parent:
            shutil.copyfile(source, path.with_name(path.name + suffix))


def _next(numbers: itertools.count[int], graph: Any) -> int:
    return next(numbers)
