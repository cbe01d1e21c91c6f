"""What surrounded the workload while it was recorded: its GPU's speed, others, whose clock."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kprof.analyze.energy import Series, around, devices_in, readings, throttle_shares
from kprof.analyze.nesting import NO_ROW
from kprof.analyze.trust.check import Check, Verdict, checked, graded, percent
from kprof.device import HARMLESS_REASONS, THROTTLE_REASONS
from kprof.trace import Trace

CLOCK_SPREAD = (0.05, 0.15)
THROTTLED = (0.0, 0.5)
# A sample farther than this from the window says nothing about it.
NEAR_NS = 500_000_000
# A driver holds some memory of a GPU by itself, and a process some for its mere use of it.
DRIVERS_BYTES = 2 << 30
CONTEXT_BYTES = 64 << 20
SOME_UTILIZATION = 5.0
# What traces round their times to.
ROUNDED_NS = 1_000

NO_SAMPLES = "no sample of the GPU lies near the window"
SAMPLE = "record with `kprof run`, which samples the GPU through NVML"


def _sampled(trace: Trace, quantity: str) -> tuple[list[Series], str]:
    """Return the readings around the window of the GPUs used, or why there are none."""
    devices = devices_in(trace.samples, "nvml")
    num_used = len(trace.kernels[["rank", "device"]].drop_duplicates())
    if len(devices) > num_used:
        return [], "more GPUs were sampled than the run used, and nothing tells which are its own"
    start = trace.kernels["start_ns"]
    start_ns, end_ns = int(start.min()), int((start + trace.kernels["duration_ns"]).max())
    found = []
    for device in devices:
        near = around(readings(trace.samples, "nvml", quantity, device), start_ns, end_ns)
        is_near = (near.time_ns >= start_ns - NEAR_NS) & (near.time_ns <= end_ns + NEAR_NS)
        if is_near.any():
            found.append(Series(near.time_ns[is_near], near.value[is_near]))
    return found, "" if found else NO_SAMPLES


def check_throttling(trace: Trace) -> Iterator[Check]:
    """Grade how often the clock was held back around the window."""
    if trace.is_host_only:
        return
    found, why = _sampled(trace, "throttle_reasons")
    meaning = "ceilings are those of a GPU that runs freely: kernels may look worse than they are"
    if not found:
        yield Check("Throttling", "unknown", why, meaning, _again(why))
        return
    harmless = {name for bit, name in THROTTLE_REASONS.items() if bit & HARMLESS_REASONS}
    shares: dict[str, float] = {}
    for series in found:
        for name, share in throttle_shares(series).items():
            if name not in harmless:
                shares[name] = max(share, shares.get(name, 0.0))
    number = sum(len(series.value) for series in found)
    told = ", ".join(f"{name} in {percent(share)}" for name, share in shares.items()) or "none"
    worst = max(shares.values(), default=0.0)
    yield from checked(
        "Throttling",
        graded(worst, THROTTLED),
        f"{told} of {number} samples around the window",
        meaning,
        "let the GPU cool, raise its power limit, or compare only runs under the same limit",
    )


def check_clock(trace: Trace) -> Iterator[Check]:
    """Grade how much the clock changed around the window."""
    if trace.is_host_only:
        return
    found, why = _sampled(trace, "sm_clock_mhz")
    meaning = "kernels of one kind may have run at different speeds, so their mean tells little"
    spreads = [
        (float(1 - series.value.min() / series.value.max()), series)
        for series in found
        if len(series.value) > 1 and series.value.max() > 0
    ]
    if not spreads:
        yield Check("Clock", "unknown", why or "one sample shows no change", meaning, _again(why))
        return
    spread, series = max(spreads, key=lambda pair: pair[0])
    yield from checked(
        "Clock",
        graded(spread, CLOCK_SPREAD),
        f"{series.value.min():,.0f} to {series.value.max():,.0f} MHz, {len(series.value)} samples",
        meaning,
        "warm up longer (--skip 50), or lock the clock: nvidia-smi --lock-gpu-clocks",
    )


def check_others(trace: Trace) -> Iterator[Check]:
    """Grade what the GPU was doing before the workload took memory of it."""
    if trace.is_host_only:
        return
    meaning = "another process may take time and bandwidth of the GPU, and no row of it is recorded"
    remedy = "record with `kprof run` on a GPU that is free: see nvidia-smi"
    befores = [_before_the_workload(trace, device) for device in devices_in(trace.samples, "nvml")]
    known = [before for before in befores if before is not None]
    if not known:
        why = (
            "the workload held its memory when sampling began"
            if befores
            else "the GPU was not sampled"
        )
        yield Check("Other processes", "unknown", why, meaning, remedy)
        return
    num_bytes, busy = max(b for b, _ in known), max(u for _, u in known)
    told = (
        f"before the workload took memory, {num_bytes / 2**30:.1f} GiB were in use and the GPU was "
        f"up to {busy:.0f} % busy; who came later shows in no sample"
    )
    is_busy, is_full = busy > SOME_UTILIZATION, num_bytes > DRIVERS_BYTES
    verdict: Verdict = "bad" if is_busy else "limited" if is_full else "good"
    yield from checked("Other processes", verdict, told, meaning, remedy)


def _before_the_workload(trace: Trace, device: int) -> tuple[float, float] | None:
    """Return the bytes in use and the utilisation in percent before the memory in use rose.

    None where it did not rise by what a process takes, so that nothing tells whose it was.
    """
    used = readings(trace.samples, "nvml", "memory_used_bytes", device)
    has_risen = used.value > (used.value[:1] + CONTEXT_BYTES)
    if not has_risen.any():
        return None
    until_ns = int(used.time_ns[int(has_risen.argmax())])
    utilization = readings(trace.samples, "nvml", "utilization_percent", device)
    busy = utilization.value[utilization.time_ns < until_ns]
    return float(used.value[0]), float(busy.max(initial=0.0))


def check_host_clock(trace: Trace) -> Iterator[Check]:
    """Grade whether activities begin before the calls that launched them, or did as recorded."""
    if trace.is_host_only:
        return
    name = "Clocks of host and GPU"
    meaning = (
        "what the host did beside an activity is not known for sure, and with it causes of idle "
        "time and predictions; durations hold"
    )
    late_ns = _lateness_of_launches(trace)
    if not len(late_ns):
        why = "of no activity the launch is known, so nothing tells whether it began before"
        yield Check(name, "unknown", why, meaning, "record the host, too: activities=[CPU, CUDA]")
        return
    num_early = int((late_ns > ROUNDED_NS).sum())
    # Of those that were put right none is early any more.
    num_moved = trace.meta.counts.get("early_activities", 0)
    num_disbelieved = trace.meta.counts.get("disbelieved_launches", 0)
    is_limited = num_moved or num_disbelieved
    verdict: Verdict = "bad" if num_early else "limited" if is_limited else "good"
    told = (
        f"{num_early or num_moved:,} of {len(late_ns):,} activities whose launch was recorded "
        "began before it"
    )
    if num_early:
        told += f", by up to {late_ns.max() / 1e3:,.0f} µs"
    elif num_moved:
        told += ", which was put right to within some µs: see the caveats"
    if num_disbelieved:
        told += (
            f"; {num_disbelieved:,} more had another's launch, by their numbers: see the caveats"
        )
    remedy = "record once more, with `kprof run`, which keeps processes apart"
    yield from checked(name, verdict, told, meaning, remedy)


def _lateness_of_launches(trace: Trace) -> np.ndarray:
    """Return how much later than an activity its launch began, in ns, of all that have one.

    Of two launches with one number nobody can tell whose an activity is.
    """
    kernels, ranges = trace.kernels, trace.ranges
    is_launch = (ranges["kind"] == "runtime") & ranges["correlation"].notna()
    is_shared = ranges.loc[is_launch, ["rank", "correlation"]].duplicated(keep=False)
    launches = np.flatnonzero(is_launch)[~is_shared.to_numpy()]
    row = kernels["launch_row"].to_numpy(np.int64, na_value=NO_ROW)
    is_launched = np.isin(row, launches)
    launch_ns = ranges["start_ns"].to_numpy(np.int64)[row[is_launched]]
    return np.asarray(launch_ns - kernels["start_ns"].to_numpy(np.int64)[is_launched])


def check_rank_clocks(trace: Trace) -> Iterator[Check]:
    """Grade how well the clocks of several ranks agree."""
    if trace.meta.num_ranks < 2:
        return
    clocks = trace.meta.clocks
    meaning = "who waited for whom across ranks cannot be told; within a rank all holds"
    remedy = "record all ranks at once with `kprof run`, with named process groups (NCCL)"
    # What was moved, drifts or contradicts itself is a caveat of the recording as well.
    is_doubtful = clocks is not None and any(caveat in clocks for caveat in trace.meta.caveats)
    verdict: Verdict = "limited" if is_doubtful else "good"
    if clocks is None or not (is_doubtful or "agree within" in clocks):
        verdict, clocks = "unknown", clocks or "nothing tells how far the clocks of ranks agree"
    yield from checked("Clocks of ranks", verdict, clocks.rstrip("."), meaning, remedy)


def _again(why: str) -> str:
    if why in (NO_SAMPLES, ""):
        return SAMPLE if why else "record more steps: --steps 10"
    return "show the run its own GPUs alone: CUDA_VISIBLE_DEVICES=0"
