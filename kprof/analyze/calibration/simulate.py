"""The verdict's error rates on simulated noise of the kinds that shared machines make.

Every part works in log ratio on a table with a row a comparison and a column a sample, in the
order in which samples are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kprof.analyze.calibration.error_rates import (
    EFFECTS,
    GAINS,
    Calibration,
    Scenario,
    targets_of_simulation,
)
from kprof.analyze.calibration.tally import Known, scenario_of
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.comparison import Metric, Plan
from kprof.findings import Caveat

ENOUGH = 2_000
TOO_FEW = Caveat(
    "few_comparisons", f"Fewer than {ENOUGH:,} comparisons scatter: chance alone may miss a target."
)


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


Make = Callable[[tuple[int, int], np.random.Generator], Floats]

SPREAD = 0.007
"""Relative spread of one sample, unless stated otherwise."""


@dataclass(frozen=True)
class Noise:
    """A way in which samples scatter, with its parameters in words."""

    name: str
    says: str
    parts: tuple[Make, ...]
    tick: float = 0.0
    """Step of the clock over the undisturbed time; 0: as fine as a float."""

    def make(self, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
        """Return the log noise of so many comparisons, of so many samples each."""
        total = np.zeros(shape)
        for part in self.parts:
            total += part(shape, rng)
        return total


def independent(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Scatter each sample for itself."""
    return rng.normal(0.0, SPREAD, shape)


def drift(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Let all become 2 % slower, or faster, in a straight line."""
    way = rng.choice([-1.0, 1.0], (shape[0], 1))
    return np.asarray(0.02 * way * np.linspace(0.0, 1.0, shape[1]))


def wander(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Let each sample be like the one before: autoregressive, 0.98, of spread 1.5 %."""
    memory, spread = 0.98, 0.015
    kicks = rng.normal(0.0, spread * np.sqrt(1 - memory**2), shape)
    kicks[:, 0] = rng.normal(0.0, spread, shape[0])
    for i in range(1, shape[1]):
        kicks[:, i] += memory * kicks[:, i - 1]
    return kicks


def step(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Let all be 3 % slower from some sample on."""
    begin = rng.integers(0, shape[1], (shape[0], 1))
    return np.asarray(0.03 * (np.arange(shape[1]) >= begin))


def spikes(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Delay one sample in twenty, by 10 % on average, exponentially."""
    return np.asarray((rng.random(shape) < 0.05) * rng.exponential(0.1, shape))


def rhythm(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Delay every fourth sample by 1.5 %, as what runs beside at a steady pace does."""
    phase = rng.integers(0, 4, (shape[0], 1))
    return np.asarray(0.015 * ((np.arange(shape[1]) + phase) % 4 == 0))


def heavy(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Scatter with tails so heavy that a variance does not exist: Student's t of 2, scale 0.5 %."""
    return np.asarray(0.005 * rng.standard_t(2, shape))


NOISES = (
    Noise("independent", "each sample for itself, 0.7 %", (independent,)),
    Noise("drift", "and 2 % slower or faster over the run", (independent, drift)),
    Noise("autocorrelated", "and AR(1) of 0.98, 1.5 %", (independent, wander)),
    Noise("step", "and 3 % slower from some sample on", (independent, step)),
    Noise("spikes", "and 5 % of samples 10 % late", (independent, spikes)),
    Noise("rhythm", "and every fourth sample 1.5 % late", (independent, rhythm)),
    Noise(
        "all together",
        "drift, AR(1), step and spikes",
        (independent, drift, wander, step, spikes),
    ),
    Noise("coarse clock", "0.7 % on a clock of 0.25 % ticks", (independent,), tick=0.0025),
    Noise("heavy tails", "Student's t of 2, 0.5 %", (heavy,)),
)

Orders = npt.NDArray[np.bool_]


def samples_of(
    noise: Floats, is_a_first: Orders, effect: float, kind: Noise
) -> tuple[Floats, Floats]:
    """Return the logs of A's and of B's samples, where B takes `effect` longer than A."""
    first, second = noise[:, 0::2], noise[:, 1::2]
    a = shown(np.where(is_a_first, first, second), 0.0, kind)
    b = shown(np.where(is_a_first, second, first), effect, kind)
    return a, b


def arms_of(samples: Floats, is_a_first: Orders) -> tuple[Floats, Floats]:
    """Return A's and B's of neighbouring samples, from the logs of what the clock showed."""
    first, second = samples[:, 0::2], samples[:, 1::2]
    return np.where(is_a_first, first, second), np.where(is_a_first, second, first)


def random_order(num_comparisons: int, num_pairs: int, rng: np.random.Generator) -> Orders:
    """Return a fair coin for each pair."""
    return rng.random((num_comparisons, num_pairs)) < 0.5


def shown(noise: Floats, effect: float, kind: Noise) -> Floats:
    """Return the log of what the clock shows."""
    if not kind.tick:
        return np.asarray(noise + np.log1p(effect))
    return np.asarray(np.log(np.round(np.exp(noise) * (1 + effect) / kind.tick) * kind.tick))
