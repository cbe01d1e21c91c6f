"""The instrument on simulated noise: its error rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kprof.analyze.calibration.designs import random_order, samples_of
from kprof.analyze.calibration.noise import NOISES, Noise
from kprof.analyze.calibration.result import EFFECTS, GAINS, Calibration, Scenario
from kprof.analyze.calibration.tally import Known, scenario_of
from kprof.analyze.calibration.targets import targets_of_simulation
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.comparison import Metric, Plan

ENOUGH = 2_000
TOO_FEW = f"Fewer than {ENOUGH:,} comparisons scatter: chance alone may miss a target."


@dataclass(frozen=True)
class Simulation:
    """The comparisons of one noise that are to be judged."""

    noise: Noise
    num_comparisons: int
    num_pairs: int
    levels: Levels
    rng: np.random.Generator


Each = Callable[[Callable[[Simulation], Scenario], Iterable[Simulation]], Iterable[Scenario]]


def simulate(
    num_comparisons: int, num_pairs: int, seed: int, date: str, each: Each = map
) -> Calibration:
    """Judge so many comparisons of each noise and effect, each of so many pairs.

    `each` applies a function to every noise, as `map` does: the `map` of a pool of processes.
    """
    begin = time.perf_counter()
    plan = Plan((Metric("simulated", "ms"),), max_pairs=num_pairs, seed=seed)
    levels = levels_of(plan)
    # Noises have generators of their own: one more of them leaves the others as they were.
    generators = np.random.default_rng(seed).spawn(len(NOISES))
    simulations = [
        Simulation(noise, num_comparisons, num_pairs, levels, rng)
        for noise, rng in zip(NOISES, generators, strict=True)
    ]
    scenarios = tuple(each(scenario_under, simulations))
    return Calibration(
        kind="simulated",
        device="simulated noise",
        driver=None,
        date=date,
        num_pairs=num_pairs,
        num_comparisons=num_comparisons,
        seed=seed,
        smallest_effect=plan.smallest_effect,
        alpha=plan.alpha,
        scenarios=scenarios,
        targets=targets_of_simulation(scenarios, plan.smallest_effect),
        took_s=time.perf_counter() - begin,
        doubts=(TOO_FEW,) if num_comparisons < ENOUGH else (),
    )


def scenario_under(simulation: Simulation) -> Scenario:
    """Judge the comparisons of one noise, those of each effect in turn."""
    noise, rng, levels = simulation.noise, simulation.rng, simulation.levels
    num_comparisons, num_pairs = simulation.num_comparisons, simulation.num_pairs
    found = []
    for effect in (0.0, *EFFECTS, *GAINS):
        made = noise.make((num_comparisons, 2 * num_pairs), rng)
        order = random_order(num_comparisons, num_pairs, rng)
        a, b = samples_of(made, order, effect, noise)
        found.append(Known(effect, float(np.log1p(effect)), a, b, order))
    return scenario_of(noise.name, noise.says, found, levels)
