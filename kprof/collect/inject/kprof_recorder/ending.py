"""How a process can end, or split, without losing the recording or showing the recorder."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

LOOK_S = 0.1


class Ending:
    """Calls `finish` when the interpreter exits and, where it listens, before SIGTERM ends it.

    Python calls a handler only when the main thread next runs Python, so a process that waits in C
    would not end: it listens only while there is something to lose. Nothing is finished while
    `is_busy`, half done.
    """

    def __init__(self, finish: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        self._finish = finish
        self._is_busy = is_busy
        self._get, self._set = signal.getsignal, signal.signal
        self._is_listening = False
        # Libraries do other things where somebody handles SIGTERM already.
        signal.getsignal = self._get_theirs
        signal.signal = self._set_theirs
        atexit.register(finish)

    def listen(self) -> None:
        """Finish before SIGTERM ends the process, unless the workload handles it itself."""
        if threading.current_thread() is threading.main_thread():
            self._is_listening = True
            if self._get(signal.SIGTERM) == signal.SIG_DFL:
                self._set(signal.SIGTERM, self._finish_then_die)

    def rest(self) -> None:
        """Let SIGTERM end the process at once."""
        if threading.current_thread() is threading.main_thread():
            self._is_listening = False
            if self._get(signal.SIGTERM) == self._finish_then_die:
                self._set(signal.SIGTERM, signal.SIG_DFL)

    def forget(self) -> None:
        """Leave the end of a forked child to itself."""
        atexit.unregister(self._finish)
        self.rest()

    def _finish_then_die(self, number: int, frame: FrameType | None) -> None:
        # A group's members may be told twice, by whoever ends the group and by kprof.
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


class OnMainThread:
    """Calls `action` on the main thread, once that next runs Python."""

    def __init__(self, action: Callable[[], None]) -> None:
        def run(_: object) -> int:
            action()
            return 0

        # Held here: the interpreter calls it when it likes.
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)

    def ask(self) -> None:
        """Let the main thread call it; who asks does not wait."""
        ctypes.pythonapi.Py_AddPendingCall(self._call, None)


class Deadline:
    """Calls `action` after a while, even where nothing of torch is hooked.

    Sooner if `is_due`, which is asked ten times a second. `action` runs on the main thread, which
    has to leave the call that it waits in, unless it `is_for_any_thread`.
    """

    def __init__(
        self,
        seconds: float,
        action: Callable[[], None],
        is_due: Callable[[], bool] = lambda: False,
        *,
        is_for_any_thread: bool = False,
    ) -> None:
        self._seconds = seconds
        self._is_due = is_due
        self._action = action if is_for_any_thread else OnMainThread(action).ask
        self._is_off = threading.Event()
        self._gate = threading.Lock()
        self._is_acting = False
        # Named: an unnamed one would take a number from the workload's own threads.
        self._thread = threading.Thread(target=self._wait, name="kprof-deadline", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Call nothing; the deadline's thread ends."""
        with self._gate:
            self._is_off.set()
            is_acting = self._is_acting
        # Who acts already may wait for a lock that is held here.
        if not is_acting:
            self._thread.join()

    def _wait(self) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end and not self._is_due():
            if self._is_off.wait(min(LOOK_S, max(0.0, end - time.monotonic()))):
                return
        with self._gate:
            self._is_acting = not self._is_off.is_set()
        if self._is_acting:
            self._action()
