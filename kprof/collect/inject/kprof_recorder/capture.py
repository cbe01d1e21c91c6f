"""One run of torch's profiler: start it, stop it, write its trace."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile
from torch.profiler import profiler as torch_profiler

from .settings import Settings

# What torch raises when a profiler cannot do what it is asked for; the workload must not feel it.
PROFILER_ERRORS = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, OSError)


class Others:
    """Whether somebody else in this process uses torch's profiler."""

    is_active = False
    is_ours = 0
    was_seen = False


def watch_others(before_they_start: object) -> None:
    """Call `before_they_start` whenever the workload itself is about to start torch's profiler."""
    assert callable(before_they_start)
    for name in ("_prepare_profiler", "_enable_profiler"):
        setattr(
            autograd_profiler, name, _starting(getattr(autograd_profiler, name), before_they_start)
        )
    disable = autograd_profiler._disable_profiler

    def stop(*arguments: object, **options: object) -> object:
        if not Others.is_ours:
            Others.is_active = False
        return disable(*arguments, **options)

    autograd_profiler._disable_profiler = stop


def _starting(start: object, before_they_start: object) -> object:
    assert callable(start)
    assert callable(before_they_start)

    def start_after_notice(*arguments: object, **options: object) -> object:
        if not Others.is_ours:
            Others.is_active = Others.was_seen = True
            before_they_start()
        return start(*arguments, **options)

    return start_after_notice


class _Ours:
    """Marks what happens inside it as the recorder's own use of the profiler.

    What torch would warn about then is none of the workload's business. (Filters of `warnings`
    would not do: to change them makes Python show old warnings again.)
    """

    def __enter__(self) -> None:
        Others.is_ours += 1
        self._warn = getattr(torch_profiler, "_warn_once", None)
        torch_profiler._warn_once = lambda *message, **options: None

    def __exit__(self, *exception: object) -> None:
        Others.is_ours -= 1
        torch_profiler._warn_once = self._warn


class Capture:
    """A trace in the making. CUDA is part of it only if the workload has initialized CUDA."""

    def __init__(self, settings: Settings) -> None:
        self.has_cuda = torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU]
        if self.has_cuda:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
        )
        self._thread: int | None = None
        self._is_prepared = False
        self.is_running = False

    def prepare(self) -> None:
        """Do what is slow about starting, which disturbs the step under way."""
        with _Ours():
            self._profile.prepare_trace()
        self._is_prepared = True

    def start(self) -> None:
        """Record from here on; the device has finished everything that came before."""
        if not self._is_prepared:
            self.prepare()
        synchronize()
        with _Ours():
            self._profile.start_trace()
        self.is_running = True
        self._thread = threading.get_ident()

    def can_stop_here(self) -> bool:
        """Whether this is the thread that started it, and not amid the capture of a CUDA graph."""
        return threading.get_ident() == self._thread and not is_capturing_a_graph()

    def stop(self) -> None:
        """Record no more; the device has finished everything that was launched."""
        synchronize()
        self.is_running = False
        with _Ours():
            self._profile.stop_trace()

    def cancel(self) -> None:
        """Give the profiler back, whatever state it is in, and forget what it recorded."""
        if self._is_prepared and not self.is_running:
            with _Ours():
                self._profile.start_trace()
            self.is_running = True
        if self.is_running:
            self.stop()

    def export(self, path: Path) -> None:
        """Write the trace to `path`, which appears only when it is complete."""
        unfinished = path.with_name(f".{path.name}")
        self._profile.export_chrome_trace(str(unfinished))
        unfinished.replace(path)


def synchronize() -> None:
    """Wait for every GPU that this process uses; initializes none."""
    if not torch.cuda.is_initialized():
        return
    current = torch.cuda.current_device()
    for device in range(torch.cuda.device_count()):
        if device == current or torch.cuda.memory_reserved(device) > 0:
            torch.cuda.synchronize(device)


def is_capturing_a_graph() -> bool:
    """Whether a CUDA graph is being captured, when nothing may synchronize."""
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
