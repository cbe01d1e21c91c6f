"""Caveats: gaps of the recording, and numbers to read with care."""

from __future__ import annotations

from collections.abc import Iterator

from kprof.analyze.attribution.ledger import count_launches
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.capture_quality.unanswered import why_no_work
from kprof.analyze.groupings import group_kernels
from kprof.analyze.roofline.bound import beaten_ceilings
from kprof.analyze.roofline.utilisation import has_work, measure_known_work, share_of_time
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import (
    format_count,
    format_share,
    format_time,
    or_missing,
    whose_time,
)
from kprof.trace import Trace

TITLE = "Caveats"
ORDER = 110

UNMODELLED_SHOWN = 8
RANKS_NAMED = 8
# Less than this share of device time is not worth a sentence.
NEGLIGIBLE = 0.001


def render(trace: Trace) -> Section:
    """Render the recording's caveats and those that the numbers themselves show."""
    sentences = [*(one.text for one in trace.meta.caveats), *_computed(trace)]
    if not sentences:
        return Section(TITLE, ORDER, (Text("No caveats are known.", "good"),))
    parts: list[Part] = [Text(f"{format_count(len(sentences), 'caveat')}.")]
    parts += [Text(sentence, "warning") for sentence in sentences]
    unmodelled = _unmodelled_table(trace)
    return Section(TITLE, ORDER, (*parts, unmodelled) if unmodelled.rows else tuple(parts))


def _computed(trace: Trace) -> Iterator[str]:
    kernels = trace.kernels
    if kernels.empty:
        return
    time = whose_time(is_host_only=trace.is_host_only)
    yield from _lost(trace)
    unattributed = share_of_time(kernels, kernels["bucket"] != "attributed")
    if unattributed > NEGLIGIBLE:
        yield (
            f"{format_share(unattributed)} of {time} is not traced to an operator or range; "
            "the ledger says why."
        )
    unknown = measure_known_work(trace).unknown
    if unknown > NEGLIGIBLE:
        yield f"The work of {format_share(unknown)} of {time} is not known: it has no roofline."
    cost = measure_cost(trace)
    if cost is not None and cost.is_noticeable:
        yield (
            f"Recording slowed a step by {format_share(cost.slowdown)}, on the host alone: the "
            "host's times are longer than without recording, the GPU's are not."
        )
    beaten = _beaten_ceilings(trace)
    if beaten:
        yield beaten
    if trace.has_timeline and (why := why_no_work(trace)):
        yield (
            "Operator shapes were not recorded: the work of most operators is not known, of "
            f"others only bounds. To find out, {why.fix}."
        )
    device = trace.meta.device
    if device is not None and not device.is_measured:
        peaks = f"peaks {device.origin}" if device.is_derived else "datasheet peaks"
        yield (
            f"The roofline uses {peaks}, which no kernel reaches. To measure this GPU's "
            "own: `kprof roofline`."
        )


def _lost(trace: Trace) -> Iterator[str]:
    """Say how many launches left no activity, and where in the recording."""
    launches = count_launches(trace)
    places = {
        "at its beginning": sum(of_rank.lost_at_start for of_rank in launches),
        "in between": sum(of_rank.lost_in_between for of_rank in launches),
        "at its end, perhaps unfinished": sum(of_rank.lost_at_end for of_rank in launches),
    }
    if not any(places.values()):
        return
    number = sum(of_rank.number for of_rank in launches)
    ranks = [str(of_rank.rank) for of_rank in launches if of_rank.num_lost]
    more = f" and {len(ranks) - RANKS_NAMED} more" if len(ranks) > RANKS_NAMED else ""
    named = f" on rank {', '.join(ranks[:RANKS_NAMED])}{more}"
    where = ", ".join(f"{count:,} {place}" for place, count in places.items() if count)
    yield (
        f"{sum(places.values()):,} of {format_count(number, 'launch', 'launches')} of kernels"
        f"{named if trace.meta.num_ranks > 1 else ''} left no activity in the recording: {where}. "
        "Their time on the device is missing."
    )


def _beaten_ceilings(trace: Trace) -> str:
    beaten = beaten_ceilings(trace)
    if beaten.empty:
        return ""
    share = share_of_time(trace.kernels, trace.kernels.index.isin(beaten.index))
    time = whose_time(is_host_only=trace.is_host_only)
    return (
        f"{format_count(len(beaten), 'activity', 'activities')} ({format_share(share)} of {time}) "
        "ran faster than the roofline says: data came from a cache, or the operator did less than "
        "its shapes tell."
    )


def _unmodelled_table(trace: Trace) -> Table:
    kernels = trace.kernels
    missing = kernels[~has_work(kernels)]
    groups = group_kernels(missing, ["name", "kind"]).head(UNMODELLED_SHOWN)
    total_ns = max(int(kernels["duration_ns"].sum()), 1)
    rows = tuple(
        (
            str(row.name),
            format_share(row.time_ns / total_ns),
            format_time(row.time_ns),
            f"{row.calls:,}",
            or_missing(row.kind),
        )
        for row in groups.itertuples(index=False)
    )
    columns = (
        Column("Unknown work", "name"),
        Column("Share", "right"),
        Column("Time", "right"),
        Column("Calls", "right"),
        Column("Kind"),
    )
    caption = "The longest activities whose work is not known."
    return Table(columns, rows, caption, terminal_rows=0)
