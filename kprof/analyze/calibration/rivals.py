"""Other tests on the very same samples, all of one work: how often they see a difference."""

from __future__ import annotations

from dataclasses import replace

from kprof.analyze.calibration.designs import alternating_order, arms_of
from kprof.analyze.calibration.result import Rate
from kprof.analyze.calibration.tally import look_at_all
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels

NOMINAL = 0.05


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
