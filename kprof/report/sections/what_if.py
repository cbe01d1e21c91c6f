"""What-if: what a step would take after the changes that would gain most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kprof.analyze.attribution.steps import find_steps
from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.whatif.across_ranks import is_across_ranks
from kprof.analyze.whatif.changes import ROOFLINE, TOGETHER, WITHOUT
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import MISSING, format_range, format_share, format_time
from kprof.trace import Prediction, Trace

TITLE = "What if"
ORDER = 78

ROWS_IN_REPORT, ROWS_OF_ANSWER = 5, 20
# Changes that one reason names.
MOST_NAMED = 4
EXPLANATION = (
    "Predicted: the recording replayed with the change, including host, streams and waits. Amdahl: "
    "the step less the device time that the change removes, the most that it can gain if nothing "
    "else limits the step. At its roofline: a perfect kernel, which no real kernel reaches. "
    "Collectives keep their recorded time."
)
WHOLLY = "Idle time that is gone is gone wholly; a fix may leave a part of it, as its finding says."
ACROSS = (
    "Late ranks in time, communication hidden or at its roofline: from the collectives of all "
    "ranks, without a replay. Hidden is the least that a step takes if all communication runs "
    "beside computation; the host may take longer. At its roofline, transfers reach the bus "
    "bandwidth that `kprof roofline` measured; small messages reach less."
)
INSIDE = "An operator counts with everything that runs inside it."


def render(trace: Trace) -> Section:
    """Render the predictions of the analysis, or those of `kprof whatif` since."""
    if why := why_no_timeline(trace):
        return Section(TITLE, ORDER, (Text(why.sentence),), in_terminal=False)
    section = section_of(trace.meta.what_if, ROWS_IN_REPORT, whole_of(trace))
    return section if trace.meta.what_if else replace(section, in_terminal=False)


def whole_of(trace: Trace) -> str:
    """Return what predictions are of: a step, or the window of a trace that marks none."""
    return "a step" if find_steps(trace) else "the window"


def section_of(
    predictions: Sequence[Prediction],
    rows: int = ROWS_OF_ANSWER,
    whole: str = "a step",
) -> Section:
    """Render predictions of what the `whole` takes, in their order, and why others are missing."""
    told = [one for one in predictions if one.predicted_step_ns is not None]
    untold = [one for one in predictions if one.predicted_step_ns is None]
    if not predictions:
        nothing = "No change was found that would save time."
        return Section(TITLE, ORDER, (Text(nothing),))
    parts: list[Part] = []
    if told:
        parts += [Text(_lead(told, whole)), _table(told, rows, whole)]
    parts += [Text(f"Not known: {text}.", "warning") for text in _reasons(untold)]
    parts.append(Text(EXPLANATION, "muted"))
    return Section(TITLE, ORDER, tuple(parts))


def _lead(told: list[Prediction], whole: str) -> str:
    best = max(told, key=saving)
    answer = (
        f"{best.target} {best.change}: {whole} would take {format_time(best.predicted_step_ns)} "
        f"instead of {format_time(best.step_ns)}; it saves {_interval(best)} of it."
    )
    if is_across_ranks(best):
        return f"{answer} The interval covers how {whole.split()[-1]}s differ."
    return (
        f"{answer} The interval covers the error of replaying the unchanged recording, and "
        "missing records: launches, stream dependencies, waits and the host's use of results"
        + (
            ". It covers the variation of the host's time; the recording overhead is subtracted."
            if best.is_without_recording
            else "."
        )
    )


def _interval(prediction: Prediction) -> str:
    """Return the saved share, from the least to the most that the recording allows."""
    step_ns, missed = max(prediction.step_ns, 1), prediction.uncertainty_ns or 0
    predicted = _predicted_ns(prediction)
    shortest, longest = prediction.shortest_step_ns, prediction.longest_step_ns
    most = 1 - (predicted - missed if shortest is None else shortest) / step_ns
    least = 1 - (predicted + missed if longest is None else longest) / step_ns
    return format_range(format_share(max(least, 0)), format_share(min(most, 1)))


def _table(told: list[Prediction], num_rows: int, whole: str) -> Table:
    columns: tuple[Column, ...] = (
        Column("What", "name"),
        Column("Change"),
        Column(whole.split()[-1].capitalize(), "right"),
        Column("Saves", "right"),
        Column("Between", "right"),
        Column("Amdahl", "right"),
        Column("Roofline known for", "right", essential=False),
    )
    rows: tuple[tuple[str, ...], ...] = tuple(
        (
            one.target,
            one.change,
            format_time(one.predicted_step_ns),
            format_share(saving(one)),
            _interval(one),
            format_time(one.amdahl_step_ns),
            format_share(one.known_share) if one.what == ROOFLINE else MISSING,
        )
        for one in told
    )
    if not any(one.what == ROOFLINE for one in told):
        columns, rows = columns[:-1], tuple(row[:-1] for row in rows)
    caption = "Each change alone. Their savings overlap and do not add up."
    if any(one.target.startswith("op:") for one in told):
        caption += f" {INSIDE}"
    if any(map(is_across_ranks, told)):
        caption += f" {ACROSS}"
    if any(one.what == WITHOUT for one in told):
        caption += f" {WHOLLY}"
    return Table(columns, rows, caption=caption, terminal_rows=num_rows)


def saving(prediction: Prediction) -> float:
    """Return the share of the step that a prediction saves; below 0 where it costs."""
    return 1 - _predicted_ns(prediction) / max(prediction.step_ns, 1)


def _predicted_ns(prediction: Prediction) -> int:
    assert prediction.predicted_step_ns is not None, "a prediction without a time has its reason"
    return prediction.predicted_step_ns


def _reasons(untold: list[Prediction]) -> list[str]:
    """Return each reason once, behind the changes that it concerns."""
    concerned: dict[str, list[str]] = {}
    for one in untold:
        what = one.change if one.what == TOGETHER else f"{one.target} {one.change}"
        concerned.setdefault(one.reason or "", []).append(what)
    return [f"{_named(about)}: {reason}" for reason, about in concerned.items()]


def _named(changes: list[str]) -> str:
    """Name some changes, and the number of the others."""
    changes = list(dict.fromkeys(changes))
    named, more = ", ".join(changes[:MOST_NAMED]), len(changes) - MOST_NAMED
    return f"{named} and {more:,} more" if more > 0 else named
