"""Whether kprof's ceilings repeat themselves: a GPU measured again and again, figure by figure.

python benchmarks/roofline.py

One process measures three times. The first gives the time that it takes and the figures, as
`kprof roofline` does, and warms the process up; the second and the third are compared. `--once`
leaves those out.
"""

import argparse
import datetime
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence

from kprof.collect.gpu_ceilings import measure_gpu

SOURCES = (
    "benchmarks/roofline.py",
    "kprof/timing.py",
    "kprof/timing.py",
    "kprof/collect/gpu_ceilings.py",
)
# What others measured on an H200, in the units below.
PEERS = {"DRAM read": 4.37e12, "DRAM write": 4.68e12, "DRAM copy": 4.31e12}
REACH_REPEAT, REACH_TOOK_S = 0.02, 60


def measured():
    """Measure all, and say how long it took."""
    ceilings = measure_gpu()
    print(f"measured in {ceilings.took_s:.1f} s", flush=True)
    return ceilings


def by_name(ceilings):
    """Return the figures of one measurement."""
    return {figure.name: figure.value for figure in ceilings.figures}


def main():
    """Measure twice and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path)
    parser.add_argument("--once", action="store_true", help="only what kprof roofline prints")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    first = measured()
    one, other = ({}, {}) if args.once else (by_name(measured()) for _ in range(2))
    rows = [row("time of kprof roofline", first.took_s, "s", "lower", REACH_TOOK_S)]
    for figure in first.figures:
        name, value, unit = figure.name, figure.value, figure.unit
        better = "lower" if unit == "ns" else "higher"
        peer = {"peer": "earlier figure", "peer_value": PEERS[name]} if name in PEERS else {}
        rows.append(row(name, value, unit, better, **peer, spread=figure.spread))
        print(f"{name}: {value:.4g} {unit}", flush=True)
        if args.once:
            continue
        difference = abs(other[name] / one[name] - 1)
        values = {"second": one[name], "third": other[name]}
        repeated = f"{name}, repeated"
        rows.append(row(repeated, difference, "share apart", "lower", REACH_REPEAT, **values))
        print(f"  repeated {100 * difference:.2f} % apart")
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    gpus = "" if torch.cuda.device_count() == 1 else f"x{torch.cuda.device_count()}"
    path = args.result or RESULTS / f"roofline_h200{gpus}_{month}.json"
    state = {"before": first.before, "after": first.after}
    write_evidence(path, "ceilings of a GPU", rows, SOURCES, commit=args.commit, state=state)


if __name__ == "__main__":
    main()
