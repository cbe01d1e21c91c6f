"""Samples of A and B in pairs of random order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kprof.analyze.calibration.noise import Noise
from kprof.analyze.verdict.ranks import Floats

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
