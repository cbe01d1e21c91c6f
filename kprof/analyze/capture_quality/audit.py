"""The audit of a capture: checks of its data quality, each with the numbers behind it.

One thing that could make a capture lie: what was found, what follows, how to do better.

What surrounded the workload while it was recorded: its GPU's speed, others, whose clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.attribution.ledger import Launches, count_launches
from kprof.analyze.attribution.steps import find_steps, sort_out, time_steps
from kprof.analyze.capture_quality.overhead import NOTICEABLE_SLOWDOWN, measure_cost
from kprof.analyze.capture_quality.unanswered import (
    Unanswered,
    why_no_cost,
    why_no_steps,
    why_no_timeline,
    why_no_work,
)
from kprof.analyze.energy import Series, around, devices_in, readings, throttle_shares
from kprof.analyze.groupings import count_gpus
from kprof.analyze.roofline.bound import beats_ceiling
from kprof.analyze.roofline.utilisation import (
    measure_known_work,
    measure_utilisation,
    share_of_time,
)
from kprof.device import HARMLESS_REASONS, THROTTLE_REASONS
from kprof.errors import counted
from kprof.trace import Trace, once_per_trace

Verdict = Literal["good", "limited", "bad", "unknown"]


@dataclass(frozen=True)
class Check:
    """One check of a capture's data quality, and its verdict."""

    name: str
    verdict: Verdict
    evidence: str
    """The numbers behind the verdict; for an unknown one, the reason."""
    meaning: str = ""
    """The consequence for the report's results; empty where there is none."""
    fix: str = ""
    """How to record better; empty where nothing has to change."""


@once_per_trace
def audit(trace: Trace) -> list[Check]:
    """Return the checks of an analyzed trace; checks that cannot apply are left out."""
    if trace.kernels.empty:
        return []
    checks = CHECKS if trace.has_timeline else CHECKS_WITHOUT_TIMELINE
    return [check for find in checks for check in find(trace)]


def graded(value: float, limits: tuple[float, float]) -> Verdict:
    """Return the verdict on a measure: good and limited up to their limits, bad beyond."""
    good, limited = limits
    return "good" if value <= good else "limited" if value <= limited else "bad"


def checked(
    name: str, verdict: Verdict, evidence: str, meaning: str = "", fix: str = ""
) -> Iterator[Check]:
    """Yield a check; a good one needs no fix."""
    is_good = verdict == "good"
    yield Check(name, verdict, evidence, "" if is_good else meaning, "" if is_good else fix)


def percent(share: float) -> str:
    """Return a share of one in percent, for a sentence."""
    return f"{100 * share:.1f} %"


CLOCK_SPREAD = (0.05, 0.15)
THROTTLED = (0.0, 0.5)
# A sample farther than this from the window says nothing about it.
NEAR_NS = 500_000_000
# A driver holds some memory of a GPU by itself, and a process some for its mere use of it.
DRIVERS_BYTES = 2 << 30
CONTEXT_BYTES = 64 << 20
SOME_UTILIZATION = 5.0
# The resolution to which traces round their times.
ROUNDED_NS = 1_000

NO_SAMPLES = "no sample of the GPU lies near the window"
SAMPLE = "record with `kprof run`, which samples the GPU through NVML"


def _sampled(trace: Trace, quantity: str) -> tuple[list[Series], str]:
    """Return the readings around the window of the GPUs used, or why there are none."""
    devices = devices_in(trace.samples, "nvml")
    num_used = count_gpus(trace.kernels)
    if len(devices) > num_used:
        return (
            [],
            "more GPUs were sampled than the run used, and which were its own is not recorded",
        )
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
    """Grade how often the clock was lowered around the window."""
    if trace.is_host_only:
        return
    found, why = _sampled(trace, "throttle_reasons")
    meaning = "ceilings assume an unthrottled GPU: kernels may look worse than they are"
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
        f"{told} of {counted(number, 'sample')} around the window",
        meaning,
        "let the GPU cool, raise its power limit, or compare only runs under the same limit",
    )


def check_clock(trace: Trace) -> Iterator[Check]:
    """Grade how much the clock changed around the window."""
    if trace.is_host_only:
        return
    found, why = _sampled(trace, "sm_clock_mhz")
    meaning = "kernels of one kind may have run at different clocks, so their mean is uncertain"
    spreads = [
        (float(1 - series.value.min() / series.value.max()), series)
        for series in found
        if len(series.value) > 1 and series.value.max() > 0
    ]
    if not spreads:
        yield Check("Clock", "unknown", why or "there is only one sample", meaning, _again(why))
        return
    spread, series = max(spreads, key=lambda pair: pair[0])
    yield from checked(
        "Clock",
        graded(spread, CLOCK_SPREAD),
        f"{series.value.min():,.0f} to {series.value.max():,.0f} MHz, "
        f"{counted(len(series.value), 'sample')}",
        meaning,
        "warm up longer (--skip 50), or lock the clock: nvidia-smi --lock-gpu-clocks",
    )


def check_others(trace: Trace) -> Iterator[Check]:
    """Grade what the GPU was doing before the workload took memory of it."""
    if trace.is_host_only:
        return
    meaning = "another process may use the GPU's time and bandwidth, and is not recorded"
    fix = "record with `kprof run` on a GPU that is free: see nvidia-smi"
    befores = [_before_the_workload(trace, device) for device in devices_in(trace.samples, "nvml")]
    known = [before for before in befores if before is not None]
    if not known:
        why = (
            "the workload held its memory when sampling began"
            if befores
            else "the GPU was not sampled"
        )
        yield Check("Other processes", "unknown", why, meaning, fix)
        return
    num_bytes, busy = max(b for b, _ in known), max(u for _, u in known)
    told = (
        f"before the workload took memory, {num_bytes / 2**30:.1f} GiB were in use and the GPU was "
        f"up to {busy:.0f} % busy; processes that began later are not seen"
    )
    is_busy, is_full = busy > SOME_UTILIZATION, num_bytes > DRIVERS_BYTES
    verdict: Verdict = "bad" if is_busy else "limited" if is_full else "good"
    yield from checked("Other processes", verdict, told, meaning, fix)


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
        "the host's work during an activity is uncertain, and so are causes of idle time and "
        "predictions; durations are correct"
    )
    late_ns = _lateness_of_launches(trace)
    if not len(late_ns):
        why = "no launch is known, so its time cannot be compared with its activity's"
        yield Check(name, "unknown", why, meaning, "record the host, too: activities=[CPU, CUDA]")
        return
    num_early = int((late_ns > ROUNDED_NS).sum())
    # Corrected activities are no longer early.
    num_moved = trace.meta.counts.get("early_activities", 0)
    num_disbelieved = trace.meta.counts.get("disbelieved_launches", 0)
    is_limited = num_moved or num_disbelieved
    verdict: Verdict = "bad" if num_early else "limited" if is_limited else "good"
    told = (
        f"{num_early or num_moved:,} of {counted(len(late_ns), 'activity', 'activities')} "
        "whose launch was recorded began before it"
    )
    if num_early:
        told += f", by up to {late_ns.max() / 1e3:,.0f} µs"
    elif num_moved:
        told += ", which was corrected to within some µs: see the caveats"
    if num_disbelieved:
        told += (
            f"; {num_disbelieved:,} more had the wrong launch, by their numbers: see the caveats"
        )
    fix = "record once more, with `kprof run`, which keeps processes apart"
    yield from checked(name, verdict, told, meaning, fix)


def _lateness_of_launches(trace: Trace) -> np.ndarray:
    """Return how much later than an activity its launch began, in ns, of all that have one.

    If two launches have one number, the owner of their activity is unknown.
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
    meaning = "waits between ranks are uncertain; results within a rank are correct"
    fix = "record all ranks at once with `kprof run`, with named process groups (NCCL)"
    clocks = clocks or "how far the clocks of ranks agree is not recorded"
    verdict: Verdict = trace.meta.clocks_grade or "unknown"
    yield from checked("Clocks of ranks", verdict, clocks.rstrip("."), meaning, fix)


def _again(why: str) -> str:
    if why in (NO_SAMPLES, ""):
        return SAMPLE if why else "record more steps: --steps 10"
    return "let the run see its own GPUs alone: CUDA_VISIBLE_DEVICES=0"


# For each measure: good up to the first, limited up to the second, bad beyond.
LOST = (0.0, 0.01)
ORPHANED = (0.001, 0.05)
UNNAMED = (0.01, 0.2)
UNMODELLED = (0.05, 0.5)
BEATEN = (0.01, 0.1)
SLOWED = (NOTICEABLE_SLOWDOWN, 0.2)
OUTSIDE = (0.05, 0.3)
APART = (0.1, 0.5)
PASSES_APART = (0.01, 0.05)
LONGER_FIRST = 0.05
ENOUGH_STEPS = 3
# A smaller share reads 0.0 %.
LEAST_TOLD = 0.0005


def _unknown(name: str, why: Unanswered | None, meaning: str) -> Iterator[Check]:
    if why is not None:
        yield Check(name, "unknown", why.because, meaning, why.fix)


def _timeline(trace: Trace) -> Iterator[Check]:
    why = why_no_timeline(trace)
    if why is not None:
        meaning = "durations add up, but when activities ran and overlapped is not known"
        yield Check("Timeline", "limited", why.because, meaning, why.fix)


def _device(trace: Trace) -> Iterator[Check]:
    if not trace.is_host_only:
        return
    lost = sum(of_rank.num_lost for of_rank in count_launches(trace))
    if lost:
        yield Check(
            "GPU activity",
            "bad",
            f"{counted(lost, 'launch', 'launches')} of kernels and graphs, and no GPU activity",
            "the GPU's work is missing; all results are about the host's operators, by their self "
            "time",
            "record the GPU, too: activities=[CPU, CUDA], and one profiler at a time",
        )
    else:
        yield Check(
            "GPU activity",
            "limited",
            "no GPU activity was recorded",
            "all results are about the host's operators, by their self time",
            "record where the workload uses a GPU, with its activities (CPU and CUDA)",
        )


def _losses(trace: Trace) -> Iterator[Check]:
    """Grade launches without activity, by where they are missing."""
    if trace.is_host_only:
        return
    launches = count_launches(trace)
    number = sum(of_rank.number for of_rank in launches)
    dropped = trace.meta.counts.get("dropped_records", 0)
    for name, place, count, fix in PLACES:
        lost = sum(map(count, launches))
        told = f"{lost:,} of {counted(number, 'launch', 'launches')} left no activity {place}"
        if name == "Dropped records" and dropped:
            told = f"the profiler reports {counted(dropped, 'dropped record')}; {told}"
            lost = max(lost, dropped)
        if not launches and not lost:
            yield Check(
                name,
                "unknown",
                "no launch was recorded, so missing activities are not known",
                "device time may be missing",
                "record the host, too: activities=[CPU, CUDA]",
            )
            continue
        share = lost / max(number, lost, 1)
        meaning = "device time is missing, and idle time may have been busy"
        yield from checked(name, graded(share, LOST), told, meaning, fix)


def _damage(trace: Trace) -> Iterator[Check]:
    """Grade damaged records, where there are any: those of the device, then those of the host."""
    counts = trace.meta.counts
    lost = {
        ("activity", "activities", " without a valid time"): "damaged_activities",
        ("activity", "activities", " far from its launch"): "misplaced_activities",
        ("activity", "activities", " beyond the next on its stream"): "overrun_activities",
        ("event", "events", " that cannot be read"): "damaged_events",
        ("begin or end", "begins or ends", " without the other"): "unmatched_edges",
    }
    repaired = counts.get("repaired_events", 0)
    told = [
        counted(counts[key], noun, plural) + what
        for (noun, plural, what), key in lost.items()
        if counts.get(key, 0)
    ]
    if told:
        lost_ns = counts.get("lost_ns", 0)
        if lost_ns:
            told.append(f"{lost_ns / 1e6:,.3f} ms as recorded")
        yield Check(
            "Damaged records",
            "bad",
            f"left out: {', '.join(told)}",
            "device time may be missing, and idle time may have been busy",
            "record once more, with fewer steps, and copy the file in full",
        )
    elif repaired or counts.get("damaged_keys", 0):
        yield Check(
            "Damaged records",
            "limited",
            f"{counted(repaired, 'event')} in invalid JSON, read in part",
            "their names or values may be wrong or missing; their times are correct",
            "record with a newer torch, which writes valid JSON",
        )


PLACES: tuple[tuple[str, str, Callable[[Launches], int], str], ...] = (
    (
        "First kernels",
        "at the beginning",
        lambda launches: launches.lost_at_start,
        "skip more steps, so that the profiler is ready when the window opens: --skip 10",
    ),
    (
        "Dropped records",
        "in between",
        lambda launches: launches.lost_in_between,
        "record fewer steps: --steps 1",
    ),
    (
        "End of the window",
        "at the end",
        lambda launches: launches.lost_at_end,
        "synchronize before the profiler stops, as `kprof run` does",
    ),
)


def _orphans(trace: Trace) -> Iterator[Check]:
    if trace.is_host_only:
        return
    is_orphan = trace.kernels["bucket"] == "orphan"
    share = share_of_time(trace.kernels, is_orphan)
    yield from checked(
        "Orphans",
        graded(share, ORPHANED),
        f"{percent(share)} of the time, {int(is_orphan.sum()):,} of "
        f"{counted(len(is_orphan), 'activity', 'activities')}, "
        "has no launch record",
        "its operator, module and step are not known, nor the host's work before it",
        "drain the GPU before the window opens, as `kprof run` does, and record the host, too",
    )


# Ranges that name what launched an activity.
NAMING = ("op", "range", "module", "phase")
ATTRIBUTE = "record with torch's profiler (`kprof run`), or name parts of the program with NVTX"


def _attribution(trace: Trace) -> Iterator[Check]:
    bucket = trace.kernels["bucket"]
    in_graph = share_of_time(trace.kernels, bucket == "graph")
    share = in_graph + share_of_time(trace.kernels, bucket == "unlinked")
    has_names = trace.ranges["kind"].isin(NAMING).any() or (bucket == "attributed").any()
    if share and not has_names:
        # Of a program without PyTorch there is nothing more to know.
        why = "neither an operator nor a range was recorded"
        yield Check("Attribution", "unknown", why, "kernels have no name but their own", ATTRIBUTE)
        return
    yield from checked(
        "Attribution",
        graded(share, UNNAMED),
        f"{percent(share)} of the time has a launch and no operator, {percent(in_graph)} in graphs",
        "shares by operator, module and phase exclude it",
        "record once without CUDA graphs, and the operators of the host: activities=[CPU, CUDA]",
    )


def _work(trace: Trace) -> Iterator[Check]:
    work = measure_known_work(trace)
    verdict = graded(work.unknown, UNMODELLED)
    if verdict == "good" and not work.is_enough:
        verdict = "limited"
    no_shapes = why_no_work(trace)
    is_partly = work.at_least >= LEAST_TOLD
    at_least = f", of {percent(work.at_least)} only a lower bound of it" if is_partly else ""
    yield from checked(
        "Known work",
        verdict,
        f"the work of {percent(work.unknown)} of the time is not known{at_least}"
        + ("; no operator's shapes were recorded" if no_shapes else ""),
        _meaning_for_utilisation(trace),
        no_shapes.fix if no_shapes else "",
    )


def _ceilings(trace: Trace) -> Iterator[Check]:
    """Grade the time that beats the ceiling of the device, where there is some."""
    is_beaten = beats_ceiling(trace.kernels)
    share = share_of_time(trace.kernels, is_beaten)
    if share <= BEATEN[0]:
        return
    beaten = trace.kernels[is_beaten]
    most = int(beaten["limit_ns"].sum()) / max(int(beaten["duration_ns"].sum()), 1)
    device = trace.meta.device
    again = " again" if device is not None and device.is_measured else ""
    yield from checked(
        "Ceilings",
        graded(share, BEATEN),
        f"{percent(share)} of the time beats the device's ceiling: {percent(most)} of it",
        "its work, type, ceiling or time is wrong, or a cache served it: its roofline share is too "
        "high, and findings about it are less certain",
        f"measure the ceilings of this GPU{again}: `kprof roofline`",
    )


def _meaning_for_utilisation(trace: Trace) -> str:
    """Say which headline shares are unknown, which are lower bounds, and what else is missing."""
    headline = measure_utilisation(trace)
    named = {"MFU": headline.mfu, "MBU": headline.mbu, "roofline share": headline.roofline}
    unknown = [name for name, share in named.items() if share.value is None]
    bounded = [name for name, share in named.items() if share.is_lower_bound]
    parts = []
    if unknown:
        parts.append(f"{_listed(unknown)} {'is' if len(unknown) == 1 else 'are'} not known")
    if bounded:
        are = "is a lower bound" if len(bounded) == 1 else "are lower bounds"
        parts.append(f"{_listed(bounded)} {are}")
    parts.append("activities of unknown work have no bound and no saving")
    return "; ".join(parts)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _overhead(trace: Trace) -> Iterator[Check]:
    cost, unknown = measure_cost(trace), why_no_cost(trace)
    if cost is None or unknown is not None:
        yield from _unknown(
            "Recording overhead",
            unknown,
            "idle time and the host's times may include the profiler's own",
        )
        return
    meaning = "idle time and the host's times are too long by that much; device times are correct"
    if trace.is_host_only:
        meaning = "all times are too long by that much"
    yield from checked(
        "Recording overhead",
        graded(cost.slowdown, SLOWED),
        f"a recorded step is {cost.difference}, over {cost.num_recorded} recorded "
        f"and {cost.num_unrecorded} unrecorded ones",
        meaning,
        "record less: --no-shapes, without --stacks and --memory",
    )


def _passes(trace: Trace) -> Iterator[Check]:
    """Grade how well the light pass, which all times are of, agrees with the full one."""
    light = trace.meta.light
    if light is None or not light.full_device_ns:
        return
    difference = light.device_ns / light.full_device_ns - 1
    how = "longer" if difference >= 0 else "shorter"
    yield from checked(
        "Light pass",
        graded(abs(difference), PASSES_APART),
        "all times are of steps that were recorded without operators; their activities took "
        f"{percent(abs(difference))} {how} in sum than in the full pass",
        "names and work are of the full pass, in which the same activities took another time",
        "warm up longer (--skip 50), or lock the clock: nvidia-smi --lock-gpu-clocks",
    )


def _steps(trace: Trace) -> Iterator[Check]:
    steps = find_steps(trace)
    if not steps:
        meaning = "shares are of a window that may not match the work of interest"
        yield from _unknown("Steps", why_no_steps(trace), meaning)
        return
    number = len(steps) // len({step.rank for step in steps})
    enough: Verdict = "good" if number >= ENOUGH_STEPS else "limited"
    meaning = "so few steps may not represent the run"
    yield from checked("Steps", enough, f"{number} recorded", meaning, "record more: --steps 5")
    yield from _marks(trace)
    # The step of an orphan is not known, which another check is about.
    is_outside = trace.kernels["step"].isna() & (trace.kernels["bucket"] != "orphan")
    outside = share_of_time(trace.kernels, is_outside)
    yield from checked(
        "Edges of the window",
        graded(outside, OUTSIDE),
        f"{percent(outside)} of the time is outside of the steps",
        "the window cuts through work of steps that are not recorded, or holds other work",
        "record whole steps with `kprof run`",
    )
    yield from _alike(trace)


def _marks(trace: Trace) -> Iterator[Check]:
    """Yield checks of step marks that are left out because they overlap with the steps."""
    marks = sort_out(trace.ranges)
    if len(marks.of_torch):
        told = f"kprof marked the steps as well: {len(marks.of_torch):,} of torch's are left out"
        yield Check("Marks of steps", "good", told)
    if len(marks.doubtful):
        yield Check(
            "Marks of steps",
            "limited",
            f"left out because they overlap with the steps: {len(marks.doubtful):,}",
            "they may be the true steps",
            "mark every step once, on one thread, and nothing else",
        )


def _alike(trace: Trace) -> Iterator[Check]:
    """Grade how much steps differ, and whether the first does from the others."""
    times = time_steps(trace).recorded_ns
    later, which = times, f"{len(times)} steps"
    if len(times) >= ENOUGH_STEPS:
        later, which = times[1:], f"the {len(times) - 1} steps after the first"
    if len(later) < 2:
        return
    spread = (max(later) - min(later)) / max(median(later), 1)
    yield from checked(
        "Steps alike",
        graded(spread, APART),
        f"{which} differ by {percent(spread)} of their median",
        "the mean step represents none of them: look at the timeline of one",
        "skip more of the warm-up (--skip 20), and record more steps",
    )
    if len(times) >= ENOUGH_STEPS and not trace.is_host_only:
        longer = times[0] / max(median(later), 1) - 1
        how = "longer" if longer >= 0 else "shorter"
        yield from checked(
            "First step",
            "limited" if longer > LONGER_FIRST else "good",
            f"the first recorded step is {percent(abs(longer))} {how} than the others",
            "the GPU is drained before it, so the host has no lead in it",
            "record more steps, so that it weighs less: --steps 10",
        )


CHECKS: tuple[Callable[[Trace], Iterator[Check]], ...] = (
    _device,
    _damage,
    _losses,
    _orphans,
    _attribution,
    _work,
    _ceilings,
    _overhead,
    _passes,
    _steps,
    check_throttling,
    check_clock,
    check_others,
    check_host_clock,
    check_rank_clocks,
)
CHECKS_WITHOUT_TIMELINE = (_timeline, _work)
