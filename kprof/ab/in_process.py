"""A against B in one process: a change is switched on or off between steps, in random order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from math import isfinite, nan
from pathlib import Path

from kprof.ab.processes import ENERGY, NO_ENERGY, STEP, TRIAL, facts_of, stopped, time_left
from kprof.ab.variants import AbOptions, Tell, measure_host_resolution_ns
from kprof.analyze.verdict.judge import fewest_pairs, is_enough, judge
from kprof.analyze.verdict.rule import FIXED_PAIRS, MOST_PAIRS
from kprof.collect.trials import Schedule, Trial, TrialInterrupted, Variant, Window, run_trial
from kprof.collect.windows import can_count_energy
from kprof.comparison import Claim, Comparison, Metric, Pair, Plan, save_pairs
from kprof.errors import KprofError, counted
from kprof.findings import Caveat
from kprof.kernels.swap.swap_report import SWAP_REPORT

SWAP = "kprof.kernels.swap.swapping:all_models"
# The energy counter needs 2 s, and a window is as long as its steps were expected to take.
ENERGY_WINDOW_S = 2.5
NO_COUNTER = "no GPU of this machine has an energy counter that can be read"


def flip(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> Comparison:
    """Take pairs of neighbouring windows of one process until the verdict stands.

    Raises:
        KprofError: the process took too few steps for a single pair.
    """
    plan = _plan(options)
    schedule = _schedule(plan, options, folder)
    least = fewest_pairs(plan)
    least_s = 2 * least * schedule.window_s
    tell(
        f"comparing {STEP.name} in one process, in at most {plan.max_pairs} pairs of windows of "
        f"{schedule.window_s:g} s: {least} pairs, {least_s:.0f} s at the least"
    )

    def look(windows: Sequence[Window]) -> bool:
        taken = pairs_of(windows, plan)
        save_pairs(plan, taken, folder)
        if taken and len(windows) % 2 == 0:
            percent = 100 * (taken[-1].b[0] / taken[-1].a[0] - 1)
            elapsed_s = (time.time_ns() - taken[0].start_ns) / 1e9
            left = time_left(len(taken), plan, elapsed_s)
            tell(f"pair {len(taken)} of at most {plan.max_pairs}: B {percent:+.1f} %; {left}")
        # The counter is read a moment after a window has ended: until then its energy is missing.
        is_whole = taken and isfinite(sum(taken[-1].a + taken[-1].b))
        return plan.stops_early and is_enough(plan, taken if is_whole else taken[:-1])

    trial, is_interrupted = _take(a, schedule, folder, look)
    pairs = pairs_of(trial.windows, plan)
    if not pairs:
        raise _too_few(options.words[0], trial)
    # One that ended by itself, not because of its values, is judged as a plan of its length.
    has_ended = not is_interrupted and not is_enough(plan, pairs)
    doubts = [
        *(Caveat(TRIAL, problem) for problem in trial.problems),
        *_end(plan, len(pairs), has_ended, is_interrupted),
    ]
    if options.energy and ENERGY not in plan.metrics:
        why = trial.why_no_energy or NO_COUNTER
        doubts.append(Caveat(NO_ENERGY, f"Energy is not compared: {why}."))
    resolution_ns = measure_host_resolution_ns() / min(w.num_steps for w in trial.windows)
    claims = judge(plan, pairs, are_all=has_ended, resolution_ns=resolution_ns)
    return Comparison(
        name=Path(options.words[0]).name,
        a=a.difference,
        b=b.difference,
        plan=plan,
        pairs=pairs,
        claims=tuple(_believed(claim, trial) for claim in claims),
        protocol=(
            "In one process, the change switched on and off between steps, in random order: "
            f"windows of {counted(trial.windows[0].num_steps, 'step')}, one step uncounted before "
            "each, from "
            "an idle GPU to an idle GPU."
        ),
        doubts=tuple(doubts),
        steps_ns={arm: tuple(w.steps_ns for w in trial.windows if w.arm == arm) for arm in "AB"},
        facts=facts_of(a, b, [trial]),
    )


def _plan(options: AbOptions) -> Plan:
    has_energy = options.energy and can_count_energy()
    # Samples of seconds take too long for many, and need fewer: they scatter less.
    most = FIXED_PAIRS if options.fixed or has_energy else MOST_PAIRS
    return Plan(
        (STEP, ENERGY) if has_energy else (STEP,),
        smallest_effect=options.smallest_effect,
        max_pairs=options.pairs or most,
        stops_early=not options.fixed,
        seed=options.seed,
    )


def _schedule(plan: Plan, options: AbOptions, folder: Path) -> Schedule:
    window_s = max(options.window_s, ENERGY_WINDOW_S if ENERGY in plan.metrics else 0)
    patch: str | None = options.patch
    arguments: tuple[str, ...] = ()
    if options.swap:
        patch, arguments = SWAP, (options.swap, str((folder / SWAP_REPORT).resolve()))
    return Schedule(order_of(plan), options.skip, window_s, patch=patch, patch_arguments=arguments)


def order_of(plan: Plan) -> str:
    """Return which variant each window belongs to: AB or BA for each pair, by a fair coin."""
    return "".join("AB" if first else "BA" for first in islice(plan.orders(), plan.max_pairs))


def pairs_of(windows: Sequence[Window], plan: Plan) -> tuple[Pair, ...]:
    """Return the pairs of neighbouring windows; a last one without its partner is left over."""
    return tuple(_pair(windows[i], windows[i + 1], plan) for i in range(0, len(windows) - 1, 2))


def _pair(first: Window, second: Window, plan: Plan) -> Pair:
    is_a_first = first.arm == "A"
    a, b = (first, second) if is_a_first else (second, first)
    return Pair(
        a=tuple(_value(metric, a) for metric in plan.metrics),
        b=tuple(_value(metric, b) for metric in plan.metrics),
        is_a_first=is_a_first,
        start_ns=first.start_ns,
        clocks_mhz=(a.sm_clock_mhz, b.sm_clock_mhz),
        problem=a.problem or b.problem,
    )


def _value(metric: Metric, window: Window) -> float:
    if metric != ENERGY:
        return float(window.time_ns)
    return nan if window.joules is None else window.joules / window.num_steps


def _take(
    a: Variant, schedule: Schedule, folder: Path, look: Callable[[Sequence[Window]], bool]
) -> tuple[Trial, bool]:
    """Return the trial, and whether it was stopped by hand after the first pair."""
    try:
        return run_trial(a, schedule, folder / "raw", is_enough=look), False
    except TrialInterrupted as stop:
        if len(stop.trial.windows) < 2:
            raise
        return stop.trial, True


def _too_few(name: str, trial: Trial) -> KprofError:
    if not trial.rule:
        return KprofError(
            f"{name} took no steps that kprof knows, so there is nothing to switch between",
            fix='name its steps: with kprof.range("step"); or compare whole runs, with --env, '
            f"--arg or --python; its output: {trial.log}",
        )
    return KprofError(
        f"{name} ended before a pair of windows was taken",
        fix=f"let it take more steps, or shorten --window or --skip; its output: {trial.log}",
    )


def _end(plan: Plan, num_pairs: int, has_ended: bool, is_interrupted: bool) -> tuple[Caveat, ...]:
    if has_ended:
        told = f"The workload ended after {num_pairs} of {plan.max_pairs} pairs."
        return (Caveat("workload_ended", told),)
    return (stopped(plan, num_pairs),) if is_interrupted else ()


def _believed(claim: Claim, trial: Trial) -> Claim:
    """Return a claim; on energy that the sensors contradict, none."""
    if claim.metric != ENERGY or not trial.why_no_energy:
        return claim
    why = f"{trial.why_no_energy[0].upper()}{trial.why_no_energy[1:]}."
    return Claim(claim.metric, "INVALID", claim.num_pairs, why=why)
