"""How often the verdicts of `kprof ab` are right: on simulated noise, or on this machine.

python benchmarks/selftest.py --simulate --jobs 16
python benchmarks/selftest.py

The result is written after every stage: what has not been taken by then is listed as missing.
"""

import argparse
import datetime
import os
import re
import sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from evidence import RESULTS, row, write_evidence
from rivals import false_positives_of_rivals, rivals_under_noise

from kprof.ab.calibrate import COMPARISONS, calibrate, keep, simulate_noise
from kprof.analyze.verdict.rule import levels_of
from kprof.comparison import Metric, Plan
from kprof.report.calibration import result_of_calibration

NUM_PAIRS, SEED = 40, 0
SIMULATED = (
    "benchmarks/selftest.py",
    "benchmarks/rivals.py",
    "kprof/analyze/verdict/*.py",
    "kprof/analyze/calibration/*.py",
)
MEASURED = (
    *SIMULATED,
    "kprof/ab/calibrate.py",
    "kprof/timing.py",
    "kprof/timing.py",
    "kprof/ab/calibrate.py",
    "kprof/ab/disturbance.py",
)


def slug(*words):
    """Return a name that documents can refer to."""
    return re.sub(r"\W+", "-", " ".join(words)).strip("-").lower()


def at(effect):
    """Return the words for a planted slow-down, or a gain where it is negative."""
    percent = 100 * float(effect)
    return f"at a gain of {-percent:g}" if percent < 0 else f"at {percent:g}"


def percent_of(rate):
    """Return the fields of a rate, in percent, with its exact 95 % interval."""
    shares = {"value": rate["rate"], "low": rate["low"], "high": rate["high"]}
    return {name: round(100 * share, 4) for name, share in shares.items()}


def rate_row(name, rate, better):
    """Return a row of one rate, None where nothing was counted."""
    if not rate["of"]:
        return None
    fields = percent_of(rate)
    counts = {"count": rate["count"], "of": rate["of"]}
    return row(name, fields.pop("value"), "%", better, **fields, **counts)


def rows_of_targets(result):
    """Return a row for each target, with where it is worst."""
    return [
        row(
            slug(target["name"]),
            100 * target["value"],
            "%",
            target["better"],
            100 * target["reach"],
            where=target["where"],
        )
        for target in result["targets"]
    ]


def rows_of_scenario(scenario):
    """Return every rate of one kind of noise, and the pairs that were taken."""
    name, fixed, early = scenario["name"], scenario["fixed"], scenario["early"]
    least = row(slug(name, "least found"), 100 * scenario["least_found"], "%", "lower")
    rows = [least]
    for way, judged in (("", fixed), ("stopping", early)):
        rows += [
            rate_row(slug(name, way, "false positives"), judged["false_positive"], "lower"),
            rate_row(slug(name, way, "false verdicts"), judged["false_verdict"], "lower"),
            rate_row(slug(name, way, "false and material"), judged["false_material"], "lower"),
            rate_row(slug(name, way, "same"), judged["same"], "higher"),
            rate_row(slug(name, way, "coverage"), judged["coverage"], "higher"),
            rate_row(slug(name, way, "wrong direction"), judged["wrong_direction"], "lower"),
        ]
        for effect, rate in judged["power"].items():
            rows.append(rate_row(slug(name, way, "power", at(effect)), rate, "higher"))
    for effect, pairs in early["pairs"].items():
        rows.append(row(slug(name, "stopping pairs", at(effect)), pairs, "pairs", "lower"))
    return [found for found in rows if found is not None]


def rows_of_rivals(rivals):
    """Return a row for each of the other tests in each noise."""
    rows = []
    for name, rates in rivals.items():
        for rival, rate in rates.items():
            low, high = rate.interval
            counts = {"count": rate.count, "of": rate.of}
            known = {"rate": rate.share, "low": low, "high": high, **counts}
            rows.append(rate_row(slug(name, rival), known, "lower"))
    return rows


def place_of(result):
    """Return where the result is kept, by kind of machine and month."""
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    device = {"simulated": "simulated_cpu", "host": "host_cpu"}.get(result["kind"])
    return RESULTS / f"selftest_{device or slug(result['device'].split()[-1])}_{month}.json"


def calibrations(args, rivals):
    """Yield the result again and again, each time with more of it, and note the other tests'."""
    levels = levels_of(Plan((Metric("time per call", "ns"),), max_pairs=NUM_PAIRS, seed=SEED))

    def show(name, samples):
        rivals[name] = false_positives_of_rivals(samples, levels)

    if args.simulate:
        number = args.comparisons or 4_000
        rivals.update(rivals_under_noise(number, NUM_PAIRS, SEED))
        with Pool(args.jobs) as pool:
            yield simulate_noise(number, NUM_PAIRS, SEED, partial(pool.map, chunksize=1))
    else:
        number = args.comparisons or COMPARISONS
        yield from calibrate(number, NUM_PAIRS, SEED, tell, show=show)


def tell(message):
    """Say how far it is."""
    print(message, file=sys.stderr, flush=True)


def write(result, rivals, args):
    """Write what is known so far."""
    rows = rows_of_targets(result)
    for scenario in result["scenarios"]:
        rows += rows_of_scenario(scenario)
    rows += rows_of_rivals(rivals)
    names = ("num_pairs", "num_comparisons", "seed", "smallest_effect", "alpha", "took_s")
    write_evidence(
        args.result or place_of(result),
        f"error rates of the verdicts, {result['device']}",
        rows,
        SIMULATED if args.simulate else MEASURED,
        commit=args.commit,
        protocol={name: result[name] for name in names},
        noises={scenario["name"]: scenario["says"] for scenario in result["scenarios"]},
        doubts=result["doubts"],
        missing=result["missing"],
    )


def main():
    """Test and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="on simulated noise, no GPU")
    parser.add_argument("--comparisons", type=int, help="of each kind")
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that simulate")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    rivals = {}
    for calibration in calibrations(args, rivals):
        result = result_of_calibration(calibration)
        write(result, rivals, args)
    if not args.simulate:
        # Comparisons that this machine makes later carry it.
        keep(calibration)
    for target in result["targets"]:
        met = "met" if target["is_met"] else "NOT met"
        print(f"{target['name']}: {target['value']:.4f}, reach {target['reach']:.4f}: {met}")
    for what in (*result["missing"], *(doubt["text"] for doubt in result["doubts"])):
        print(f"missing or in doubt: {what}")


if __name__ == "__main__":
    main()
