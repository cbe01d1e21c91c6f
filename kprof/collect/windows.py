"""Timed windows of a workload's steps, with NVML's samples of each."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kprof.collect.nvml import LEAST_ENERGY_NS, POWER_LAG_NS, Nvml, Samples, Tail
from kprof.collect.process_folders import recorders_of
from kprof.collect.recorder.kprof_recorder.schedule import SHEET, Schedule
from kprof.device import BRAKES, THROTTLE_REASONS
from kprof.errors import counted

# Share of the arm's usual clock; below it, the GPU was throttled.
LEAST_CLOCK = 0.75


@dataclass(frozen=True)
class Window:
    """Some steps of one arm, timed together; times in ns, moments since 1970."""

    arm: str
    num_steps: int
    start_ns: int
    end_ns: int
    time_ns: float
    """Time per step, including everything between steps."""
    steps_ns: tuple[int, ...]
    """Durations of the steps themselves, at most 256, evenly spread."""
    first_step: int
    peak_memory_bytes: int | None = None
    """Allocated by torch on all GPUs of the process; None without a GPU."""
    sm_clock_mhz: float | None = None
    """The mean of NVML's samples inside the window; None if there are none."""
    joules: float | None = None
    """Energy of all GPUs of the workload; None for a window shorter than 2 s."""
    problem: str = ""
    """Which of the causes stated before speaks against it; empty: none."""

    @property
    def settled_ns(self) -> float:
        """Time per step without what the first one took more than the others.

        Before it, the GPU's queue was drained. Equal to `time_ns` with fewer than 2 steps.
        """
        later = self.steps_ns[1:]
        return (
            self.time_ns - (self.steps_ns[0] - fmean(later)) / self.num_steps
            if later
            else self.time_ns
        )


@dataclass
class Timed:
    """The messages of one process so far."""

    tail: Tail
    about: dict[str, Any] = field(default_factory=dict)
    """Its rule, rank, device and versions; empty before its first step."""
    arm: str | None = None
    """The arm that has the turn."""
    windows: list[dict[str, Any]] = field(default_factory=list)
    num_left_out: int = 0
    """Windows of another kind of step, which were timed before the kind was known that counts."""
    problems: list[str] = field(default_factory=list)
    is_patch_broken: bool = False
    is_over: bool = False
    """Whether no more windows come."""

    def look(self) -> None:
        """Read what has been added."""
        for line in self.tail.lines():
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "begin":
            self.about = line
            self.num_left_out += len(self.windows)
            self.windows.clear()
        elif kind == "turn":
            self.arm = line["arm"]
        elif kind == "window":
            self.windows.append(line)
        elif kind in ("caveat", "problem"):
            self.problems.append(line["text"])
            self.is_patch_broken |= line.get("is_of_patch", False)
        self.is_over |= kind in ("end", "problem")


class Sheets:
    """The messages of all processes of a workload, with NVML's samples."""

    def __init__(self, raw: Path) -> None:
        self._raw = raw
        self._timed: dict[Path, Timed] = {}
        self.samples = Samples(raw / "nvml.jsonl")

    def look(self) -> None:
        """Read what is new."""
        self.samples.look()
        for path in sorted(self._raw.glob(f"rank*-pid*/{SHEET}")):
            timed = self._timed.setdefault(path, Timed(Tail(path)))
            timed.look()

    @property
    def all(self) -> list[Timed]:
        """Every process that has told anything."""
        return list(self._timed.values())

    @property
    def leading(self) -> Timed | None:
        """The process whose windows count: of rank 0, and no helper of another's."""
        stepping = [timed for timed in self.all if timed.about]
        pids = {timed.about["pid"] for timed in stepping}
        leaders = [
            timed
            for timed in stepping
            if timed.about["rank"] == 0 and timed.about["started_by"] not in pids
        ]
        return max(leaders, key=lambda timed: len(timed.windows), default=None)

    @property
    def num_windows(self) -> int:
        """How many windows count so far."""
        return len(self.leading.windows) if self.leading is not None else 0

    def windows(self) -> tuple[Window, ...]:
        """Return the leading process's windows, judged by what NVML saw of its GPU."""
        leading = self.leading
        if leading is None or not leading.windows:
            return ()
        gpus = leading.about["gpus"]
        index = self.samples.index_of(gpus[0]) if gpus else None
        spans = [(line["start_ns"], line["end_ns"]) for line in leading.windows]
        clocks = [self._mean_clock(index, span) for span in spans]
        counts = [max(self.samples.inside(index, s, "num_processes"), default=0) for s in spans]
        least = min((count for count in counts if count), default=0)
        usual_mhz = _usual([line["arm"] for line in leading.windows], clocks)
        return tuple(
            Window(
                arm=line["arm"],
                num_steps=line["num_steps"],
                start_ns=line["start_ns"],
                end_ns=line["end_ns"],
                time_ns=line["time_ns"],
                steps_ns=tuple(line["steps_ns"]),
                first_step=line["first_step"],
                peak_memory_bytes=line["peak_memory_bytes"],
                sm_clock_mhz=clock,
                joules=self.joules(span),
                problem=_throttled(clock, usual_mhz.get(line["arm"]))
                or self._slowed(index, span)
                or ("another process came onto the GPU" if count > least else ""),
            )
            for line, span, clock, count in zip(leading.windows, spans, clocks, counts, strict=True)
        )

    @property
    def is_over(self) -> bool:
        """Whether no more windows come that count."""
        is_patch_broken = any(timed.is_patch_broken for timed in self.all)
        return is_patch_broken or (self.leading is not None and self.leading.is_over)

    @property
    def is_partitioned(self) -> bool:
        """Whether a GPU of the workload is shared by instances (MIG), which its sensors are not."""
        return any(self.samples.is_partitioned(index) for index in self._gpus())

    def joules(self, span_ns: tuple[int, int]) -> float | None:
        """Return what all GPUs of the workload took in a span; None of one shorter than 2 s."""
        return _sum(self.samples.joules(i, span_ns) for i in self._gpus())

    def power_against_counters(self, span_ns: tuple[int, int]) -> float | None:
        """Return the integral of power over what the energy counters say of the same span.

        Without the span's first second, which the power lags behind; None where either is missing.
        """
        steady_ns = span_ns[0] + POWER_LAG_NS, span_ns[1]
        counted = _sum(self.samples.counted_joules(i, steady_ns) for i in self._gpus())
        integrated = _sum(self.samples.joules_by_power(i, steady_ns) for i in self._gpus())
        return integrated / counted if counted and integrated is not None else None

    def _gpus(self) -> list[int | None]:
        """Return NVML's index of each GPU that takes part; none where one is on another machine."""
        abouts = [timed.about for timed in self.all if timed.about]
        if any(about["host"] != platform.node() for about in abouts):
            return []
        return list({self.samples.index_of(gpu) for about in abouts for gpu in about["gpus"]})

    def versions(self) -> dict[str, str]:
        """Return the versions of torch and of the driver that the leading process ran on."""
        about = self.leading.about if self.leading is not None else {}
        told = {"torch": about.get("torch"), "driver": self.samples.driver if about else None}
        return {name: version for name, version in told.items() if version}

    def problems(self) -> tuple[str, ...]:
        """Return what a reader of the windows has to know, as sentences."""
        told = [problem for timed in self.all for problem in timed.problems]
        recorders = recorders_of(self._raw).values()
        told += [problem for recorder in recorders for problem in recorder["problems"]]
        leading = self.leading
        if leading is None:
            return tuple(dict.fromkeys(told))
        about, gpus = leading.about, leading.about["gpus"]
        if about["world_size"] > 1:
            told.append(f"{about['world_size']} ranks took part; the windows are those of rank 0.")
        elif num_others := sum(1 for t in self.all if t.about and t is not leading):
            told.append(
                f"{_others(num_others)} took steps as well; the windows are those of "
                f"process {about['pid']}."
            )
        if leading.num_left_out:
            told.append(
                f"Left out: {counted(leading.num_left_out, 'window')} of another kind of step."
            )
        if any(line["is_unsteady"] for line in leading.windows):
            told.append("Steps still got faster when the warm-up came to its bound.")
        index = self.samples.index_of(gpus[0]) if gpus else None
        num_before = self.samples.first(index).get("num_processes", 0) if index is not None else 0
        if num_before:
            were = "was" if num_before == 1 else "were"
            told.append(f"{_others(num_before)} {were} on the GPU before it began.")
        return tuple(dict.fromkeys(told))

    def _mean_clock(self, index: int | None, span_ns: tuple[int, int]) -> float | None:
        clocks = self.samples.inside(index, span_ns, "sm_clock_mhz")
        return fmean(clocks) if clocks else None

    def _slowed(self, index: int | None, span_ns: tuple[int, int]) -> str:
        seen = 0
        for reasons in self.samples.inside(index, span_ns, "throttle_reasons"):
            seen |= int(reasons) & BRAKES
        names = [name for bit, name in THROTTLE_REASONS.items() if seen & bit]
        return f"the GPU slowed down: {', '.join(names)}" if names else ""


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


def _each(windows: Sequence[Window]) -> list[Span]:
    """Return every window as a span of its own."""
    return [Span(window.start_ns, window.end_ns, window.num_steps) for window in windows]


def _why_not_believed(spans: Sequence[Span], sheets: Sheets) -> str:
    """Return what speaks against the counters in these spans, or nothing."""
    checks = [sheets.power_against_counters((span.start_ns, span.end_ns)) for span in spans]
    worst = max((abs(check - 1) for check in checks if check is not None), default=None)
    if worst is None:
        return "power was not sampled, with which the energy counters could be checked"
    if worst > MOST_DISAGREEMENT:
        return f"the energy counters and the sampled power differ by {100 * worst:.0f} %"
    return ""


def _others(number: int) -> str:
    return "1 other process" if number == 1 else f"{number} other processes"


def _usual(arms: Sequence[str], clocks: Sequence[float | None]) -> dict[str, float]:
    """Return the usual clock of each arm: what one of them needs more power for is its own."""
    of: dict[str, list[float]] = {}
    for arm, clock in zip(arms, clocks, strict=True):
        if clock is not None:
            of.setdefault(arm, []).append(clock)
    return {arm: median(values) for arm, values in of.items()}


def _throttled(clock: float | None, usual_mhz: float | None) -> str:
    if clock is None or usual_mhz is None or clock >= LEAST_CLOCK * usual_mhz:
        return ""
    return f"the GPU's clock fell below {LEAST_CLOCK:.0%} of its usual {usual_mhz:.0f} MHz"


def _sum(joules: Iterable[float | None]) -> float | None:
    """Return the sum of what is known of every GPU; None if it is not of all, or of none."""
    all_of_them = list(joules)
    known = [one for one in all_of_them if one is not None]
    return sum(known) if known and len(known) == len(all_of_them) else None
