"""Two runs side by side, as sections or as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median

from kprof.analyze.attribution.steps import IMBALANCE, time_steps
from kprof.analyze.diff.alignment import (
    NAME,
    UNCHANGED,
    Difference,
    Fate,
    Layout,
    Names,
    Row,
    Side,
    apportion,
)
from kprof.analyze.diff.comparability import DEVICES_DIFFER
from kprof.analyze.diff.ranks import MEASURES, Measure, RankDifference, RankRow, Times
from kprof.report.kernel_names import readable
from kprof.report.section import Column, Facts, Part, Section, Table, Text
from kprof.report.sections.run import blind_spots
from kprof.report.sections.time import HOST_IDLE, NO_CAUSE
from kprof.report.units import (
    MISSING,
    format_count,
    format_exact,
    format_time,
)
from kprof.trace import Caveat, Trace

SCHEMA = 1
ROWS_ON_TERMINAL = 8
TITLES: dict[Layout, str] = {
    "part": "By kind and cause of idleness",
    "phase": "By phase",
    "module": "By module",
    "operator": "By operator",
    "kernel": "By kernel",
}
NAMELESS: dict[Layout, str] = {
    "part": "of no known kind",
    "phase": "no phase known",
    "module": "in no module",
    "operator": "of no operator",
    "kernel": "of no name",
}
ONE_CAPTURE = (
    "Each run was captured once. This shows differences between the two captures, not whether one "
    "program is faster: the variation between captures of the same program was not measured. "
    "To prove a gain, compare both with `kprof ab`."
)
NS_IN_US = 1_000
HEADERS: dict[Measure, str] = {
    "step": "Time",
    "busy": "Busy",
    "exposed_communication": "Exposed communication",
    "idle": "Idle",
    "late": "Late by",
    "waits": "Waits",
}
ESSENTIAL: tuple[Measure, ...] = ("step", "exposed_communication", "late")
WITHIN = f"within {UNCHANGED:.0%}".replace("%", " %")


@dataclass(frozen=True)
class Compared:
    """Two analyzed runs, what differs between them, and what else may be behind that."""

    a: Trace
    b: Trace
    difference: Difference
    doubts: tuple[Caveat, ...]
    ranks: RankDifference | None = None
    """All ranks of both, of which one has several."""

    @property
    def title(self) -> str:
        """Name both runs."""
        return f"{self.a.meta.source} (A) against {self.b.meta.source} (B)"

    @property
    def is_host_only(self) -> bool:
        """Whether both are about the host's operators; with a GPU's run none is compared."""
        return self.a.is_host_only

    @property
    def unit(self) -> str:
        """The unit of comparison: a step, or the whole window where no step is marked."""
        return "step" if self.difference.a.num_steps else "window"


def sections_of_difference(compared: Compared, num_rows: int = ROWS_ON_TERMINAL) -> list[Section]:
    """Render the difference, and each layout with at most `num_rows` of its rows.

    The rows left out are added up in one, so that every column adds up to its first row.
    """
    sections = [_summary(compared)]
    if compared.ranks is not None:
        sections.append(_ranks_section(compared.ranks, compared.unit, num_rows))
    for layout, title in TITLES.items():
        # A host's activities are its operators: one table is enough.
        if layout == "kernel" and compared.is_host_only:
            continue
        sections.append(_layout_section(compared, layout, title, num_rows))
    return sections


def result_of_difference(compared: Compared) -> dict[str, object]:
    """Return the difference as plain data; times in ns of a step, whole numbers that add up."""
    difference = compared.difference
    return {
        "schema": SCHEMA,
        "a": _side_result(compared.a, difference.a),
        "b": _side_result(compared.b, difference.b),
        "unit": compared.unit,
        "difference_ns": difference.difference_ns,
        "layouts": {
            layout: [_row_result(row) for row in rows]
            for layout, rows in difference.layouts.items()
        },
        **({"ranks": _ranks_result(compared.ranks)} if compared.ranks else {}),
        "doubts": [{"id": one.id, "text": one.text} for one in compared.doubts],
    }


def _ranks_result(ranks: RankDifference) -> dict[str, object]:
    return {
        "mean": _rank_result(ranks.mean),
        "by_rank": [_rank_result(row) for row in ranks.ranks],
        "stragglers_a": ranks.late_a,
        "stragglers_b": ranks.late_b,
        "late_since": ranks.late_since,
        "in_time_since": ranks.in_time_since,
    }


def _rank_result(row: RankRow) -> dict[str, object]:
    times = {
        f"{measure}_ns": {
            "a": _whole(one.a_ns),
            "b": _whole(one.b_ns),
            "difference": _whole(one.difference_ns),
            "fate": one.fate,
        }
        for measure, one in row.times.items()
    }
    return {"rank": row.rank, **times}


def _whole(time_ns: float | None) -> int | None:
    return None if time_ns is None else round(time_ns)


def _side_result(trace: Trace, side: Side) -> dict[str, object]:
    return {
        "source": trace.meta.source,
        "command": list(trace.meta.command),
        "gpus": [asdict(gpu) for gpu in trace.gpus],
        "num_ranks": trace.meta.num_all_ranks,
        **asdict(side),
        "steps": asdict(time_steps(trace)),
    }


def _row_result(row: Row) -> dict[str, object]:
    return {
        "names_a": list(row.names[0]),
        "names_b": list(row.names[1]),
        "is_idle": row.is_idle,
        "fate": row.fate,
        "matched_by": row.matched_by or None,
        "a": asdict(row.a),
        "b": asdict(row.b),
        "difference_ns": row.difference_ns,
    }


def _summary(compared: Compared) -> Section:
    difference = compared.difference
    a, b = difference.a, difference.b
    change = difference.difference_ns
    share = f" ({100 * change / a.step_ns:+.1f} %)" if a.step_ns else ""
    by = f"{format_time(change) if change < 0 else '+' + format_time(change)}"
    lead = (
        f"A {compared.unit} takes {format_time(a.step_ns)} in A and {format_time(b.step_ns)} in B: "
    )
    lead += f"unchanged ({by}, {WITHIN})." if difference.is_unchanged else f"{by}{share}."
    facts = Facts(
        tuple(
            (name, trace.meta.source, _described(trace))
            for name, trace in (("A", compared.a), ("B", compared.b))
        )
    )
    over = " of a step in the mean" if compared.unit == "step" else " of the window"
    sum_text = (
        f"Elapsed time{over}: B {format_exact(b.step_ns)} - A "
        f"{format_exact(a.step_ns)} = {change:+,} ns. Every table below adds up to it."
    )
    # Percentages of two devices compare the devices: that comes before any of them.
    first = [Text(one.text, "warning") for one in compared.doubts if one.id == DEVICES_DIFFER]
    others = [Text(one.text, "warning") for one in compared.doubts if one.id != DEVICES_DIFFER]
    parts: tuple[Part, ...] = (*first, Text(lead), facts, Text(sum_text), _step_table(compared))
    told = (_recording_table(compared), Text(ONE_CAPTURE))
    return Section("Difference", 0, (*parts, *told, *others))


def _described(trace: Trace) -> str:
    gpus = list(dict.fromkeys(gpu.name for gpu in trace.gpus))
    device = "host CPU" if trace.is_host_only else ", ".join(gpus) or "GPU not known"
    num_ranks = trace.meta.num_all_ranks
    ranks = format_count(num_ranks, "rank") if num_ranks > 1 else ""
    versions = [
        f"{n} {trace.meta.versions[n]}" for n in ("torch", "cuda") if n in trace.meta.versions
    ]
    return ", ".join(text for text in (device, ranks, *versions, trace.meta.command_line) if text)


def _step_table(compared: Compared) -> Table:
    """Show how far the steps of each run lie apart."""
    rows = []
    clocks = []
    for name, trace in (("A", compared.a), ("B", compared.b)):
        times = time_steps(trace)
        clocks.append(f"{name} by {times.clock}")
        for what, of in (("recorded", times.recorded_ns), ("unrecorded", times.unrecorded_ns)):
            if of:
                spread = (format_time(t) for t in (min(of), median(of), max(of)))
                rows.append((f"{name}, {what}", f"{len(of):,}", *spread))
    columns = (
        Column("Steps of"),
        Column("Number", "right"),
        Column("Least", "right"),
        Column("Median", "right"),
        Column("Most", "right"),
    )
    return Table(columns, tuple(rows), caption=f"How long steps took: {', '.join(clocks)}.")


def _recording_table(compared: Compared) -> Table:
    """Show what each recording cost, lost and attributed."""
    told = [
        {label: value for label, value, _ in blind_spots(run)} for run in (compared.a, compared.b)
    ]
    labels = list(dict.fromkeys([*told[0], *told[1]]))
    columns = (Column("Recording"), *(Column(label, "right") for label in labels))
    rows = tuple(
        (name, *(of_run.get(label, MISSING) for label in labels))
        for name, of_run in zip("AB", told, strict=True)
    )
    return Table(columns, rows, caption="What recording cost, lost and attributed of each run.")


def _ranks_section(ranks: RankDifference, unit: str, num_rows: int) -> Section:
    """Show who is late in which run, and the time of each rank in both."""
    lead = Text(_late(ranks))
    shown = ranks.ranks[:num_rows]
    columns = (
        Column("Rank", "right"),
        *(
            Column(HEADERS[measure], "right", essential=measure in ESSENTIAL)
            for measure in MEASURES
        ),
    )
    rows = tuple(
        ("mean" if row.rank is None else f"{row.rank}", *(_change(row.times[m]) for m in MEASURES))
        for row in (ranks.mean, *shown)
    )
    left_out = len(ranks.ranks) - len(shown)
    more = f" {format_count(left_out, 'rank')} that differ less: `--json`." if left_out else ""
    caption = (
        f"Time of a {unit} of every rank in B, and how much more that is than in A. Late by: mean "
        "delay at the collectives after the ranks in time. Changes of at most 1 % of the rank's "
        f"{unit} are unchanged (=).{more}"
    )
    return Section("By rank", 0, (lead, Table(columns, rows, caption, terminal_rows=len(rows))))


def _late(ranks: RankDifference) -> str:
    """Say which ranks are late in one run alone, and which in both."""
    since, before = ranks.late_since, ranks.in_time_since
    if since is None or before is None or ranks.late_a is None:
        return "Who waits for whom is not known of both runs."
    both = sorted({*ranks.late_a} - {*before})
    told = [
        f"{where}: {', '.join(map(str, those))}"
        for where, those in (("in B alone", since), ("in A alone", before), ("in both", both))
        if those
    ]
    return f"Ranks that the others wait for, {'; '.join(told)}." if told else "No rank is late."


def _change(times: Times) -> str:
    """Return the time in the second run and its change; in the first one where it is gone."""
    if times.fate in ("vanished", "appeared"):
        return (
            f"{format_time(times.a_ns if times.fate == 'vanished' else times.b_ns)}, {times.fate}"
        )
    by = times.difference_ns
    if by is None or times.fate is None:
        return format_time(times.b_ns)
    if times.fate in ("same", "unchanged"):
        return f"{format_time(times.b_ns)} (=)"
    return f"{format_time(times.b_ns)} ({'+' if by > 0 else ''}{format_time(by)})"


def _layout_section(compared: Compared, layout: Layout, title: str, num_rows: int) -> Section:
    rows = compared.difference.layouts[layout]
    changes = compared.difference.changes(layout)
    fates = Counter(row.fate for row in rows)
    named: tuple[Fate, ...] = ("appeared", "vanished", "replaced", "changed")
    told = ", ".join(f"{fates[fate]:,} {fate}" for fate in named if fates[fate])
    alike = f"{fates['same']:,} the same"
    if fates["unchanged"]:
        alike = f"{fates['unchanged']:,} unchanged ({WITHIN}), {alike}"
    lead = f"{told}; {alike}." if told else f"Nothing differs: {alike}."
    if not changes:
        return Section(title, 0, (Text(lead),))
    return Section(title, 0, (Text(lead), _table(compared, layout, changes[:num_rows])))


def _table(compared: Compared, layout: Layout, shown: tuple[Row, ...]) -> Table:
    """Show some rows, all others as one, and the sum, rounded so that each column adds up."""
    difference = compared.difference
    unit, unit_ns = _unit(difference)
    number = len(difference.layouts[layout]) - len(shown)
    columns_ns = [
        [*own, total - sum(own)]
        for own, total in (
            ([row.a.step_ns for row in shown], difference.a.step_ns),
            ([row.b.step_ns for row in shown], difference.b.step_ns),
        )
    ]
    of_a, of_b = (apportion(column, unit_ns) for column in columns_ns)
    times = [_formatted(a, b) for a, b in zip(of_a, of_b, strict=True)]
    # The sum comes first: a page folds the end of a long table away.
    whole = (f"all of a {compared.unit}", *_formatted(sum(of_a), sum(of_b)), "", "", "", "")
    parts = [
        (cells[0], *time, *cells[1:])
        for cells, time in zip(
            (_cells(compared, layout, row) for row in shown), times, strict=False
        )
    ]
    others = [(format_count(number, "other"), *times[-1], "", "", "", "")] if number else []
    rows: list[tuple[str, ...]] = [whole, *parts, *others]
    caption = f"Time and calls of a {compared.unit}. The parts add up to the first row."
    longest = max((abs(row.difference_ns) for row in shown), default=0) or 1
    bars = [0.0, *(row.difference_ns / longest for row in shown), *(0.0 for _ in others)]
    # A column in which nothing stands would only take room.
    columns = _columns(unit)
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return Table(
        tuple(columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
        caption,
        tuple(bars),
        terminal_rows=len(rows),
        has_signed_share=True,
    )


def _columns(unit: str) -> tuple[Column, ...]:
    return (
        Column("Part", "name"),
        *(Column(f"{name}, {unit}", "right") for name in ("A", "B", "Change")),
        Column("Fate"),
        Column("Calls", "right", essential=False),
        Column("In A", "name", essential=False),
        Column("Matched by", essential=False),
    )


def _unit(difference: Difference) -> tuple[str, int]:
    """Return the unit in which times are shown, and what its last decimal is in ns."""
    longest = max(difference.a.step_ns, difference.b.step_ns)
    return ("ms", NS_IN_US) if longest >= 1000 * NS_IN_US else ("µs", 1)


def _formatted(a: int, b: int) -> tuple[str, str, str]:
    """Format thousandths of the unit, of both runs and their difference."""
    change = f"{(b - a) / 1000:+,.3f}" if a != b else "0.000"
    return f"{a / 1000:,.3f}", f"{b / 1000:,.3f}", change


def _cells(compared: Compared, layout: Layout, row: Row) -> tuple[str, str, str, str, str]:
    """Return a row's name, fate and calls, its name in the first run if another, and the match."""
    names_a, names_b = row.names
    name = _name(compared, layout, row, names_b or names_a)
    before = _name(compared, layout, row, names_a) if names_a and names_b else ""
    matched_by = "" if row.matched_by == NAME else row.matched_by
    difference = compared.difference
    calls = [
        _per_step(amount.calls, side.num_gpu_steps)
        for amount, side in ((row.a, difference.a), (row.b, difference.b))
    ]
    number = " → ".join(dict.fromkeys(calls)) if not row.is_idle else ""
    return name, row.fate, number, before if names_a != names_b else "", matched_by


def _name(compared: Compared, layout: Layout, row: Row, names: Names) -> str:
    """Name a part by the longest of its names, and say how many more it has."""
    first = names[0]
    if row.is_idle and first == IMBALANCE:
        text = IMBALANCE
    elif row.is_idle and layout != "part":
        text = "idle"
    elif row.is_idle and first is None and compared.is_host_only:
        text = HOST_IDLE
    elif row.is_idle:
        text = f"idle ({first or NO_CAUSE})"
    elif first is None:
        text = NAMELESS[layout]
    else:
        text = readable(first) or "(the model itself)"
    return f"{text}, and {len(names) - 1} more" if len(names) > 1 else text


def _per_step(calls: int, num_steps: int) -> str:
    return f"{calls // num_steps:,}" if calls % num_steps == 0 else f"{calls / num_steps:,.1f}"
