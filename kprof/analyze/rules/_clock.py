"""Clock: how often, and by how much, the GPU was slowed down while it was recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kprof.analyze.energy import Series, around, devices_in, readings
from kprof.analyze.evidence import Int64s, is_one_of, total_ns
from kprof.analyze.summary import count_gpus
from kprof.analyze.trust.unanswered import Unanswered
from kprof.finding import Remedy
from kprof.trace import Trace

# Kernels that wait for memory do not care for the SMs' clock.
COMPUTING = ("gemm", "attention", "convolution")
NEAR_NS = 500_000_000


@dataclass(frozen=True)
class Held:
    """How the clock of a GPU was held back around the window."""

    share: float
    """Of the samples around the window, those in which it was."""
    mean_mhz: float | None
    most_mhz: float | None
    """The highest clock of all samples; None where none was sampled."""

    @property
    def slowdown(self) -> float:
        """What the mean clock lacks of the highest, as a share; 0 where nobody knows."""
        if not self.mean_mhz or not self.most_mhz:
            return 0.0
        return max(1 - self.mean_mhz / self.most_mhz, 0.0)

    @property
    def words(self) -> str:
        """Say how fast the clock ran, or nothing where it was not sampled."""
        if not self.mean_mhz or not self.most_mhz:
            return ""
        return f", at {self.mean_mhz:,.0f} MHz on average instead of {self.most_mhz:,.0f}"


def why_no_clock(trace: Trace) -> Unanswered | None:
    """Say why nobody can tell whether the clock was held back."""
    if held_back(trace, 0) is not None:
        return None
    return Unanswered(
        "Was the clock held back?",
        "no sample of the GPU's clock lies near the window, or more GPUs were sampled than it used",
        "record with `kprof run`, which samples the GPU through NVML, on that GPU alone",
    )


def held_back(trace: Trace, reasons: int) -> Held | None:
    """Return how often one of `reasons`, a set of bits, held back the GPU that it did most."""
    devices = devices_in(trace.samples, "nvml")
    if len(devices) > count_gpus(trace.kernels):
        return None
    found = []
    for device in devices:
        bits = _near(trace, device, "throttle_reasons")
        if not len(bits.value):
            continue
        clock = _near(trace, device, "sm_clock_mhz").value
        every = readings(trace.samples, "nvml", "sm_clock_mhz", device).value
        share = float(((bits.value.astype(np.int64) & reasons) > 0).mean())
        mean = float(clock.mean()) if len(clock) else None
        found.append(Held(share, mean, float(every.max()) if len(every) else None))
    return max(found, key=lambda held: held.share, default=None)


def _near(trace: Trace, device: int, quantity: str) -> Series:
    """Return the readings within the window, and the nearest on either side, if they are near."""
    start = trace.kernels["start_ns"]
    begin, end = int(start.min()), int((start + trace.kernels["duration_ns"]).max())
    near = around(readings(trace.samples, "nvml", quantity, device), begin, end)
    is_near = (near.time_ns >= begin - NEAR_NS) & (near.time_ns <= end + NEAR_NS)
    return Series(near.time_ns[is_near], near.value[is_near])


def computing_rows(trace: Trace) -> Int64s:
    """Return the kernels whose speed follows the clock."""
    return np.asarray(np.flatnonzero(is_one_of(trace.kernels["kind"], *COMPUTING)), dtype=np.int64)


def at_full_clock(trace: Trace, rows: Int64s, held: Held) -> Remedy:
    """Return what the rows take at the highest clock that was sampled, or nothing if unknown."""
    took = total_ns(trace, rows)
    if not held.slowdown or not took:
        return Remedy()
    return Remedy(best_ns=round(took * (1 - held.slowdown)), modest_ns=took)
