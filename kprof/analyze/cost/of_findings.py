"""What the savings of findings are worth: shares of what the run's GPUs cost in a month."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kprof.analyze.attribution.steps import step_rows
from kprof.analyze.cost.measured import gpus_in
from kprof.analyze.cost.price import HOURS_PER_MONTH, ON_DEMAND, Band, Price, Quote, price_of
from kprof.errors import KprofError
from kprof.findings import Diagnosis, Finding, Saving, Worth
from kprof.trace import Trace


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

    findings = tuple(_of(one, priced(one.saving)) for one in diagnosis.findings)
    return replace(
        diagnosis,
        findings=findings,
        together=priced(diagnosis.together),
        swapped=priced(diagnosis.swapped),
        price=_basis(price, count),
    )


def _of(finding: Finding, saving: Saving | None) -> Finding:
    return replace(finding, saving=saving)


def worth_of(saving: Saving, whole: Band) -> Worth | None:
    """Return which part of a sum of dollars a saving is; None where the saving is unknown."""
    if saving.high_ns is None or saving.step_ns <= 0:
        return None
    shares = (ns / saving.step_ns for ns in (saving.low_ns or 0, saving.middle_ns, saving.high_ns))
    low, middle, high = shares
    return Worth(low * float(whole.low), middle * float(whole.mid), high * float(whole.high))


def _basis(price: Price, count: int) -> str:
    band = price.usd_per_gpu_hour
    low, middle, high = (f"${float(usd):,.2f}" for usd in (band.low, band.mid, band.high))
    gpus = f"{count} GPUs" if count > 1 else "1 GPU"
    spread = "" if band.is_known else f" ({low} to {high})"
    dates = " to ".join(dict.fromkeys(f"{day}" for day in (price.oldest, price.newest)))
    return (
        f"{gpus} for a month of {HOURS_PER_MONTH} hours at {middle}{spread} an hour: "
        f"{price.name}, list prices of {dates}"
    )
