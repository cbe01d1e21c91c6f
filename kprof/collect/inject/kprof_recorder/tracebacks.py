"""Keeps the recorder's own frames out of tracebacks, whoever prints them."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

FOLDER = str(Path(__file__).parent)


def hide_from_tracebacks() -> None:
    """Leave the recorder's own frames out of tracebacks, whoever prints them.

    What ends a script or a thread, or comes where nobody can catch it, the interpreter prints
    itself; everybody else asks `traceback`.
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
