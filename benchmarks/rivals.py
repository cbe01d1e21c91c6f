"""Other tests on the very same samples, all of one work: how often they see a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kprof.analyze.calibration.error_rates import Rate
from kprof.analyze.calibration.simulate import NOISES, Orders, arms_of, shown
from kprof.analyze.calibration.tally import look_at_all
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.comparison import Metric, Plan

NOMINAL = 0.05


def rivals_under_noise(
    num_comparisons: int, num_pairs: int, seed: int
) -> dict[str, dict[str, Rate]]:
    """Return their false positives by noise, on the samples without an effect of `simulate`."""
    levels = levels_of(Plan((Metric("simulated", "ms"),), max_pairs=num_pairs, seed=seed))
    generators = np.random.default_rng(seed).spawn(len(NOISES))
    found = {}
    for noise, rng in zip(NOISES, generators, strict=True):
        made = noise.make((num_comparisons, 2 * num_pairs), rng)
        found[noise.name] = false_positives_of_rivals(shown(made, 0.0, noise), levels)
    return found


def alternating_order(num_comparisons: int, num_pairs: int) -> Orders:
    """Return the order of ABBA ABBA …: balanced, but not random."""
    return np.broadcast_to(np.arange(num_pairs) % 2 == 0, (num_comparisons, num_pairs))


def false_positives_of_rivals(samples: Floats, levels: Levels) -> dict[str, Rate]:
    """Return how often other designs, at 5 %, tell samples of one work apart.

    `samples` are logs of times, a row a comparison, in the order in which they were taken.
    """
    from scipy.stats import mannwhitneyu, ttest_ind

    half = samples.shape[1] // 2
    a, b = samples[:, :half], samples[:, half:]
    order = alternating_order(len(samples), half)
    of_a, of_b = arms_of(samples, order)
    look = look_at_all(of_b - of_a, replace(levels, fixed=NOMINAL))
    found = {
        "blocked, Welch": ttest_ind(a, b, axis=1, equal_var=False).pvalue <= NOMINAL,
        "blocked, Mann-Whitney": mannwhitneyu(a, b, axis=1, method="asymptotic").pvalue <= NOMINAL,
        "ABBA, signed ranks": (look.low > 0) | (look.high < 0),
    }
    return {name: Rate(int(flags.sum()), int(flags.size)) for name, flags in found.items()}
