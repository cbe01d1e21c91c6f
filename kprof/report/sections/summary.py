"""The summary: what ran, where its time goes, what limits it, the best changes, data quality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kprof.analyze.findings.unexplained import is_of_nvidia
from kprof.findings import Diagnosis
from kprof.report.figures import IDLE_COLOUR, UNKNOWN_COLOUR, colours_of
from kprof.report.section import Bar, Part, Section, Segment, Text
from kprof.report.sections.findings import saved_of, saving_interval, start_up_in_words
from kprof.report.sections.idle import MEANINGS
from kprof.report.sections.run import HOST_ONLY
from kprof.report.sections.time import label_of
from kprof.report.summary import LimitPart, Summary, TimePart, summarize
from kprof.report.units import (
    format_count,
    format_share,
    format_tenths,
    format_time,
    tenths_of_a_percent,
)
from kprof.trace import Trace

TITLE = "Summary"
ORDER = 5

# Segments of the bar; the smaller parts are one for activities and one for idle time.
MOST_SEGMENTS = 6
NUM_LIMITS = 3
LONGEST_COMMAND = 60
# A second limit of less than this share of the time is none to name.
LEAST_LIMIT = 0.01
# Less start-up than this share stands with the findings alone.
LEAST_START_UP = 0.05
NO_CAUSE = "idle time whose cause is not known"
HOST_IDLE = "time between operators (Python code or waiting)"
TO_KNOW = "Counters tell: `kprof run --ncu SCRIPT`."
TO_KNOW_OF_OTHERS = "Counters tell: see the profiler of the device's vendor."
NOT_COUNTED = ("copy", "set")
BOUNDS = {
    None: "activities whose bound is not known",
    "memory": "memory bandwidth",
    "compute": "arithmetic",
    "issue": "instruction issue",
    "latency": "latency of kernels that do not fill the GPU",
}
ON_THE_HOST = {
    None: "the host's operators",
    "latency": "operators that reach neither the host's bandwidth nor its arithmetic",
}
# Fewer, and no steps, are no workload: something else may limit a longer run.
FEW_ACTIVITIES = 10
OF_THIS_WINDOW = "shares and savings are of this window, not of a longer run."
NO_CHANGE = "No rule found a change that would save time."


def render(trace: Trace) -> Section:
    """Render the answer of the report, on one screen."""
    summary, diagnosis = summarize(trace), trace.diagnosis or Diagnosis()
    parts: list[Part] = [Text(HOST_ONLY, "warning")] if summary.is_host_only else []
    parts.append(Text(_lead(summary, trace.meta.num_all_ranks)))
    parts += [Text(one.text, "warning") for one in trace.meta.caveats if one.id == "failed_calls"]
    if summary.time and not summary.num_steps and len(trace.kernels) < FEW_ACTIVITIES:
        number = format_count(len(trace.kernels), "activity", "activities")
        parts.append(Text(f"Only {number}: {OF_THIS_WINDOW}", "warning"))
    if summary.time:
        parts += [_bar(summary), Text(_limit(summary, is_of_nvidia=is_of_nvidia(trace)))]
    if once := start_up_in_words(trace, diagnosis, least_share=LEAST_START_UP):
        parts.append(Text(once))
    parts += _changes(summary, diagnosis)
    parts.append(Text(_quality(summary)))
    return Section(TITLE, ORDER, tuple(parts))


def _lead(summary: Summary, num_all_ranks: int) -> str:
    names = Counter(summary.devices)
    listed = [name if times == 1 else f"{times} times {name}" for name, times in names.items()]
    device = "the host CPU" if summary.is_host_only else ", ".join(listed) or "an unnamed device"
    told = f"{_cut(summary.workload)} on {device}"
    if not summary.time:
        return f"{told}: no time was recorded."
    takes = format_time(summary.whole_ns)
    if not summary.num_steps:
        verb = "is" if summary.whole == "the device time" else "takes"
        return f"{told}: {summary.whole} {verb} {takes}; no step was marked.{_used(summary)}"
    recorded = format_count(summary.num_steps, "recorded step")
    ranks = f" of {format_count(summary.num_ranks, 'rank')}" if num_all_ranks > 1 else ""
    if summary.num_ranks < num_all_ranks:
        ranks += f", {num_all_ranks:,} in all"
    unrecorded = ""
    if summary.unrecorded_ns is not None:
        unrecorded = f", without recording {format_time(summary.unrecorded_ns)}"
    told += f": a step takes {takes}{unrecorded} (mean of {recorded}{ranks})."
    return f"{told}{_used(summary)}"


def _cut(workload: str) -> str:
    """Return a command whose first words name the workload; the section below has all of it."""
    return workload if len(workload) <= LONGEST_COMMAND else f"{workload[: LONGEST_COMMAND - 1]}…"


def _used(summary: Summary) -> str:
    if summary.busy_share is None:
        return ""
    told = f" Busy {format_share(summary.busy_share)}"
    if summary.roofline_share is None:
        return f"{told}, roofline share not known."
    least = "≥ " if summary.roofline_is_least else ""
    return f"{told}, roofline share {least}{format_share(summary.roofline_share)}."


def _bar(summary: Summary) -> Bar:
    """Return the bar of kinds and causes of idle time; its shares add up to 100.0 %."""
    groups: dict[str, list[tuple[TimePart, int]]] = {}
    smaller = [one.is_idle for one in summary.time[MOST_SEGMENTS:]]
    tenths = tenths_of_a_percent([one.time_ns for one in summary.time])
    for number, one in enumerate(zip(summary.time, tenths, strict=True)):
        label = label_of(one[0].name, is_idle=one[0].is_idle, in_host=summary.is_host_only)
        num_smaller = smaller.count(one[0].is_idle)
        # A part that would be alone among the smaller ones keeps its name.
        if number >= MOST_SEGMENTS and num_smaller > 1:
            # "other" is the name of a kind.
            counted = f"{num_smaller} smaller"
            label = f"idle ({counted} causes)" if one[0].is_idle else f"{counted} kinds"
        groups.setdefault(label, []).append(one)
    ordered = sorted(groups.items(), key=lambda group: group[1][0][0].is_idle)
    colours = colours_of(one.name for one in summary.time if one.name and not one.is_idle)
    segments = tuple(_segment(label, parts, summary, colours) for label, parts in ordered)
    return Bar(segments, f"Where {summary.whole} goes: every instant once.")


def _segment(
    label: str, parts: list[tuple[TimePart, int]], summary: Summary, colours: Mapping[str, str]
) -> Segment:
    share, first = sum(one.share for one, _ in parts), parts[0][0]
    colour = UNKNOWN_COLOUR if len(parts) > 1 else colours.get(first.name or "", UNKNOWN_COLOUR)
    return Segment(
        label,
        share,
        format_tenths(sum(tenths for _, tenths in parts)),
        format_time(share * summary.whole_ns),
        IDLE_COLOUR if first.is_idle else colour,
        first.is_idle,
    )


def _limit(summary: Summary, *, is_of_nvidia: bool) -> str:
    first, *others = summary.limits
    words = {**BOUNDS, **ON_THE_HOST} if summary.is_host_only else BOUNDS
    no_cause = HOST_IDLE if summary.is_host_only else NO_CAUSE
    named = _in_words(first, words, no_cause)
    told = f"Limited by {named}: {format_share(first.share)} of {summary.whole}."
    # No counter is measured for a copy.
    is_counted = first.mostly not in NOT_COUNTED and not summary.is_host_only
    if first.kind == "bound" and first.name is None and is_counted:
        told += f" {TO_KNOW if is_of_nvidia else TO_KNOW_OF_OTHERS}"
    others = [one for one in others if one.share >= LEAST_LIMIT]
    if second := [
        f"{_in_words(one, words, no_cause)} ({format_share(one.share)})"
        for one in others[: NUM_LIMITS - 1]
    ]:
        told += f" Then {'; '.join(second)}."
    return told


def _in_words(limit: LimitPart, bounds: Mapping[str | None, str], no_cause: str) -> str:
    mostly = f", mostly {limit.mostly}" if limit.mostly else ""
    if limit.kind == "communication":
        return "communication"
    if limit.kind == "host copies":
        return "copies between the host and the GPU"
    if limit.kind == "imbalance":
        return "load imbalance (a slower GPU)"
    if limit.kind == "start-up":
        return "start-up (idle time that happened once)"
    if limit.kind == "bound":
        return f"{bounds.get(limit.name, limit.name)}{mostly}"
    if limit.name is None:
        return no_cause
    meaning = MEANINGS.get(limit.name)
    return f"idle time, {limit.name}" + (f" ({meaning})" if meaning else "")


def _changes(summary: Summary, diagnosis: Diagnosis) -> list[Part]:
    parts: list[Part] = []
    if (cost := summary.large_cost) is not None:
        is_priced = cost.saving is not None and cost.saving.high_ns is not None
        unknown = "change" if is_priced else "saving"
        # The claim about a host names its largest operators, whatever they cost.
        before = "" if summary.is_host_only else f"Large cost, {unknown} not known: "
        parts.append(Text(f"{before}{cost.claim}. Next: `{cost.command}`", "item"))
    if not summary.changes:
        parts.append(Text(NO_CHANGE))
    for number, one in enumerate(summary.changes, 1):
        change = f"{one.change[:1].upper()}{one.change[1:]}"
        time, share = saving_interval(one.saving)
        saves = f"saves {time} ({share}) of {saved_of(one.saving, diagnosis)}"
        told = f"{number}. {change}: {saves}, certainty {one.confidence}. Next: `{one.command}`"
        parts.append(Text(told, "item"))
    return parts


def _quality(summary: Summary) -> str:
    if not summary.quality:
        return "Data quality: nothing was recorded that could be checked."
    counts = ", ".join(
        f"{number} {verdict}" for verdict, number in reversed(summary.quality.items())
    )
    told = f"Data quality: {counts} of {format_count(sum(summary.quality.values()), 'check')}"
    return f"{told} ({', '.join(summary.doubts)})." if summary.doubts else f"{told}."
