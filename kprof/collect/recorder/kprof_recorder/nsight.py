"""Windows that Nsight Systems traces from outside this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.autograd.profiler import emit_nvtx

from .capture import Capture, synchronize
from .counters import CountedCapture
from .native import get_ident
from .others import Ours
from .settings import NSIGHT, Settings


class NsightCapture(Capture):
    """A window of Nsight Systems, which writes the trace itself.

    torch's profiler stays off, as only one may listen to CUPTI; operators go into the trace as
    NVTX ranges. Where several processes are traced together, the first one to begin would begin
    for all and the first to end would end for all: so one of them alone, the leader, does both.
    """

    can_be_provisional = False

    def __init__(self, settings: Settings) -> None:
        self.has_cuda = True
        self.is_running = False
        self._thread: int | None = None
        self._is_leader = os.environ.get("LOCAL_RANK", "0") == settings.leader
        self._operators = emit_nvtx(record_shapes=settings.shapes)

    def prepare(self) -> None:
        """Do nothing: there is nothing slow about it that could be done ahead."""

    def start(self) -> None:
        """Record from here on; the device has finished everything that came before."""
        synchronize()
        if self._is_leader:
            torch.cuda.profiler.start()
        with Ours():
            self._operators.__enter__()
        self._thread = get_ident()
        self.is_running = True

    @property
    def can_start_here(self) -> bool:
        """Whether this thread may start it: every one may."""
        return True

    @property
    def can_be_stopped_here(self) -> bool:
        """Whether this thread may stop it: torch refuses to end another thread's own ranges."""
        return get_ident() == self._thread

    def stop(self, *, is_last: bool = False) -> None:
        """Record no more; the device has finished everything that was launched."""
        self.is_running = False
        synchronize()
        try:
            with Ours():
                self._operators.__exit__(None, None, None)
        finally:
            if self._is_leader:
                torch.cuda.profiler.stop()

    def cancel(self) -> None:
        """End what has begun; the trace of a window that comes later takes its place."""
        if self.is_running:
            self.stop()

    def export(self, path: Path) -> None:
        """Write nothing: Nsight Systems does."""


def new_capture(settings: Settings) -> Capture:
    """Return a capture by the tracer that the settings name."""
    return NsightCapture(settings) if settings.tracer == NSIGHT else Capture(settings)


def new_window(settings: Settings) -> Capture:
    """Return a capture for the window: with counters, where the settings ask for them."""
    is_counted = settings.counters and settings.tracer != NSIGHT
    return CountedCapture(settings) if is_counted else new_capture(settings)


def is_in_sight(settings: Settings) -> bool:
    """Whether the tracer can see what happens now: to Nsight Systems nothing is without CUDA."""
    return settings.tracer != NSIGHT or torch.cuda.is_initialized()
