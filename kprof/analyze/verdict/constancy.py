"""Whether B over A stayed one ratio: it changes, it wanders, or a sample slows the one after it.

Everything works on the last axis, for one comparison or for thousands of simulated ones. Drift is
harmless, for both samples of a pair have it. These two are not: no pairing takes them away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kprof.analyze.verdict.ranks import Floats, p_value, walsh_averages

Flags = npt.NDArray[np.bool_]

# A part of the pairs that is shorter than this is no evidence of a change.
SHORTEST_PART = 5
# Standard deviations of a rank sum at the best split: 0.1 % of equal pairs reach them.
CHANGE_DEVIATIONS = 3.9
# The middle halves of two parts are so many standard deviations apart: in less than 0.5 % of equal
# pairs. A rank sum cannot reach the limit above where one part is short, however far apart it is.
# The deviation of few pairs is itself uncertain, hence the second number, over that of the pairs.
CHANGE_GAP, CHANGE_GAP_OF_FEW = 1.5, 15.0
MAD_OF_NORMAL = 0.6745
# Neighbours up to so many pairs apart are compared, and so many standard deviations of their rank
# correlations together are evidence: 0.1 % of equal pairs reach them.
FURTHEST_NEIGHBOUR, WAVE_DEVIATIONS = 3, 3.0
# What those further apart add to the correlations, where each is a part of the one before.
FURTHER_NEIGHBOURS = 1.5
# A difference beyond the margin by so many standard errors is one, however the ratio wanders.
SURE_DEVIATIONS = 3.0
# Fainter likeness, which 3 % of equal pairs reach, leaves a difference beyond the margin as it is
# where 0 is so many of the same standard errors away.
FAINT_WAVE_DEVIATIONS, SURE_OF_FAINT = 2.0, 4.0
# Standard deviations from the median, by the median deviation, beyond which a pair is a stall.
WIDEST_WAVE = 3.0
# A ratio that wanders is one ratio all the same where so many parts in time deserve one verdict.
NUM_PARTS = 4
# Standard deviations of a rank sum within pairs of one order, and of both orders: 0.3 % and 0.1 %
# of equal pairs, two-sided.
CARRY_OVER_DEVIATIONS, CARRY_OVER_OF_BOTH = 3.0, 3.3


@dataclass(frozen=True)
class Change:
    """Whether the ratio changed, and how many pairs came before that."""

    is_found: Flags
    turns_verdict: Flags
    """The ratios before and after deserve different verdicts: less, alike or more."""
    num_before: npt.NDArray[np.intp]


def find_change(differences: Floats, margin: float) -> Change:
    """Look for a time from which on the log ratios are others, by more than the margin.

    `differences` are in the order in which they were taken. Every split is looked at.
    """
    num_pairs = differences.shape[-1]
    places = np.arange(SHORTEST_PART, num_pairs - SHORTEST_PART + 1)
    if not len(places):
        nothing = np.zeros(differences.shape[:-1], bool)
        return Change(nothing, nothing, np.zeros(nothing.shape, np.intp))
    deviations = _rank_sums(differences)[..., places - 1]
    deviations /= np.sqrt(places * (num_pairs - places) * (num_pairs + 1) / 12)
    gap, before, after = _compare_parts(differences, places)
    widest = CHANGE_GAP + CHANGE_GAP_OF_FEW / num_pairs
    scores = np.maximum(np.abs(deviations) / CHANGE_DEVIATIONS, gap / widest)
    # A small change that is proven matters as little as a small difference.
    scores[np.abs(after - before) <= margin] = 0.0
    is_turn = _side_of(before, margin) != _side_of(after, margin)
    is_found, is_turned = (scores >= 1).any(axis=-1), ((scores >= 1) & is_turn).any(axis=-1)
    # Among splits that turn the verdict, where there are some, the clearest.
    scores[is_turned] = np.where(is_turn, scores, 0.0)[is_turned]
    return Change(np.asarray(is_found), np.asarray(is_turned), places[scores.argmax(axis=-1)])


def _side_of(log_ratio: Floats, margin: float) -> Floats:
    """Return -1, 0 or 1 for less, alike and more."""
    return np.sign(log_ratio) * (np.abs(log_ratio) > margin)


def _rank_sums(differences: Floats) -> Floats:
    """Return after each pair the sum of the ranks so far, less what is expected of equal pairs."""
    above = np.sign(differences[..., :, None] - differences[..., None, :]).sum(axis=-1) / 2
    return np.asarray(np.cumsum(above, axis=-1))


def _compare_parts(differences: Floats, places: npt.NDArray[np.intp]) -> tuple[Floats, ...]:
    """Return the gap between the middle halves in standard deviations, and both medians.

    All splits are compared at once, along a new last axis.
    """
    is_first = np.arange(differences.shape[-1]) < places[:, None]
    low_1, middle_1, high_1 = _quartiles_where(differences, is_first)
    low_2, middle_2, high_2 = _quartiles_where(differences, ~is_first)
    middles = np.where(is_first, middle_1[..., None], middle_2[..., None])
    away = np.abs(differences[..., None, :] - middles)
    deviation = np.median(away, axis=-1) / MAD_OF_NORMAL
    gap = np.maximum(low_2 - high_1, low_1 - high_2)
    in_deviations = np.where(gap > 0, np.inf, 0.0)
    np.divide(gap, deviation, out=in_deviations, where=deviation > 0)
    return in_deviations, middle_1, middle_2


def _quartiles_where(values: Floats, flags: Flags) -> list[Floats]:
    """Return the quartiles of the values that each row of flags takes, along a new last axis."""
    ordered = np.sort(np.where(flags, values[..., None, :], np.inf), axis=-1)
    rows, last = np.arange(len(flags)), flags.sum(axis=-1) - 1
    found = []
    for share in (0.25, 0.5, 0.75):
        below = np.floor(share * last).astype(np.intp)
        above = np.minimum(below + 1, last)
        part = share * last - below
        low, high = ordered[..., rows, below], ordered[..., rows, above]
        found.append(np.asarray(low + part * (high - low)))
    return found


# In processes without a warm-up, the first and the last window differ so clearly in 0.1 %.
WARM_UP_P = 0.001


def say_warm_up(ratios: Floats, margin: float) -> str:
    """Say that B over A changes within each process so that the verdict turns; empty: it does not.

    `ratios` holds the log ratios of B's windows to A's, a row for each pair of processes. Every
    process begins anew, so that a warm-up repeats in each of them, and pairs in time agree.
    """
    if ratios.ndim != 2 or ratios.shape[1] < 2 or len(ratios) < 2 * SHORTEST_PART:
        return ""
    first, last = ratios[:, 0], ratios[:, -1]
    chance = float(p_value(walsh_averages(first - last), len(first)))
    before, after = float(np.median(first)), float(np.median(last))
    is_turn = _side_of(np.array(before), margin) != _side_of(np.array(after), margin)
    if chance >= WARM_UP_P or abs(before - after) <= margin or not is_turn:
        return ""
    return (
        f"B over A was {np.exp(before):.4f} in the first window of a process and "
        f"{np.exp(after):.4f} in the last: one of the two warms up late, so raise --skip."
    )


@dataclass(frozen=True)
class Waves:
    """Whether neighbouring pairs are alike: B wanders, or goes to and fro between states."""

    is_found: Flags
    turns_verdict: Flags
    """Parts of the comparison deserve different verdicts, or the waves may have made this one."""
    lowest: Floats
    """The least median of a part, as a log ratio."""
    highest: Floats


def find_waves(differences: Floats, margin: float) -> Waves:
    """Look for log ratios that are like those of the pairs before them.

    Noise that A and B share enters a pair with the sign of a coin, so that neighbours are not alike
    by it. Where they are, the pairs hold less than as many independent ones would.
    """
    num_pairs = differences.shape[-1]
    ranks = differences.argsort(axis=-1).argsort(axis=-1) - (num_pairs - 1) / 2
    whole = (ranks**2).sum(axis=-1)
    lags = range(1, min(FURTHEST_NEIGHBOUR, num_pairs - 1) + 1)
    # For equal pairs, each correlation is -1/n on average, with a variance of about 1/n.
    likeness = [(ranks[..., lag:] * ranks[..., :-lag]).sum(axis=-1) / whole for lag in lags]
    together = np.asarray(sum(likeness))
    excess = (together + len(lags) / num_pairs) * (num_pairs / len(lags)) ** 0.5
    parts = np.array_split(differences, NUM_PARTS, axis=-1)
    medians = np.stack([np.median(part, axis=-1) for part in parts], axis=-1)
    lowest, highest = medians.min(axis=-1), medians.max(axis=-1)
    is_found = excess >= WAVE_DEVIATIONS
    is_found &= highest - lowest > margin
    is_turn = _side_of(lowest, margin) != _side_of(highest, margin)
    inflation = 1 + 2 * FURTHER_NEIGHBOURS * np.maximum(together, 0.0)
    error = differences.std(axis=-1) * (inflation / num_pairs) ** 0.5
    distance = np.abs(np.median(differences, axis=-1))
    is_turn |= distance < margin + SURE_DEVIATIONS * error
    of_next = (likeness[0] + 1 / num_pairs) * num_pairs**0.5
    is_faint = np.maximum(excess, of_next) >= FAINT_WAVE_DEVIATIONS
    inner = _without_tails(differences)
    nearest = np.minimum(distance, np.abs(inner.mean(axis=-1)))
    is_faint &= (highest - lowest > margin) & (distance >= margin)
    is_faint &= nearest < SURE_OF_FAINT * inner.std(axis=-1) * (inflation / num_pairs) ** 0.5
    turns_verdict = (is_found & is_turn) | is_faint
    return Waves(np.asarray(is_found | is_faint), np.asarray(turns_verdict), lowest, highest)


def _without_tails(values: Floats) -> Floats:
    """Return the values, with those far from the median moved in: stalls are no waves."""
    middle = np.median(values, axis=-1, keepdims=True)
    deviation = np.median(np.abs(values - middle), axis=-1, keepdims=True) / MAD_OF_NORMAL
    reach = WIDEST_WAVE * deviation
    return np.asarray(np.clip(values, middle - reach, middle + reach))


@dataclass(frozen=True)
class CarryOver:
    """Whether a sample depends on which variant ran before it."""

    is_found: Flags
    turns_verdict: Flags
    """It is as large as the difference between the two less the margin."""
    size: Floats
    """Log ratio of a sample after B to one after A."""


def find_carry_over(
    differences: Floats, is_a_first: Flags, follows_b: Flags, is_known: Flags, margin: float
) -> CarryOver:
    """Compare samples after B with samples after A of the same variant.

    Only the first sample of a pair can follow either. It is compared in pairs of the same order,
    over its partner, so that drift and what comes second do not matter. `follows_b` tells whether
    the sample before the pair was one of B, where `is_known`. It is looked for in A's samples, in
    B's, and in both together.
    """
    first_over_second = np.where(is_a_first, -differences, differences)
    both = _after_b(first_over_second, follows_b, is_known, is_a_first)
    of_a = _after_b(first_over_second, follows_b, is_known & is_a_first, is_a_first)
    of_b = _after_b(first_over_second, follows_b, is_known & ~is_a_first, is_a_first)
    is_found = np.zeros(differences.shape[:-1], bool)
    size = np.zeros(differences.shape[:-1])
    limits = (CARRY_OVER_DEVIATIONS, CARRY_OVER_DEVIATIONS, CARRY_OVER_OF_BOTH)
    for (deviations, apart), least in zip((of_b, of_a, both), limits, strict=True):
        here = (deviations >= least) & (np.abs(apart) > margin)
        size = np.where(here, apart, size)
        is_found |= here
    distance = np.abs(np.median(differences, axis=-1))
    return CarryOver(is_found, is_found & (distance - np.abs(size) <= margin), size)


def _after_b(
    values: Floats, follows_b: Flags, counts: Flags, is_a_first: Flags
) -> tuple[Floats, Floats]:
    """Return the deviations of the stratified rank sum, and how far apart the medians are."""
    signs = np.sign(values[..., :, None] - values[..., None, :])
    after_b, after_a = follows_b & counts, ~follows_b & counts
    total, variance = np.zeros(values.shape[:-1]), np.zeros(values.shape[:-1])
    weights, apart = np.zeros(values.shape[:-1]), np.zeros(values.shape[:-1])
    for stratum in (is_a_first, ~is_a_first):
        of_b, of_a = after_b & stratum, after_a & stratum
        num_b, num_a = of_b.sum(axis=-1), of_a.sum(axis=-1)
        total += np.einsum("...i,...ij,...j->...", of_b, signs, of_a, optimize=True) / 2
        here = num_a * num_b * (num_a + num_b + 1) / 12
        variance += here
        medians = _median_where(values, of_b) - _median_where(values, of_a)
        apart += np.where(here > 0, here * np.nan_to_num(medians), 0.0)
        weights += here
    deviations = np.abs(total) / np.sqrt(np.maximum(variance, 1e-300))
    return deviations, apart / np.maximum(weights, 1e-300)


def _median_where(values: Floats, flags: Flags) -> Floats:
    """Return the median of the flagged values of each row, NaN where there are none."""
    count = flags.sum(axis=-1)
    ordered = np.sort(np.where(flags, values, np.inf), axis=-1)
    ends = np.stack([np.maximum(count - 1, 0) // 2, count // 2], axis=-1)
    ends = np.minimum(ends, values.shape[-1] - 1)
    middle = np.take_along_axis(ordered, ends, axis=-1).mean(axis=-1)
    return np.where(count > 0, middle, np.nan)
