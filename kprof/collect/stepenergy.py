"""What a step took in joules, from windows that follow each other for long enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kprof.collect.inject.kprof_recorder.schedule import Schedule
from kprof.collect.nvml import Nvml
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


def can_count_energy(open_nvml: Callable[[], Nvml] = Nvml) -> bool:
    """Tell whether some GPU of this machine has an energy counter."""
    nvml = open_nvml()
    try:
        asked = [nvml.ask("nvmlDeviceGetTotalEnergyConsumption", h) for h in nvml.handles.values()]
    finally:
        nvml.close()
    return any(energy_mj is not None for energy_mj in asked)


def energy_of(
    windows: Sequence[Window], schedule: Schedule, sheets: Sheets
) -> tuple[float | None, str]:
    """Return the joules of a step, or None and why: the end of a sentence.

    Of arms that take turns in one process None as well, for each of their windows has its own;
    why is empty then where those can be believed.
    """
    leading = sheets.leading
    if leading is None or not leading.about["gpus"]:
        return None, "no GPU took part"
    if sheets.is_partitioned:
        return None, "its GPU is partitioned (MIG), and the counter is that of all partitions"
    is_alone = len(schedule.arms) == 1
    spans = spans_of(windows, schedule.settle_steps) if is_alone else _each(windows)
    long = [span for span in spans if span.end_ns - span.start_ns >= LEAST_ENERGY_NS]
    if not long or not (is_alone or len(long) == len(spans)):
        least_s = LEAST_ENERGY_NS / 1e9
        return None, f"the windows do not last {least_s:g} s, which the energy counter needs"
    used = [sheets.joules((span.start_ns, span.end_ns)) for span in long]
    known = [joules for joules in used if joules is not None]
    if len(known) < len(used):
        return None, "the energy counters of its GPUs could not all be read"
    # Power lags, so of short turns it is the mean of both arms that the counters must agree with.
    checked = long if is_alone else [Span(long[0].start_ns, long[-1].end_ns, 0)]
    if why := _why_not_believed(checked, sheets):
        return None, why
    return (sum(known) / sum(span.num_steps for span in long) if is_alone else None), ""


def _why_not_believed(spans: Sequence[Span], sheets: Sheets) -> str:
    """Return what speaks against the counters in these spans, or nothing."""
    checks = [sheets.power_against_counters((span.start_ns, span.end_ns)) for span in spans]
    worst = max((abs(check - 1) for check in checks if check is not None), default=None)
    if worst is None:
        return "power was not sampled, with which the energy counters could be checked"
    if worst > MOST_DISAGREEMENT:
        return f"the energy counters and the sampled power differ by {100 * worst:.0f} %"
    return ""


def _each(windows: Sequence[Window]) -> list[Span]:
    """Return every window as a span of its own."""
    return [Span(window.start_ns, window.end_ns, window.num_steps) for window in windows]


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
