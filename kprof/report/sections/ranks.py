"""Ranks: how long each waits for others in collectives, how often others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import isnan
from typing import Any

from kprof.analyze.bus_bandwidth import measure_collectives
from kprof.analyze.condense import rank_totals
from kprof.analyze.expert_load import find_expert_load
from kprof.analyze.findings.rules.stragglers import why_no_ranks
from kprof.analyze.late_ranks import Lateness, RankLateness, find_lateness
from kprof.analyze.pipeline_bubbles import find_bubbles
from kprof.report.figures import ORANGE, PALE, RED, Drawn, axis, margins
from kprof.report.section import Column, Figure, Part, Section, Table, Text
from kprof.report.units import MISSING, format_amount, format_share, format_time
from kprof.trace import RankTotals, Trace

TITLE = "Ranks"
ORDER = 77
# Of a job of many process groups, those with most exposed time; and the characters of its name.
MOST_COLLECTIVES, MOST_CHARACTERS = 20, 28
# Columns of a rank that are shown where they were recorded.
RECORDED: dict[str, Callable[[RankTotals], str]] = {
    "GPU": lambda one: ", ".join(uuid.removeprefix("GPU-")[:8] for uuid in one.gpu_uuids),
    "Place": lambda one: ", ".join(f"{name} {place}" for name, place in one.place.items()),
}
MEANING = {
    "GPU": " GPU: the beginning of its UUID.",
    "Place": " Place: the rank's number in its process group along each dimension of parallelism.",
}


def render(trace: Trace) -> Section:
    """Render who waits for whom, and the time of each rank, the latest first."""
    found = find_lateness(trace)
    totals = rank_totals(trace)
    parts: list[Part] = []
    if found is not None:
        parts.append(Text(_lead(found)))
    else:
        why = why_no_ranks(trace)
        parts.append(Text(why.sentence if why else "No collective was recorded on several ranks."))
    if found is not None and any(one.num_late for one in found.ranks):
        parts.append(_map(found))
    if len(totals) > 1:
        parts.append(_table(totals, found))
        parts += [*_pipeline(trace), *_experts(trace), *_collectives(trace)]
    return Section(TITLE, ORDER, tuple(parts), in_terminal=found is not None)


def _lead(found: Lateness) -> str:
    unit = "step" if found.are_steps else "part of the window"
    names = ", ".join(map(str, found.stragglers))
    ranks = f"rank {names}" if len(found.stragglers) == 1 else f"ranks {names}"
    # Also where it costs too little for a finding: the rows below, and the what-if, tell of it.
    if found.stragglers and found.lost_ns > 0:
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
    units = "steps" if found.are_steps else "parts of the window"
    return f"No rank keeps the others waiting repeatedly, in {found.num_units} {units}."


def _map(found: Lateness) -> Figure:
    """Draw how late each rank came in each unit, as a share of the unit; in time is pale."""
    unit_ns = max(found.unit_ns, 1.0)
    shares = [
        [round(100 * max(ns, 0) / unit_ns, 1) for ns in one.late_by_ns] for one in found.ranks
    ]
    unit = "step" if found.are_steps else "part of the window"
    heat: Drawn = {
        "type": "heatmap",
        "x": [str(number) for number in found.units],
        "y": [one.rank for one in found.ranks],
        "z": shares,
        "zmin": 0,
        "zmax": max(map(max, shares)),
        "colorscale": [[0, PALE], [0.5, ORANGE], [1, RED]],
        "colorbar": {"ticksuffix": " %", "thickness": 12},
        "hovertemplate": f"rank %{{y}}, {unit} %{{x}}: %{{z}} %<extra></extra>",
    }
    layout: Drawn = {
        "margin": margins(),
        "xaxis": axis(unit, type="category", fixedrange=True),
        "yaxis": axis("rank", autorange="reversed", fixedrange=True),
    }
    caption = f"How late each rank comes to the collectives, as a share of a {unit}, by {unit}."
    return Figure([heat], layout, caption, height_px=min(120 + 18 * len(found.ranks), 640))


def _table(totals: Sequence[RankTotals], found: Lateness | None) -> Table:
    late = {one.rank: one for one in found.ranks} if found else {}
    rows = sorted(totals, key=lambda one: -late[one.rank].late_ns if one.rank in late else 0)
    more = [name for name, of in RECORDED.items() if any(map(of, totals))]
    columns = (
        Column("Rank", "right"),
        Column("Host", essential=False),
        Column("Late in", "right"),
        Column("Late by", "right"),
        Column("Waits", "right"),
        Column("Share", "right", essential=False),
        Column("Busy", "right"),
        Column("Idle for", essential=False),
        *(Column(name, essential=False) for name in more),
    )
    return Table(
        columns,
        tuple(
            (
                *_row(one, late.get(one.rank), found),
                *(RECORDED[name](one) or MISSING for name in more),
            )
            for one in rows
        ),
        caption=(_of_waits(found) if found else "")
        + "Busy: share of the rank's window in which its GPUs ran something. Idle for: the cause "
        "of most of the rest." + "".join(MEANING[name] for name in more),
        share=tuple(_share(late.get(one.rank), found) for one in rows) if found else (),
    )


def _pipeline(trace: Trace) -> list[Table]:
    """Return the waits of each pipeline stage, where they are known."""
    rows = tuple(
        (
            f"{one.stage}",
            f"{len(one.ranks):,}",
            format_time(round(one.waits_ns)),
            format_share(one.share),
        )
        for one in find_bubbles(trace) or ()
    )
    columns = (
        Column("Pipeline stage", "right"),
        Column("Ranks", "right"),
        Column("Waits", "right"),
        Column("Of a step", "right"),
    )
    caption = (
        "Pipeline bubbles, the mean of each stage's ranks: time in sends and receives beyond the "
        "shortest one, with nothing else on the device. Stages with less work wait longer."
    )
    return [Table(columns, rows, caption=caption)] if rows else []


def _experts(trace: Trace) -> list[Table]:
    """Return the busiest rank of each expert-parallel group, where the load is known."""
    every = find_expert_load(trace) or ()
    rows = tuple(
        (_shortened(one.group), f"{one.busiest[0]}", f"{one.busiest[1]:.2f} x", f"{one.calls:,}")
        for one in every[:MOST_COLLECTIVES]
    )
    columns = (
        Column("Experts' group"),
        Column("Busiest rank", "right"),
        Column("Load", "right"),
        Column("All-to-alls", "right"),
    )
    caption = (
        "Load of experts: elements that all-to-alls bring to the busiest rank, as a multiple of "
        "the mean of its group."
    )
    return [Table(columns, rows, caption=caption)] if rows else []


def _collectives(trace: Trace) -> list[Table]:
    """Return the table of collectives by process group and operation, if there are any."""
    every = measure_collectives(trace)
    rows = [
        (
            one["collective"],
            _shortened(one["group"]),
            f"{one['calls']:,}",
            format_time(one["exposed_ns"]),
            format_time(one["hidden_ns"]),
            *_rates(one),
        )
        for one in every.head(MOST_COLLECTIVES).to_dict("records")
    ]
    columns = (
        Column("Collective"),
        Column("Group", essential=False),
        Column("Calls", "right", essential=False),
        Column("Exposed", "right"),
        Column("Hidden", "right"),
        Column("Transfer", "right"),
        Column("Bus", "right"),
        Column("Of ceiling", "right"),
    )
    more = f" {len(every) - len(rows):,} more are in `--json`." if len(every) > len(rows) else ""
    caption = (
        "Collectives of all ranks. Hidden: computation runs beside them. Transfer: median time "
        "from the last rank's arrival to the end. Bus: its bandwidth as nccl-tests defines it. "
        "Of ceiling: of the bandwidth that `kprof roofline` measured with large messages on as "
        f"many GPUs of one host.{more}"
    )
    return [Table(columns, tuple(rows), caption=caption)] if rows else []


def _rates(one: dict[Hashable, Any]) -> tuple[str, str, str]:
    """Return the transfer, its bus bandwidth, and that as a share of the ceiling."""
    transfer, bus, ceiling = (
        None if isnan(one[name]) else float(one[name])
        for name in ("transfer_ns", "bus_bytes_per_s", "ceiling_bytes_per_s")
    )
    share = bus / ceiling if bus is not None and ceiling else None
    return format_time(transfer), format_amount(bus, "B/s"), format_share(share)


def _shortened(group: str) -> str:
    return group if len(group) <= MOST_CHARACTERS else f"{group[: MOST_CHARACTERS - 2]} …"


def _of_waits(found: Lateness) -> str:
    unit = "a step" if found.are_steps else "a part of the window"
    return (
        f"Late by: mean delay at the collectives after the ranks in time, in {unit}"
        f" of {format_time(round(found.unit_ns))}. Waits: time in collectives until the last "
        "rank arrives, with nothing else on the device. "
    )


def _row(one: RankTotals, kept_up: RankLateness | None, found: Lateness | None) -> tuple[str, ...]:
    waits = (MISSING,) * 4
    if kept_up is not None and found is not None:
        waits = (
            f"{kept_up.num_late} of {found.num_units}",
            format_time(max(round(kept_up.late_ns), 0)),
            format_time(round(kept_up.waits_ns)),
            format_share(_share(kept_up, found)),
        )
    causes = {cause: ns for cause, ns in one.idle_by_cause_ns.items() if cause != "unknown"}
    return (
        f"{one.rank}",
        one.host or MISSING,
        *waits,
        format_share(one.busy_ns / one.window_ns) if one.window_ns else MISSING,
        max(causes, key=causes.__getitem__) if causes else MISSING,
    )


def _share(one: RankLateness | None, found: Lateness) -> float:
    return min(one.waits_ns / max(found.unit_ns, 1), 1.0) if one else 0.0
