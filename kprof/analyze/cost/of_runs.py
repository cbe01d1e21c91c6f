"""The cost facts of a recorded run, and the worth of its findings' savings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from kprof.analyze.attribution.steps import step_rows, time_steps
from kprof.analyze.cost.price import HOURS_PER_MONTH, ON_DEMAND, Band, Price, Quote, price_of
from kprof.analyze.energy import measure_step_energy
from kprof.analyze.groupings import count_gpus
from kprof.device import listed_name
from kprof.errors import KprofError, three_digits
from kprof.findings import Diagnosis, Saving, Worth
from kprof.trace import Trace

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Measured:
    """The measured facts, None where there is no measurement; `notes` say how, or why not."""

    gpu: str | None
    gpus: int | None
    step_s: float | None
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
    energy = "its energy was not measured" if joules is None else f"{three_digits(joules)} J a step"
    return Measured(name, gpus, step_s, joules, (f"{found}; {energy}.",))


def gpus_in(trace: Trace) -> tuple[str | None, int]:
    """Return the GPUs' name as price lists have it, None where they differ, and how many worked."""
    return _gpu_name(trace), count_gpus((trace.all_ranks or trace).kernels)


def _gpu_name(trace: Trace) -> str | None:
    names = {gpu.name for gpu in trace.gpus}
    if len(names) != 1:
        return None
    return listed_name(names.pop())


def _step_s(trace: Trace) -> tuple[float | None, str]:
    """Return the median step: of those that were not recorded, where there were any."""
    times = time_steps(trace)
    steps = times.unrecorded_ns or times.recorded_ns
    if not steps:
        return None, "no step is marked"
    step_s = median(steps) / NS_PER_S
    kind = "steps not recorded" if times.unrecorded_ns else "recorded steps, which recording slows"
    text = f"{step_s * 1000:.4g} ms a step by {times.clock} (median of {len(steps)} {kind})"
    return step_s, text


def with_worth(trace: Trace, quotes: Sequence[Quote]) -> Trace:
    """Add to every saving what it is worth at on-demand prices; none is where no list has the GPU.

    A step of which a share is saved does a month's work in that much less of the GPUs' time. A
    window that marks no step is no unit of work: its savings have no worth.
    """
    if trace.diagnosis is None or trace.is_host_only or trace.kernels.empty:
        return trace
    if not len(step_rows(trace.ranges)):
        return trace
    name, count = gpus_in(trace)
    try:
        price = price_of(quotes, name or "", ON_DEMAND)
    except KprofError:
        return trace
    return replace(trace, diagnosis=_priced(trace.diagnosis, price, count))


def _priced(diagnosis: Diagnosis, price: Price, count: int) -> Diagnosis:
    month = price.usd_per_gpu_hour.map(lambda usd: usd * count * HOURS_PER_MONTH)

    def priced(saving: Saving | None) -> Saving | None:
        return saving and replace(saving, worth=worth_of(saving, month))

    findings = tuple(replace(one, saving=priced(one.saving)) for one in diagnosis.findings)
    return replace(
        diagnosis,
        findings=findings,
        together=priced(diagnosis.together),
        swapped=priced(diagnosis.swapped),
        price=_basis(price, count),
    )


def worth_of(saving: Saving, whole: Band) -> Worth | None:
    """Return which part of a sum of dollars a saving is; None where the saving is unknown."""
    low_ns, middle_ns, high_ns = saving.low_ns, saving.middle_ns, saving.high_ns
    if low_ns is None or middle_ns is None or high_ns is None or saving.step_ns <= 0:
        return None
    low, middle, high = (ns / saving.step_ns for ns in (low_ns, middle_ns, high_ns))
    return Worth(low * whole.low, middle * whole.mid, high * whole.high)


def _basis(price: Price, count: int) -> str:
    band = price.usd_per_gpu_hour
    low, middle, high = (f"${usd:,.2f}" for usd in (band.low, band.mid, band.high))
    gpus = f"{count} GPUs" if count > 1 else "1 GPU"
    spread = "" if band.is_known else f" ({low} to {high})"
    dates = " to ".join(dict.fromkeys(f"{day}" for day in (price.oldest, price.newest)))
    return (
        f"{gpus} for a month of {HOURS_PER_MONTH} hours at {middle}{spread} an hour: "
        f"{price.name}, list prices of {dates}"
    )
