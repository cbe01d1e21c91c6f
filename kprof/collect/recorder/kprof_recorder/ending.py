"""Ends or forks a process without losing the recording, and without warnings of the recorder."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from .capture import Others, Ours
from .compiler import replace
from .native import (
    THREADS,
    Lock,
    RLock,
    get_native_id,
    is_main_thread,
    monotonic,
    sleep,
    start_new_thread,
)

LOOK_S = 0.1
LEAVING_S = 0.1


class Ending:
    """Calls `finish` when the interpreter exits and, where it listens, before SIGTERM ends it.

    `os._exit` leaves without Python's exit, often where something hangs: there is `at_os_exit`,
    which must wait for nothing.

    Python calls a handler only when the main thread next runs Python, so a process that waits in C
    would not end: it listens only while there is something to lose. Nothing is finished while
    `is_busy`, half done.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        is_busy: Callable[[], bool],
        at_os_exit: Callable[[], None],
    ) -> None:
        self._finish = finish
        self._is_busy = is_busy
        self._get, self._set = signal.getsignal, signal.signal
        self._is_listening = False
        # Libraries act differently where SIGTERM has a handler already.
        signal.getsignal = self._get_theirs
        signal.signal = self._set_theirs
        atexit.register(finish)
        replace(os, "_exit", lambda leave: _after(at_os_exit, leave))

    def listen(self) -> None:
        """Finish before SIGTERM ends the process, unless the workload handles it itself."""
        if is_main_thread():
            self._is_listening = True
            if self._get(signal.SIGTERM) == signal.SIG_DFL:
                self._set(signal.SIGTERM, self._finish_then_die)

    def rest(self) -> None:
        """Let SIGTERM end the process at once."""
        if is_main_thread():
            self._is_listening = False
            if self._get(signal.SIGTERM) == self._finish_then_die:
                self._set(signal.SIGTERM, signal.SIG_DFL)

    def forget(self) -> None:
        """Leave the end of a forked child to itself."""
        atexit.unregister(self._finish)
        self.rest()

    def _finish_then_die(self, number: int, frame: FrameType | None) -> None:
        # A group's members may be stopped twice, by the end of the group and by kprof.
        self._set(number, signal.SIG_IGN)
        if not self._is_busy():
            self._finish()
        self._set(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _get_theirs(self, signalnum: int) -> Any:  # noqa: ANN401 - what a handler may be
        """Return the handler of a signal, as if the recorder had none."""
        return self._shown(self._get(signalnum))

    def _set_theirs(self, signalnum: int, handler: Any) -> Any:  # noqa: ANN401
        """Set the handler of a signal; in the default's place comes the recorder's again."""
        is_default = signalnum == signal.SIGTERM and handler == signal.SIG_DFL
        ours = self._is_listening and is_default
        return self._shown(self._set(signalnum, self._finish_then_die if ours else handler))

    def _shown(self, handler: Any) -> Any:  # noqa: ANN401
        return signal.SIG_DFL if handler == self._finish_then_die else handler


def _after(action: Callable[[], None], leave: Callable[[int], NoReturn]) -> Callable[..., NoReturn]:
    def leave_after_action(status: int) -> NoReturn:
        try:
            action()
        finally:
            leave(status)

    return leave_after_action


def on_fork(
    *,
    in_child: Callable[[], None],
    before: Callable[[], None] = lambda: None,
    in_parent: Callable[[], None] = lambda: None,
) -> None:
    """Call `before` and `in_parent` in the parent, around the fork, and `in_child` in the child."""
    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def leave_without_destructors() -> None:
    """Let this forked child end its exit where torch's profiler would wait for ever.

    The profiler's threads stayed with the parent, and a destructor of its library waits for them.
    The exit code is kept, and what C has in its buffers is written as it would have been.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        # The last one comes first; neither takes more than the exit code.
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


class MainThread:
    """Actions for the main thread, which calls them once it next runs Python.

    The interpreter gets `PyObject_IsTrue` and this object, which lives as long as the process.
    (A function made by ctypes would have to outlive a call that may come at any time.) An
    exception, such as KeyboardInterrupt where a signal comes amid an action, reaches the main
    thread, as that of a signal's handler does.
    """

    def __init__(self) -> None:
        self._actions: deque[Callable[[], None]] = deque()
        self._is_asked = False
        # Not `ctypes.pythonapi`: the workload may give its functions other types.
        api = ctypes.PyDLL(None)
        self._add_pending_call = api.Py_AddPendingCall
        self._add_pending_call.argtypes = (ctypes.c_void_p, ctypes.py_object)
        self._is_true = ctypes.cast(api.PyObject_IsTrue, ctypes.c_void_p)
        api.Py_IncRef(ctypes.py_object(self))

    def call(self, action: Callable[[], None]) -> None:
        """Let the main thread call `action`; the caller does not wait."""
        self._actions.append(action)
        self._ask()

    def forget(self) -> None:
        """Drop the actions that have not been called yet."""
        self._actions.clear()

    def _ask(self) -> None:
        # Once for all: the interpreter has few places for such calls.
        if not self._is_asked:
            self._is_asked = True
            if self._add_pending_call(self._is_true, self) != 0:
                self._is_asked = False

    def __bool__(self) -> bool:
        self._is_asked = False
        try:
            while self._actions:
                self._actions.popleft()()
        finally:
            if self._actions:
                self._ask()
        return False


main_thread = MainThread()


class Deadline:
    """Calls `action` after a while, even where nothing of torch is hooked.

    Sooner if `is_due`, which is asked ten times a second. `action` runs on the main thread, which
    has to leave the call that it waits in, unless it `is_for_any_thread`; and there it waits until
    nothing `is_busy` that it would interrupt.
    """

    def __init__(
        self,
        seconds: float,
        action: Callable[[], None],
        is_due: Callable[[], bool] = lambda: False,
        is_busy: Callable[[], bool] = lambda: False,
        *,
        is_for_any_thread: bool = False,
    ) -> None:
        self._seconds = seconds
        self._is_due = is_due
        self._is_busy = is_busy
        self._action = action
        self._is_for_any_thread = is_for_any_thread
        self._is_off = self._is_acting = False
        self._native_id = 0
        # Reentrant: the main thread may be interrupted by the action while it cancels it.
        self._gate = RLock()
        # Released to wake the thread, and where the thread ends.
        self._wake, self._is_running = Lock(), Lock()
        self._wake.acquire()
        self._is_running.acquire()
        # `threading` does not know it: the workload counts and numbers its own threads.
        start_new_thread(self._run, ())

    def cancel(self) -> None:
        """Call nothing; the deadline's thread ends."""
        with self._gate:
            self._is_off = True
            is_acting = self._is_acting
            self._notify()
        # An action under way in the thread may wait for a lock that the caller holds.
        if not is_acting:
            with self._is_running:
                wait_for_end_of(self._native_id)

    def _notify(self) -> None:
        with self._gate:
            if self._wake.locked():
                self._wake.release()

    def _run(self) -> None:
        self._native_id = get_native_id()
        try:
            end = monotonic() + self._seconds
            while monotonic() < end and not self._is_due():
                self._wake.acquire(timeout=min(LOOK_S, max(0.0, end - monotonic())))
                if self._is_off:
                    return
            if self._is_for_any_thread:
                self._act_here()
            else:
                self._act_on_main_thread()
        finally:
            self._is_running.release()

    def _act_here(self) -> None:
        with self._gate:
            self._is_acting = not self._is_off
        if self._is_acting:
            self._action()

    def _act_on_main_thread(self) -> None:
        while not self._is_off:
            main_thread.call(self._act_unless_busy)
            self._wake.acquire()
            sleep(LOOK_S if not self._is_off else 0)

    def _act_unless_busy(self) -> None:
        if not self._is_off and not self._is_busy():
            self._is_off = True
            self._action()
        self._notify()


def wait_for_end_of(native_id: int) -> None:
    """Wait for the system's own thread, which ends a moment after its Python has."""
    end = monotonic() + LEAVING_S
    while (THREADS / str(native_id)).exists() and monotonic() < end:
        sleep(LEAVING_S / 100)


# From here on, a fork warns where there is more than one thread.
WARNS = (3, 12)
FILTER = ("ignore", re.compile("This process "), DeprecationWarning, None, 0)


class ForkWarning:
    """Keeps Python from warning of threads at a fork where the workload itself has but one.

    The other is the one that torch's profiler starts and keeps, and the recorder was the first to
    use that. The list of filters is exchanged, and not by a function of `warnings`: those make
    Python show once more what it has shown already.
    """

    def __init__(self) -> None:
        self._theirs: Any = None
        self._ours: Any = None

    def before_fork(self) -> None:
        """Silence the warning that is to come, if it is of the recorder's making."""
        if sys.version_info >= WARNS and _is_alone_but_for_ours():
            self._theirs = warnings.filters
            self._ours = warnings.filters = [FILTER, *self._theirs]

    def in_parent(self) -> None:
        """Let warnings be heard again, once this thread goes on: some Pythons warn after this."""
        if warnings.filters is self._ours:
            main_thread.call(self._restore)

    def in_child(self) -> None:
        """Show warnings again; all threads of the child are its own."""
        main_thread.forget()
        self._restore()
        Ours.has_begun = False

    def _restore(self) -> None:
        if warnings.filters is self._ours:
            warnings.filters = self._theirs


def _is_alone_but_for_ours() -> bool:
    if not Ours.has_begun or Others.was_seen:
        return False
    try:
        return sum(1 for _ in THREADS.iterdir()) == 2
    except OSError:
        return False
