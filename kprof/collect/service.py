"""Records windows of a process that never ends, on request: the launcher's side."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kprof.collect.launch import (
    LaunchOptions,
    complete,
    environment_for,
    messages_of,
    run_command,
    write_description,
)
from kprof.collect.nvml import Sampler
from kprof.collect.process_folders import recorders_of
from kprof.collect.recorder.kprof_recorder.trigger import write_order
from kprof.errors import LaunchError, counted

# Ranks finish within this time of each other; who has not begun by then takes no part.
GRACE_S = 1.0
# A window that does not end by itself so long after its end was asked for is left as it is.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Trigger:
    """The trigger of a window: a signal to kprof, a file, or the service's first N requests."""

    kind: Literal["signal", "file", "requests"]
    num_requests: int = 0

    @classmethod
    def parse(cls, text: str) -> Trigger:
        """Return the trigger that `signal`, `file` or `requests=N` means.

        Raises:
            LaunchError: it is none of these.
        """
        kind, _, number = text.partition("=")
        if kind == "requests" and number.isdecimal():
            return cls("requests", int(number))
        if text == "signal":
            return cls("signal")
        if text == "file":
            return cls("file")
        raise LaunchError(
            f"--trigger {text}: no such trigger",
            fix="use --trigger signal, --trigger file or --trigger requests=N",
        )


@dataclass(frozen=True)
class Window:
    """A window of the service, completely written."""

    folder: Path
    parts: tuple[Path, ...]
    """One folder for each process that took part; empty when none did."""
    messages: tuple[str, ...]


class Service:
    """A running service, and at most one open window of it.

    `new_folder` gives each window its folder, `on_window` gets it when it is complete. The order
    to record lies in a file that every process of the service can see; nothing is signalled to
    them, so that signals stay the service's own.
    """

    def __init__(
        self,
        options: LaunchOptions,
        trigger: Trigger,
        new_folder: Callable[[], Path],
        on_window: Callable[[Window], None],
    ) -> None:
        self.options = options
        self.trigger = trigger
        self.num_windows = 0
        self._new_folder = new_folder
        self._on_window = on_window
        self._order = options.out / ".order.json"
        self._open: OpenWindow | None = None
        self._is_wanted = trigger.kind == "requests"
        self._started_ns = time.time_ns()

    @property
    def file(self) -> Path:
        """The file whose appearance starts a window, and whose removal ends it."""
        return self.options.out / "record"

    @property
    def instruction(self) -> str:
        """How to start a window, as a sentence for its user."""
        if self.trigger.kind == "signal":
            return f"To record, and to stop before the end: kill -USR1 {os.getpid()}"
        if self.trigger.kind == "file":
            return f"To record: touch {self.file}; to stop before the end, remove it."
        number = counted(self.trigger.num_requests, "request or step", "requests or steps")
        return f"Recording begins after {number} of the engine."

    def run(self) -> int:
        """Run the service to its end, which may never come, and return its exit code."""
        raw = self.options.out / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        write_description(raw, self.options.command, (self._started_ns, None), None)
        before = signal.signal(signal.SIGUSR1, self._toggle) if self._is_by_signal else None
        try:
            environment = environment_for(self.options, raw, self._order.resolve())
            self.look()
            exit_code = run_command(self.options.command, environment, lambda process: self.look())
        finally:
            if before is not None:
                signal.signal(signal.SIGUSR1, before)
        if self._open is not None:
            self._close(self._open, exit_code)
        return exit_code

    def look(self) -> None:
        """Open a window that is wanted, close one that is complete."""
        if self.trigger.kind == "file":
            self._is_wanted = self.file.exists()
        if self._open is None:
            if self._is_wanted:
                self._open = self._begin()
        elif self._open.is_over(is_wanted=self._is_wanted, order=self._order):
            self._close(self._open, None)

    @property
    def _is_by_signal(self) -> bool:
        return self.trigger.kind == "signal"

    def _toggle(self, number: int, frame: object) -> None:
        self._is_wanted = not self._is_wanted

    def _begin(self) -> OpenWindow:
        folder = self.options.out if self.num_windows == 0 else self._new_folder()
        self.num_windows += 1
        raw = folder / "raw"
        raw.mkdir(exist_ok=True)
        write_description(raw, self.options.command, (self._started_ns, None), None)
        sampler = Sampler(raw / "nvml.jsonl")
        sampler.start()
        by_count = self.trigger.kind == "requests"
        skip = self.trigger.num_requests if by_count else self.options.skip
        write_order(self._order, raw.resolve(), skip)
        return OpenWindow(folder, sampler)

    def _close(self, window: OpenWindow, exit_code: int | None) -> None:
        self._open = None
        self._is_wanted = False
        self._order.unlink(missing_ok=True)
        self.file.unlink(missing_ok=True)
        window.sampler.stop()
        raw = window.folder / "raw"
        ended_ns = None if exit_code is None else time.time_ns()
        times_ns = (self._started_ns, ended_ns)
        is_empty = not recorders_of(raw)
        parts, troubles = complete(
            raw, self.options.command, times_ns, exit_code, self.options.ranks
        )
        messages = (NOTHING,) if is_empty else messages_of(window.sampler, raw)
        self._on_window(Window(window.folder, parts, messages + troubles))


NOTHING = (
    "Nothing was recorded: no process took a step, called a model or replayed a CUDA graph while "
    "the recording was asked for."
)


class OpenWindow:
    """A window under way: where it goes, and how far its processes are."""

    def __init__(self, folder: Path, sampler: Sampler) -> None:
        self.folder = folder
        self.sampler = sampler
        self._complete_since: float | None = None
        self._unwanted_since: float | None = None

    def is_over(self, *, is_wanted: bool, order: Path) -> bool:
        """Whether every process that takes part has written its window, or none will."""
        now = time.monotonic()
        if not is_wanted and self._unwanted_since is None:
            self._unwanted_since = now
            order.unlink(missing_ok=True)
        waited_s = 0.0 if self._unwanted_since is None else now - self._unwanted_since
        recorders = recorders_of(self.folder / "raw").values()
        if not all(has_ended(recorder) for recorder in recorders):
            self._complete_since = None
            return waited_s > PATIENCE_S
        if not recorders:
            return waited_s > GRACE_S
        if self._complete_since is None:
            self._complete_since = now
        return now - self._complete_since > GRACE_S


def has_ended(recorder: dict[str, Any]) -> bool:
    """Whether a process has written all that it will, or lives no more."""
    if recorder["is_complete"] or recorder["host"] != platform.node():
        return bool(recorder["is_complete"])
    try:
        os.kill(recorder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
