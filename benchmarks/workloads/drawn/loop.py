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
MOST_S = 0.03
MOST_RESERVED = 2 << 30


class Counting(TorchDispatchMode):
    """Counts dispatched operators."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def is_suited(case, device):
    """Tell whether a case runs, in a short time and few operators."""
    counting = Counting()
    try:
        if case.part in ("operators", "models"):
            with counting:
                case(device)
        else:
            case(device)
        synchronize(device)
        began = time.monotonic()
        made = case(device)
        synchronize(device)
        took = time.monotonic() - began - transfer_s(case)
        del made
    except Exception as error:
        print(f"left out {case.name}: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
        if "device-side assert" in str(error) or "illegal memory" in str(error):
            raise
        return False
    return counting.number <= MOST_CALLS[case.part] and took < MOST_S


def transfer_s(case):
    """Return about how long a case's inputs take from the host."""
    return sum(one.num_bytes for one in case.inputs) / 2e9


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def chosen_cases(seeds, device, file, *, tiny):
    """Return the suited cases of all seeds, each with its label.

    The file has each case's verdict. A case without one that was begun ended the process.
    """
    known = {}
    if file.exists():
        known = {tuple(key): suits for key, suits in json.loads(file.read_text())}
    cases = []
    for seed in seeds:
        for number, case in enumerate(draw(seed, device, tiny=tiny)):
            key = seed, number
            if key not in known:
                known[key] = False
                write(file, known)
                torch.manual_seed(number)
                known[key] = is_suited(case, device)
                write(file, known)
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
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    cases = chosen_cases(args.seeds, device, args.chosen, tiny=args.tiny)
    print(f"{len(cases)} cases after {time.monotonic() - began:.0f} s", flush=True)
    until = float(os.environ.get("COUNTED_UNTIL", "inf"))
    # The first step, which nobody records, is for code that compiles or tunes when it first runs.
    first = [(label, case) for label, case in cases if case.part in ("compiled", "triton")]
    for turn in range(args.steps):
        with kprof.range("step"):
            for number, (label, case) in enumerate(cases if turn else first):
                if time.time() > until:
                    break
                torch.manual_seed(number)
                with kprof.range(label):
                    case(device)
                if device == "cuda" and torch.cuda.memory_reserved() > MOST_RESERVED:
                    torch.cuda.empty_cache()
    synchronize(device)


if __name__ == "__main__":
    main()
