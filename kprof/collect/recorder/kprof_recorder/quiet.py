"""Keeps messages of torch and Kineto about the recorder out of the workload's stderr.

It also keeps the recorder's own frames out of tracebacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

# Above every level at which Kineto speaks, and none that anybody asks for: Kineto reads its
# environment when it is used for the first time, and that level is to stay.
NOTHING = 9_999
# torch's own: only what ends the process.
FATAL = 3
TORCH_LOG = "FLAGS_caffe2_log_level"


class Level:
    """The level of a log inside a library, as one of its variables holds it."""

    def __init__(self, name: str, quiet: int) -> None:
        self._quiet = quiet
        try:
            self._variable = ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), name)
            self.is_known = True
        except (OSError, ValueError):
            self._variable = ctypes.c_int(quiet)
            self.is_known = False
        self._before = self._variable.value

    def lower(self) -> None:
        """Let the log say nothing."""
        self._before = self._variable.value
        self._variable.value = self._quiet

    def restore(self) -> None:
        """Let it speak as before, or as the library itself has decided meanwhile."""
        if self._variable.value == self._quiet:
            self._variable.value = self._before


def hush() -> None:
    """Let torch's log say nothing more; for a process in which no more of the workload runs."""
    Level(TORCH_LOG, FATAL).lower()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Let what C prints on stderr lead nowhere, as one message of Kineto's that is in no log.

    Without a file, which would take a descriptor, and for good: another thread may be writing.
    """
    libc = ctypes.CDLL(None)
    try:
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        libc.fmemopen.restype = ctypes.c_void_p
    except (ValueError, AttributeError):
        yield
        return
    before, stderr.value = stderr.value, libc.fmemopen(None, ctypes.c_size_t(4096), b"w")
    try:
        yield
    finally:
        stderr.value = before


class Warnings:
    """Who gets what torch's C++ code warns of in a thread: Python's `warnings`, or torch's log.

    Python gets it where the recorder is called from inside such code, as from an
    `autograd.Function`: when that code returns, long after the recorder is done.
    """

    def __init__(self) -> None:
        self._get: Any = lambda: None
        self._set: Any = lambda handler: None
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(torch._C.__file__)
            get = library._ZN3c1012WarningUtils19get_warning_handlerEv
            give = library._ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE
            get.restype, give.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
            self._get, self._set = get, give

    def send_to_log(self) -> int | None:
        """Let the log get them, and return who got them before."""
        before: int | None = self._get()
        self._set(None)
        return before

    def send_to(self, handler: int | None) -> None:
        """Let `handler` get them."""
        self._set(handler)


class Quiet:
    """Silence inside `with`, which may be nested; what the workload's own profiler says is heard.

    torch warns there of work of another thread that was open when a recording ended.
    """

    def __init__(self) -> None:
        kineto = Level("_ZN9libkineto6Logger14severityLevel_E", NOTHING)
        self._levels = (kineto, Level(TORCH_LOG, FATAL))
        self._depth = 0
        if not kineto.is_known:
            # Read when Kineto is used for the first time, and for good: the workload's own
            # profiler prints no progress either.
            os.environ.setdefault("KINETO_LOG_LEVEL", str(NOTHING))

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            for level in self._levels:
                level.lower()

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for level in self._levels:
                level.restore()


FOLDER = str(Path(__file__).parent)


def hide_from_tracebacks() -> None:
    """Leave the recorder's own frames out of tracebacks.

    The interpreter prints errors that end a script or a thread, or that cannot be caught; all
    others print through `traceback`.
    """
    show, show_in_thread, show_ignored = sys.excepthook, threading.excepthook, sys.unraisablehook

    def show_without_recorder(
        kind: type[BaseException], error: BaseException, entries: TracebackType | None
    ) -> None:
        _strip(error, set())
        show(kind, error, _without_recorder(entries))

    def show_in_thread_without_recorder(end: threading.ExceptHookArgs) -> None:
        error = end.exc_value
        _strip(error, set())
        entries = error.__traceback__ if error is not None else end.exc_traceback
        show_in_thread(threading.ExceptHookArgs((end.exc_type, error, entries, end.thread)))

    def show_ignored_without_recorder(ignored: sys.UnraisableHookArgs) -> None:
        _strip(ignored.exc_value, set())
        entries = _without_recorder(ignored.exc_traceback)
        told = (ignored.exc_type, ignored.exc_value, entries, ignored.err_msg, ignored.object)
        show_ignored(type(ignored)(told))  # type: ignore[call-arg]

    for owner, name, hook in (
        (sys, "excepthook", show_without_recorder),
        (sys, "unraisablehook", show_ignored_without_recorder),
        (threading, "excepthook", show_in_thread_without_recorder),
    ):
        # Some look whether anybody has replaced Python's own.
        if getattr(owner, name) is getattr(owner, f"__{name}__", None):
            setattr(owner, f"__{name}__", hook)
        setattr(owner, name, hook)
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
