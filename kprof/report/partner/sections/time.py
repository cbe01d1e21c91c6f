"""Where the time goes, in plain words, adding up to 100 %."""

from __future__ import annotations

from kprof.analyze.attribution.ledger import count_launches
from kprof.analyze.attribution.steps import count_gpu_steps, split_steps
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.findings.scores import SAME_STEP
from kprof.analyze.roofline.utilisation import share_of_time
from kprof.errors import counted
from kprof.report.partner.drawings import Part, both, stack
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.mixed import step_in, steps_compared
from kprof.report.partner.parts import Block, Chapter, Missing, Picture
from kprof.report.partner.wording import KINDS, WAITS, share_in_words, time_within
from kprof.report.section import Column, Table, Text
from kprof.report.units import format_time, round_shares
from kprof.trace import Trace

TITLE = "Where the time goes"

MOST_PARTS = 9
UNKNOWN_KIND, UNKNOWN_WAIT = "Work of no known kind", "Idle: cause unknown"
REST = "Everything else"
HOST_IDLE = "Between operators"
NONE = "none"
HOW = "kprof run train.py, then name the run's folder"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render a bar and a table of the parts, of the first and of the last run."""
    stages = [(name, run) for name, run in stages_of(evidence) if not split_steps(run).empty]
    if not stages:
        return Missing("Where the time goes", HOW)
    times = {name: _by_part(run) for name, run in stages}
    parts = _longest(times)
    last_name, last = stages[-1]
    blocks: list[Block] = [Text(_lead(last, times[last_name]))]
    blocks.append(_picture(stages, times, parts))
    told = (_recorded(stages), _compared(stages, evidence), _unattributed(last), _lost(last))
    blocks += [Text(text, "muted") for text in told if text]
    return Chapter(TITLE, tuple(blocks))


def stages_of(evidence: Evidence) -> list[tuple[str, Trace]]:
    """Return the first run and the last one, with what each is called."""
    runs = evidence.runs
    if len(runs) < 2:
        return [("Recorded", run) for run in runs]
    return [("Before", runs[0]), ("After", runs[-1])]


def _by_part(run: Trace) -> dict[str, int]:
    split = split_steps(run)
    times: dict[str, int] = {}
    for part, is_idle, time_ns in zip(
        split["part"], split["is_idle"], split["time_ns"].tolist(), strict=True
    ):
        name = _name(part, bool(is_idle), run)
        times[name] = times.get(name, 0) + time_ns
    return times


def _name(part: object, is_idle: bool, run: Trace) -> str:
    if not isinstance(part, str):
        if is_idle:
            return HOST_IDLE if run.is_host_only else UNKNOWN_WAIT
        return UNKNOWN_KIND
    return WAITS.get(part, f"Idle: {part}") if is_idle else KINDS.get(part, part)


def _longest(times: dict[str, dict[str, int]]) -> list[str]:
    """Return the parts that are shown by name, work before idleness, the longest first."""
    shares: dict[str, float] = {}
    for parts in times.values():
        total = sum(parts.values())
        for name, time_ns in parts.items():
            shares[name] = max(shares.get(name, 0.0), time_ns / total)
    chosen = sorted(shares, key=lambda name: (-shares[name], name))[:MOST_PARTS]
    return sorted(chosen, key=lambda name: (is_wait(name), -shares[name], name))


def is_wait(name: str) -> bool:
    """Tell whether a part is one in which nothing ran."""
    return name.startswith("Idle") or name == HOST_IDLE


def idle_share(run: Trace) -> float | None:
    """Return the share of the time in which nothing ran; None where it is unknown."""
    times = _by_part(run) if run.has_timeline else {}
    total = sum(times.values())
    return sum(time for name, time in times.items() if is_wait(name)) / total if total else None


def wait_share(run: Trace, cause: str | None) -> float | None:
    """Return the share of the time that was idle for a cause; None where it is not known."""
    times = _by_part(run) if cause is not None and run.has_timeline else {}
    total = sum(times.values())
    return times.get(WAITS.get(cause or "", ""), 0) / total if total else None


def _folded(times: dict[str, int], parts: list[str]) -> dict[str, int]:
    """Return the time of the parts by name, and of all others as one."""
    kept = {name: times.get(name, 0) for name in parts}
    rest = sum(times.values()) - sum(kept.values())
    return {**kept, REST: rest} if rest else kept


def _lead(run: Trace, times: dict[str, int]) -> str:
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: (-item[1], item[0]))[:3]
    listed = "; ".join(
        f"{share_in_words(t / total)} {name[:1].lower()}{name[1:]}" for name, t in largest
    )
    idle = idle_share(run)
    if idle is None:
        return f"Most of the time on the device: {listed}. How long it was idle is not known."
    who = "No operator ran" if run.is_host_only else "The GPU was idle"
    return f"Most of the time: {listed}. {who} for {share_in_words(idle)} of it."


def _picture(
    stages: list[tuple[str, Trace]], times: dict[str, dict[str, int]], parts: list[str]
) -> Picture:
    folded = {name: _folded(times[name], parts) for name, _ in stages}
    names = list(dict.fromkeys(name for part in folded.values() for name in part))
    styles = _styles(names)
    bars = []
    for stage, _ in stages:
        total = sum(folded[stage].values())
        shares = [Part(n, t / total, styles[n]) for n, t in folded[stage].items() if t]
        bars.append((stage if len(stages) > 1 else "", shares))
    wide, narrow = both(lambda width: stack(bars, width))
    caption = (
        "Every instant counts once. Hatched parts are idle time. Where activities overlap, an "
        "instant belongs to computation before communication before copies."
    )
    table = _table(stages, folded, names)
    legend = tuple((styles[name], name) for name in names)
    title = "All of the time, by activity"
    return Picture(title, wide, narrow, caption, table, is_table_open=True, legend=legend)


def _styles(names: list[str]) -> dict[str, str]:
    """Return a class for each part: colours for work, patterns for idleness."""
    work = [name for name in names if not is_wait(name) and name != REST]
    waits = [name for name in names if is_wait(name)]
    styles = {name: f"k{i}" for i, name in enumerate(work)}
    styles |= {name: f"w{i % 3}" for i, name in enumerate(waits)}
    return styles | {REST: "k9"}


def _table(
    stages: list[tuple[str, Trace]], folded: dict[str, dict[str, int]], names: list[str]
) -> Table:
    columns = [Column("Activity", "name")]
    cells: list[list[str]] = [[name] for name in names] + [["All"]]
    for stage, run in stages:
        times = [folded[stage].get(name, 0) for name in names]
        prefix = f"{stage}: s" if len(stages) > 1 else "S"
        columns.append(Column(f"{prefix}hare", "right"))
        steps = count_gpu_steps(run) if run.meta.num_ranks == 1 else 0
        what = "time of a step" if steps else "time"
        columns.append(
            Column(f"{stage}: {what}" if len(stages) > 1 else what.capitalize(), "right")
        )
        for row, share, time_ns in zip(cells, round_shares(times), times, strict=False):
            row += [share if time_ns else NONE, _time(time_ns, steps)]
        cells[-1] += ["100.0 %", _time(sum(times), steps)]
    last = folded[stages[-1][0]]
    total = sum(last.values())
    shares = [last.get(name, 0) / total for name in names]
    rows = tuple(tuple(row) for row in cells)
    return Table(tuple(columns), rows, "Adds up to 100 %.", share=(*shares, 0.0))


def _time(time_ns: int, steps: int) -> str:
    return format_time(time_ns / max(steps, 1)) if time_ns else NONE


def _recorded(stages: list[tuple[str, Trace]]) -> str:
    """Say of which runs a step took longer while it was recorded, and how much."""
    costs = {name: measure_cost(run) for name, run in stages}
    told = [
        f"{f'{name.lower()}, ' if len(stages) > 1 else ''}a step takes "
        f"{format_time(cost.recorded_ns)} recorded and {format_time(cost.unrecorded_ns)} otherwise"
        for name, cost in costs.items()
        if cost is not None and cost.is_noticeable
    ]
    if not told:
        return ""
    return (
        "These are recorded steps. Recording slows the host, not the GPU: "
        f"{'; '.join(told)}, in the median."
    )


def _compared(stages: list[tuple[str, Trace]], evidence: Evidence) -> str:
    """Say of which runs a step took another time than in the comparison, and how long."""
    compared = steps_compared(evidence)
    if len(stages) == 1 and compared:
        # Unknown whether the run was recorded with or without the change.
        shown = " before and ".join(shown for _, shown in compared)
        sides = [([of for of, _ in compared], f"{shown} after the change")]
    else:
        sides = [([of], shown) for of, shown in compared]
    told = []
    for (name, run), (medians, shown) in zip(stages, sides, strict=False):
        found = step_in(run)
        if found is None or any(abs(found[0] / of - 1) <= SAME_STEP for of in medians):
            continue
        about = f"{name.lower()}, " if len(stages) > 1 else ""
        own_in_words = f"{time_within(found[0], 0.01)} {found[1]}"
        told.append(f"{about}{own_in_words} and {shown} in the comparison")
    if not told:
        return ""
    lead = "Step times differ between runs, and shares of the time vary with them"
    return f"{lead}: {'; '.join(told)}."


def untraced_share(run: Trace) -> float:
    """Return the share of the device time, or the operators' own, that no operator caused."""
    if run.kernels.empty:
        return 0.0
    return share_of_time(run.kernels, run.kernels["bucket"] != "attributed")


def _unattributed(run: Trace) -> str:
    if run.kernels.empty:
        return ""
    share = untraced_share(run)
    whose = "the operators' own time" if run.is_host_only else "the device time"
    if share < 0.0005:
        return f"All of {whose} is traced to the operator that caused it."
    return f"{share_in_words(share)} of {whose} is not traced to an operator; it is included."


def _lost(run: Trace) -> str:
    if run.kernels.empty or run.is_host_only:
        return ""
    launches = count_launches(run)
    number = sum(of_rank.number for of_rank in launches)
    lost = sum(of_rank.num_lost for of_rank in launches)
    if not launches:
        return "The recording holds no launches, so whether it lost work of the GPU is not known."
    if not lost:
        all_of = "all " if number > 1 else ""
        told = counted(number, "launch", "launches")
        return f"The recording holds the GPU's work of {all_of}{told}."
    return (
        f"The recording lost the GPU's work of {lost:,} of {counted(number, 'launch', 'launches')}."
    )
