"""Threads other than the one that starts torch's profiler: whether and how they are recorded."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity

# Imported by the code of every kernel that Inductor compiled with Triton.
COMPILED_KERNELS = "torch._inductor.runtime.triton_heuristics"
# Few operators take longer on the host.
LEAVING_S = 0.02


def of_all_threads(*, memory: bool) -> Any:  # noqa: ANN401 - torch's own has no type
    """Return what makes a trace hold every thread, and lets any of them end it.

    None where more would be lost than gained: with all threads torch leaves out the memory (seen
    with 2.13) and the shapes of compiled Triton kernels' inputs (2.11). But not in a thread that
    may end: torch crashes where that does before its own trace. None before torch has it (2.7).
    """
    if is_main_thread() and (memory or COMPILED_KERNELS in sys.modules):
        return None
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def hears_all_threads() -> bool:
    """Whether this torch can record threads other than the one that starts its profiler."""
    return "profile_all_threads" in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or "")


def is_main_thread() -> bool:
    """Whether this is the thread that lives as long as Python does."""
    return threading.current_thread() is threading.main_thread()


def let_others_leave() -> None:
    """Have no other thread inside an operator that torch's profiler notes, for it is to stop.

    torch frees what they are about to write to, and the process crashes (seen with 2.11 and 2.13).
    """
    toggle = getattr(torch.autograd, "_toggle_collection_dynamic", None)
    if toggle is not None and threading.active_count() > 1:
        toggle(False, {ProfilerActivity.CPU})
        time.sleep(LEAVING_S)
