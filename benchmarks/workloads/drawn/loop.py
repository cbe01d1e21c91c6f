"""Steps over the cases that some seeds draw, each in a range that names its seed, part and case.

Cases that fail, take too long or dispatch too many operators are found in the first run, which
writes the others down in `--chosen`; a run that finds this file runs exactly these.
Inputs come from the host for each case, and go when it is over: Nsight Compute saves and restores
all memory of the process around every launch, and its copies launch nothing that is counted.
Once the moment in COUNTED_UNTIL (seconds since 1970) has come, no further case is begun.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from cases import draw
from torch.utils._python_dispatch import TorchDispatchMode

import kprof

# A case is for a few launches; those of a model are many.
MOST_CALLS = {"operators": 40, "models": 220, "compiled": 40, "triton": 40}
# The first call also loads code.
MOST_S = 2.0
MOST_RESERVED = 2 << 30


class Counting(TorchDispatchMode):
    """Counts dispatched operators."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def is_suited(case, device):
    """Tell whether a case runs, in a short time and few operators."""
    counting, began = Counting(), time.monotonic()
    try:
        if case.part in ("operators", "models"):
            with counting:
                case(device)
        else:
            case(device)
        synchronize(device)
    except Exception as error:
        print(f"left out {case.name}: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
        if "device-side assert" in str(error) or "illegal memory" in str(error):
            raise
        return False
    took = time.monotonic() - began
    is_short = took < MOST_S or case.part in ("compiled", "triton")
    return is_short and counting.number <= MOST_CALLS[case.part]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def chosen_cases(args, device):
    """Return the suited cases of all seeds, each with its label.

    The file has each case's verdict: a case that ended the process is unsuited. So are cases for
    which no time is left.
    """
    known, until = {}, time.monotonic() + args.choosing_s
    if args.chosen.exists():
        known = {tuple(key): suits for key, suits in json.loads(args.chosen.read_text())}
    cases = []
    draws = [draw(seed, device, tiny=args.tiny) for seed in args.seeds]
    for number, drawn in enumerate(zip(*draws, strict=True)):
        for seed, case in zip(args.seeds, drawn, strict=True):
            key = seed, number
            if key not in known:
                known[key] = False
                write(args.chosen, known)
                torch.manual_seed(number)
                known[key] = time.monotonic() < until and is_suited(case, device)
                write(args.chosen, known)
            if known[key]:
                cases.append((f"case:{seed}:{case.part}:{number}:{case.name}", case))
    random.Random(0).shuffle(cases)
    return cases


def write(file, known):
    file.write_text(json.dumps([[list(key), suits] for key, suits in known.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--chosen", type=Path, required=True)
    parser.add_argument("--choosing-s", type=float, default=600, help="seconds to try cases")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The first step is not recorded. It is for what happens once: choosing cases, and code that
    # compiles or tunes when it first runs. Calls of models in it are no steps of their own.
    with kprof.range("step"):
        began = time.monotonic()
        cases = chosen_cases(args, device)
        for _, case in cases:
            if case.part in ("compiled", "triton"):
                case(device)
        synchronize(device)
        print(f"{len(cases)} cases after {time.monotonic() - began:.0f} s", flush=True)
    for _ in range(args.steps - 1):
        with kprof.range("step"):
            run(cases, device)
    synchronize(device)


def run(cases, device):
    """Run the cases, in the time that there is."""
    until = float(os.environ.get("COUNTED_UNTIL", "inf"))
    for number, (label, case) in enumerate(cases):
        if time.time() > until:
            print(f"no time for {len(cases) - number} of {len(cases)} cases", flush=True)
            break
        torch.manual_seed(number)
        with kprof.range(label):
            case(device)
        if device == "cuda" and torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
