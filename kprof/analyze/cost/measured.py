"""What a recorded run knows of its cost: step time, GPUs, energy of a step."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from statistics import median

from kprof.analyze.attribution.steps import time_steps
from kprof.analyze.energy import measure_step_energy
from kprof.analyze.groupings import count_gpus
from kprof.device import find_device
from kprof.trace import Trace

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Measured:
    """What was measured, None where it was not; `notes` say how, or why not."""

    gpu: str | None
    gpus: int | None
    step_s: Fraction | None
    joules_per_step: float | None
    notes: tuple[str, ...]


def measured_in(trace: Trace) -> Measured:
    """Return what a trace tells of its cost; a run without a device tells nothing."""
    if trace.is_host_only or trace.kernels.empty:
        why = f"{trace.meta.source} ran on no GPU, so it says nothing of a GPU's cost."
        return Measured(None, None, None, None, (why,))
    name, gpus = gpus_in(trace)
    step_s, how = _step_s(trace)
    joules = measure_step_energy(trace).joules
    found = f"{trace.meta.source}: {gpus} GPU{'s' if gpus > 1 else ''}, {how}"
    energy = "its energy was not measured" if joules is None else f"{joules:.3g} J a step"
    return Measured(name, gpus, step_s, joules, (f"{found}; {energy}.",))


def gpus_in(trace: Trace) -> tuple[str | None, int]:
    """Return the GPUs' name as price lists have it, None where they differ, and how many worked."""
    return _gpu_name(trace), count_gpus(trace.kernels)


def listed_name(device_name: str) -> str:
    """Return the name of a device as price lists have it: SXM is what they do not mention."""
    return " ".join(word for word in device_name.split() if word != "SXM")


def _gpu_name(trace: Trace) -> str | None:
    names = {gpu.name for gpu in trace.gpus}
    if len(names) != 1:
        return None
    driver_name = names.pop()
    device = find_device(driver_name)
    return listed_name(device.name) if device else driver_name


def _step_s(trace: Trace) -> tuple[Fraction | None, str]:
    """Return the median step: of those that were not recorded, where there were any."""
    times = time_steps(trace)
    steps = times.unrecorded_ns or times.recorded_ns
    if not steps:
        return None, "no step is marked"
    step_s = Fraction(median(steps)) / NS_PER_S
    kind = "steps not recorded" if times.unrecorded_ns else "recorded steps, which recording slows"
    text = f"{float(step_s) * 1000:.4g} ms a step by {times.clock} (median of {len(steps)} {kind})"
    return step_s, text
