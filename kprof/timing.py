"""The only timing loop in the repository: how long work takes on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Work = Callable[[], object]

# The GPU sleeps so long before each sample that everything timed is queued when it wakes: what is
# measured is the GPU's time, not that of launching.
SLEEP_CYCLES = 2_000_000
MOST_CALLS = 400


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
    num_calls = _warm_up(work, warm_up_s, sample_ns)
    samples = [_sample(work, num_calls) for _ in range(num_samples)]
    low, _, high = quantiles(samples, n=4)
    return GpuTime(median(samples), low, high, num_samples, num_calls)


def captured(work: Work, num_calls: int) -> Work:
    """Return the replay of a CUDA graph of `num_calls` calls: no launch cost between them."""
    import torch

    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        work()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            work()
    replay: Work = graph.replay
    return replay


def _warm_up(work: Work, seconds: float, sample_ns: float) -> int:
    """Run `work` for so long, and return how many calls fill a sample."""
    import torch

    until = time.monotonic() + seconds
    took_ns = _sample(work, 1)
    while time.monotonic() < until:
        took_ns = _sample(work, min(MOST_CALLS, max(1, int(sample_ns / max(took_ns, 1.0)))))
    torch.cuda.synchronize()
    return min(MOST_CALLS, max(1, int(sample_ns / max(took_ns, 1.0))))


def _sample(work: Work, num_calls: int) -> float:
    """Return the time of one call in ns, from events around `num_calls` of them."""
    import torch

    begin: Any = torch.cuda.Event(enable_timing=True)
    end: Any = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for _ in range(num_calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6 / num_calls
