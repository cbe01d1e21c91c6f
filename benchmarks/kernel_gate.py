"""Levels L0 and L1 of the quality gate for our kernels on one GPU, with compute-sanitizer if asked.

python benchmarks/kernel_gate.py [KERNEL ...] [--sanitizer] [--minutes 8] [--missing]

Each of our providers is judged in a process of its own, which is `kprof kernels check`, with
`--forward` where it has no gradients; some run beside each other, as nothing here is timed. One
that does not end in time has no verdict, and the result, which is written anew with every verdict,
says so. `--missing` keeps the verdicts of a result that the same code gave, and judges the others.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from evidence import RESULTS, ROOT, describe_gpu, named_after, row, stale, write_evidence

from kprof.errors import KprofError
from kprof.kernels import all_kernels, kernel_named

SOURCES = (
    *("benchmarks/kernel_gate.py", "kprof/commands/kernels.py", "kprof/kernels/correctness/*.py"),
    *("kprof/kernels/bench/measure.py", "kprof/kernels/bench/sanitize.py"),
)
LEVELS = ("L0", "L1")
# What takes longest, and therefore begins first.
LONGEST = (
    *("attention_forward", "paged_attention", "decode_attention", "attention_fp8"),
    *("rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm", "softmax", "linear_cross_entropy"),
)
# Routes of a layer, which a swap takes for calls without gradients alone: they have none.
FORWARD_ALONE = (("fp8_linear", "kprof-wide"), ("fp8_linear", "kprof-tiles"))


def main():
    """Judge the kernels named, or all, and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--sanitizer", action="store_true", help="let compute-sanitizer look, too")
    parser.add_argument(
        "--missing", action="store_true", help="judge those without a verdict in the result"
    )
    args = parser.parse_args()
    look = partial(check, sanitizes=args.sanitizer)
    rows = rows_of_all("kernel_gate", look, SOURCES, args)
    for one in rows:
        print(f"{one['name']:44} {one['state']:10} {one['why'][:120]}")
    sys.exit(int(not all(one["met"] for one in rows)))


def parser_of(description):
    """Return what reads the options of a look at all kernels."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all together, at most")
    parser.add_argument(
        "--at-once", type=int, default=os.cpu_count(), help="providers beside each other"
    )
    parser.add_argument("--result", type=Path)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    return parser


def rows_of_all(what, look, sources, args):
    """Return the rows of each provider that is looked at; the result is written with each."""
    ends_s = time.monotonic() + 60 * args.minutes
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"{what}_h200_{month}.json"
    rows, subjects = [], ours_of(args.kernels)
    if getattr(args, "missing", False):
        rows = kept_rows(json.loads(named_after(describe_gpu()["gpu"], path).read_text()))
        subjects = [one for one in subjects if not is_judged(*one, rows)]
    sources = {*sources, *(f"kprof/kernels/{name}.py" for name, _ in ours_of(args.kernels))}
    with ThreadPoolExecutor(args.at_once) as pool:
        asked = [pool.submit(look, *one, ends_s=ends_s) for one in subjects]
        for one in as_completed(asked):
            rows = sorted([*rows, *one.result()], key=lambda row: row["name"])
            write_evidence(path, what, rows, sources, commit=args.commit)
    return rows


def kept_rows(result):
    """Return the rows with a verdict of a result, which today's code has to have made.

    Raises:
        KprofError: other code made it.
    """
    if labels := stale(result):
        raise KprofError(f"another {labels[0]} made that result", fix="leave out --missing")
    return [one for one in result["rows"] if one["state"] != "not run"]


def is_judged(name, provider, rows):
    """Tell whether there is a verdict of each level."""
    names = {one["name"] for one in rows}
    return {f"{name}-{provider}-{level}" for level in LEVELS} <= names


def ours_of(names):
    """Return kernel and provider of all that is ours among these kernels; none: among all."""
    kernels = [kernel_named(name) for name in names] or all_kernels().values()
    kernels = sorted(kernels, key=lambda one: one.name not in LONGEST)
    return [
        (kernel.name, one.name)
        for kernel in kernels
        for one in kernel.providers
        if one.distribution == "kprof"
    ]


def check(name, provider, sanitizes, ends_s):
    """Return the rows of one provider."""
    command = [sys.executable, "-m", "kprof", "kernels", "check", name, "--provider", provider]
    command += ["--json", *(["--sanitizer"] if sanitizes else [])]
    command += ["--forward"] if (name, provider) in FORWARD_ALONE else []
    left_s = max(ends_s - time.monotonic(), 1)
    began_s = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, cwd=ROOT)
        (report,) = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return rows_of(name, provider, None, "it did not end in time")
    except ValueError:
        return rows_of(name, provider, None, done.stderr.strip()[-300:])
    print(f"{name} by {provider}: {time.monotonic() - began_s:.0f} s", flush=True)
    return rows_of(name, provider, report)


def rows_of(name, provider, report, problem=""):
    """Return a row for each level: whether it passed, on what that rests, and what it tells."""
    if report is None:
        return [_row(name, provider, level, "not run", problem) for level in LEVELS]
    levels = [
        _row(
            name,
            provider,
            one["name"],
            one["state"],
            one["why"],
            subject=report["subject"],
            reached=report["reached"],
            looked_at=one["looked_at"],
            measures=len(one["measures"]),
            notes=one["notes"],
        )
        for one in report["levels"]
        if one["name"] in LEVELS
    ]
    return [*levels, *scope_row(name, provider, report.get("scope"))]


def scope_row(name, provider, scope):
    """Return the row that says whether the gate tried all sizes that a swap lets a kernel take."""
    reach = kernel_named(name).reach
    if scope is None or not reach:
        return []
    tried = [size["largest"] for size in scope["sizes"][: len(reach)]]
    is_tried = all(one >= most for one, most in zip(tried, reach, strict=True))
    state = "passed" if is_tried else "failed"
    why = f"tried up to {tried}, where a swap allows {list(reach)}"
    return [_row(name, provider, "scope", state, why, scope=scope)]


def _row(name, provider, level, state, why, **more):
    value = {"passed": 1, "failed": 0}.get(state)
    named = f"{name}-{provider}-{level}"
    return row(named, value, "passed", "higher", reach=1, state=state, why=why, **more)


if __name__ == "__main__":
    main()
