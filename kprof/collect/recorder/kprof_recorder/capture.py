"""One capture: of torch's profiler, of hardware counters beside it, or of Nsight Systems.

A workload may use torch's profiler itself, which ends or forbids the recorder's use (`Others`).

Counters: CUPTI's PM sampling reads counters of the whole GPU at a fixed interval; nothing is run
twice. Only the samples' order and interval are kept: their timestamps ran twice too fast where
torch's profiler had been active.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile
from torch.profiler import profiler as torch_profiler

from .compiler import subclasses
from .memory import history
from .named_ranges import TorchRange
from .native import (
    THREADS,
    get_ident,
    get_native_id,
    is_main_thread,
    monotonic,
    num_other_threads,
    perf_counter_ns,
    sleep,
)
from .quiet import Quiet, Warnings, unheard
from .settings import NSIGHT, Settings


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
        of_all = of_all_threads(memory=settings.memory)
        self._profile = profile(
            activities=self._activities(),
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
            experimental_config=of_all,
        )
        self.is_of_all_threads = of_all is not None
        self._keeps_memory = settings.memory
        self._thread: int | None = None
        self._is_prepared = False
        self.is_running = False

    def _activities(self) -> list[ProfilerActivity]:
        """Return what is recorded."""
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.has_cuda else [])]

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
        if self._keeps_memory:
            history.start()
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
            if self._keeps_memory:
                history.stop()
            if lets_go:
                synchronize()
        except PROFILER_ERRORS as error:
            self._switch_off()
            raise RuntimeError(
                f"torch's profiler could not be stopped, and what it recorded is lost: {error}"
            ) from error
        finally:
            TorchRange.num_changes += 1
            Unended.note(is_last=is_last)

    def _switch_off(self) -> None:
        """Switch off what could not be stopped: left on, it crashes the interpreter at its end."""
        if self._profile.profiler.kineto_results is None:
            with contextlib.suppress(*PROFILER_ERRORS), Ours():
                torch.autograd._disable_profiler()

    def cancel(self) -> None:
        """Give the profiler back in any state, and drop its recording."""
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
        if self._keeps_memory:
            with contextlib.suppress(OSError):
                history.write(path.parent)
        # The trace's memory is the workload's again.
        self._profile = None


class LightCapture(Capture):
    """A pass over steps that slows them little: the device's activities and the calls into CUDA."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(replace(settings, shapes=False, stacks=False, memory=False))

    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CUDA]


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


class Unended:
    """The operators in which a capture has ended and that are still under way, in any thread.

    They call Python: an autograd function's forward, a hook of the backward pass. Where one ends,
    torch writes to the trace in which it began, which is gone, as soon as there is another trace.
    """

    frames: ClassVar[list[FrameType]] = []

    @classmethod
    def note(cls, *, is_last: bool) -> None:
        """Note those that are under way, because a capture has ended; none after the last."""
        callers = frozenset() if is_last else _codes_around_operators()
        cls.frames = [frame for frame in _frames() if frame.f_code in callers]

    @classmethod
    def exist(cls) -> bool:
        """Whether one of them is still under way."""
        # Others are let go: they hold what the workload has passed on.
        under_way = set(_frames()) if cls.frames else ()
        cls.frames = [frame for frame in cls.frames if frame in under_way]
        return bool(cls.frames)


def _codes_around_operators() -> frozenset[CodeType]:
    """Return the code that runs while an operator that calls Python is under way."""
    functions = [
        torch.autograd.Function.apply,
        getattr(torch.autograd.graph, "_engine_run_backward", torch.autograd.backward),
        torch._ops.OpOverload.__call__,
        torch._ops.OpOverloadPacket.__call__,
    ]
    # From torch 2.14 on, `apply` has no frame: what it calls has.
    for one in subclasses(torch.autograd.Function):
        functions += [one.forward, one.setup_context]
    return frozenset(one.__code__ for one in functions if hasattr(one, "__code__"))


def _frames() -> Iterator[FrameType]:
    """Yield the frames of all threads."""
    for newest in sys._current_frames().values():
        frame: FrameType | None = newest
        while frame is not None:
            yield frame
            frame = frame.f_back


def can_start() -> bool:
    """Whether the profiler is free, the GPU may be synchronized, and files may be opened.

    The trace must also outlive this thread, and no end of an operator may reach one that is gone.
    """
    is_free = not Others.is_active and not is_capturing_a_graph() and _can_open_files()
    is_free = is_free and not Unended.exist()
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


FILE = "counters.json"
INTERVAL_NS = 20_000
# The traffic of the second-level cache shows when anything runs at all.
TRAFFIC = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
WORKING = ("sm__cycles_active.sum", "sm__pipe_tensor_cycles_active_realtime.sum")
# The first that the GPU can count in one pass; seen on an H200: all of them.
QUANTITIES = ((*TRAFFIC, *WORKING), TRAFFIC)
SPARE_SAMPLES = 1_000
# Four seconds; decoding more would keep the workload waiting at the end of the window.
MOST_SAMPLES = 200_000


class Counters:
    """The counters of the GPU in use; why there are none is reported, and stops no other part."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why nothing was sampled; None while all is well."""
        self._collector: Any = None
        self._quantities: tuple[str, ...] = ()
        self._content: dict[str, object] = {}
        self._started_ns = 0

    def prepare(self) -> None:
        """Do what is slow about starting, once: after another time there would be no samples."""
        if self._collector is not None or self.problem or not torch.cuda.is_initialized():
            return
        try:
            from cupti import pm_sampling

            device = torch.cuda.current_device()
            collector = pm_sampling.Collector(device_index=device)
            collector.enable()
            self._quantities = _configured(collector)
        except ImportError as error:
            self.problem = f"cupti-python cannot be imported ({error}): pip install cupti-python"
        except PermissionError:
            self.problem = (
                "the driver lets only administrators read counters (ERR_NVGPUCTRPERM): load it "
                "with NVreg_RestrictProfilingToAdminUsers=0, or run as root"
            )
        except Exception as error:  # noqa: BLE001 - no failure here may be the workload's
            self.problem = f"CUPTI refused, {_said(error)}"
        else:
            self._collector = collector
            self._content = {"device": device, "interval_ns": INTERVAL_NS}

    def start(self) -> None:
        """Sample from here on."""
        self.prepare()
        if self._collector is None:
            self.problem = self.problem or "the workload used no GPU"
            return
        try:
            self._collector.start()
        except Exception as error:  # noqa: BLE001
            self._give_up(f"CUPTI did not start, {_said(error)}")
        self._started_ns = perf_counter_ns()

    def stop(self) -> None:
        """Stop sampling, and decode the samples."""
        if self._collector is None:
            return
        try:
            self._collector.stop()
            self._decode()
        except MemoryError:
            self._give_up("the window was too long for CUPTI's buffer: record fewer steps")
        except Exception as error:  # noqa: BLE001
            self._give_up(f"CUPTI did not give the samples, {_said(error)}")

    def write(self, folder: Path) -> None:
        """Write the samples, or why there are none, into `folder`."""
        unfinished, path = folder / f".{FILE}", folder / FILE
        content = {"problem": self.problem} if self.problem else self._content
        unfinished.write_text(json.dumps({"schema": 1, **content}, separators=(",", ":")))
        unfinished.replace(path)

    def _decode(self) -> None:
        elapsed_ns = perf_counter_ns() - self._started_ns
        most = min(elapsed_ns // INTERVAL_NS + SPARE_SAMPLES, MOST_SAMPLES)
        data = self._collector.decode(max_samples=most)
        rows = [sample.metric_values for sample in data]
        if not rows:
            self.problem = "CUPTI gave no samples"
        self._content["num_populated"] = data.num_populated_samples
        self._content["values"] = {
            name: [round(values[place]) for values in rows]
            for place, name in enumerate(self._quantities)
        }

    def _give_up(self, problem: str) -> None:
        self.problem, self._collector = problem, None


class CountedCapture(Capture):
    """A window in which counters are sampled beside torch's profiler."""

    def prepare(self) -> None:
        """Do what is slow about starting, which disturbs the step under way."""
        super().prepare()
        counters.prepare()

    def start(self) -> None:
        """Record from here on; the device has finished everything that came before."""
        super().start()
        counters.start()

    def stop(self, *, is_last: bool = False) -> None:
        """Record no more; the samples come first, since Kineto may leave CUPTI when it stops."""
        synchronize()
        counters.stop()
        super().stop(is_last=is_last)

    def export(self, path: Path) -> None:
        """Write the trace to `path`, and the samples beside it."""
        super().export(path)
        with contextlib.suppress(OSError):
            counters.write(path.parent)


# One for the process: CUPTI can be set up once.
counters = Counters()


def _configured(collector: Any) -> tuple[str, ...]:  # noqa: ANN401 - no types of its own
    """Let CUPTI count as much as it can in one pass; return what that is."""
    *more, least = QUANTITIES
    for quantities in more:
        with contextlib.suppress(Exception):
            collector.configure(metrics=list(quantities), sampling_interval=INTERVAL_NS)
            return quantities
    collector.configure(metrics=list(least), sampling_interval=INTERVAL_NS)
    return least


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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


class Others:
    """Whether other code in this process uses torch's profiler."""

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


class Ours:
    """Marks what happens inside it as the recorder's own use of the profiler.

    What torch would warn about then is none of the workload's business. (Filters of `warnings`
    would not do: to change them makes Python show old warnings again.)
    """

    quiet = Quiet()
    warnings = Warnings()
    has_begun = False
    """Whether the recorder has used the profiler, of which a thread stays."""

    def __enter__(self) -> None:
        Ours.has_begun = True
        Others.is_ours += 1
        self.quiet.__enter__()
        self._warned = self.warnings.send_to_log()
        self._warn = getattr(torch_profiler, "_warn_once", None)
        torch_profiler._warn_once = lambda *message, **options: None

    def __exit__(self, *exception: object) -> None:
        Others.is_ours -= 1
        self.warnings.send_to(self._warned)
        self.quiet.__exit__()
        torch_profiler._warn_once = self._warn
