"""A against B in alternating processes: a pair is a process of each, in random order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import isfinite, log, log1p
from pathlib import Path
from statistics import mean, median

import numpy as np

from kprof.ab.variants import AbOptions, Tell, measure_host_resolution_ns
from kprof.analyze.verdict.constancy import say_warm_up
from kprof.analyze.verdict.judge import fewest_for_verdict, fewest_pairs, is_enough, judge
from kprof.analyze.verdict.rule import FIXED_PAIRS
from kprof.collect.trials import Schedule, Trial, Variant, Window, run_trial
from kprof.comparison import Claim, Comparison, Metric, Pair, Plan, save_pairs
from kprof.errors import KprofError, counted
from kprof.findings import Caveat
from kprof.report.units import format_count

STEP = Metric("step time", "ns")
RUN = Metric("run time", "ns")
ENERGY = Metric("energy per step", "J")
# What doubts are about.
TRIAL, NO_ENERGY = "trial", "energy_not_compared"
NUM_WINDOWS = 5
# The energy counter is too coarse for less.
ENERGY_WINDOW_S = 1.0


def alternate(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> Comparison:
    """Take pairs of processes until the verdict stands, or all are taken.

    A first process of each is not counted: it fills the caches of files and compilers, and shows
    what can be measured, before the plan is made.
    """
    schedules = {label: _schedule(options, label) for label in "AB"}
    tell("first process of each, not counted")
    pilots = [_trial(v, schedules[v.label], folder / "raw" / "pilot") for v in (a, b)]
    plan = _plan(options, pilots)
    tell(
        f"comparing {plan.metrics[0].name} in at most {plan.max_pairs} pairs of processes, "
        f"{fewest_pairs(plan)} at the least"
    )
    orders = plan.orders()
    taken: list[Pair] = []
    steps: dict[str, list[tuple[int, ...]]] = {"A": [], "B": []}
    reasons: list[str] = []
    ratios: list[list[float]] = []
    doubts = _doubts(plan, options, pilots)
    began_s = time.monotonic()
    while not is_enough(plan, taken):
        is_a_first = next(orders)
        start_ns = time.time_ns()
        where = folder / "raw" / f"{len(taken) + 1:03d}"
        in_order = (a, b) if is_a_first else (b, a)
        try:
            trials = {v.label: _trial(v, schedules[v.label], where) for v in in_order}
        except KeyboardInterrupt:
            if not taken:
                raise
            doubts += (stopped(plan, len(taken)),)
            break
        for label, trial in trials.items():
            steps[label].append(tuple(one for w in trial.windows for one in w.steps_ns))
            reasons.append(trial.why_no_energy)
        ratios.append(_ratios(trials["A"], trials["B"]))
        taken.append(_pair(plan, trials["A"], trials["B"], is_a_first, start_ns))
        save_pairs(plan, taken, folder)
        left = time_left(len(taken), plan, time.monotonic() - began_s)
        tell(f"{_progress(taken, plan)}; {left}")
    if ENERGY in plan.metrics:
        doubts += _doubts_of_energy(reasons)
    fewest_steps = min((w.num_steps for trial in pilots for w in trial.windows), default=1)
    claims = judge(plan, taken, resolution_ns=measure_host_resolution_ns() / fewest_steps)
    return Comparison(
        name=Path(options.words[0]).name,
        a=a.difference,
        b=b.difference,
        plan=plan,
        pairs=tuple(taken),
        claims=tuple(_constant(claim, plan, ratios) for claim in claims),
        protocol=_protocol(plan, schedules["A"]),
        doubts=doubts,
        steps_ns={label: tuple(runs) for label, runs in steps.items()},
        facts=facts_of(a, b, pilots),
    )


def _schedule(options: AbOptions, label: str) -> Schedule:
    window_s = max(options.window_s, ENERGY_WINDOW_S) if options.energy else options.window_s
    return Schedule(label * NUM_WINDOWS, skip=options.skip, window_s=window_s)


def _trial(variant: Variant, schedule: Schedule, folder: Path) -> Trial:
    return run_trial(
        variant,
        schedule,
        folder / variant.label,
        is_enough=lambda windows: len(windows) >= NUM_WINDOWS,
    )


def _plan(options: AbOptions, pilots: Sequence[Trial]) -> Plan:
    """Decide what is compared, from what the first processes showed.

    Raises:
        KprofError: one of the two took steps and the other did not.
    """
    stepped = [trial.label for trial in pilots if trial.windows]
    if len(stepped) == 1:
        raise KprofError(
            f"only {stepped[0]} took enough steps to be timed, so the two cannot be compared",
            fix=f"see {pilots[0].log} and {pilots[1].log}; fewer warm-up steps: --skip",
        )
    metrics: tuple[Metric, ...] = (STEP,) if stepped else (RUN,)
    if options.energy and all(trial.joules_per_step is not None for trial in pilots):
        metrics += (ENERGY,)
    return Plan(
        metrics,
        smallest_effect=options.smallest_effect,
        max_pairs=options.pairs or FIXED_PAIRS,
        stops_early=not options.fixed,
        seed=options.seed,
    )


def _doubts(plan: Plan, options: AbOptions, pilots: Sequence[Trial]) -> tuple[Caveat, ...]:
    problems = dict.fromkeys(problem for trial in pilots for problem in trial.problems)
    doubts = [Caveat(TRIAL, problem) for problem in problems]
    if plan.metrics[0] is RUN:
        told = "Neither took steps that kprof knows, so whole runs are compared, start-up included."
        doubts.append(Caveat("whole_runs", told))
    if options.energy and ENERGY not in plan.metrics:
        why = next(trial.why_no_energy for trial in pilots if trial.joules_per_step is None)
        doubts.append(Caveat(NO_ENERGY, f"Energy is not compared: {why}."))
    return tuple(doubts)


def stopped(plan: Plan, num_taken: int) -> Caveat:
    """Say that the user stopped the sampling, and where it was too soon for any verdict."""
    said = f"It was stopped by hand after {num_taken} of {plan.max_pairs} pairs"
    least = fewest_for_verdict(plan)
    end = "." if num_taken >= least else f": no verdict comes before {least}."
    return Caveat("stopped_by_hand", f"{said}{end}")


def _ratios(a: Trial, b: Trial) -> list[float]:
    """Return the log ratios of B's windows to A's, in order; none where one of them is missing."""
    times = [[w.time_ns for w in _good(trial)] for trial in (a, b)]
    if any(len(of) != NUM_WINDOWS for of in times):
        return []
    return [log(of_b / of_a) for of_a, of_b in zip(*times, strict=True)]


def _good(trial: Trial) -> list[Window]:
    return [window for window in trial.windows if not window.problem]


def _pair(plan: Plan, a: Trial, b: Trial, is_a_first: bool, start_ns: int) -> Pair:
    problems = [w.problem for trial in (a, b) for w in trial.windows if w.problem]
    is_bad = any(trial.windows and not _good(trial) for trial in (a, b))
    return Pair(
        a=tuple(_value(metric, a) for metric in plan.metrics),
        b=tuple(_value(metric, b) for metric in plan.metrics),
        is_a_first=is_a_first,
        start_ns=start_ns,
        clocks_mhz=(_clock(a), _clock(b)),
        mean_a=tuple(_mean(metric, a) for metric in plan.metrics),
        mean_b=tuple(_mean(metric, b) for metric in plan.metrics),
        num_windows=max(1, min(len(_good(a)), len(_good(b)))),
        problem=problems[0] if is_bad else "",
    )


def _value(metric: Metric, trial: Trial) -> float:
    if metric is RUN:
        return float(trial.wall_ns)
    if metric is ENERGY:
        return float("nan") if trial.joules_per_step is None else trial.joules_per_step
    windows = _good(trial) or trial.windows
    return median(w.time_ns for w in windows) if windows else float("nan")


def _clock(trial: Trial) -> float | None:
    clocks = [w.sm_clock_mhz for w in trial.windows if w.sm_clock_mhz is not None]
    return median(clocks) if clocks else None


def _mean(metric: Metric, trial: Trial) -> float:
    """Return the mean of the windows where the value is their median: costs follow the mean."""
    windows = _good(trial) or trial.windows
    if metric is not STEP or not windows:
        return _value(metric, trial)
    return mean(w.time_ns for w in windows)


def time_left(num_taken: int, plan: Plan, elapsed_s: float) -> str:
    """Return how long the other pairs will take, those at the least and all of them, in words."""
    each_s = elapsed_s / num_taken
    least_s, most_s = (
        max(number - num_taken, 0) * each_s for number in (fewest_pairs(plan), plan.max_pairs)
    )
    if not most_s:
        return "no pair left"
    least = f"{duration_in_words(least_s)} to " if least_s else "at most "
    return f"{least if least_s < most_s else ''}{duration_in_words(most_s)} left"


def duration_in_words(seconds: float) -> str:
    """Return a time for somebody who waits: in seconds below two minutes, else in minutes."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 119.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _progress(taken: Sequence[Pair], plan: Plan) -> str:
    last = taken[-1]
    change = 100 * (last.b[0] / last.a[0] - 1)
    said = f"B {change:+.1f} %" if isfinite(change) else "no step was timed in one of the two"
    return f"pair {len(taken)} of at most {plan.max_pairs}: {said}"


def _doubts_of_energy(reasons: Sequence[str]) -> tuple[Caveat, ...]:
    """Say why the energy of some processes is missing; each reason is empty where it is not."""
    counts = Counter(reason for reason in reasons if reason)
    return tuple(
        Caveat(
            "energy_missing",
            f"The energy of {number} of {counted(len(reasons), 'process', 'processes')} is "
            f"missing: {reason}.",
        )
        for reason, number in counts.items()
    )


def _constant(claim: Claim, plan: Plan, ratios: Sequence[Sequence[float]]) -> Claim:
    """Return a claim; on steps whose ratio changes within each process, none."""
    whole = np.array([of for of in ratios if of], dtype=float)
    reason = say_warm_up(whole, log1p(plan.smallest_effect)) if claim.metric is STEP else ""
    return Claim(claim.metric, "INVALID", claim.num_pairs, why=reason) if reason else claim


def _protocol(plan: Plan, schedule: Schedule) -> str:
    how = "Alternating processes in random order, one of A and one of B a pair: "
    if plan.metrics[0] is RUN:
        return how + "the whole time of each, from its start to its end."
    return (
        f"{how}of each the median of {NUM_WINDOWS} windows of at least {schedule.window_s:g} s "
        f"after {format_count(schedule.skip, 'step')}, from an idle GPU to an idle GPU."
    )


def facts_of(a: Variant, b: Variant, trials: Sequence[Trial]) -> dict[str, str]:
    """Return what it takes to do the comparison again, and what it ran on."""
    facts = {"command of A": a.line, "command of B": b.line}
    first = trials[0]
    if first.device_name:
        facts["GPU"] = first.device_name
    if first.rule:
        facts["step"] = first.rule
    facts |= first.versions
    peaks = [_peak(trial) for trial in trials]
    if None not in peaks:
        facts["peak memory of A, B"] = " , ".join(f"{peak:,} B" for peak in peaks)
    return facts


def _peak(trial: Trial) -> int | None:
    return max((w.peak_memory_bytes for w in trial.windows if w.peak_memory_bytes), default=None)
