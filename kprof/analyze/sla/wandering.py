"""How far the mean of a run's slices may be off, where the slices wander together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from kprof.analyze.sla.bounds import CONFIDENCE
from kprof.analyze.sla.independence import CHANCE_OF_RUNS, RUNS_DIFFER, Numbers

LEAST_SLICES = 5
"""Fewer give no bound worth its name."""
LEAST_FREEDOM = 0.2
"""With fewer degrees of freedom a run is too short for a bound: its slices go one way all along."""
WANDERS = "the rate wanders"


class Reach(NamedTuple):
    """How far a mean may be off, infinite where nobody knows, and of how many slices it is."""

    reach: float
    num_independent: int
    why_fewer: str = ""


def reach_of(runs: Sequence[Numbers]) -> Reach:
    """Return how far the mean of all slices may be off: the furthest that is found.

    By the slices; by slices twice as long, as what wanders slowly hides behind noise in short
    ones; and by the means of the runs, where those differ by more than their slices explain.
    """
    found = [_by_slices(runs)]
    if all(len(run) >= 2 * LEAST_SLICES for run in runs):
        found.append(_by_slices([_twice_as_long(run) for run in runs]))
    if len(runs) > 1:
        found.append(_by_runs(runs))
    furthest = max(found, key=lambda each: each.reach)
    fewest = furthest.num_independent if furthest.why_fewer else sum(map(len, runs))
    return furthest._replace(num_independent=fewest)


def _by_slices(runs: Sequence[Numbers]) -> Reach:
    """Take what a slice has in common with the next for the way of all (a process AR(1)).

    Of n slices with a correlation r, n (1 - r) / (1 + r) count as independent. Short series show
    less of r than there is (Marriott and Pope, 1954), and less variance.
    """
    centred = [run - run.mean() for run in runs]
    num, squares = sum(map(len, runs)), float(sum((run**2).sum() for run in centred))
    if not squares:
        return Reach(0.0, num)
    alike = sum(float((run[1:] * run[:-1]).sum()) for run in centred) / squares
    length = num / len(runs)
    correlation = min(max((alike * length + 1) / (length - 3), 0.0), 1.0)
    independent = num * (1 - correlation) / (1 + correlation)
    why = WANDERS if correlation else ""
    freedom = independent - len(runs)
    if freedom < LEAST_FREEDOM:
        return Reach(np.inf, max(int(independent), 1), why)
    variance = squares / num * independent / freedom
    reach = float(stats.t.ppf(CONFIDENCE, freedom) * np.sqrt(variance / independent))
    return Reach(reach, max(int(independent), 1), why)


def _twice_as_long(run: Numbers) -> Numbers:
    pairs: Numbers = run[: len(run) // 2 * 2].reshape(-1, 2).mean(axis=1)
    return pairs


def _by_runs(runs: Sequence[Numbers]) -> Reach:
    """Take runs for what is independent, if they differ by more than chance among slices."""
    means, lengths = np.array([run.mean() for run in runs]), np.array([len(run) for run in runs])
    within = sum(float(((run - run.mean()) ** 2).sum()) for run in runs)
    variance = within / (lengths.sum() - len(runs))
    between = float((lengths * (means - np.average(means, weights=lengths)) ** 2).sum())
    freedom = len(runs) - 1
    if between <= variance * stats.chi2.ppf(1 - CHANCE_OF_RUNS, freedom):
        return Reach(0.0, int(lengths.sum()))
    reach = stats.t.ppf(CONFIDENCE, freedom) * means.std(ddof=1) / np.sqrt(len(runs))
    return Reach(float(reach), len(runs), RUNS_DIFFER)
