"""Which of many cases run: all, or one in a few where a committed result speaks for the others.

The outcome of a case follows from the code that a result has the digests of, and from the
versions that run it. Where those are still the same, what ran well there need not run each time.
"""

import hashlib
import json
import os
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

    def read(self):
        """Return what it holds."""
        return json.loads((BENCHMARKS / "results" / self.name).read_text())


HOSTILE = Kept("hostile", "hostile_cpu_2026-11.json")
GATE = Kept("gate_mutations", "gate_mutations_cpu_2026-11.json")


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


def ran_today(kept):
    """Return the digests today of all that the result depends on."""
    return benchmark("evidence").what_ran(benchmark(kept.script).SOURCES)


def changed_since(kept, result):
    """Return what no longer is as it was when `result` was measured: code, versions."""
    today, versions = ran_today(kept), benchmark("evidence").installed_versions()
    labels = sorted(today.keys() | result["ran"].keys())
    return [
        *(label for label in labels if today.get(label) != result["ran"].get(label)),
        *(name for name in VERSIONS if versions.get(name) != result["versions"].get(name)),
    ]


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
