"""The headline: how much of what the GPU could do was used."""

from __future__ import annotations

from kprof.analyze.attribution.steps import count_gpu_steps
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.roofline.utilisation import Share, measure_utilisation
from kprof.report.section import Facts, Part, Section, Text
from kprof.report.units import UNKNOWN, format_share, format_time
from kprof.trace import Trace

TITLE = "Utilisation"
ORDER = 20


def render(trace: Trace) -> Section:
    """Render MFU, MBU, roofline share and busy share, all over the same time."""
    headline = measure_utilisation(trace)
    named = (
        ("Roofline share", headline.roofline),
        ("MFU", headline.mfu),
        ("MBU", headline.mbu),
        ("Busy", headline.busy),
    )
    parts: list[Part] = [Text(_lead(trace, headline.roofline, headline.busy))]
    if trace.has_timeline:
        parts.append(Facts(_told_once(tuple((name, *_shown(share)) for name, share in named))))
    unrecorded = _without_recording(trace, named)
    if unrecorded:
        parts.append(Text(unrecorded))
    if trace.meta.device is not None:
        device = trace.meta.device
        # A measured source says so itself.
        source = device.source if device.is_measured else f"{device.origin} ({device.source})"
        parts.append(Text(f"Ceilings of the roofline: {device.name}, {source}.", "muted"))
    return Section(TITLE, ORDER, tuple(parts))


def _told_once(facts: tuple[tuple[str, str, str], ...]) -> tuple[tuple[str, str, str], ...]:
    """Return facts of one value and one explanation as one, in the order of the first."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, value, basis in facts:
        names.setdefault((value, basis), []).append(name)
    return tuple((", ".join(of), *fact) for fact, of in names.items())


def _without_recording(trace: Trace, named: tuple[tuple[str, Share], ...]) -> str:
    """Return the headline for an unrecorded step, where it differs noticeably."""
    cost = measure_cost(trace)
    # Host operators are themselves slower while they are recorded: nothing tells by how much.
    if trace.is_host_only or cost is None or not cost.is_noticeable:
        return ""
    shares = ", ".join(
        f"{name} {'≥ ' if share.is_lower_bound else ''}"
        f"{format_share(cost.without_recording(share.value))}"
        for name, share in named
        if share.value is not None
    )
    return (
        f"Recording slowed a step from {format_time(cost.unrecorded_ns)} to "
        f"{format_time(cost.recorded_ns)}. In an unrecorded step: {shares}."
    )


def _lead(trace: Trace, roofline: Share, busy: Share) -> str:
    device = "host" if trace.is_host_only else "GPU"
    if why := why_no_timeline(trace):
        return f"How much of the device was used is not known: {why.because}."
    if busy.value is None:
        return "No activity was recorded: nothing to measure."
    if roofline.value is None:
        return (
            f"The {device} was busy for {_in_words(busy.value)} of {_whole(trace)}; its "
            "roofline share is not known."
        )
    at_least = "at least " if roofline.is_lower_bound else ""
    return (
        f"At the full speed of the {device}'s memory and arithmetic, the work would take "
        f"{at_least}{_in_words(roofline.value)} of the time of {_whole(trace)}; the {device} "
        f"was busy for {_in_words(busy.value)} of it."
    )


def _in_words(share: float) -> str:
    return format_share(share).replace("< ", "less than ")


def _whole(trace: Trace) -> str:
    return "all steps" if count_gpu_steps(trace) else "the window"


def _shown(share: Share) -> tuple[str, str]:
    if share.value is None:
        return (UNKNOWN, share.basis)
    shown = format_share(share.value)
    return (f"≥ {shown}" if share.is_lower_bound else shown, share.basis)
