"""Which hostile workloads run: all, or a few where a committed result speaks for the others.

How a workload behaves follows from the recorder's sources, its own, and the versions that run it.
Where those are still the ones of a result in which it behaved alike, it need not run each time.
"""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "hostile_cpu_2026-11.json"
VERSIONS = ("python", "torch", "triton", "numpy")
# What the launch imports besides the sources whose hashes are in the result.
UNHASHED = tuple(f"kprof/{name}.py" for name in ("collect/nsys", "collect/nvml", "collect/parts"))
UNHASHED += ("kprof/errors.py",)


@dataclass(frozen=True)
class Sample:
    """The names of the workloads that a run leaves out, and why it leaves out those, or none."""

    left_out: frozenset
    reason: str


@cache
def benchmark():
    """Return the modules that make the result and that write it."""
    with patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        return import_module("hostile"), import_module("evidence")


def changed_since(result):
    """Return what no longer is as it was when `result` was measured: files, versions."""
    hostile, evidence = benchmark()
    sources, versions = evidence.hash_sources(hostile.SOURCES), evidence.installed_versions()
    names = sorted(sources.keys() | result["sources"].keys())
    return [
        *(name for name in names if sources.get(name) != result["sources"].get(name)),
        *(name for name in UNHASHED if _differs(name, result["commit"])),
        *(name for name in VERSIONS if versions.get(name) != result["versions"].get(name)),
    ]


def _differs(name, commit):
    """Tell whether a file is another one than in `commit`, also where nobody knows that commit."""
    git = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", name]
    return subprocess.run(git, capture_output=True).returncode != 0


def sample(names, count, commit, result):
    """Return which of the workloads `names` to leave out, so that `count` known ones run.

    Nothing is left out where anything changed since `result`; nor are those that did not run
    there, or did not behave alike. Each `commit` draws others, so that every workload comes round.
    """
    if changed := changed_since(result):
        return Sample(frozenset(), f"changed since {RESULT.name}: {', '.join(changed)}")
    alike = {row["name"] for row in result["rows"] if row["value"] == 0}
    drawn = sorted(alike.intersection(names), key=lambda name: _rank(commit, name))
    reason = f"only {count} of {len(drawn)} run, drawn by commit {commit[:7]}: "
    return Sample(frozenset(drawn[count:]), f"{reason}nothing changed since {RESULT.name}")


def _rank(commit, name):
    return hashlib.sha256(f"{commit} {name}".encode()).digest()


@cache
def sample_here(names, count):
    """Return the sample of the commit that is checked out; all run where `count` is None."""
    if count is None:
        return Sample(frozenset(), "all were asked for")
    commit = benchmark()[1].current_commit()
    return sample(names, int(count), commit, json.loads(RESULT.read_text()))
