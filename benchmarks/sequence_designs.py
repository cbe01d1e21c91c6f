"""Why the confidence sequence is made as it is, and plans as long as they are.

Other designs on the same simulated pairs; then plans of 40, 80 and 160 pairs that stop early.

python benchmarks/sequence_designs.py
"""

import argparse
import datetime
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence

from kprof.analyze.calibration.simulate import NOISES, random_order, samples_of
from kprof.analyze.calibration.tally import Known, tally
from kprof.analyze.verdict.rule import MOST_PAIRS, levels_of
from kprof.analyze.verdict.sequence import BETS_AT_40_PAIRS, CLIP, scales
from kprof.comparison import Metric, Plan

SOURCES = (
    "benchmarks/sequence_designs.py",
    "kprof/analyze/calibration/*.py",
    "kprof/analyze/verdict/rule.py",
    "kprof/analyze/verdict/sequence.py",
)
ALPHA, MARGIN, NUM_PAIRS = 0.01, float(np.log(1.01)), 40
EFFECTS = (0.0, 0.01, 0.02, 0.05)
CLIPS, STAKES = (1.0, 1.5, 2.0, 2.5), ((0.7,), (1.0,), (0.4, 1.0), (0.6, 1.2), (0.5, 1.5), (0.7, 2))
PLANS, SPREADS = (40, 80, 160), (0.01, 0.02, 0.03)
MIXTURES = ((0.6, 3.0), (1.0, 2.0), (1.0, 3.0), (1.5, 2.0))


def sized(differences, scale, shift, clip):
    """Return the differences less a shift, in units of what was known of their spread."""
    away = differences - shift
    size = np.sign(away) * clip
    np.divide(away, scale, out=size, where=scale > 0)
    return np.clip(size, -clip, clip)


def coin_bets(x, stakes):
    """Return the log capital of the bets at exact odds, against "not above"."""
    capitals = [np.cumsum(np.log(2) - np.logaddexp(0, -2 * s * x), axis=1) for s in stakes]
    return np.logaddexp.reduce(capitals) - np.log(len(stakes)), np.log(2 / ALPHA)


def normal_mixture(x, rho):
    """Return the log of de la Peña's mixture for sums above 0; its level is for both sides."""
    total, variance = np.cumsum(x, axis=1), np.cumsum(x * x, axis=1)
    log = rho**2 * total**2 / (2 * (1 + rho**2 * variance)) - np.log1p(rho**2 * variance) / 2
    return np.where(total > 0, log, -np.inf), np.log(1 / ALPHA)


def first_look(capital, enough):
    """Return after how many pairs the capital was enough, infinite where it never was."""
    reached = capital >= enough
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)


def pairs_until_decided(design, parameter, clip, differences, scale):
    """Return after how many pairs each comparison was decided, either way or as the same."""

    def look(sign, shift):
        return first_look(*design(sized(sign * differences, scale, shift, clip), parameter))

    apart = np.minimum(look(1, 0.0), look(-1, 0.0))
    alike = np.maximum(look(1, -MARGIN), look(-1, -MARGIN))
    return np.minimum(apart, alike), apart


def simulated(num_comparisons):
    """Return for each noise and effect the log ratios, and the spread known before each."""
    found = {}
    for number, noise in enumerate(NOISES):
        rng = np.random.default_rng(number)
        for effect in EFFECTS:
            made = noise.make((num_comparisons, 2 * NUM_PAIRS), rng)
            order = random_order(num_comparisons, NUM_PAIRS, rng)
            a, b = samples_of(made, order, effect, noise)
            differences = b - a
            found[noise.name, effect] = differences, scales(differences)
    return found


def figures_of(design, parameter, clip, samples):
    """Return pairs taken on average over all noises, by effect, and the worst error."""
    taken = {effect: [] for effect in EFFECTS}
    errors = []
    for (_, effect), (differences, scale) in samples.items():
        decided, apart = pairs_until_decided(design, parameter, clip, differences, scale)
        taken[effect].append(np.minimum(decided, NUM_PAIRS).mean())
        if effect == 0:
            errors.append(np.isfinite(apart).mean())
    return {effect: float(np.mean(means)) for effect, means in taken.items()}, max(errors)


def rows_of_plans(num_comparisons):
    """Yield how often a plan that stops early has no answer where A and B are alike.

    Spreads are those of a pair's log ratio, normal.
    """
    rng = np.random.default_rng(0)
    for spread in SPREADS:
        none = rng.normal(0.0, spread, (num_comparisons, max(PLANS)))
        for most in PLANS:
            levels = levels_of(Plan((Metric("time", "ms"),), max_pairs=most))
            found = [Known(e, float(np.log1p(e)), none[:, :most] + np.log1p(e)) for e in EFFECTS]
            _, early = tally(found, levels)
            decided = early.same.count + early.false_verdict.count
            pairs = {f"at_{100 * float(e):g}": round(n, 2) for e, n in early.pairs.items()}
            name = f"at most {most} pairs that scatter by {100 * spread:g}".replace(" ", "-")
            label = name + (" (kprof)" if most == MOST_PAIRS else "")
            share = 100 * (1 - decided / early.same.of)
            errs = round(100 * early.false_positive.share, 3)
            print(f"{label}: {share:.1f} % without an answer, {errs} % false, {pairs}")
            yield row(name, share, "%", "lower", **pairs, error_percent=errs)


def main():
    """Try all designs on the same samples and write how many pairs each takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=4_000, help="of each noise and effect")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    designs = [("normal mixture", normal_mixture, rho, clip) for rho, clip in MIXTURES]
    designs += [("coin", coin_bets, stakes, clip) for clip in CLIPS for stakes in STAKES]
    samples, rows = simulated(args.comparisons), []
    for name, design, parameter, clip in designs:
        taken, error = figures_of(design, parameter, clip, samples)
        mean = float(np.mean(list(taken.values())))
        is_ours = design is coin_bets and (parameter, clip) == (BETS_AT_40_PAIRS, CLIP)
        words = "-".join(f"{x:g}" for x in np.atleast_1d(parameter)).replace(".", "_")
        label = "kprof" if is_ours else f"{name}-{words}-clip-{clip:g}".replace(".", "_")
        by_effect = {f"at_{100 * e:g}": round(pairs, 2) for e, pairs in taken.items()}
        rows.append(
            row(
                label.replace(" ", "-"),
                mean,
                "pairs",
                "lower",
                **by_effect,
                error_percent=round(100 * error, 3),
            )
        )
        print(f"{label}: {mean:.2f} pairs, error {100 * error:.2f} %, {by_effect}")
    rows += rows_of_plans(min(args.comparisons, 1_000))
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"sequence_designs_cpu_{month}.json"
    write_evidence(path, "designs of the confidence sequence", rows, SOURCES)


if __name__ == "__main__":
    main()
