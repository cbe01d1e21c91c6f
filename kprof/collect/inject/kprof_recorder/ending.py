"""How a process can end, or split, without losing the recording or showing the recorder."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import torch

FOLDER = str(Path(__file__).parent)


def on_exit(finish: Callable[[], None]) -> None:
    """Call `finish` when the interpreter exits, and before SIGTERM ends the process."""
    atexit.register(finish)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:

        def finish_then_die(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            finish()
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, finish_then_die)


def on_fork(*, before: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Call `before` in the parent and `in_child` in every child, which must record nothing."""

    def silence() -> None:
        in_child()
        torch.autograd._enable_record_function(False)

    os.register_at_fork(before=before, after_in_child=silence)


def hide_from_tracebacks() -> None:
    """Leave the recorder's own frames out of the traceback that ends a script."""
    show = sys.excepthook

    def show_without_recorder(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        seen: set[int] = set()
        _strip(error, seen)
        show(kind, error, error.__traceback__)

    sys.excepthook = show_without_recorder


def _strip(error: BaseException | None, seen: set[int]) -> None:
    """Take the recorder's frames out of the traceback of `error` and of those that led to it."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _without_recorder(error.__traceback__)
    _strip(error.__cause__, seen)
    _strip(error.__context__, seen)


def _without_recorder(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(FOLDER):
            entries.append(traceback)
        traceback = traceback.tb_next
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
        self._timer = threading.Timer(seconds, self._ask_interpreter)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Call nothing; the timer's thread ends."""
        self._timer.cancel()
        self._timer.join()

    def _ask_interpreter(self) -> None:
        ctypes.pythonapi.Py_AddPendingCall(self._call, None)
