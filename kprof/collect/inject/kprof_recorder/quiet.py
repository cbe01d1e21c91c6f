"""Keeps what torch and Kineto would say of the recorder's own work out of the workload's stderr."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch

# Above every level at which Kineto speaks.
NOTHING = 99
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

    torch warns there of whatever another thread had under way when a recording ended.
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
