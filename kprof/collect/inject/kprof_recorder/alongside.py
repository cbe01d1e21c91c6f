"""Threads other than the one that starts torch's profiler: whether and how they are recorded."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from .native import THREADS, get_native_id, is_main_thread, monotonic, num_other_threads, sleep

# Imported by the code of every kernel that Inductor compiled with Triton.
COMPILED_KERNELS = "torch._inductor.runtime.triton_heuristics"
# Few operators take longer on the host.
LEAVING_S = 0.02
# As long at most, where threads get no processor.
LEAVING_MOST_S = 1.0


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


def let_others_leave() -> None:
    """Have no other thread inside an operator that torch's profiler notes, for it is to stop.

    torch frees what they are about to write to, and the process crashes (seen with 2.11 and 2.13).
    """
    toggle = getattr(torch.autograd, "_toggle_collection_dynamic", None)
    if toggle is not None and num_other_threads() > 0:
        toggle(False, {ProfilerActivity.CPU})
        end = monotonic() + LEAVING_MOST_S
        before = running_threads()
        sleep(LEAVING_S)
        while _have_had_no_turn(before) and monotonic() < end:
            sleep(LEAVING_S)


def running_threads() -> dict[str, int]:
    """Return the time in ns that each other thread which could run now has had a processor.

    Empty where the system does not tell, as only Linux does.
    """
    own, found = str(get_native_id()), {}
    for thread in THREADS.glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in brackets, and may hold anything.
            state = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state == "R" and thread.name != own:
                found[thread.name] = int((thread / "schedstat").read_text().split()[0])
    return found


def _have_had_no_turn(before: dict[str, int]) -> bool:
    """Whether a thread has waited for a processor since, on a machine with more work than those."""
    still = running_threads()
    return any(still[name] - ran < LEAVING_S * 1e9 for name, ran in before.items() if name in still)
