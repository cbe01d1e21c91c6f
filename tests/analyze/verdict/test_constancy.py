"""What is not constant in a comparison, found pair by pair with plain sums, on random ones."""

import math
from statistics import fmean, median, pstdev, quantiles

import numpy as np
import pytest

from kprof.analyze.verdict import constancy
from kprof.analyze.verdict.constancy import find_carry_over, find_change, find_waves

MARGIN = 0.01
SEEDS = range(40)


def sign(value):
    return (value > 0) - (value < 0)


def side(value):
    return sign(value) if abs(value) > MARGIN else 0


def drawn(seed):
    """Draw log ratios of some pairs: noise, with or without a step, waves, stalls and ties."""
    random = np.random.default_rng(seed)
    num_pairs = int(random.integers(8, 60))
    noise = random.normal(0, random.choice([0.002, 0.01, 0.03]), num_pairs)
    memory = random.choice([0.0, 0.4, 0.9])
    for place in range(1, num_pairs):
        noise[place] += memory * noise[place - 1]
    noise[random.integers(num_pairs) :] += random.choice([0.0, 0.005, 0.02, -0.04])
    noise += random.choice([0.0, 0.012, -0.03, 0.06])
    noise[random.random(num_pairs) < random.choice([0.0, 0.05])] += 0.3
    return np.round(noise, random.choice([2, 3, 9])), random


def split(values, place):
    """Return how clearly the values before a place differ from the others, and both medians."""
    first, rest = values[:place], values[place:]
    surplus = sum(sign(one - other) for one in first for other in rest) / 2
    deviations = surplus / math.sqrt(len(first) * len(rest) * (len(values) + 1) / 12)
    parts = [(quantiles(part, n=4, method="inclusive"), part) for part in (first, rest)]
    (low_1, before, high_1), (low_2, after, high_2) = (of for of, _ in parts)
    away = median(abs(one - of[1]) for of, part in parts for one in part) / 0.6745
    gap = max(low_2 - high_1, low_1 - high_2)
    in_deviations = gap / away if away else (math.inf if gap > 0 else 0.0)
    widest = constancy.CHANGE_GAP + constancy.CHANGE_GAP_OF_FEW / len(values)
    score = max(abs(deviations) / constancy.CHANGE_DEVIATIONS, in_deviations / widest)
    return (score if abs(after - before) > MARGIN else 0.0), before, after


def test_a_change_is_the_clearest_split_and_of_those_that_turn_the_verdict_if_any_does():
    outcomes = set()
    for seed in SEEDS:
        values, _ = drawn(seed)
        shortest = constancy.SHORTEST_PART
        splits = {
            place: split(values.tolist(), place)
            for place in range(shortest, len(values) - shortest + 1)
        }
        turning = {p: s for p, (s, b, a) in splits.items() if side(b) != side(a) and s >= 1}
        scores = turning or {place: score for place, (score, *_) in splits.items()}
        is_found = any(score >= 1 for score, *_ in splits.values())
        found = find_change(values, MARGIN)
        assert (bool(found.is_found), bool(found.turns_verdict)) == (is_found, bool(turning)), seed
        if is_found:
            assert scores[int(found.num_before)] == pytest.approx(max(scores.values())), seed
        outcomes.add((is_found, bool(turning)))
    assert outcomes == {(False, False), (True, False), (True, True)}


def test_parts_too_short_to_be_compared_have_no_change():
    for num_pairs in range(2 * constancy.SHORTEST_PART + 2):
        found = find_change(np.r_[np.zeros(num_pairs // 2), np.ones(num_pairs // 2)], MARGIN)
        assert bool(found.is_found) == (num_pairs // 2 >= constancy.SHORTEST_PART)


def wave_of(values):
    """Return whether neighbours are alike, and whether the verdict rests on it."""
    num = len(values)
    ranks = np.argsort(np.argsort(values)).tolist()
    centred = [rank - (num - 1) / 2 for rank in ranks]
    whole = sum(one**2 for one in centred)
    lags = range(1, min(constancy.FURTHEST_NEIGHBOUR, num - 1) + 1)
    alike = [sum(a * b for a, b in zip(centred, centred[n:], strict=False)) / whole for n in lags]
    excess = sum(one + 1 / num for one in alike) * math.sqrt(num / len(lags))
    medians = [median(part.tolist()) for part in np.array_split(values, constancy.NUM_PARTS)]
    is_apart = max(medians) - min(medians) > MARGIN
    inflation = 1 + 2 * constancy.FURTHER_NEIGHBOURS * max(sum(alike), 0.0)

    def error_of(some):
        return pstdev(some) * math.sqrt(inflation / num)

    distance = abs(median(values))
    is_near = distance < MARGIN + constancy.SURE_DEVIATIONS * error_of(values)
    turns = side(min(medians)) != side(max(medians)) or is_near
    is_found = excess >= constancy.WAVE_DEVIATIONS and is_apart
    of_next = (alike[0] + 1 / num) * math.sqrt(num)
    reach = constancy.WIDEST_WAVE * median(abs(one - median(values)) for one in values) / 0.6745
    inner = [min(max(one, median(values) - reach), median(values) + reach) for one in values]
    nearest = min(distance, abs(fmean(inner)))
    is_faint = max(excess, of_next) >= constancy.FAINT_WAVE_DEVIATIONS
    is_faint &= is_apart and distance >= MARGIN
    is_faint &= nearest < constancy.SURE_OF_FAINT * error_of(inner)
    return is_found or is_faint, (is_found and turns) or is_faint, min(medians), max(medians)


def test_waves_are_ranks_that_are_like_those_of_the_pairs_before():
    outcomes = set()
    for seed in range(3 * len(SEEDS)):
        values, _ = drawn(seed)
        is_found, turns, lowest, highest = wave_of(values)
        found = find_waves(values, MARGIN)
        assert (bool(found.is_found), bool(found.turns_verdict)) == (is_found, turns), seed
        assert (float(found.lowest), float(found.highest)) == pytest.approx((lowest, highest))
        outcomes.add((is_found, turns))
    assert outcomes == {(False, False), (True, False), (True, True)}


def after_b(values, follows_b, counts, is_a_first):
    """Return the deviations of the rank sums of both orders together, and the medians' distance."""
    total = variance = apart = 0.0
    for order in (True, False):
        here = [i for i, first in enumerate(is_a_first) if first == order and counts[i]]
        of_b = [values[i] for i in here if follows_b[i]]
        of_a = [values[i] for i in here if not follows_b[i]]
        weight = len(of_a) * len(of_b) * (len(of_a) + len(of_b) + 1) / 12
        total += sum(sign(one - other) for one in of_b for other in of_a) / 2
        variance += weight
        apart += weight * (median(of_b) - median(of_a)) if weight else 0.0
    return (abs(total) / math.sqrt(variance), apart / variance) if variance else (0.0, 0.0)


def test_carry_over_is_a_first_sample_that_depends_on_the_one_before_it():
    outcomes = set()
    for seed in SEEDS:
        values, random = drawn(seed)
        is_a_first, follows_b = random.random((2, len(values))) < 0.5
        is_known = random.random(len(values)) < random.choice([0.9, 1.0])
        effect = random.choice([0.0, 0.03, -0.08])
        only = random.choice(["A", "B", "both"])
        is_hit = {"A": is_a_first, "B": ~is_a_first, "both": np.ones(len(values), bool)}[only]
        values = values + effect * np.where(is_a_first, -1, 1) * (follows_b & is_hit)
        first_over_second = np.where(is_a_first, -values, values).tolist()
        is_found, size = False, 0.0
        looks = (
            (~is_a_first & is_known, constancy.CARRY_OVER_DEVIATIONS),
            (is_a_first & is_known, constancy.CARRY_OVER_DEVIATIONS),
            (is_known, constancy.CARRY_OVER_OF_BOTH),
        )
        for counts, least in looks:
            deviations, apart = after_b(first_over_second, follows_b, counts, is_a_first)
            if deviations >= least and abs(apart) > MARGIN:
                is_found, size = True, apart
        turns = is_found and abs(median(values)) - abs(size) <= MARGIN
        found = find_carry_over(values, is_a_first, follows_b, is_known, MARGIN)
        assert (bool(found.is_found), bool(found.turns_verdict)) == (is_found, turns), seed
        assert float(found.size) == pytest.approx(size), seed
        outcomes.add((is_found, turns))
    assert outcomes == {(False, False), (True, False), (True, True)}
