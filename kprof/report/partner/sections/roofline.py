"""The roofline: how close the work comes to the limits of the hardware."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.groupings import group_operators
from kprof.analyze.roofline.utilisation import measure_utilisation
from kprof.report.kernel_names import readable
from kprof.report.partner.drawings import Ceiling, Dot, both, roofline
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Chapter, Missing, Picture, Symbol
from kprof.report.partner.sections.time import stages_of
from kprof.report.partner.wording import BOUNDS, KINDS, share_in_words
from kprof.report.section import Column, Table, Text
from kprof.report.units import (
    format_amount,
    format_share,
    format_share_of_limit,
    shorten,
)
from kprof.trace import Trace

TITLE = "Distance to the hardware limits"

MOST_DOTS, MOST_ROWS = 60, 12
LOOKS: dict[str, tuple[Symbol, str]] = {
    "memory": ("circle", "k0"),
    "compute": ("square", "k1"),
    "issue": ("cross", "k2"),
    "latency": ("triangle", "k7"),
}
UNKNOWN: tuple[Symbol, str] = ("diamond", "k9")
EARLIER = (
    "This is the run before the change. The work of the run after it is unknown, for example "
    "because a CUDA graph replays it."
)
HOW = "record the operators' shapes with kprof run, on a GPU that kprof knows or has measured"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render the shares of the limits, the drawing, and the groups that take longest."""
    runs = [run for _, run in reversed(stages_of(evidence))]
    for run in runs:
        groups = group_operators(run)
        groups = groups[(groups["bytes"].fillna(0) > 0) & (groups["time_ns"] > 0)]
        computing = groups[groups["flops"].fillna(0) > 0]
        if not computing.empty:
            told = [*([EARLIER] if run is not runs[0] else []), *_lead(run, groups)]
            picture = _picture(run, computing.head(MOST_DOTS), len(computing))
            return Chapter(TITLE, (*map(Text, told), picture))
    return Missing("How close the work comes to the hardware limits", HOW)


def _lead(run: Trace, groups: pd.DataFrame) -> list[str]:
    used = measure_utilisation(run).roofline
    sentences = []
    if used.value is not None:
        least = "at least " if used.is_lower_bound else ""
        share = share_in_words(used.value)
        sentences.append(
            f"At the full speed of the GPU's memory and arithmetic, this work would take "
            f"{least}{share} of its time{_unrecorded(run, used.value)}. Real programs reach 30 to "
            "50 %."
        )
    total = max(int(run.kernels["duration_ns"].sum()), 1)
    by_bound = groups.groupby(groups["bound"].astype(object))["time_ns"].sum()
    listed = ", ".join(
        f"{share_in_words(time_ns / total)} {BOUNDS.get(str(bound), str(bound))}"
        for bound, time_ns in by_bound.sort_values(ascending=False).items()
    )
    if listed:
        sentences.append(f"Busy time by its limit: {listed}.")
    device = run.meta.device
    if device is not None and not device.is_measured:
        whose = device.origin if device.is_derived else "the datasheet's"
        sentences.append(f"The limits are {whose} ({device.source}), not measured here.")
    elif device is not None:
        how = "" if device.source.startswith("measured") else "measured: "
        sentences.append(f"The limits were {how}{device.source}.")
    return sentences


def _unrecorded(run: Trace, share: float) -> str:
    """Return the share in an unrecorded step, where recording made steps much longer."""
    cost = measure_cost(run)
    if run.is_host_only or cost is None or not cost.is_noticeable:
        return ""
    return f" while it was recorded, and {share_in_words(cost.without_recording(share))} otherwise"


def _picture(run: Trace, points: pd.DataFrame, number: int) -> Picture:
    dots = [_dot(row) for row in points.itertuples(index=False)]
    memory, flats = _ceilings(run)
    wide, narrow = both(
        lambda width: roofline(dots, width, memory, flats, "operations per second (FLOP/s)")
    )
    cut = f"the {MOST_DOTS} longest of {number:,}" if number > MOST_DOTS else "all"
    caption = (
        f"Each mark is one kind of work ({cut}); its size is its share of the time. The closer to "
        "a line, the closer to the hardware limit."
    )
    legend = tuple(
        (f"{LOOKS[b][1]} {LOOKS[b][0]}", BOUNDS[b]) for b in LOOKS if b in set(points["bound"])
    )
    return Picture(
        "Speed of the work and the hardware limits", wide, narrow, caption, _table(points),
        legend=legend,
    )  # fmt: skip


def _dot(group: Any) -> Dot:  # noqa: ANN401 - a named tuple of pandas
    bound = None if pd.isna(group.bound) else str(group.bound)
    symbol, style = LOOKS.get(bound or "", UNKNOWN)
    speed = float(group.flops) / (float(group.time_ns) / 1e9)
    size = float(np.clip(60 * np.sqrt(float(group.share)), 6, 44))
    limit = format_share_of_limit(group)
    tip = (
        f"{_name(group)}: {format_share(group.share)} of the time, "
        f"{format_amount(speed, 'FLOP/s')}, {limit} of its limit"
    )
    return Dot(float(group.flops) / float(group.bytes), speed, symbol, style, tip, round(size, 1))


def _name(group: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    op = "" if pd.isna(group.op) else f"{group.op}, "
    return shorten(f"{op}{readable(str(group.name))}", 110)


def _ceilings(run: Trace) -> tuple[Ceiling | None, list[Ceiling]]:
    device = run.meta.device
    if device is None:
        return None, []
    kernels = run.kernels
    used = kernels["dtype"][kernels["flops"].fillna(0) > 0].dropna().unique()
    rates = {str(d): device.flops_per_s[str(d)] for d in used if str(d) in device.flops_per_s}
    flats = [
        Ceiling(f"{dtype}: {format_amount(rate, 'FLOP/s')}", rate)
        for dtype, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]
    speed = device.memory_bytes_per_s
    return Ceiling(f"memory: {format_amount(speed, 'B/s')}", speed), flats


def _table(points: pd.DataFrame) -> Table:
    columns = (
        Column("Work", "name"),
        Column("Kind"),
        Column("Share of time", "right"),
        Column("FLOP/s", "right"),
        Column("Of its limit", "right"),
        Column("Limited by"),
    )
    rows = tuple(
        (
            _name(row),
            "not known" if pd.isna(row.kind) else KINDS.get(str(row.kind), str(row.kind)),
            format_share(float(row.share)),
            format_amount(float(row.flops) / (float(row.time_ns) / 1e9), "FLOP/s"),
            format_share_of_limit(row),
            "not known"
            if pd.isna(row.bound)
            else BOUNDS[str(row.bound)].removeprefix("limited by "),
        )
        for row in points.head(MOST_ROWS).itertuples(index=False)
    )
    return Table(columns, rows, "The kinds of work that take longest.")
