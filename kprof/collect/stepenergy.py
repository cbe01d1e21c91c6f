"""What a step took in joules, from windows that follow each other for long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kprof.collect.inject.kprof_recorder.schedule import Schedule
from kprof.collect.samples import LEAST_ENERGY_NS
from kprof.collect.windows import Sheets, Window

# Between neighbouring windows lie the steps that belong to none; with more, something else ran.
LARGEST_GAP = 3
# The counter and the integral of power are two sensors' word for the same thing.
MOST_DISAGREEMENT = 0.05


@dataclass(frozen=True)
class Span:
    """Neighbouring windows of one arm, with the steps between them."""

    start_ns: int
    end_ns: int
    num_steps: int


def energy_of(
    windows: Sequence[Window], schedule: Schedule, sheets: Sheets
) -> tuple[float | None, str]:
    """Return the joules of a step, or None and why: the end of a sentence."""
    leading = sheets.leading
    if leading is None or not leading.about["gpus"]:
        return None, "no GPU took part"
    if len(schedule.arms) > 1:
        return None, "both arms take turns in one process, so what it took is that of both"
    spans = spans_of(windows, schedule.settle_steps)
    long = [span for span in spans if span.end_ns - span.start_ns >= LEAST_ENERGY_NS]
    if not long:
        least_s = LEAST_ENERGY_NS / 1e9
        return None, f"the windows do not last {least_s:g} s, which the energy counter needs"
    used = [sheets.joules((span.start_ns, span.end_ns)) for span in long]
    known = [joules for joules in used if joules is not None]
    if len(known) < len(used):
        return None, "the energy counters of its GPUs could not all be read"
    checks = [sheets.power_against_counters((span.start_ns, span.end_ns)) for span in long]
    worst = max((abs(check - 1) for check in checks if check is not None), default=None)
    if worst is None:
        return None, "power was not sampled, with which the energy counters could be checked"
    if worst > MOST_DISAGREEMENT:
        return None, f"the energy counters and the sampled power differ by {100 * worst:.0f} %"
    return sum(known) / sum(span.num_steps for span in long), ""


def spans_of(windows: Sequence[Window], settle_steps: int) -> list[Span]:
    """Return the spans of time in which nothing but steps of one arm ran."""
    spans: list[Span] = []
    before: Window | None = None
    for window in windows:
        end_step = window.first_step + window.num_steps
        if before is not None and _follows(window, before, settle_steps):
            num_new = end_step - before.first_step - before.num_steps
            span = spans[-1]
            spans[-1] = Span(span.start_ns, window.end_ns, span.num_steps + num_new)
        else:
            spans.append(Span(window.start_ns, window.end_ns, window.num_steps))
        before = window
    return spans


def _follows(window: Window, before: Window, settle_steps: int) -> bool:
    gap_ns = window.start_ns - before.end_ns
    num_steps = window.first_step - before.first_step - before.num_steps
    is_near = gap_ns <= LARGEST_GAP * (settle_steps + 1) * before.time_ns
    return window.arm == before.arm and num_steps == settle_steps and is_near
