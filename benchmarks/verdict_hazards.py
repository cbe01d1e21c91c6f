"""How often a verdict is false where two variants differ in more than a constant ratio.

python benchmarks/verdict_hazards.py
python benchmarks/verdict_hazards.py --jobs 16

Each hazard is a table of samples, a row a comparison, whose truth is known. Sampling stops and is
judged by the rule of `kprof ab`, for all comparisons of a hazard at once; one by one where the
clock's ticks, a floor or several windows of a sample decide.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence

from kprof.ab.compare import exit_code_of
from kprof.analyze.calibration.tally import Known, when_stopped, with_all_pairs
from kprof.analyze.verdict import is_enough, judge
from kprof.analyze.verdict.judge import fewest_pairs
from kprof.analyze.verdict.plausibility import CALL_NS, reason_below_floor
from kprof.analyze.verdict.rule import levels_of
from kprof.comparison import Metric, Pair, Plan

SPREAD, BASE_NS, SEED = 0.007, 1e7, 36
SHORT, LONG = 42, 162
COMPARISONS, BLOCK = 2_000, 100
SOURCES = (
    "benchmarks/verdict_hazards.py",
    "kprof/analyze/verdict/*.py",
    "kprof/analyze/calibration/tally.py",
    "kprof/ab/compare.py",
)
TIME = Metric("step time", "ns")
NUM_WINDOWS = 5
"""Of each process, where a pair is one of each variant."""

FASTER, SLOWER, DIFFERENT, PROVEN = (
    {"FASTER"},
    {"SLOWER"},
    {"FASTER", "SLOWER"},
    {"FASTER", "SLOWER", "SAME"},
)


@dataclass(frozen=True)
class Samples:
    """Logs of the times of comparisons over A's undisturbed time: a row each, pairs in time."""

    a: np.ndarray
    b: np.ndarray
    is_a_first: np.ndarray


@dataclass(frozen=True)
class Hazard:
    """A way in which samples mislead, and what would be false to say then."""

    name: str
    make: Callable
    """From a generator and a shape (comparisons, pairs) to samples."""
    most_pairs: int
    false: set
    """Verdicts; empty: an exit code of 1 instead."""
    reach: float = 1.0
    """The most that may be false, in percent."""
    is_of_processes: bool = False
    """Each pair holds five windows of each variant, of which the median is judged."""
    is_of_values: bool = False
    """The values themselves decide: the ticks of their clock, or a floor."""
    resolution: float | None = None
    """What the clock tells apart over A's undisturbed time, where it is asked; None: it is not."""


def coins(rng, shape):
    """Return whether A comes first, a fair coin for each pair."""
    return rng.random(shape) < 0.5


def noise(rng, shape, spread=SPREAD):
    """Return normal noise of each sample."""
    return rng.normal(0, spread, shape)


def in_time(first, second, is_a_first):
    """Return the samples of A and of B from those of both places of each pair."""
    return np.where(is_a_first, first, second), np.where(is_a_first, second, first)


def ratio_of(ratio):
    """Return a hazard that is none: B has this ratio all the time."""

    def make(rng, shape):
        return Samples(noise(rng, shape), np.log(ratio) + noise(rng, shape), coins(rng, shape))

    return make


def shared(series, ratio=1.0):
    """Return noise that all samples share in the order in which they are taken."""

    def make(rng, shape):
        order = coins(rng, shape)
        both = series(rng, (shape[0], 2 * shape[1])) + noise(rng, (shape[0], 2 * shape[1]))
        a, b = in_time(both[:, 0::2], both[:, 1::2], order)
        return Samples(a, b + np.log(ratio), order)

    return make


def only_b(series, ratio=1.0):
    """Return noise that only B has, in the order in which its samples are taken."""

    def make(rng, shape):
        b = np.log(ratio) + series(rng, shape) + noise(rng, shape)
        return Samples(noise(rng, shape), b, coins(rng, shape))

    return make


def wandering(memory, spread):
    """Return a series in which each value is like the one before (autoregressive)."""

    def series(rng, shape):
        values = rng.normal(0, spread * np.sqrt(1 - memory**2), shape)
        values[:, 0] = rng.normal(0, spread, shape[0])
        for i in range(1, shape[1]):
            values[:, i] += memory * values[:, i - 1]
        return values

    return series


def drifting(rng, shape):
    """Return a drift of 5 % up or down over the comparison."""
    way = rng.choice([-1.0, 1.0], (shape[0], 1))
    return 0.05 * way * np.linspace(0, 1, shape[1])


def two_modes(rng, shape):
    """Return one of two modes for each sample, 5 % apart."""
    return 0.05 * (rng.random(shape) < 0.5)


def two_states(rng, shape):
    """Return one of two states, 5 % apart, that change after 5 samples on average."""
    return states(rng, shape, 0.2)


def long_states(rng, shape):
    """Return the same states, which change after 20 samples on average."""
    return states(rng, shape, 0.05)


def states(rng, shape, chance):
    """Return one of two states, 5 % apart, that change with this chance before each sample."""
    changes = np.cumsum(rng.random(shape) < chance, axis=1) + rng.integers(0, 2, (shape[0], 1))
    return 0.05 * (changes % 2)


def heavy(rng, shape):
    """Return noise whose variance does not exist: Student's t of 2 degrees, 0.5 %."""
    return 0.005 * rng.standard_t(2, shape)


def wide(rng, shape):
    """Return noise of ten times the variance of the other arm's."""
    return rng.normal(0, 3 * SPREAD, shape)


def every(period, size):
    """Return a delay of every so-manieth sample, from any of them on."""

    def series(rng, shape):
        phase = rng.integers(0, period, (shape[0], 1))
        return np.log1p(size) * ((np.arange(shape[1]) + phase) % period == 0)

    return series


def half_way(size):
    """Return a delay from some sample on, in the middle third of all or of the first 96."""

    def series(rng, shape):
        begin = rng.uniform(1 / 3, 2 / 3, (shape[0], 1)) * min(shape[1], 96)
        return np.log1p(size) * (np.arange(shape[1]) >= begin)

    return series


def stalls(share, mean=1.02, median=0.98, *, are_equal=True, before=None):
    """Return a B of this median that stalls in a share of its samples, so that its mean is this.

    All stalls are as long, or exponential; A and B have the noise `before` as well.
    """
    size = (mean - median) / share

    def make(rng, shape):
        length = size if are_equal else size * rng.exponential(size=shape)
        b = np.log(median + length * (rng.random(shape) < share)) + noise(rng, shape)
        a = noise(rng, shape)
        if before:
            a, b = a + before(rng, shape), b + before(rng, shape)
        return Samples(a, b, coins(rng, shape))

    return make


def spikes(rng, shape):
    """Return delays of one sample in twenty, by 10 % on average."""
    return np.log1p((rng.random(shape) < 0.05) * rng.exponential(0.1, shape))


def periodic(period, mean=1.02, median=0.98):
    """Return a B that stalls in every so-manieth of its samples."""
    size = (mean - median) * period

    def make(rng, shape):
        phase = rng.integers(0, period, (shape[0], 1))
        is_stall = (np.arange(shape[1]) + phase) % period == 0
        b = np.log(median + size * is_stall) + noise(rng, shape)
        return Samples(noise(rng, shape), b, coins(rng, shape))

    return make


def carry_over(size, ratio=1.0):
    """Return variants of which the sample after one of B is slower."""

    def make(rng, shape):
        order = coins(rng, shape)
        # The sample before a pair is B's where the pair before began with A.
        follows_b = np.roll(order, 1, axis=1)
        follows_b[:, 0] = False
        first, second = (
            np.log1p(size) * follows_b + noise(rng, shape),
            np.log1p(size) * ~order + noise(rng, shape),
        )
        a, b = in_time(first, second, order)
        return Samples(a, b + np.log(ratio), order)

    return make


def changing(first, num_before, later):
    """Return a B whose ratio changes once after so many pairs."""

    def make(rng, shape):
        ratio = np.where(np.arange(shape[1]) < num_before, first, later)
        return Samples(noise(rng, shape), np.log(ratio) + noise(rng, shape), coins(rng, shape))

    return make


def warming(size, num_pairs, later):
    """Return a B that is slower by `size` at first, which dies away over so many pairs."""

    def make(rng, shape):
        b = np.log(later) + size * np.exp(-np.arange(shape[1]) / num_pairs) + noise(rng, shape)
        return Samples(noise(rng, shape), b, coins(rng, shape))

    return make


def ticking(tick, spread, ratio, jitter=0.05):
    """Return readings of a clock with ticks, with jitter of a twentieth of a tick."""

    def make(rng, shape):
        base = 1 + 0.1 * rng.random((shape[0], 1))

        def read(times):
            return np.log(np.round(times / tick) * tick + rng.normal(0, jitter * tick, shape))

        a, b = (base * of * np.exp(noise(rng, shape, spread)) for of in (1.0, ratio))
        return Samples(read(a), read(b), coins(rng, shape))

    return make


def memoised(rng, shape):
    """Return 40 ns of B, which looks its result up."""
    b = np.log(40 / BASE_NS) + noise(rng, shape, 0.05)
    return Samples(noise(rng, shape), b, coins(rng, shape))


def of_both(name, make, false, reach=1.0):
    """Return the hazard with few pairs and with many."""
    return [
        Hazard(
            f"{name}, {most} pairs", make, most, false, reach(most) if callable(reach) else reach
        )
        for most in (SHORT, LONG)
    ]


def of_values(*args):
    """Return the same of a hazard that the values themselves show."""
    return [replace(hazard, is_of_values=True) for hazard in of_both(*args)]


def unseen(share):
    """Return how often no sample of so many stalls, in percent, and one more."""
    return lambda most: round(1 + 100 * (1 - share) ** most, 1)


ALPHA = 5.0
"""Percent that may be FASTER or SLOWER without a difference."""

HAZARDS = [
    *of_both("same", ratio_of(1.0), DIFFERENT, ALPHA),
    *of_both("0.5 % slower, exit code 1", ratio_of(1.005), set()),
    *of_both("2 % slower", ratio_of(1.02), FASTER | {"SAME"}),
    *of_both("2 % faster", ratio_of(0.98), SLOWER | {"SAME"}),
    *of_both("10 % slower", ratio_of(1.1), FASTER | {"SAME"}),
    *of_both("10 % faster", ratio_of(0.9), SLOWER | {"SAME"}),
    *[
        hazard
        for share in (0.05, 0.1, 0.25)
        for hazard in of_both(
            f"stalls in {100 * share:g} % of B", stalls(share), FASTER, unseen(share)
        )
    ],
    *of_both("stalls in 5 % of B, B 10 % faster", stalls(0.05, median=0.9), FASTER, unseen(0.05)),
    *of_both(
        "stalls in 10 % of B, lengths exponential",
        stalls(0.1, are_equal=False),
        FASTER,
        unseen(0.1),
    ),
    *of_both(
        "stalls in 10 % of B, spikes in both", stalls(0.1, before=spikes), FASTER, unseen(0.1)
    ),
    *of_both("every 10th of B stalls", periodic(10), FASTER),
    *of_both("every 20th of B stalls", periodic(20), FASTER),
    Hazard("stalls in 5 % of B's windows, processes", stalls(0.05), 40, FASTER, 1.0, True),
    Hazard("stalls in 25 % of B's windows, processes", stalls(0.25), 40, FASTER, 1.0, True),
    *of_both(
        "stalls in 10 % of B, same median", stalls(0.1, median=1.0, mean=1.04), {"SAME"}, ALPHA
    ),
    *of_both("3 % after B", carry_over(0.03), DIFFERENT, ALPHA),
    *of_both("5 % after B and B 2 % faster", carry_over(0.05, 0.98), SLOWER),
    *of_both("4 % slower for 12 pairs, then 4 % faster", changing(1.04, 12, 0.96), SLOWER),
    *of_both("4 % faster for 12 pairs, then 4 % slower", changing(0.96, 12, 1.04), FASTER),
    *of_both("30 % slower for 8 pairs, then 5 % faster", changing(1.3, 8, 0.95), SLOWER),
    *of_both("10 % slower for 20 pairs, then 5 % faster", changing(1.1, 20, 0.95), SLOWER),
    *of_both("30 % slower for 15 pairs, then 5 % faster", changing(1.3, 15, 0.95), SLOWER),
    *of_both("warm-up of 20 % over 10 pairs, then 4 % faster", warming(0.2, 10, 0.96), SLOWER),
    *of_values(
        "ticks of 1 %, noise 1 %, B 1.5 % slower", ticking(0.01, 0.01, 1.015), {"SAME", "FASTER"}
    ),
    *of_values(
        "ticks of 2 %, noise 2 %, B 1.5 % slower", ticking(0.02, 0.02, 1.015), {"SAME", "FASTER"}
    ),
    *of_values(
        "ticks of 2 %, noise 0.2 %, B 1.5 % slower",
        ticking(0.02, 0.002, 1.015),
        {"SAME", "FASTER"},
    ),
    *of_values("ticks of 2 %, noise 0.4 %, B 0.5 % slower", ticking(0.02, 0.004, 1.005), DIFFERENT),
    *of_values("memoised B, 40 ns", memoised, PROVEN),
    *of_both("drift of both", shared(drifting), DIFFERENT, ALPHA),
    *of_both("both wander (AR 0.98)", shared(wandering(0.98, 0.015)), DIFFERENT, ALPHA),
    *of_both("both in two modes", shared(two_modes), DIFFERENT, ALPHA),
    *of_both("both in two states", shared(two_states), DIFFERENT, ALPHA),
    *of_both("clock lowered by 20 % half way", shared(half_way(0.2)), DIFFERENT, ALPHA),
    *of_both("every 4th sample late", shared(every(4, 0.05)), DIFFERENT, ALPHA),
    *of_both("every 2nd sample late", shared(every(2, 0.05)), DIFFERENT, ALPHA),
    *of_both("heavy tails", shared(heavy), DIFFERENT, ALPHA),
    *of_both("B's variance ten times A's", only_b(wide), DIFFERENT, ALPHA),
    *of_both("B in two modes", only_b(two_modes, np.exp(-0.025)), DIFFERENT, ALPHA),
    *of_both("B wanders (AR 0.9)", only_b(wandering(0.9, 0.015)), DIFFERENT),
    *of_both("B in two states", only_b(two_states, np.exp(-0.025)), DIFFERENT),
    *of_both("B in two long states", only_b(long_states, np.exp(-0.025)), DIFFERENT),
    *of_both(
        "B slower by 8 % half way, 4 % faster before", only_b(half_way(0.08), 0.96), DIFFERENT
    ),
    # The last ones, so that the others keep their places, which seed their generators.
    *[
        replace(hazard, resolution=0.02)
        for hazard in (
            *of_values(
                "clock known, ticks of 2 %, noise 0.2 %, B 1.5 % slower",
                ticking(0.02, 0.002, 1.015),
                {"SAME", "FASTER"},
            ),
            *of_values(
                "clock known, ticks of 2 %, noise 0.4 %, B 0.5 % slower",
                ticking(0.02, 0.004, 1.005),
                DIFFERENT,
            ),
        )
    ],
]


def pairs_of(samples, at):
    """Return one comparison's pairs, in order, one window each."""
    values = zip(
        (BASE_NS * np.exp(samples.a[at])).tolist(),
        (BASE_NS * np.exp(samples.b[at])).tolist(),
        samples.is_a_first[at].tolist(),
        strict=True,
    )
    return [Pair((a,), (b,), first, number) for number, (a, b, first) in enumerate(values)]


def processes_of(pairs):
    """Return pairs of processes: the median of each five windows, with their mean."""
    taken, windows = [], iter(pairs)
    while five := list(islice(windows, NUM_WINDOWS)):
        a, b = ([getattr(pair, arm)[0] for pair in five] for arm in "ab")
        taken.append(
            Pair(
                (float(np.median(a)),),
                (float(np.median(b)),),
                five[0].is_a_first,
                five[0].start_ns,
                mean_a=(float(np.mean(a)),),
                mean_b=(float(np.mean(b)),),
                num_windows=NUM_WINDOWS,
            )
        )
    return taken


def verdict_of(plan, pairs, resolution=None):
    """Return verdict and exit code of pairs after which sampling stopped, and their number."""
    resolution_ns = None if resolution is None else BASE_NS * resolution
    (claim,) = judge(plan, pairs, resolution_ns=resolution_ns)
    if reason_below_floor(pairs, CALL_NS, "a step"):
        return "INVALID", 3, len(pairs)
    return claim.verdict, exit_code_of(claim, plan.smallest_effect), len(pairs)


def outcomes_of(place, block):
    """Return verdict, exit code and number of pairs of a block of comparisons of a hazard."""
    hazard = HAZARDS[place]
    plan = Plan((TIME,), max_pairs=hazard.most_pairs, seed=0)
    windows = NUM_WINDOWS if hazard.is_of_processes else 1
    rng = np.random.default_rng((SEED, place, block))
    samples = hazard.make(rng, (BLOCK, windows * hazard.most_pairs))
    if hazard.is_of_processes:
        comparisons = [processes_of(pairs_of(samples, at)) for at in range(BLOCK)]
        looks = range(fewest_pairs(plan), plan.max_pairs + 1)
        stops = [next(n for n in looks if is_enough(plan, pairs[:n])) for pairs in comparisons]
        taken = zip(comparisons, stops, strict=True)
        return [verdict_of(plan, pairs[:stop]) for pairs, stop in taken]
    known, levels = Known(0.0, 0.0, samples.a, samples.b, samples.is_a_first), levels_of(plan)
    found = when_stopped(known, levels, with_all_pairs(known, levels))
    if hazard.is_of_values:
        stops = enumerate(found.stops)
        return [
            verdict_of(plan, pairs_of(samples, at)[:stop], hazard.resolution) for at, stop in stops
        ]
    return [
        (said, int(said == "SLOWER" and is_material), int(stop))
        for said, is_material, stop in zip(
            verdicts_in(found), found.is_material, found.stops, strict=True
        )
    ]


def verdicts_in(found):
    """Return the verdicts of comparisons that were judged at once."""
    said = np.full(len(found.stops), "INCONCLUSIVE", dtype=object)
    said[found.is_refused] = "INVALID"
    verdict = found.verdict
    for flags, name in (
        (verdict.is_slower, "SLOWER"),
        (verdict.is_faster, "FASTER"),
        (verdict.is_same, "SAME"),
    ):
        said[flags] = name
    return said


def row_of(hazard, found):
    """Return the row of a hazard, and print it."""
    is_exit = not hazard.false
    num_false = sum(code == 1 if is_exit else said in hazard.false for said, code, _ in found)
    verdicts = dict(Counter(said for said, _, _ in found).most_common())
    pairs = sum(taken for _, _, taken in found) / len(found)
    share = 100 * num_false / len(found)
    mark = "!" if share > hazard.reach else " "
    print(
        f"{mark} {hazard.name:58} false {share:5.2f} %  {pairs:5.1f} pairs  {verdicts}", flush=True
    )
    return row(
        re.sub(r"\W+", "-", hazard.name).strip("-").lower(),
        share,
        "%",
        "lower",
        hazard.reach,
        says=hazard.name,
        false=sorted(hazard.false) or "exit code 1",
        verdicts=verdicts,
        pairs=round(pairs, 1),
    )


def main():
    """Judge so many comparisons of each hazard, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=COMPARISONS)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="hazards whose names hold this; writes nothing")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    places = [place for place, hazard in enumerate(HAZARDS) if args.only in hazard.name]
    blocks = range(-(-args.comparisons // BLOCK))
    tasks = [(place, block) for place in places for block in blocks]
    with Pool(args.jobs) as pool:
        parts = pool.starmap_async(outcomes_of, tasks, chunksize=1).get()
    rows = []
    for number, place in enumerate(places):
        mine = parts[number * len(blocks) : (number + 1) * len(blocks)]
        found = [outcome for part in mine for outcome in part][: args.comparisons]
        rows.append(row_of(HAZARDS[place], found))
    if not args.only:
        write_evidence(
            args.result or RESULTS / "verdict_hazards_cpu_2026-11.json",
            "false verdicts where two variants differ in more than a constant ratio",
            rows,
            SOURCES,
            commit=args.commit,
            num_comparisons=args.comparisons,
            seed=SEED,
        )


if __name__ == "__main__":
    main()
