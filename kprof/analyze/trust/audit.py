"""The audit of a capture: what could make it lie, with the numbers that say whether it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from kprof.analyze.launches import Launches, count_launches
from kprof.analyze.marks import sort_out
from kprof.analyze.overhead import NOTICEABLE_SLOWDOWN, measure_cost
from kprof.analyze.steps import find_steps, time_steps
from kprof.analyze.trust.check import Check, Verdict, checked, graded, percent
from kprof.analyze.trust.surroundings import (
    check_clock,
    check_host_clock,
    check_others,
    check_rank_clocks,
    check_throttling,
)
from kprof.analyze.trust.unanswered import (
    Unanswered,
    why_no_cost,
    why_no_steps,
    why_no_timeline,
)
from kprof.analyze.utilisation import has_work, share_of_time
from kprof.trace import Trace

# Of each measure: up to the first it is good, up to the second limited, beyond it bad.
LOST = (0.0, 0.01)
ORPHANED = (0.001, 0.05)
UNNAMED = (0.01, 0.2)
UNMODELLED = (0.05, 0.5)
SLOWED = (NOTICEABLE_SLOWDOWN, 0.2)
OUTSIDE = (0.05, 0.3)
APART = (0.1, 0.5)
LONGER_FIRST = 0.05
ENOUGH_STEPS = 3


def audit(trace: Trace) -> list[Check]:
    """Grade an analyzed trace on all that could make it lie; what cannot apply is left out."""
    if trace.kernels.empty:
        return []
    checks = CHECKS if trace.has_timeline else CHECKS_WITHOUT_TIMELINE
    return [check for find in checks for check in find(trace)]


def _unknown(name: str, why: Unanswered | None, meaning: str) -> Iterator[Check]:
    if why is not None:
        yield Check(name, "unknown", why.because, meaning, why.way_out)


def _timeline(trace: Trace) -> Iterator[Check]:
    why = why_no_timeline(trace)
    if why is not None:
        meaning = "durations add up, but nothing tells when and beside what anything ran"
        yield Check("Timeline", "limited", why.because, meaning, why.way_out)


def _device(trace: Trace) -> Iterator[Check]:
    if trace.is_host_only:
        yield Check(
            "GPU activity",
            "limited",
            "no GPU activity was recorded",
            "every figure is about the host's operators, by their own time",
            "record where the workload uses a GPU, with its activities (CPU and CUDA)",
        )


def _losses(trace: Trace) -> Iterator[Check]:
    """Grade launches without activity, by where they are missing."""
    if trace.is_host_only:
        return
    launches = count_launches(trace)
    number = sum(of_rank.number for of_rank in launches)
    dropped = trace.meta.counts.get("dropped_records", 0)
    for name, place, count, remedy in PLACES:
        lost = sum(map(count, launches))
        told = f"{lost:,} of {number:,} launches left no activity {place}"
        if name == "Dropped records" and dropped:
            told = f"the profiler says that it dropped {dropped:,} records; {told}"
            lost = max(lost, dropped)
        if not launches and not lost:
            yield Check(
                name,
                "unknown",
                "no launch was recorded, so nothing tells which activities are missing",
                "device time may be missing",
                "record the host, too: activities=[CPU, CUDA]",
            )
            continue
        share = lost / max(number, lost, 1)
        meaning = "device time is missing, and what is idle may have been busy"
        yield from checked(name, graded(share, LOST), told, meaning, remedy)


def _damage(trace: Trace) -> Iterator[Check]:
    """Grade damaged records, where there are any: those of the device, then those of the host."""
    counts = trace.meta.counts
    lost = {
        "activities without a valid time": counts.get("damaged_activities", 0),
        "activities far from their launch": counts.get("misplaced_activities", 0),
        "activities that overrun their stream": counts.get("overrun_activities", 0),
        "events that cannot be read": counts.get("damaged_events", 0),
        "begins or ends without the other": counts.get("unmatched_edges", 0),
    }
    repaired = counts.get("repaired_events", 0)
    told = [f"{number:,} {what}" for what, number in lost.items() if number]
    if told:
        lost_ns = counts.get("lost_ns", 0)
        if lost_ns:
            told.append(f"{lost_ns / 1e6:,.3f} ms as recorded")
        yield Check(
            "Damaged records",
            "bad",
            f"left out: {', '.join(told)}",
            "device time may be missing, and what is idle may have been busy",
            "record once more, with fewer steps, and copy the file in full",
        )
    elif repaired or counts.get("damaged_keys", 0):
        yield Check(
            "Damaged records",
            "limited",
            f"{repaired:,} events are no valid JSON, and were read as far as they can be",
            "a name or a value of theirs may be wrong or missing; their times hold",
            "record with a newer torch, which writes valid JSON",
        )


PLACES: tuple[tuple[str, str, Callable[[Launches], int], str], ...] = (
    (
        "First kernels",
        "at the beginning",
        lambda launches: launches.lost_at_start,
        "skip more steps, so that the profiler is awake when the window opens: --skip 10",
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
        f"{percent(share)} of the time, {int(is_orphan.sum()):,} of {len(is_orphan):,} activities, "
        "has no launch record",
        "its operator, module and step are not known, nor what the host did before it",
        "drain the GPU before the window opens, as `kprof run` does, and record the host, too",
    )


def _attribution(trace: Trace) -> Iterator[Check]:
    bucket = trace.kernels["bucket"]
    in_graph = share_of_time(trace.kernels, bucket == "graph")
    share = in_graph + share_of_time(trace.kernels, bucket == "unlinked")
    yield from checked(
        "Attribution",
        graded(share, UNNAMED),
        f"{percent(share)} of the time has a launch and no operator, {percent(in_graph)} in graphs",
        "shares by operator, module and phase are about the rest",
        "record once without CUDA graphs, and the operators of the host: activities=[CPU, CUDA]",
    )


def _work(trace: Trace) -> Iterator[Check]:
    share = share_of_time(trace.kernels, ~has_work(trace.kernels))
    has_shapes = bool(trace.ranges["input_shapes"].notna().any())
    yield from checked(
        "Known work",
        graded(share, UNMODELLED),
        f"the work of {percent(share)} of the time is not known"
        + ("" if has_shapes else "; no operator's shapes were recorded"),
        "MFU, MBU and roofline share are lower bounds; the rest has no bound and no saving",
        "" if has_shapes else "record shapes: without --no-shapes, or record_shapes=True",
    )


def _overhead(trace: Trace) -> Iterator[Check]:
    cost, unknown = measure_cost(trace), why_no_cost(trace)
    if cost is None or unknown is not None:
        yield from _unknown(
            "Recording overhead",
            unknown,
            "idle time and the host's times may in part be the profiler's",
        )
        return
    meaning = "idle time and the host's times are too long by as much; device times are not"
    if trace.is_host_only:
        meaning = "all times are too long by as much"
    yield from checked(
        "Recording overhead",
        graded(cost.slowdown, SLOWED),
        f"a recorded step is {cost.difference}, over {cost.num_recorded} recorded "
        f"and {cost.num_unrecorded} unrecorded ones",
        meaning,
        "record less: --no-shapes, without --stacks and --memory",
    )


def _steps(trace: Trace) -> Iterator[Check]:
    steps = find_steps(trace)
    if not steps:
        meaning = "shares are of a window that may hold more, or less, than the work of interest"
        yield from _unknown("Steps", why_no_steps(trace), meaning)
        return
    number = len(steps) // len({step.rank for step in steps})
    enough: Verdict = "good" if number >= ENOUGH_STEPS else "limited"
    meaning = "so few may not stand for the run"
    yield from checked("Steps", enough, f"{number} recorded", meaning, "record more: --steps 5")
    yield from _marks(trace)
    # The step of an orphan is not known, which another check is about.
    is_outside = trace.kernels["step"].isna() & (trace.kernels["bucket"] != "orphan")
    outside = share_of_time(trace.kernels, is_outside)
    yield from checked(
        "Edges of the window",
        graded(outside, OUTSIDE),
        f"{percent(outside)} of the time lies in no step",
        "the window cuts through work of steps that are not recorded, or holds other work",
        "record whole steps with `kprof run`",
    )
    yield from _alike(trace)


def _marks(trace: Trace) -> Iterator[Check]:
    """Tell of marks that are left out, since they overlap with the steps."""
    marks = sort_out(trace.ranges)
    if len(marks.of_torch):
        told = f"left out, since kprof marked the steps, too: {len(marks.of_torch):,} of torch's"
        yield Check("Marks of steps", "good", told)
    if len(marks.doubtful):
        yield Check(
            "Marks of steps",
            "limited",
            f"left out, since they overlap with the steps: {len(marks.doubtful):,}",
            "nothing tells for certain that the steps are not those",
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
        f"{which} lie {percent(spread)} of their median apart",
        "a mean step stands for none of them: look at the timeline of one",
        "skip more of the warm-up (--skip 20), and record more steps",
    )
    if len(times) >= ENOUGH_STEPS and not trace.is_host_only:
        longer = times[0] / max(median(later), 1) - 1
        how = "longer" if longer >= 0 else "shorter"
        yield from checked(
            "First step",
            "limited" if longer > LONGER_FIRST else "good",
            f"the first recorded step is {percent(abs(longer))} {how} than the others",
            "the GPU is drained before it, so it lacks the head start that the host has otherwise",
            "record more steps, of which it is a smaller part: --steps 10",
        )


CHECKS: tuple[Callable[[Trace], Iterator[Check]], ...] = (
    _device,
    _damage,
    _losses,
    _orphans,
    _attribution,
    _work,
    _overhead,
    _steps,
    check_throttling,
    check_clock,
    check_others,
    check_host_clock,
    check_rank_clocks,
)
CHECKS_WITHOUT_TIMELINE = (_timeline, _work)
