"""The instrument on simulated noise: its error rates, with the usual tests beside it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from kprof.analyze.calibration.designs import (
    alternating_order,
    blocks_of,
    differences_of,
    random_order,
)
from kprof.analyze.calibration.noise import NOISES, Noise
from kprof.analyze.calibration.result import EFFECTS, Calibration, Rate, Scenario
from kprof.analyze.calibration.tally import Known, look_at_all, scenario_of
from kprof.analyze.calibration.targets import targets_of_simulation
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.comparison import Metric, Plan

NOMINAL = 0.05
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
    for effect in (0.0, *EFFECTS):
        made = noise.make((num_comparisons, 2 * num_pairs), rng)
        order = random_order(num_comparisons, num_pairs, rng)
        differences = differences_of(made, order, effect, noise)
        found.append(Known(effect, float(np.log1p(effect)), differences))
        samples = made if effect == 0 else samples
    rivals = _rivals(samples, noise, levels)
    return scenario_of(noise.name, noise.says, found, levels, rivals)


def _rivals(samples: Floats, noise: Noise, levels: Levels) -> dict[str, Rate]:
    """Return the false positives of other designs on samples in which A and B are alike."""
    from scipy.stats import mannwhitneyu, ttest_ind

    a, b = blocks_of(samples, noise)
    order = alternating_order(len(samples), samples.shape[1] // 2)
    look = look_at_all(differences_of(samples, order, 0.0, noise), replace(levels, fixed=NOMINAL))
    found = {
        "blocked, Welch": ttest_ind(a, b, axis=1, equal_var=False).pvalue <= NOMINAL,
        "blocked, Mann-Whitney": mannwhitneyu(a, b, axis=1, method="asymptotic").pvalue <= NOMINAL,
        "ABBA, signed ranks": (look.low > 0) | (look.high < 0),
    }
    return {name: Rate(int(flags.sum()), int(flags.size)) for name, flags in found.items()}
