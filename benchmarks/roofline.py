"""Whether kprof's ceilings repeat themselves: a GPU measured again and again, figure by figure.

python benchmarks/roofline.py

`kprof roofline` gives the time it takes and the figures; then one process measures three times.
The first warms it up, the second and the third are compared. `--once` leaves that out.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence

from kprof.collect.gpu_ceilings import measure_gpu

SOURCES = (
    "benchmarks/roofline.py",
    "kprof/timing.py",
    "kprof/stopwatch.py",
    "kprof/collect/gpu_ceilings.py",
)
# The installed program, as users have it, not this working tree.
KPROF = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
# What others measured on an H200, in the units below.
PEERS = {"DRAM read": 4.37e12, "DRAM write": 4.68e12, "DRAM copy": 4.31e12}
REACH_REPEAT, REACH_TOOK_S = 0.02, 60


def measured():
    """Return what one call of kprof roofline prints."""
    done = subprocess.run([KPROF, "roofline", "--json"], capture_output=True, check=True)
    return json.loads(done.stdout)


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
    one, other = {}, {}
    if not args.once:
        _, one, other = (by_name(measure_gpu()) for _ in range(3))
    rows = [row("time of kprof roofline", first["took_s"], "s", "lower", REACH_TOOK_S)]
    for figure in first["figures"]:
        name, value = figure["name"], figure["value"]
        better = "lower" if figure["unit"] == "ns" else "higher"
        peer = {"peer": "earlier figure", "peer_value": PEERS[name]} if name in PEERS else {}
        rows.append(row(name, value, figure["unit"], better, **peer, spread=figure["spread"]))
        print(f"{name}: {value:.4g} {figure['unit']}", flush=True)
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
    state = {"before": first["before"], "after": first["after"]}
    write_evidence(path, "ceilings of a GPU", rows, SOURCES, commit=args.commit, state=state)


if __name__ == "__main__":
    main()
