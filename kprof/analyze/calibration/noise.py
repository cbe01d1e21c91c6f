"""Noise as shared machines make it: what the time of one sample is, over what it would be.

Every part works in log ratio on a table with a row a comparison and a column a sample, in the
order in which samples are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kprof.analyze.verdict.ranks import Floats

Make = Callable[[tuple[int, int], np.random.Generator], Floats]

SPREAD = 0.007
"""Of one sample, where nothing else is said."""


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
