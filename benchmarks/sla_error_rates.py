"""How often `kprof sla` says "met" of services whose true percentile is just beyond the limit.

    python benchmarks/sla_error_rates.py [simulations per row]

A row is a service with a known percentile and a limit a hair below it, so that every "met" is
false. `naive` compares the sample's percentile with the limit; `bound` takes the bound for
independent samples; `kprof` weighs slow answers that come in clumps as well. `true met` is how
often kprof proves a limit that is a third beyond the true percentile.

Writes `results/sla_error_rates_cpu_<yyyy-mm>.json`, whose value is the share of `kprof`.
"""

import argparse
import datetime
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import numpy as np
from evidence import RESULTS, row, write_evidence

from kprof.analyze.sla.percentiles import ranks_of
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.target_verdict import bound_percentile

SOURCES = (
    "benchmarks/sla_error_rates.py",
    "kprof/analyze/sla/percentiles.py",
    "kprof/analyze/sla/samples.py",
    "kprof/analyze/sla/target_verdict.py",
)
MOST_WRONG_PERCENT = 1.0
SIGMA = 0.35
WARM_UP = 2_000


def independent(rng, num):
    """Draw lognormal times, each by itself."""
    return np.exp(SIGMA * rng.standard_normal(num))


def correlated(share):
    """Return a service of which every time is like the one before it, by this share."""

    def draw(rng, num):
        noise = rng.standard_normal(num + WARM_UP) * np.sqrt(1 - share**2)
        state, values = 0.0, np.empty(num + WARM_UP)
        for i, each in enumerate(noise):
            state = share * state + each
            values[i] = state
        return np.exp(SIGMA * values[WARM_UP:])

    return draw


def queue(load):
    """One server, exponential service, Poisson arrivals: time in the system."""

    def draw(rng, num):
        between = rng.exponential(1 / load, num + WARM_UP)
        service = rng.exponential(1, num + WARM_UP)
        walk = np.concatenate([[0], np.cumsum(service[:-1] - between[1:])])
        return (walk - np.minimum.accumulate(walk) + service)[WARM_UP:]

    return draw


def truth_of(name, quantile):
    """Return the true percentile, in closed form."""
    if name.startswith("queue"):
        load = float(name.split()[-1].rstrip("%")) / 100
        return -np.log(1 - quantile) / (1 - load)
    return float(np.exp(SIGMA * NormalDist().inv_cdf(quantile)))


SERVICES = {
    "independent": independent,
    "correlated 0.5": correlated(0.5),
    "correlated 0.9": correlated(0.9),
    "queue 50 %": queue(0.5),
    "queue 80 %": queue(0.8),
}


def rates(name, quantile, num, repeats, rng):
    """Return how often each rule calls a missed limit met, and kprof a kept one."""
    counts = np.zeros(4)
    truth = truth_of(name.replace(" %", "%"), float(quantile))
    limit, loose = truth * (1 - 1e-9), truth * 4 / 3
    for _ in range(repeats):
        times = SERVICES[name](rng, num)
        ordered, ranks = np.sort(times), ranks_of(num, quantile)
        high = bound_percentile([Sample(times, times)], quantile).high
        bound = np.inf if ranks.high is None else ordered[ranks.high - 1]
        kprof = np.inf if high is None else high
        counts += (
            ordered[ranks.estimate - 1] <= limit,
            bound <= limit,
            kprof <= limit,
            kprof <= loose,
        )
    return 100 * counts / repeats


def main():
    """Print a row for every service, percentile and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", type=int, nargs="?", default=20)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    repeats, rows = args.repeats, []
    rng = np.random.default_rng(0)
    print(f"{'service':15} {'':4} {'n':>6} {'naive':>7} {'bound':>7} {'kprof':>7} {'true met':>9}")
    for percentile, sizes in (
        ("50", (100, 2000)),
        ("95", (500, 2000)),
        ("99", (500, 2000, 10_000)),
    ):
        for name in SERVICES:
            for num in sizes:
                found = rates(name, Fraction(percentile) / 100, num, repeats, rng)
                cells = " ".join(f"{rate:6.1f}%" for rate in found[:3])
                print(f"{name:15} p{percentile:3} {num:6} {cells} {found[3]:8.1f}%", flush=True)
                rows.append(_row(f"{name}-p{percentile}-{num}", found))
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"sla_error_rates_cpu_{month}.json"
    write_evidence(path, "how often kprof sla calls a missed limit met", rows, SOURCES)


def _row(name, found):
    naive, bound, kprof, true_met = (round(float(rate), 2) for rate in found)
    label = name.replace(" %", "").replace(" ", "-").replace(".", "_")
    others = {"naive": naive, "bound": bound, "true_met": true_met}
    return row(label, kprof, "%", "lower", MOST_WRONG_PERCENT, **others)


if __name__ == "__main__":
    main()
