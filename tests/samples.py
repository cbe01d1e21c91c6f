"""Which of many cases run: all, or one in a few where a committed result speaks for the others.

What comes of a case follows from the sources that a result lists with their hashes, and from the
versions that run them. Where those are still the same, what ran well there need not run each time.
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
VERSIONS = ("python", "torch", "triton", "numpy")


@dataclass(frozen=True)
class Kept:
    """A committed result of many cases."""

    script: str
    """The module of `benchmarks/` that makes it."""
    name: str
    unhashed: tuple
    """What its cases import of kprof besides the sources whose hashes it has."""

    def read(self):
        """Return what it holds."""
        return json.loads((BENCHMARKS / "results" / self.name).read_text())


_OF_LAUNCH = tuple(f"kprof/collect/{name}.py" for name in ("nsys", "nvml", "parts"))
HOSTILE = Kept("hostile", "hostile_cpu_2026-11.json", (*_OF_LAUNCH, "kprof/errors.py"))
GATE = Kept("gate_mutations", "gate_mutations_cpu_2026-11.json", ("kprof/errors.py",))


@dataclass(frozen=True)
class Sample:
    """The names of the cases that a run leaves out, and why it leaves out those, or none."""

    left_out: frozenset
    reason: str


@cache
def benchmark(name):
    """Return a module of `benchmarks/`, whose scripts import each other as they lie there."""
    with patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        return import_module(name)


def sources_of(kept):
    """Return the hashes today of the sources that the result has the hashes of."""
    return benchmark("evidence").hash_sources(benchmark(kept.script).SOURCES)


def changed_since(kept, result):
    """Return what no longer is as it was when `result` was measured: files, versions."""
    sources, versions = sources_of(kept), benchmark("evidence").installed_versions()
    names = sorted(sources.keys() | result["sources"].keys())
    return [
        *(name for name in names if sources.get(name) != result["sources"].get(name)),
        *(name for name in kept.unhashed if _differs(name, result["commit"])),
        *(name for name in VERSIONS if versions.get(name) != result["versions"].get(name)),
    ]


def _differs(name, commit):
    """Tell whether a file is another one than in `commit`, also where nobody knows that commit."""
    git = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", name]
    return subprocess.run(git, capture_output=True).returncode != 0


def draw(kept, result, names, every, commit):
    """Return which of the cases `names` to leave out, so that one of `every` that is known runs.

    Nothing is left out where anything changed since `result`; nor is what did not run there, or
    not as it should. Each `commit` draws others, so that every case comes round.
    """
    if changed := changed_since(kept, result):
        return Sample(frozenset(), f"changed since {kept.name}: {', '.join(changed)}")
    known = {row["name"] for row in result["rows"] if row["met"]}.intersection(names)
    ranked = sorted(known, key=lambda name: hashlib.sha256(f"{commit} {name}".encode()).digest())
    count = -(-len(ranked) // every)
    reason = f"only {count} of {len(ranked)} run, drawn by commit {commit[:7]}: "
    return Sample(frozenset(ranked[count:]), f"{reason}nothing changed since {kept.name}")


@cache
def sample(kept, names, every):
    """Return the sample of the commit that is checked out: one of `every`, None for all."""
    if not every:
        return Sample(frozenset(), "")
    commit = benchmark("evidence").current_commit()
    return draw(kept, kept.read(), names, int(every), commit)


def skip_if_left_out(kept, names, name):
    """Skip a case that the sample leaves out, if one was asked for: SAMPLE=6 is one of six."""
    drawn = sample(kept, tuple(names), os.environ.get("SAMPLE"))
    if name in drawn.left_out:
        pytest.skip(drawn.reason)


def tell_if_all_run(kept, names):
    """Let the summary say why all cases run where a sample was asked for."""
    drawn = sample(kept, tuple(names), os.environ.get("SAMPLE"))
    if drawn.reason and not drawn.left_out:
        pytest.xfail(f"all {len(names)} run, {drawn.reason}")
