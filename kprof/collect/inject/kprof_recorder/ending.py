"""How a process can end, or split, without losing the recording or showing the recorder."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

FOLDER = str(Path(__file__).parent)


def on_exit(finish: Callable[[], None]) -> None:
    """Call `finish` when the interpreter exits, and before SIGTERM ends the process."""
    atexit.register(finish)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:

        def finish_then_die(number: int, frame: FrameType | None) -> None:
            # A group's members may be told twice, by whoever ends the group and by kprof.
            signal.signal(number, signal.SIG_IGN)
            finish()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, finish_then_die)


def on_fork(*, before: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Call `before` in the parent and `in_child` in every child, which must record nothing."""

    def silence() -> None:
        in_child()
        torch.autograd._enable_record_function(False)

    os.register_at_fork(before=before, after_in_child=silence)


def hide_from_tracebacks() -> None:
    """Leave the recorder's own frames out of tracebacks, whoever prints them.

    What ends a script or a thread, the interpreter prints itself; everybody else asks `traceback`.
    """
    show, show_in_thread = sys.excepthook, threading.excepthook

    def show_without_recorder(
        kind: type[BaseException], error: BaseException, entries: TracebackType | None
    ) -> None:
        _strip(error, set())
        show(kind, error, error.__traceback__)

    def show_in_thread_without_recorder(end: threading.ExceptHookArgs) -> None:
        error = end.exc_value
        _strip(error, set())
        entries = error.__traceback__ if error is not None else end.exc_traceback
        show_in_thread(threading.ExceptHookArgs((end.exc_type, error, entries, end.thread)))

    sys.excepthook = show_without_recorder
    threading.excepthook = show_in_thread_without_recorder
    # From Python 3.11 on, the second is what `traceback` walks itself.
    for name in ("walk_tb", "_walk_tb_with_full_positions"):
        if hasattr(traceback, name):
            setattr(traceback, name, _walking_past_recorder(getattr(traceback, name)))


def _walking_past_recorder(walk: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(walk)
    def walk_without_recorder(entries: TracebackType | None) -> Iterator[Any]:
        return (step for step in walk(entries) if not _is_ours(step[0]))

    return walk_without_recorder


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(FOLDER)


def _strip(error: BaseException | None, seen: set[int]) -> None:
    """Take the recorder's frames out of the traceback of `error` and of those that led to it."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _without_recorder(error.__traceback__)
    _strip(error.__cause__, seen)
    _strip(error.__context__, seen)
    for part in getattr(error, "exceptions", ()):  # Of a group, which older Pythons lack.
        if isinstance(part, BaseException):
            _strip(part, seen)


def _without_recorder(entry: TracebackType | None) -> TracebackType | None:
    entries = []
    while entry is not None:
        if not _is_ours(entry.tb_frame):
            entries.append(entry)
        entry = entry.tb_next
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        entry.tb_next = following
    return entries[0] if entries else None


class Deadline:
    """Calls `action` on the main thread after a while, even where nothing of torch is hooked."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        def run(_: object) -> int:
            action()
            return 0

        # Held here: the interpreter calls it when it likes.
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
        self._seconds = seconds
        self._is_off = threading.Event()
        # Named: an unnamed one would take a number from the workload's own threads.
        self._thread = threading.Thread(target=self._wait, name="kprof-deadline", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Call nothing; the deadline's thread ends."""
        self._is_off.set()
        self._thread.join()

    def _wait(self) -> None:
        if not self._is_off.wait(self._seconds):
            ctypes.pythonapi.Py_AddPendingCall(self._call, None)
