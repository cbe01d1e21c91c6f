"""What compute-sanitizer finds in our kernels, on one GPU: accesses out of bounds, and races.

python benchmarks/kernel_sanitized.py [KERNEL ...] [--minutes 8]

Each of our providers runs every edge shape once in every dtype and layout, as `kprof kernels check
--sanitizer` lets it, without the gate: first alone, so that all is compiled, then under each tool.
Nothing is timed, so several run beside each other; one that does not end in time has found nothing
and says so. The result is written anew with every provider.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from evidence import row
from kernel_gate import FORWARD_ALONE, parser_of, rows_of_all

from kprof.kernels.bench import sanitize

SOURCES = (
    *("benchmarks/kernel_sanitized.py", "benchmarks/kernel_gate.py"),
    *("kprof/kernels/correctness/inputs.py", "kprof/kernels/correctness/observe.py"),
    *("kprof/kernels/bench/measure.py", "kprof/kernels/bench/sanitize.py"),
)


def main():
    """Let the tools look at the kernels named, or at all, and write the result."""
    rows = rows_of_all("kernel_sanitized", looked_at, SOURCES, parser_of(__doc__).parse_args())
    for one in rows:
        print(f"{one['name']:52} {one['value']!s:8} {one['what'][:120]}")
    sys.exit(int(not all(one["met"] for one in rows)))


def looked_at(name, provider, ends_s):
    """Return a row of what each tool found in one provider."""
    began_s = time.monotonic()
    why = why_it_does_not_run(name, provider, ends_s)
    with ThreadPoolExecutor() as pool:
        told = [pool.submit(found_by, tool, name, provider, why, ends_s) for tool in sanitize.WHAT]
    print(f"{name} by {provider}: {time.monotonic() - began_s:.0f} s", flush=True)
    return [row_of(name, provider, future.result()) for future in told]


def row_of(name, provider, found):
    """Return the row of what one tool found, with each different finding."""
    told = {"what": found.what, "findings": list(found.findings)}
    named = f"{name}-{provider}-{found.tool}"
    return row(named, found.num_errors, "findings", "lower", 0, **told)


def why_it_does_not_run(name, provider, ends_s):
    """Run the edges without a tool; return why they did not end, or nothing."""
    are_forward = (name, provider) in FORWARD_ALONE
    command = sanitize.edges_of(name, provider, are_forward=are_forward)
    limit_s = max(ends_s - time.monotonic(), 1)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "it did not end in time without a tool"
    last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
    return last[0] if done.returncode else ""


def found_by(tool, name, provider, why, ends_s):
    """Return what one tool found, in the time that is left."""
    left_s = ends_s - time.monotonic()
    if why or left_s < 1:
        return sanitize.Sanitized(tool, None, why or "there was no time")
    sanitize.LONGEST_S = int(left_s)
    are_forward = (name, provider) in FORWARD_ALONE
    return sanitize.sanitize(tool, name, provider, are_forward=are_forward)


if __name__ == "__main__":
    main()
