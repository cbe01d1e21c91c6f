"""One run of torch's profiler: on which threads it records, its start, its stop, its file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .named_ranges import TorchRange
from .native import (
    THREADS,
    get_ident,
    get_native_id,
    is_main_thread,
    monotonic,
    num_other_threads,
    sleep,
)
from .others import Others, Ours
from .quiet import unheard
from .settings import Settings

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


# torch's errors when a profiler cannot start; the workload must not see them.
PROFILER_ERRORS = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, OSError)

# The files of NVIDIA's driver: on Linux, and on Windows.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")

# Read by Kineto whenever a trace stops.
DETACH = "TEARDOWN_CUPTI"


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch's profiler from importing torch's compiler only to look at its settings.

    That takes 0.6 s and leaves a thousand modules in a workload that may never compile.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    find = torch.__getattr__

    def find_what_is_there(name: str) -> object:
        if name == "_inductor":
            raise AttributeError(name)
        return find(name)

    torch.__getattr__ = find_what_is_there
    try:
        yield
    finally:
        torch.__getattr__ = find


@contextlib.contextmanager
def _detaching() -> Iterator[None]:
    """Let Kineto leave CUPTI where it stops: else every later launch would stay slower.

    Not where the workload has decided that itself, and not before CUDA 12.6, where attaching once
    more may crash in CUDA graphs.
    """
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if DETACH in os.environ or version < (12, 6):
        yield
        return
    os.environ[DETACH] = "1"
    try:
        yield
    finally:
        del os.environ[DETACH]


class Capture:
    """A trace in the making. CUDA is part of it only if the workload has initialized CUDA."""

    can_be_provisional = True
    is_of_all_threads = False

    is_cut_short = False
    """Whether Kineto stopped to record the GPU by itself before it was asked to."""

    def __init__(self, settings: Settings) -> None:
        self.has_cuda = torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU]
        if self.has_cuda:
            activities.append(ProfilerActivity.CUDA)
        of_all = of_all_threads(memory=settings.memory)
        self._profile = profile(
            activities=activities,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
            experimental_config=of_all,
        )
        self.is_of_all_threads = of_all is not None
        self._thread: int | None = None
        self._is_prepared = False
        self.is_running = False

    def prepare(self) -> None:
        """Do what is slow about starting, which disturbs the step under way."""
        # Kineto says on stderr that this thread is not the one that has imported torch.
        is_odd = not is_main_thread()
        with Ours(), _without_inductor(), unheard() if is_odd else contextlib.nullcontext():
            self._profile.prepare_trace()
        self._is_prepared = True

    def take_over(self, prepared: Capture) -> None:
        """Start with what another capture has set up: Kineto has one at a time, and says no."""
        self._profile, self.has_cuda = prepared._profile, prepared.has_cuda
        self.is_of_all_threads, self._is_prepared = prepared.is_of_all_threads, True

    def start(self) -> None:
        """Record from here on; the device has finished everything that came before."""
        if not self._is_prepared:
            self.prepare()
        synchronize()
        TorchRange.num_changes += 1
        with Ours():
            self._profile.start_trace()
        self._thread = get_ident()
        self.is_running = True

    @property
    def can_start_here(self) -> bool:
        """Whether this thread may start it: one that may end must not have a trace of its own."""
        return self.is_of_all_threads or is_main_thread()

    @property
    def can_be_stopped_here(self) -> bool:
        """Whether this thread may stop it: another thread's own profile is not found by torch."""
        return self.is_of_all_threads or get_ident() == self._thread

    def stop(self, *, is_last: bool = False) -> None:
        """Record no more; the device has finished everything that was launched."""
        self.is_running = self._is_prepared = False
        self.is_cut_short = self.has_cuda and has_stopped_early()
        try:
            synchronize()
            # Kineto lets go at the next call into CUDA, and where none comes, it waits for ever:
            # the process would hang in its exit.
            lets_go = is_last and bool(used_devices())
            with Ours(), _detaching() if lets_go else contextlib.nullcontext():
                if self.is_of_all_threads:
                    let_others_leave()
                self._profile.stop_trace()
            if lets_go:
                synchronize()
        except PROFILER_ERRORS as error:
            self._switch_off()
            raise RuntimeError(
                f"torch's profiler could not be stopped, and what it recorded is lost: {error}"
            ) from error
        finally:
            TorchRange.num_changes += 1

    def _switch_off(self) -> None:
        """Switch off what could not be stopped: left on, it crashes the interpreter at its end."""
        if self._profile.profiler.kineto_results is None:
            with contextlib.suppress(*PROFILER_ERRORS), Ours():
                torch.autograd._disable_profiler()

    def cancel(self) -> None:
        """Give the profiler back, whatever state it is in, and forget what it recorded."""
        if self._is_prepared and not self.is_running:
            with Ours():
                self._profile.start_trace()
            self.is_running = True
        if self.is_running:
            self.stop()

    def export(self, path: Path) -> None:
        """Write the trace to `path`, which appears only when it is complete."""
        unfinished = path.with_name(f".{path.name}")
        try:
            # Kineto complains on stderr where it cannot open a file.
            unfinished.touch()
            with Ours():
                self._profile.export_chrome_trace(str(unfinished))
            if not _is_complete(unfinished):
                raise OSError("torch wrote only a part of it: is the disk full?")
        except PROFILER_ERRORS:
            # Kineto's own unfinished file as well: the room is needed to say what happened.
            for part in path.parent.glob(f"{unfinished.name}*"):
                part.unlink()
            raise
        unfinished.replace(path)
        # The trace's memory is the workload's again.
        self._profile = None


class Ahead:
    """At most one capture, set up before it is needed while no other work is disturbed."""

    def __init__(self, make: Callable[[Settings], Capture]) -> None:
        self._make = make
        self._capture: Capture | None = None

    def prepare(self, settings: Settings) -> None:
        """Set one up if none is and nothing is in the way."""
        if self._capture is None and can_start():
            self._capture = self._make(settings)
            self._capture.prepare()

    def take(self, settings: Settings) -> Capture:
        """Return the capture that was set up, or a new one."""
        capture, self._capture = self._capture, None
        if capture is not None and not capture.can_start_here:
            capture.cancel()
            capture = None
        return capture or self._make(settings)

    def hand_over(self, capture: Capture) -> bool:
        """Let `capture` start with the prepared parts; tell whether there were any."""
        prepared, self._capture = self._capture, None
        if prepared is not None:
            capture.take_over(prepared)
        return prepared is not None

    def cancel(self) -> None:
        """Give the profiler back."""
        if self._capture is not None:
            self._capture.cancel()
            self._capture = None


def has_stopped_early() -> bool:
    """Whether Kineto says that it has stopped by itself; a torch that cannot tell says nothing."""
    return bool(getattr(torch.autograd, "_is_kineto_stopped", bool)())


def can_start() -> bool:
    """Whether the profiler is free, the GPU may be synchronized, and files may be opened.

    The trace must also outlive this thread.
    """
    is_free = not Others.is_active and not is_capturing_a_graph() and _can_open_files()
    return is_free and (is_main_thread() or hears_all_threads())


def _can_open_files() -> bool:
    """Whether a descriptor is left: without one, Kineto complains on the workload's stderr."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def _is_complete(trace: Path) -> bool:
    """Whether a trace has its end: torch does not say when the disk is full."""
    with trace.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16))
        return file.read().rstrip().endswith(b"}")


def synchronize() -> None:
    """Wait for every GPU that this process uses; initializes none."""
    for device in used_devices():
        torch.cuda.synchronize(device)


def used_devices() -> list[int]:
    """Return the GPUs that this process uses; initializes none."""
    if not torch.cuda.is_initialized():
        return []
    # Where no thread has worked, to wait would take up memory there for ever.
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", torch.cuda.memory_reserved)
    return [device for device in range(torch.cuda.device_count()) if is_used(device)]


def would_wake_a_gpu() -> bool:
    """Whether to start torch's profiler now would be the first use of a GPU in this process.

    It asks CUDA for its GPUs whatever it is to record, and after that CUDA fails in every child
    that is forked.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_there = any(Path(device).exists() for device in GPU_DEVICES)
    return (
        bool(torch.version.cuda) and is_there and not is_hidden and not torch.cuda.is_initialized()
    )


def is_capturing_a_graph() -> bool:
    """Whether a CUDA graph is being captured, when nothing may synchronize."""
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
