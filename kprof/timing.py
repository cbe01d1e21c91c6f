"""The timing loop of kprof: warm up, then samples of one call, or of two in pairs.

Three clocks: the host's (wall), the GPU's, and the GPU's with a cold L2 cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from typing import Any, Literal, Protocol, get_args

from kprof.comparison import Pair

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
    """The measured quantity, in words for a report."""
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


MOST_CALLS = 400
# A sample is so much longer than what its clock tells apart.
LEAST_RESOLVED = 100
# Warm-up goes on until two blocks of samples in a row agree so well, but not for ever.
BLOCK = 5
STABLE_WITHIN = 0.02
LONGEST_WARM_UP = 10


@dataclass(frozen=True)
class GpuTime:
    """Time of one call on the GPU, over samples of `num_calls` calls each."""

    median_ns: float
    low_ns: float
    """First quartile of the samples."""
    high_ns: float
    """Third quartile of the samples."""
    num_samples: int
    num_calls: int

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.high_ns - self.low_ns) / self.median_ns


def time_on_gpu(
    work: Work, *, num_samples: int = 12, sample_ns: float = 4e6, warm_up_s: float = 0.3
) -> GpuTime:
    """Time `work`, which launches on the current stream and does not synchronize.

    Warm-up runs by time, so that clocks have settled; a sample holds as many calls as fill
    `sample_ns`. Work that is to find its data in DRAM must rotate among buffers larger than L2.
    """
    stopwatch = GpuStopwatch()
    num_calls = warm_up((work,), stopwatch, warm_up_s, sample_ns).num_calls
    samples = [stopwatch.time(work, num_calls) for _ in range(num_samples)]
    low, _, high = quantiles(samples, n=4)
    return GpuTime(median(samples), low, high, num_samples, num_calls)


def captured(work: Work, num_calls: int) -> Work:
    """Return the replay of a CUDA graph of `num_calls` calls: no launch cost between them.

    `work` runs once before, on the stream that is captured then: a backward pass launches on the
    stream of its forward pass.
    """
    import torch

    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        work()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        for _ in range(num_calls):
            work()
    replay: Work = graph.replay
    return replay


@dataclass(frozen=True)
class WarmUp:
    """How the warm-up ended: calls that fill a sample, and whether times had stopped to move."""

    num_calls: int
    is_stable: bool


def warm_up(
    works: tuple[Work, ...], stopwatch: Stopwatch, seconds: float, sample_ns: float
) -> WarmUp:
    """Run all `works` in turn for so long, and on until their times agree with those before."""
    began_s = time.monotonic()
    sample_ns = max(sample_ns, LEAST_RESOLVED * stopwatch.resolution_ns)
    num_calls = 1
    before = [0.0] * len(works)
    while True:
        now = []
        for work in works:
            samples = [stopwatch.time(work, num_calls) for _ in range(BLOCK)]
            now.append(median(samples))
        num_calls = min(MOST_CALLS, max(1, int(sample_ns / max(min(now), 1.0))))
        is_stable = all(abs(a - b) <= STABLE_WITHIN * b for a, b in zip(before, now, strict=True))
        before = now
        took_s = time.monotonic() - began_s
        if took_s >= seconds and (is_stable or took_s >= LONGEST_WARM_UP * seconds):
            wait_for_gpu()
            return WarmUp(num_calls, is_stable)


@dataclass(frozen=True)
class Conditions:
    """The GPU's state during a sample; missing where no sensor reports it."""

    sm_clock_mhz: float | None = None
    num_others: int | None = None
    """Other processes on the same GPU."""
    is_braked: bool | None = None
    """Whether heat or a fault held the clock back."""

    @property
    def problem(self) -> str:
        """Why a sample taken under these conditions does not count, or nothing."""
        if self.num_others:
            return "another process came onto the GPU"
        return "heat or a power brake held the clock back" if self.is_braked else ""


Watch = Callable[[], Conditions]


def take_pairs(
    a: Work, b: Work, stopwatch: Stopwatch, num_calls: int, order: Random, watch: Watch
) -> Iterator[Pair]:
    """Yield pairs of samples of `a` and `b` for ever, a fair coin deciding which comes first.

    Before each sample one call of the same work, untimed, takes away what the other left behind.
    The coin is thrown for every pair alone: that is what makes the verdict hold under any drift.
    """
    while True:
        is_a_first = order.random() < 0.5
        start_ns = time.time_ns()
        first, second = (
            _sample(work, stopwatch, num_calls, watch)
            for work in ((a, b) if is_a_first else (b, a))
        )
        of_a, of_b = (first, second) if is_a_first else (second, first)
        yield Pair(
            a=(of_a[0],),
            b=(of_b[0],),
            is_a_first=is_a_first,
            start_ns=start_ns,
            problem=first[1].problem or second[1].problem,
            clocks_mhz=(of_a[1].sm_clock_mhz, of_b[1].sm_clock_mhz),
        )


def _sample(
    work: Work, stopwatch: Stopwatch, num_calls: int, watch: Watch
) -> tuple[float, Conditions]:
    work()
    took_ns = stopwatch.time(work, num_calls)
    # The driver's clock is that of the last milliseconds, so it is read right after the work.
    return took_ns, watch()
