"""Series of a sampled quantity, such as power: readings, integrals over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.steps import find_steps
from kprof.analyze.groupings import count_gpus
from kprof.device import THROTTLE_REASONS
from kprof.trace import Trace


@dataclass(frozen=True)
class Series:
    """The readings of one quantity of one device, in the order of time."""

    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


def readings(samples: pd.DataFrame, source: str, quantity: str, device: int) -> Series:
    """Return the readings of `quantity` of `device`; empty where there are none."""
    rows = (samples["source"] == source) & (samples["quantity"] == quantity)
    mine = samples[rows & (samples["device"] == device)]
    ordered = mine.sort_values("time_ns", kind="stable")
    return Series(ordered["time_ns"].to_numpy(np.int64), ordered["value"].to_numpy(np.float64))


def around(series: Series, start_ns: int, end_ns: int) -> Series:
    """Return the readings between two moments, and the nearest one on either side of them."""
    first = max(int(np.searchsorted(series.time_ns, start_ns, side="right")) - 1, 0)
    last = int(np.searchsorted(series.time_ns, end_ns, side="left")) + 1
    return Series(series.time_ns[first:last], series.value[first:last])


def devices_in(samples: pd.DataFrame, source: str) -> list[int]:
    """Return the devices that `source` sampled."""
    mine = samples["device"][(samples["source"] == source).to_numpy()]
    return sorted(int(device) for device in mine.unique())


def energy_between(counter: Series, start_ns: int, end_ns: int) -> float | None:
    """Return the joules used between two moments from an energy counter in millijoules.

    None where the counter was not read on both sides, or fewer than three times in between:
    it advances in steps of tens of milliseconds, so a shorter span would be a guess.
    """
    time_ns = counter.time_ns
    inside = int(((time_ns >= start_ns) & (time_ns <= end_ns)).sum())
    if inside < 3 or time_ns[0] > start_ns or time_ns[-1] < end_ns:
        return None
    at_start, at_end = np.interp([start_ns, end_ns], time_ns, counter.value)
    return float(at_end - at_start) / 1000


@dataclass(frozen=True)
class StepEnergy:
    """Energy of a step on all GPUs of a run; `joules` is None where `why` says why."""

    joules: float | None
    num_steps: int
    """Recorded steps of a rank that it is averaged over."""
    num_gpus: int
    why: str = ""


def measure_step_energy(trace: Trace) -> StepEnergy:
    """Return the energy of a step, from the GPUs' energy counters over all recorded steps."""
    steps, devices = find_steps(trace), devices_in(trace.samples, "nvml")
    if not steps:
        why = 'no step is marked; name them: kprof.range("step")'
        return StepEnergy(None, 0, len(devices), why)
    num_steps = max(len(steps) // len({step.rank for step in steps}), 1)
    counters = [readings(trace.samples, "nvml", "energy_mj", device) for device in devices]
    if not any(len(counter.value) for counter in counters):
        why = "the GPU has no energy counter that could be read"
        return StepEnergy(None, num_steps, len(devices), why)
    if len(devices) > count_gpus(trace.kernels):
        why = (
            "more GPUs were sampled than the run used, and nothing tells which are its own; to "
            "know, show it those alone: CUDA_VISIBLE_DEVICES"
        )
        return StepEnergy(None, num_steps, len(devices), why)
    start_ns = min(step.start_ns for step in steps)
    end_ns = max(step.device_end_ns for step in steps)
    used = [energy_between(counter, start_ns, end_ns) for counter in counters]
    known = [joules for joules in used if joules is not None]
    if len(known) < len(used):
        why = (
            "the recorded steps are too short for the energy counter, or not all sampled; to know, "
            "record more: --steps 50"
        )
        return StepEnergy(None, num_steps, len(devices), why)
    return StepEnergy(sum(known) / num_steps, num_steps, len(devices))


def throttle_shares(reasons: Series) -> dict[str, float]:
    """Return for each reason the share of samples in which it held, most frequent first."""
    bits = reasons.value.astype(np.int64)
    if not len(bits):
        return {}
    shares = {name: float(((bits & bit) > 0).mean()) for bit, name in THROTTLE_REASONS.items()}
    known = int(np.bitwise_or.reduce(list(THROTTLE_REASONS)))
    shares["a reason that kprof does not know"] = float(((bits & ~known) > 0).mean())
    held = {name: share for name, share in shares.items() if share > 0}
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def thin_out(series: Series, most: int, *, keep_peaks: bool = False) -> Series:
    """Average neighbouring readings, or keep their peaks, until at most `most` are left."""
    number = len(series.value)
    if number <= most:
        return series
    borders = np.linspace(0, number, most + 1).astype(np.int64)[:-1]
    if keep_peaks:
        return Series(series.time_ns[borders], np.maximum.reduceat(series.value, borders))
    counts = np.diff(np.append(borders, number))
    return Series(series.time_ns[borders], np.add.reduceat(series.value, borders) / counts)
