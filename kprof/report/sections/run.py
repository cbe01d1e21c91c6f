"""The run: command, GPU, window, steps, recording overhead and attribution."""

from __future__ import annotations

from collections import Counter

from kprof.analyze.attribution.ledger import count_launches, num_launches
from kprof.analyze.attribution.steps import Step, denominator, find_steps, rule_of
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.capture_quality.unanswered import why_no_cost, why_no_steps, why_no_timeline
from kprof.analyze.groupings import measure_capacity, measure_elapsed
from kprof.analyze.roofline.utilisation import measure_known_work, share_of_time
from kprof.report.section import Facts, Part, Section, Text
from kprof.report.units import (
    UNKNOWN,
    format_count,
    format_memory,
    format_share,
    format_time,
    of_all,
    whose_time,
)
from kprof.trace import Trace

TITLE = "Run"
ORDER = 10

VARIES = "; the difference is no larger than the variation of the steps"
ENDED = "The workload ended with exit code {}; this report covers the recording before that."
HOST_ONLY = "No GPU activity was recorded; this report covers the host's operators."


def render(trace: Trace) -> Section:
    """Render the command, the machine, the steps, the cost of recording and what it lost."""
    lead = Text(HOST_ONLY, "warning") if trace.is_host_only else Text(_lead(trace))
    parts: list[Part] = [lead]
    recording = trace.meta.recording
    if recording and recording.exit_code:
        parts.append(Text(ENDED.format(recording.exit_code), "warning"))
    if trace.kernels.empty:
        parts.append(Text("The trace holds no activity: nothing to report.", "warning"))
    facts = [_what(trace), _where(trace), _how_long(trace), _steps(trace)]
    if trace.meta.clocks:
        number = format_count(trace.meta.num_all_ranks, "rank")
        facts.append(("Clocks", number, trace.meta.clocks))
    parts.append(Facts((*facts, *blind_spots(trace))))
    if trace.meta.versions:
        parts.append(_versions(trace))
    return Section(TITLE, ORDER, tuple(parts))


def _lead(trace: Trace) -> str:
    what = format_count(int(num_launches(trace.kernels).sum()), "activity", "activities")
    if not trace.has_timeline:
        device_time = format_time(int(trace.kernels["duration_ns"].sum()))
        return f"{what} on {_gpu_names(trace)}, {device_time} of device time in all."
    whole = format_time(denominator(trace).step_ns)
    steps = find_steps(trace)
    if not steps:
        return f"{what} on {_gpu_names(trace)} in {whole}; no step was marked."
    number = format_count(len(steps), "recorded step")
    if on_ranks := _on_ranks(trace, steps):
        told = f"{number}, {on_ranks}, on {_gpu_names(trace)}: {what}."
        return f"{told} A step of the job takes {whole}."
    took = f"{whole} each in the mean" if len(steps) > 1 else whole
    return f"{number} of {took} on {_gpu_names(trace)}: {what}."


def _on_ranks(trace: Trace, steps: list[Step]) -> str:
    """Return that the steps are those of all ranks, where there are several."""
    if trace.meta.num_ranks < 2:
        return ""
    by_rank = Counter(step.rank for step in steps)
    counts = set(by_rank.values())
    if len(counts) > 1 or len(by_rank) < trace.meta.num_ranks:
        return "of all ranks together"
    return f"{counts.pop():,} on each of {trace.meta.num_ranks:,} ranks"


def _gpu_names(trace: Trace) -> str:
    names = [gpu.name for gpu in trace.gpus]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    listed = [name if number == 1 else f"{number} times {name}" for name, number in counts.items()]
    return ", ".join(listed) or "a device that the trace does not name"


def _what(trace: Trace) -> tuple[str, str, str]:
    meta = trace.meta
    read_from = f"{meta.source}, written by {meta.tool}"
    if not meta.command and meta.recording is not None:
        return (
            "Command",
            UNKNOWN,
            f"{read_from}: a notebook or a prompt, which no command repeats",
        )
    if not meta.command:
        return ("Command", UNKNOWN, f"{read_from}, which does not record it; `kprof run` does")
    return ("Command", meta.command_line, read_from)


def _where(trace: Trace) -> tuple[str, str, str]:
    host = f"host {trace.meta.host}" if trace.meta.host else ""
    ranks = format_count(trace.meta.num_ranks, "rank") if trace.meta.num_ranks > 1 else ""
    first = trace.gpus[0] if trace.gpus and not trace.is_host_only else None
    memory = format_memory(first.memory_bytes) if first and first.memory_bytes else ""
    sms = format_count(first.num_sms, "SM") if first and first.num_sms else ""
    details = ", ".join(detail for detail in (sms, memory, ranks, host) if detail)
    if trace.is_host_only:
        return ("Device", "host CPU", details)
    if not trace.gpus:
        why = f"the trace does not name it; {details}" if details else "the trace does not name it"
        return ("GPU", UNKNOWN, why)
    return ("GPU", _gpu_names(trace), details)


def _how_long(trace: Trace) -> tuple[str, str, str]:
    if why := why_no_timeline(trace):
        return ("Window", UNKNOWN, why.reason)
    recording = trace.meta.recording
    wall = recording.wall_ns if recording else None
    whole = f"; the whole run took {format_time(wall)}" if wall else ""
    together = ""
    if trace.meta.num_ranks > 1:
        together = ", on the rank that took longest"
    if whose := of_all(trace):
        together += f"; {format_time(measure_capacity(trace.kernels))}{whose}"
    return (
        "Window",
        format_time(measure_elapsed(trace.kernels)),
        f"from the first activity's start to the last one's end{together}{whole}",
    )


def _steps(trace: Trace) -> tuple[str, str, str]:
    recording = trace.meta.recording
    steps = find_steps(trace)
    number = len(recording.steps_recorded) if recording else len(steps)
    if not number and (recording is None or not recording.num_steps_seen):
        why = why_no_steps(trace)
        return ("Steps", UNKNOWN, why.reason if why else "none was recorded")
    if recording is None:
        on_ranks, rule = _on_ranks(trace, steps), rule_of(trace.ranges)
        return ("Steps", f"{number:,}", f"{on_ranks}; {rule}" if on_ranks else rule)
    more = "" if recording.is_count_final else " or more"
    seen = f"recorded of {recording.num_steps_seen:,}{more} seen"
    return ("Steps", f"{number:,}", f"{seen}. {recording.step_rule}".strip())


def blind_spots(trace: Trace) -> list[tuple[str, str, str]]:
    """Return recording overhead, lost records, and the shares attributed and of known work."""
    told = [_overhead(trace), _dropped(trace), _attributed(trace), _known_work(trace)]
    return [fact for fact in told if fact is not None]


def _overhead(trace: Trace) -> tuple[str, str, str]:
    label = "Recording overhead"
    cost, why = measure_cost(trace), why_no_cost(trace)
    if cost is None:
        return (label, UNKNOWN, why.reason if why else "")
    medians = (
        f"median step {format_time(cost.recorded_ns)} recorded ({cost.num_recorded}) against "
        f"{format_time(cost.unrecorded_ns)} unrecorded ({cost.num_unrecorded}), by the "
        f"{cost.clock}'s clock"
    )
    if why is not None:
        return (label, UNKNOWN, f"{medians}; {why.reason}")
    if cost.is_within_spread:
        return (label, f"at most {100 * cost.most_slowdown:.1f} %", f"{medians}{VARIES}")
    return (label, f"{100 * cost.slowdown:+.1f} %", medians)


def _dropped(trace: Trace) -> tuple[str, str, str] | None:
    """Return the launches whose activity is missing; nothing where only the host was recorded."""
    if trace.is_host_only:
        return None
    launches = count_launches(trace)
    number = sum(of_rank.number for of_rank in launches)
    lost = sum(of_rank.num_lost for of_rank in launches)
    dropped = trace.meta.counts.get("dropped_records")
    if not launches and dropped is None:
        return ("Dropped records", UNKNOWN, "no launch was recorded that could be missed")
    made = format_count(number, "launch", "launches")
    told = [f"{lost:,} of {made} left no activity"] if launches else []
    told += [f"the profiler counted {dropped:,}"] if dropped is not None else []
    return ("Dropped records", f"{max(lost, dropped or 0):,}", "; ".join(told))


def _attributed(trace: Trace) -> tuple[str, str, str]:
    kernels = trace.kernels
    if kernels.empty:
        return ("Attributed", UNKNOWN, "there is no activity")
    attributed = share_of_time(kernels, kernels["bucket"] == "attributed")
    time = whose_time(is_host_only=trace.is_host_only)
    return (
        "Attributed",
        format_share(attributed),
        f"of {time} is traced to its operator or range",
    )


def _known_work(trace: Trace) -> tuple[str, str, str] | None:
    """Return the share of known work, as the utilisation and the data quality count it."""
    if trace.kernels.empty:
        return None
    work = measure_known_work(trace)
    time = whose_time(is_host_only=trace.is_host_only)
    told = f"of {time}"
    if work.known:
        told += f": its bytes; for {format_share(work.flops)} its FLOPs"
    if work.at_least:
        told += f"; for {format_share(work.at_least)} more, only a lower bound"
    return ("Known work", format_share(work.known), told)


def _versions(trace: Trace) -> Text:
    listed = ", ".join(f"{name} {text}" for name, text in sorted(trace.meta.versions.items()))
    return Text(f"Versions: {listed}.", "muted")
