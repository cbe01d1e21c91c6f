"""The utilisation of the GPU over the elapsed time: MFU, MBU, roofline share.

MFU and MBU are shares of the datasheet's peaks, as everybody quotes them; the roofline share is
one of the ceilings that were measured, where they were. Without a datasheet the peaks are those
that were measured, else those that follow from the GPU's attributes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.attribution.steps import denominator, find_lead
from kprof.analyze.capture_quality.unanswered import (
    Unanswered,
    why_no_ceilings,
    why_no_timeline,
    why_no_work,
)
from kprof.analyze.element_type import computed_in
from kprof.device import Device, find_device
from kprof.trace import Trace, once_per_trace

# Below this share of device time with known work, a utilisation is only a lower bound.
ENOUGH_KNOWN = 0.95
# A lower bound of a share, below which it says nothing: it reads "< 0.01 %".
NO_BOUND = 0.00005


@dataclass(frozen=True)
class Share:
    """A share of one, None if unknown; `basis` says how it was counted, or why it is unknown."""

    value: float | None
    basis: str
    is_lower_bound: bool = False
    """Whether much of the device time has no known work, so that the share may be larger."""


@dataclass(frozen=True)
class KnownWork:
    """How much of the device time has known work: shares of one, which add up to one.

    Device time of the steps; of the window where none is marked. Where nothing ran in these, all
    of it is unknown.
    """

    known: float
    """FLOPs or bytes are known."""
    at_least: float
    """Only a lower bound of them is known."""
    unknown: float
    flops: float
    """The part of `known` that computes: its FLOPs are known, and some."""
    of: str = "the device time"
    """The time that these are shares of."""

    @property
    def is_enough(self) -> bool:
        """Tell whether a utilisation is more than a lower bound."""
        return self.known >= ENOUGH_KNOWN


@dataclass(frozen=True)
class Utilisation:
    """The headline: shares of the time of all steps; of the window where none is marked.

    Work that checkpointing did a second time takes time, but is not counted.
    """

    mfu: Share
    mbu: Share
    roofline: Share
    busy: Share


@once_per_trace
def measure_known_work(trace: Trace) -> KnownWork:
    """Measure how much of the device time has known work, in an analyzed trace."""
    kernels = _in_steps(trace)
    has_any = has_work(kernels)
    is_bounded = kernels["work_bound"] == "at least"
    computes = kernels["flops"].to_numpy(np.float64, na_value=0.0) > 0
    return KnownWork(
        known=share_of_time(kernels, has_any & ~is_bounded),
        at_least=share_of_time(kernels, has_any & is_bounded),
        unknown=share_of_time(kernels, ~has_any) if kernels["duration_ns"].any() else 1.0,
        flops=share_of_time(kernels, computes & ~is_bounded.to_numpy(bool)),
        of="the operators' own time" if trace.is_host_only else "the device time",
    )


@once_per_trace
def measure_utilisation(trace: Trace) -> Utilisation:
    """Measure the headline shares of an analyzed trace."""
    lead, peaks = find_lead(trace).kernels, _peaks(trace)
    kernels = _in_steps(trace)
    elapsed_ns = denominator(trace).time_ns
    if not elapsed_ns:
        nothing = Share(None, "nothing ran")
        return Utilisation(nothing, nothing, nothing, nothing)
    if (untimed := why_no_timeline(trace)) is not None:
        unknown = Share(None, untimed.reason)
        return Utilisation(unknown, unknown, unknown, unknown)
    busy_ns = int(allotted_time(trace)[~lead].sum())
    busy = Share(busy_ns / elapsed_ns, "at least one activity was running")
    if peaks is None:
        why = why_no_ceilings(trace)
        unknown = Share(None, why.reason if why else "the device's peaks are unknown")
        return Utilisation(unknown, unknown, unknown, busy)
    known = measure_known_work(trace)
    no_work = why_no_work(trace)
    useful = kernels[~kernels["recomputed"].to_numpy(dtype=bool)]
    return Utilisation(
        mfu=_bounded(_measure_mfu(useful, peaks, elapsed_ns), known, no_work),
        mbu=_bounded(_measure_mbu(useful, peaks, elapsed_ns), known, no_work),
        roofline=_bounded(_measure_roofline_share(useful, elapsed_ns), known, no_work),
        busy=busy,
    )


def _in_steps(trace: Trace) -> pd.DataFrame:
    """Return the activities of the steps; all where no step is marked."""
    lead = find_lead(trace).kernels
    return trace.kernels[~lead] if lead.any() else trace.kernels


def _peaks(trace: Trace) -> Device | None:
    """Return the datasheet's rates; without a datasheet, those of the roofline."""
    device = trace.meta.device
    if device is None or not device.is_measured or not trace.gpus:
        return device
    return find_device(trace.gpus[0].name) or device


def _bounded(share: Share, known: KnownWork, why: Unanswered | None) -> Share:
    """Say so where all of the work of a good part of the device time is not known, and why."""
    if share.value is None:
        return Share(None, f"{share.basis}: {why.reason}" if why else share.basis)
    if known.is_enough:
        return share
    only = f"the work of only {100 * known.known:.1f} % of {known.of} is known"
    if share.value < NO_BOUND:
        return Share(None, only)
    return Share(share.value, f"{share.basis}; {only}", is_lower_bound=True)


def has_work(kernels: pd.DataFrame) -> pd.Series[bool]:
    """Tell which rows' work is known."""
    return kernels["bytes"].notna() | kernels["flops"].notna()


def share_of_time(kernels: pd.DataFrame, rows: pd.Series[bool] | NDArray[np.bool_]) -> float:
    """Return the share of all device time that lies in `rows`."""
    duration_ns = kernels["duration_ns"].to_numpy(np.int64)
    chosen_ns = int(duration_ns[np.asarray(rows, dtype=bool)].sum())
    return chosen_ns / max(int(duration_ns.sum()), 1)


def _measure_mfu(kernels: pd.DataFrame, device: Device, elapsed_ns: int) -> Share:
    """FLOPs of every row over what the device could do in the time, each type at its own peak."""
    flops = kernels["flops"].to_numpy(np.float64, na_value=0.0)
    types = kernels["dtype"].cat
    codes = types.codes.to_numpy()
    in_types = [computed_in(str(name)) for name in types.categories]
    peak = np.array([device.flops_per_s.get(name, 0.0) for name in in_types] + [0.0])
    # A row of unknown type has code -1: the peak of 0 appended at the end, which is not counted.
    counted = (flops > 0) & (peak[codes] > 0)
    if not counted.any():
        return Share(None, "no operator's FLOPs are known")
    by_type = np.bincount(codes[counted], weights=flops[counted], minlength=len(types.categories))
    at_peak_ns = float((by_type / np.where(peak[:-1] > 0, peak[:-1], np.inf)).sum()) * 1e9
    main = str(types.categories[int(by_type.argmax())])
    rate = "measured rate" if device.is_measured else "datasheet's dense peak"
    of_their_type = f"{rate} of their type"
    if device.is_derived:
        of_their_type = f"dense peak of their type, {device.origin}"
    return Share(
        at_peak_ns / elapsed_ns,
        f"useful FLOPs over the {of_their_type}, mostly {main}",
    )


def _measure_mbu(kernels: pd.DataFrame, device: Device, elapsed_ns: int) -> Share:
    num_bytes = kernels["bytes"].to_numpy(np.float64, na_value=0.0).sum()
    if not num_bytes:
        return Share(None, "no operator's bytes are known")
    could_move = device.memory_bytes_per_s * elapsed_ns / 1e9
    rate = "measured rate" if device.is_measured else "bandwidth by the datasheet"
    if device.is_derived:
        rate = f"bandwidth, {device.origin}"
    basis = f"minimum traffic of the operators over the memory's {rate}"
    return Share(float(num_bytes) / could_move, basis)


def _measure_roofline_share(kernels: pd.DataFrame, elapsed_ns: int) -> Share:
    known = kernels["limit_ns"].notna()
    if not known.any():
        return Share(None, "no operator's work is known")
    limit_ns = int(kernels["limit_ns"].to_numpy(np.int64, na_value=0).sum())
    return Share(limit_ns / elapsed_ns, "time at the roofline over elapsed time")
