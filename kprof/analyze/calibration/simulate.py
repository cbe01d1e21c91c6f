"""The instrument on simulated noise: its error rates, with the usual tests beside it."""

from __future__ import annotations

import time

import numpy as np

from kprof.analyze.calibration.designs import random_order, samples_of, shown
from kprof.analyze.calibration.noise import NOISES, Noise
from kprof.analyze.calibration.result import EFFECTS, GAINS, Calibration, Scenario
from kprof.analyze.calibration.rivals import false_positives_of_rivals
from kprof.analyze.calibration.tally import Known, scenario_of
from kprof.analyze.calibration.targets import targets_of_simulation
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.comparison import Metric, Plan

ENOUGH = 2_000
TOO_FEW = f"Fewer than {ENOUGH:,} comparisons scatter: chance alone may miss a target."


def simulate(num_comparisons: int, num_pairs: int, seed: int, date: str) -> Calibration:
    """Judge so many comparisons of each noise and effect, each of so many pairs."""
    begin = time.perf_counter()
    plan = Plan((Metric("simulated", "ms"),), max_pairs=num_pairs, seed=seed)
    levels = levels_of(plan)
    # Noises have generators of their own: one more of them leaves the others as they were.
    generators = np.random.default_rng(seed).spawn(len(NOISES))
    scenarios = tuple(
        _scenario(noise, (num_comparisons, num_pairs), levels, rng)
        for noise, rng in zip(NOISES, generators, strict=True)
    )
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


def _scenario(
    noise: Noise, shape: tuple[int, int], levels: Levels, rng: np.random.Generator
) -> Scenario:
    num_comparisons, num_pairs = shape
    found, samples = [], np.empty(0)
    for effect in (0.0, *EFFECTS, *GAINS):
        made = noise.make((num_comparisons, 2 * num_pairs), rng)
        order = random_order(num_comparisons, num_pairs, rng)
        a, b = samples_of(made, order, effect, noise)
        found.append(Known(effect, float(np.log1p(effect)), a, b, order))
        samples = shown(made, 0.0, noise) if effect == 0 else samples
    rivals = false_positives_of_rivals(samples, levels)
    return scenario_of(noise.name, noise.says, found, levels, rivals)
