"""How long a load any rule needs before it may call a target met that slow spells break.

    python benchmarks/sla_least_load.py

A load without a slow moment looks like that of a flawless service, whatever is computed from it.
A service breaks a percentile in slow spells, all of the longest length, that come by chance. The
value is in how many percent a load as long as kprof takes (`takes`, in spells) has no slow moment;
`ten` is the same of a load of ten spells. `least` is the shortest load of which at most 1 % have
none, from the exponential time to the next spell.

Writes `results/sla_least_load_cpu_<yyyy-mm>.json`.
"""

import argparse
import datetime
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence
from sla_spells import LENGTHS, MOST_WRONG_PERCENT, SPELL_S, is_slow

from kprof.analyze.sla.independence import LEAST_SPELLS
from kprof.analyze.sla.percentiles import least_samples

SOURCES = (
    "benchmarks/sla_least_load.py",
    "benchmarks/sla_spells.py",
    "kprof/analyze/sla/percentiles.py",
)
PERCENTILES = {
    name: Fraction(kept)
    for name, kept in {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99"}.items()
}
QUIET_LOADS = 20_000


def quiet_percent(kept, num_spells, rng):
    """Return in how many percent a load has no slow moment, looked at ten times a spell."""
    length, share = LENGTHS["longest"], 1 - float(kept)
    # Pieces of a long time that lie one after another.
    num_points = 10 * num_spells
    at_s = np.arange(num_points * 50) * (SPELL_S / 10)
    quiet = 0
    for _ in range(QUIET_LOADS // 50):
        quiet += int((~is_slow(rng, at_s, share, length).reshape(50, num_points)).all(axis=1).sum())
    return 100 * quiet / (QUIET_LOADS // 50 * 50)


def least_spells(kept):
    """Return the shortest load that has no slow moment in at most 1 %, if spells come by chance.

    The time to the next spell is exponential, on average kept / (1 - kept) spells.
    """
    share = 1 - float(kept)
    return float(kept) / share * math.log(100 * float(kept))


def rows_of_least(rng):
    """Return a row for every percentile."""
    rows = []
    for name, kept in PERCENTILES.items():
        takes = max(least_samples(kept), LEAST_SPELLS)
        quiet, ten = (quiet_percent(kept, num, rng) for num in (takes, LEAST_SPELLS))
        others = {"ten": round(ten, 2), "least": round(least_spells(kept), 1), "takes": takes}
        rows.append(row(name, round(quiet, 2), "%", "lower", MOST_WRONG_PERCENT, **others))
        print(f"{name}: takes {takes} spells, {quiet:.2f} % quiet, of ten {ten:.1f} %", flush=True)
    return rows


def main():
    """Print a row for every percentile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    rows = rows_of_least(np.random.default_rng(1))
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"sla_least_load_cpu_{month}.json"
    what = "in how many loads as long as kprof sla takes a service that is slow in spells is not"
    write_evidence(path, what, rows, SOURCES)


if __name__ == "__main__":
    main()
