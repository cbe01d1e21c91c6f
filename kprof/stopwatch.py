"""How long a call takes, on one of three clocks: the wall's, the GPU's, the GPU's with cold L2."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

Work = Callable[[], object]
Clock = Literal["wall", "gpu", "cold gpu"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)

# The GPU sleeps before each sample so that all that is timed is queued when it wakes: what is
# measured is then the GPU's time, not that of launching.
SLEEP_CYCLES = 1_000_000
LONGEST_SLEEP_CYCLES = 64_000_000
# By how much it sleeps less after a sample in which all was queued in time. Slowly: where it has
# to be long, each attempt to do with less costs a sample.
SHRINK = 0.95
# What is written between two calls so that the second finds nothing in L2, times its size.
FLUSHED = 2


class Stopwatch(Protocol):
    """Times calls; `resolution_ns` is the least that its clock tells apart."""

    name: str
    """What it measures, in words for a report."""
    resolution_ns: float
    num_exposed: int
    """Samples in which the GPU had to wait for launches, although its own time is asked for."""

    def time(self, work: Work, num_calls: int) -> float:
        """Return the time of one call in ns, as the mean of `num_calls` in a row."""
        ...


def stopwatch_for(clock: Clock) -> Stopwatch:
    """Return the stopwatch of that name; those of the GPU need torch and a CUDA device."""
    if clock == "wall":
        return WallStopwatch()
    return GpuStopwatch() if clock == "gpu" else ColdStopwatch()


class WallStopwatch:
    """Times calls on the host's clock, from an idle GPU to an idle GPU where there is one."""

    name = "wall time per call, from an idle GPU to an idle GPU"
    num_exposed = 0

    def __init__(self) -> None:
        self.resolution_ns = time.get_clock_info("perf_counter").resolution * 1e9

    def time(self, work: Work, num_calls: int) -> float:
        """Return the time of one call in ns, as the mean of `num_calls` in a row."""
        wait_for_gpu()
        begin_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            work()
        wait_for_gpu()
        return (time.perf_counter_ns() - begin_ns) / num_calls


class GpuStopwatch:
    """Times calls between two events on the current stream, launches hidden behind a sleep."""

    name = "GPU time per call, calls back to back"
    # Events have a resolution of about half a microsecond (CUDA driver API, cuEventElapsedTime).
    resolution_ns = 500.0

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._sleep_cycles = SLEEP_CYCLES
        self.num_exposed = 0

    def time(self, work: Work, num_calls: int) -> float:
        """Return the time of one call in ns, as the mean of `num_calls` in a row."""
        took_ns, is_hidden = self._sample(work, num_calls)
        if is_hidden:
            # A disturbance that has passed must not make every later sample wait.
            self._sleep_cycles = max(SLEEP_CYCLES, int(SHRINK * self._sleep_cycles))
        while not is_hidden and self._sleep_cycles < LONGEST_SLEEP_CYCLES:
            self._sleep_cycles *= 2
            took_ns, is_hidden = self._sample(work, num_calls)
        self.num_exposed += not is_hidden
        return took_ns

    def _sample(self, work: Work, num_calls: int) -> tuple[float, bool]:
        """Return the time of one call, and whether all were queued before the first began."""
        begin, end = self._event(), self._event()
        self._cuda._sleep(self._sleep_cycles)
        begin.record()
        for _ in range(num_calls):
            work()
        end.record()
        is_hidden = not begin.query()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6 / num_calls, is_hidden

    def _event(self) -> Any:  # noqa: ANN401 - torch's own
        return self._cuda.Event(enable_timing=True)


class ColdStopwatch(GpuStopwatch):
    """Times calls one by one, each after a write of twice the size of L2."""

    name = "GPU time per call, L2 flushed before each"

    def __init__(self) -> None:
        super().__init__()
        import torch

        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flushed = torch.empty(FLUSHED * size, dtype=torch.int8, device="cuda")

    def _sample(self, work: Work, num_calls: int) -> tuple[float, bool]:
        marks = [(self._event(), self._event()) for _ in range(num_calls)]
        self._cuda._sleep(self._sleep_cycles)
        for begin, end in marks:
            self._flushed.zero_()
            begin.record()
            work()
            end.record()
        is_hidden = not marks[0][0].query()
        marks[-1][1].synchronize()
        total_ms = sum(float(begin.elapsed_time(end)) for begin, end in marks)
        return total_ms * 1e6 / num_calls, is_hidden


def wait_for_gpu() -> None:
    """Wait until the GPU has done what it was given; nothing where no GPU is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
