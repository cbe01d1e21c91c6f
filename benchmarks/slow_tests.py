"""The slow tests, with a committed result that says for which code they passed.

python benchmarks/slow_tests.py [--if-changed] [--workers 2]

`make test` leaves out the tests that are marked `slow`: they compile kernels for a GPU that is not
there, start many processes, open reports in a browser or repeat an experiment thousands of times.
This command runs them and writes the digest of the code that they passed on. With --if-changed it
runs nothing where the committed result is of today's code, and says so.
"""

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import time

from evidence import RESULTS, ROOT, dumped, row, write_evidence

sys.path.insert(0, str(ROOT))
from tests.report.browser import IS_AVAILABLE

RESULT = RESULTS / "slow_tests_cpu_2026-11.json"
MARKED = "slow and not gpu and not hostile"
CODE = ("kprof", "tests", "examples", "benchmarks", "playbooks", "pyproject.toml")
LEFT_OUT = ("benchmarks/results/", "benchmarks/notes/")


def main():
    """Run the slow tests; write the result where all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-changed", action="store_true", help="run what no result speaks for")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.if_changed and passed_on() == digest_of_code():
        print(f"slow tests: passed on this code before, see {RESULT.relative_to(ROOT)}")
        return
    began_s = time.monotonic()
    workers = ("-n", str(args.workers), "--dist", "worksteal")
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", MARKED, *workers]
    done = subprocess.run(pytest, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode:
        sys.exit(done.returncode)
    counts = done.stdout.strip().splitlines()[-1]
    if not IS_AVAILABLE:
        print("no result is written, since no report was opened: make chromium")
        return
    rows = [row("seconds", time.monotonic() - began_s, "s", "lower", counts=counts)]
    write_evidence(RESULT, "slow_tests", rows, (), code=digest_of_code())


def passed_on():
    """Return the digest of the code that the committed result is of; None without a result."""
    return json.loads(RESULT.read_text())["code"] if RESULT.exists() else None


def digest_of_code():
    """Return one digest of all files that git tracks and that the tests depend on.

    Comments and layout of Python files don't count: no test sees them.
    """
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *CODE],
        capture_output=True,
        text=True,
        check=True,
    )
    found = hashlib.sha256()
    for name in sorted(listed.stdout.split("\0")):
        path = ROOT / name
        if name and path.is_file() and not name.startswith(LEFT_OUT):
            content = path.read_bytes()
            if path.suffix == ".py":
                content = dumped(ast.parse(content)).encode()
            found.update(name.encode() + b"\0" + content + b"\0")
    return found.hexdigest()


if __name__ == "__main__":
    main()
