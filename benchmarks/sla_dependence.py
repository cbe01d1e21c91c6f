"""How often `kprof sla` is wrong, and right, where answers, runs or slices depend on one another.

    python benchmarks/sla_dependence.py [simulations per row]

A row is a service of which the truth is known. `false met` is with a limit a hair too tight for
it, `false missed` with one a hair too loose. `true met` is with a limit a third beyond the truth
(of a start that varies, a fifth). `bound` takes all for independent, as if each answer, run and
slice came by itself; `kprof` is the verdict.

Writes `results/sla_dependence_cpu_<yyyy-mm>.json`, whose value is the share of false "met".
"""

import argparse
import datetime
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from evidence import RESULTS, row, write_evidence
from scipy import stats
from sla_error_rates import MOST_WRONG_PERCENT, correlated, independent

from kprof.analyze.sla.evaluate import judge
from kprof.analyze.sla.percentiles import bound_share, ranks_of
from kprof.analyze.sla.rates import Rate, reach_of
from kprof.analyze.sla.responses import Load, Response, Responses
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.target_verdict import judge_rate, judge_times
from kprof.analyze.sla.targets import parse_target

SOURCES = (
    "benchmarks/sla_dependence.py",
    "benchmarks/sla_error_rates.py",
    *(
        f"kprof/analyze/sla/{name}.py"
        for name in ("bounds", "independence", "judge", "samples", "verdict", "wandering")
    ),
)
HAIR = 1e-6
P99 = Fraction(99, 100)
P95_NS = 1e8 * float(np.exp(0.35 * NormalDist().inv_cdf(0.95)))


class Found(NamedTuple):
    """Bounds as if all were independent, and what kprof says of a limit."""

    low: float
    high: float
    verdict: object


def run_of(times_ns, has_failed):
    """Return a run of these times to the first token, one every 100 ms."""
    rows = []
    for i, (time, is_lost) in enumerate(zip(times_ns, has_failed, strict=True)):
        sent, end = i * 10**8, i * 10**8 + int(time)
        chunks = np.array([end])
        if is_lost:
            rows.append(Response(sent, "failed", sent, end_ns=end))
        else:
            rows.append(Response(sent, "answered", sent, chunks, end_ns=end, output_tokens=1))
    return Responses("simulated", "none", Load("open", "10 requests/s"), tuple(rows))


def in_spells(rng, num, share, length):
    """Tell of each answer whether it is in a spell, of this mean length."""
    if length == 1:
        return rng.random(num) < share
    lengths, is_in, found = (length, length * (1 - share) / share), rng.random() < share, []
    while len(found) < num:
        found += [is_in] * int(rng.geometric(1 / lengths[0 if is_in else 1]))
        is_in = not is_in
    return np.array(found[:num])


def attainment(draw, num):
    """95 % of the answers are within the limit."""

    def simulate(rng):
        times = 1e8 * draw(rng, num)
        run, within = run_of(times, np.zeros(num, bool)), parse_target(f"ttft_p50<={P95_NS}ns")
        bounds = bound_share(int((times <= P95_NS).sum()), num)

        def verdict(lost):
            target = parse_target(f"attainment>={100 * (1 - lost):.6f}%")
            return judge([run], [within, target], spell_s=0)[1].verdict

        return Found(1 - bounds.high, 1 - bounds.low, verdict)

    return 0.05, simulate


def errors(length, num):
    """1 % of the answers fail, in spells."""

    def simulate(rng):
        lost = in_spells(rng, num, 0.01, length)
        run, bounds = run_of(np.full(num, 1e8), lost), bound_share(int(lost.sum()), num)

        def verdict(share):
            return judge([run], [parse_target(f"errors<={100 * share:.6f}%")], spell_s=0)[0].verdict

        return Found(bounds.low, bounds.high, verdict)

    return 0.01, simulate


def gaps(length, num, has_long):
    """1 % of the answers, and of the gaps, take longer than 50 ms; each answer in all its gaps."""

    def simulate(rng):
        sizes = np.full(num, 50)
        if has_long:
            sizes = np.minimum(rng.pareto(1.2, num) * 20 + 5, 20_000).astype(int)
        # Noise, as a clock has it; slow ones last a time that varies about the limit.
        slow = 5e7 * np.exp(0.3 * rng.standard_normal(num))
        each = np.where(in_spells(rng, num, 0.02, length), slow, 2e7 + 1e6 * rng.random(num))
        values = np.repeat(each, sizes)
        ordered, ranks = np.sort(values), ranks_of(num, P99)
        low, high = (ordered[int(rank / num * len(values)) - 1] for rank in ranks[::2])

        def verdict(limit):
            target = parse_target(f"gap_p99<={limit:.3f}ns")
            return judge_times(target, [Sample(values, values, sizes=sizes)]).verdict

        return Found(low, high, verdict)

    return 5e7, simulate


def starts(num_runs, num, spread, within=0.05):
    """Runs whose level differs from start to start, and every answer from the next."""

    def simulate(rng):
        levels = spread * rng.standard_normal((num_runs, 1))
        table = 1e8 * np.exp(levels + within * rng.standard_normal((num_runs, num)))
        ordered, ranks = np.sort(table.ravel()), ranks_of(table.size, Fraction(1, 2))
        samples = [Sample(run, run) for run in table]

        def verdict(limit):
            return judge_times(parse_target(f"ttft_p50<={limit:.3f}ns"), samples).verdict

        return Found(ordered[ranks.low - 1], ordered[ranks.high - 1], verdict)

    return 1e8, simulate


def rate(lasts, noise=0.02, wander=0.2):
    """A rate, here of its slowness, that wanders: a run lasts so many times its memory."""

    def simulate(rng):
        slices = 1 + noise * rng.standard_normal(20)
        if lasts:
            step, state = np.exp(-lasts / 200), rng.standard_normal()
            states = np.empty(200)
            for i, each in enumerate(rng.standard_normal(200)):
                states[i] = state = step * state + np.sqrt(1 - step**2) * each
            slices += wander * states.reshape(20, 10).mean(1)
        mean, found = slices.mean(), reach_of([slices])
        reach = stats.t.ppf(0.99, 19) * slices.std(ddof=1) / np.sqrt(20)

        def verdict(limit):
            # A limit that is beyond as a rate is below.
            target = parse_target(f"requests>={2 - limit:.9f}req/s")
            bounds = (2 - mean - found.reach, 2 - mean, 2 - mean + found.reach)
            return judge_rate(target, Rate(*bounds, 20, found.num_independent)).verdict

        return Found(mean - reach, mean + reach, verdict)

    return 1.0, simulate


CASES = {
    "attainment-independent-500": attainment(independent, 500),
    "attainment-independent-2000": attainment(independent, 2000),
    "attainment-correlated-0_9-500": attainment(correlated(0.9), 500),
    "attainment-correlated-0_9-2000": attainment(correlated(0.9), 2000),
    "errors-single-3000": errors(1, 3000),
    "errors-spells-5-3000": errors(5, 3000),
    "errors-spells-20-3000": errors(20, 3000),
    "errors-spells-20-20000": errors(20, 20_000),
    "gaps-equal-2000": gaps(1, 2000, has_long=False),
    "gaps-heavy-tailed-2000": gaps(1, 2000, has_long=True),
    "gaps-spells-20-2000": gaps(20, 2000, has_long=False),
    "gaps-spells-20-20000": gaps(20, 20_000, has_long=False),
    "starts-3-alike": starts(3, 300, 0.0),
    "starts-10-alike": starts(10, 300, 0.0),
    "starts-2-apart-0_5": starts(2, 300, 0.005),
    "starts-3-apart-0_5": starts(3, 300, 0.005),
    "starts-3-apart-10": starts(3, 300, 0.1),
    "starts-10-apart-10": starts(10, 300, 0.1),
    "windows-20-alike": starts(20, 20, 0.0, within=0.01),
    "windows-20-apart-0_5": starts(20, 20, 0.005, within=0.01),
    "windows-20-apart-1": starts(20, 20, 0.01, within=0.01),
    "rate-steady": rate(0),
    "rate-wanders-1": rate(1),
    "rate-wanders-3": rate(3),
    "rate-wanders-10": rate(10),
}
FAR = {"starts": 1.005, "windows": 1.002, "rate": 1.05}
"""How much looser than the truth the limit is that is to be proven; a third where not named."""


def shares(name, repeats, rng):
    """Return in how many percent of runs each rule is wrong, and right."""
    truth, simulate = CASES[name]
    tight, loose = truth * (1 - HAIR), truth * (1 + HAIR)
    far = truth * FAR.get(name.split("-")[0], 4 / 3)
    counts = np.zeros(6)
    for _ in range(repeats):
        found = simulate(rng)
        counts += (
            found.high <= tight,
            found.low > loose,
            found.high <= far,
            found.verdict(tight) == "MET",
            found.verdict(loose) == "MISSED",
            found.verdict(far) == "MET",
        )
    return 100 * counts / repeats


def main():
    """Print a row for every service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", type=int, nargs="?", default=20)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    print(f"{'':32} {'as if independent':^24}   {'kprof':^24}")
    print(f"{'':32}" + "  ".join([f" {'met!':>7} {'missed!':>7} {'met':>7}"] * 2))
    for name in CASES:
        found = [round(float(share), 2) for share in shares(name, args.repeats, rng)]
        cells = [f"{share:6.1f}%" for share in found]
        print(f"{name:32} {' '.join(cells[:3])}   {' '.join(cells[3:])}", flush=True)
        bound_met, bound_missed, bound_true, met, missed, true = found
        others = {"missed": missed, "true_met": true, "bound": bound_met}
        others |= {"bound_missed": bound_missed, "bound_true_met": bound_true}
        rows.append(row(name, met, "%", "lower", MOST_WRONG_PERCENT, **others))
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"sla_dependence_cpu_{month}.json"
    what = "how often kprof sla is wrong where answers, runs or slices depend on one another"
    write_evidence(path, what, rows, SOURCES)


if __name__ == "__main__":
    main()
