"""Keeps what torch and Kineto would say of the recorder's own work out of the workload's stderr."""

from __future__ import annotations

import ctypes
import os

import torch

# Above every level at which Kineto speaks.
NOTHING = 99
# torch's own: only what ends the process.
FATAL = 3


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


class Quiet:
    """Silence inside `with`, which may be nested; what the workload's own profiler says is heard.

    torch warns there of whatever another thread had under way when a recording ended.
    """

    def __init__(self) -> None:
        kineto = Level("_ZN9libkineto6Logger14severityLevel_E", NOTHING)
        self._levels = (kineto, Level("FLAGS_caffe2_log_level", FATAL))
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
