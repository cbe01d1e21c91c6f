"""Loads the CUPTI that cupti-python was made for, before torch loads an older one of its own.

A process has one CUPTI, whichever was first; an older one refuses cupti-python's calls with
CUPTI_ERROR_INVALID_PARAMETER.
"""

from __future__ import annotations

import contextlib
import ctypes
from importlib.util import find_spec
from pathlib import Path

# In this order: CUPTI looks for the others once it is asked for counters.
LIBRARIES = ("libnvperf_host.so", "libnvperf_target.so", "libcupti.so.*")


def load_cupti() -> None:
    """Load the libraries beside the package `cupti`, where both are there."""
    package = find_spec("cupti")
    if package is None or package.origin is None:
        return
    beside = Path(package.origin).parent.parent
    for library in LIBRARIES:
        for path in sorted(beside.glob(f"nvidia/cu*/lib/{library}")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
