"""Ranks: how long each waits for others in collectives, how often others wait for it."""

from __future__ import annotations

from kprof.analyze.findings.rules.stragglers import LEAST_SHARE, why_no_ranks
from kprof.analyze.late_ranks import Lateness, RankLateness, find_lateness
from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import MISSING, format_share, format_time
from kprof.trace import Trace

TITLE = "Ranks"
ORDER = 77


def render(trace: Trace) -> Section:
    """Render who waits for whom, a row for each rank, the latest first."""
    found = find_lateness(trace)
    if found is None:
        why = why_no_ranks(trace)
        text = why.sentence if why else "No collective was recorded on several ranks."
        return Section(TITLE, ORDER, (Text(text),), in_terminal=False)
    return Section(TITLE, ORDER, (Text(_lead(found)), _table(found)))


def _lead(found: Lateness) -> str:
    unit = "step" if found.are_steps else "part of the window"
    names = ", ".join(map(str, found.stragglers))
    ranks = f"rank {names}" if len(found.stragglers) == 1 else f"ranks {names}"
    if found.stragglers and found.lost_ns >= LEAST_SHARE * found.unit_ns:
        whose = f" ({found.where})" if found.where else ""
        return (
            f"The others wait {format_time(round(found.lost_ns))} of each {unit} of "
            f"{format_time(round(found.unit_ns))} for {ranks}{whose}."
        )
    if found.rotating_ns:
        return (
            f"Ranks are late in turn, which costs {format_time(round(found.rotating_ns))} of each "
            f"{unit} of {format_time(round(found.unit_ns))}; no single rank is late repeatedly."
        )
    return f"No rank keeps the others waiting repeatedly, in {found.num_units} {unit}s."


def _table(found: Lateness) -> Table:
    latest_first = sorted(found.ranks, key=lambda one: -one.late_ns)
    columns = (
        Column("Rank", "right"),
        Column("Host", essential=False),
        Column("Late in", "right"),
        Column("Late by", "right"),
        Column("Waits", "right"),
        Column("Share", "right", essential=False),
    )
    rows = tuple(_row(one, found) for one in latest_first)
    unit = "a step" if found.are_steps else "a part of the window"
    return Table(
        columns,
        rows,
        caption=(
            f"Late by: mean delay at the collectives after the ranks in time, in {unit}"
            f" of {format_time(round(found.unit_ns))}. Waits: time in collectives until the last "
            "rank arrives, with nothing else on the device."
        ),
        share=tuple(_share(one, found) for one in latest_first),
    )


def _row(one: RankLateness, found: Lateness) -> tuple[str, ...]:
    return (
        f"{one.rank}",
        one.host or MISSING,
        f"{one.num_late} of {found.num_units}",
        format_time(max(round(one.late_ns), 0)),
        format_time(round(one.waits_ns)),
        format_share(_share(one, found)),
    )


def _share(one: RankLateness, found: Lateness) -> float:
    return min(one.waits_ns / max(found.unit_ns, 1), 1.0)
