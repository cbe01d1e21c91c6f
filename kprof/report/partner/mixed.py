"""Mixed evidence: what shows that a page is put together of other workloads, or other devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from kprof.analyze.attribution.steps import time_steps
from kprof.comparison import Comparison
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.outcome import medians_in_words, medians_of
from kprof.report.partner.wording import time_within
from kprof.trace import Trace

STEP_TIME = "step time"
NO_GPU = "no GPU"
# Recording can double a step, and a step varies from process to process; beyond this it is another.
OTHER_STEP = 3.0


def say_mixed(evidence: Evidence) -> list[str]:
    """Warn, a sentence or two each, of what is not of one workload, one device or one step."""
    return [
        *_say_workloads(_workloads(evidence)),
        *_say_devices(evidence),
        *_say_steps(evidence),
    ]


def gpu_of(comparison: Comparison) -> str:
    """Return the GPU that a comparison names; empty where it names none."""
    return next((text for name, text in comparison.facts.items() if name.lower() == "gpu"), "")


def step_in(run: Trace) -> tuple[float, str] | None:
    """Return the median step of a run in ns, unrecorded if possible, and where it was measured."""
    times = time_steps(run)
    steps = times.unrecorded_ns or times.recorded_ns
    where = "around" if times.unrecorded_ns else "in"
    return (median(steps), f"{where} the recording") if steps else None


def steps_compared(evidence: Evidence) -> list[tuple[float, str]]:
    """Return the median step of A and of B of the headline in ns and in words; else nothing."""
    comparison = evidence.headline
    if comparison is None or comparison.headline.metric.name != STEP_TIME:
        return []
    claim = comparison.headline
    medians, words = medians_of(comparison, claim), medians_in_words(comparison, claim)
    if medians is None or words is None or min(medians) <= 0:
        return []
    return list(zip(medians, words, strict=True))


def _say_workloads(workloads: list[set[str]]) -> Iterator[str]:
    if len(workloads) < 2:
        return
    listed = "; ".join(", ".join(sorted(scripts)) for scripts in workloads)
    yield (
        f"This report holds measurements of different workloads: {listed}. Results of one may not "
        "hold for another."
    )


def _workloads(evidence: Evidence) -> list[set[str]]:
    """Return the scripts that were recorded and compared; those of one comparison are together."""
    of_runs: list[list[Sequence[str]]] = [[run.meta.command] for run in evidence.runs]
    of_comparisons: list[list[Sequence[str]]] = [
        [shlex.split(line) for name in "AB" if (line := comparison.facts.get(f"command of {name}"))]
        for comparison in evidence.comparisons
    ]
    found: list[set[str]] = []
    for commands in (*of_runs, *of_comparisons):
        scripts = {_script(words) for words in commands if words}
        if scripts:
            scripts = scripts.union(*(one for one in found if one & scripts))
            found = [*(one for one in found if not one & scripts), scripts]
    return found


def _script(words: Sequence[str]) -> str:
    """Return the name of a command's script or module; of any other command, its program's."""
    pairs = pairwise(words)
    named = (word for before, word in pairs if before == "-m" or word.endswith(".py"))
    return Path(next(named, words[0])).name


def _say_devices(evidence: Evidence) -> Iterator[str]:
    """Warn where something beside the comparison of the verdict was measured on another device."""
    comparison = evidence.headline
    if comparison is None:
        return
    own = gpu_of(comparison) or NO_GPU
    beside = [("a recording", _devices_of(run)) for run in evidence.runs]
    beside += [("a comparison", {gpu_of(one) or NO_GPU}) for one in evidence.comparisons[1:]]
    others = dict.fromkeys(
        f"{what} on {', '.join(sorted(names))}"
        for what, names in beside
        if names and own not in names
    )
    if others:
        yield (
            f"Not all of this was measured on one device: the comparison of the verdict names "
            f"{own}, but the report also holds {', '.join(others)}. The verdict holds for its own "
            "device alone."
        )


def _devices_of(run: Trace) -> set[str]:
    """Return the names of a run's GPUs; of one on a host that it is none; empty: not known."""
    return {NO_GPU} if run.is_host_only else {gpu.name for gpu in run.gpus}


def _say_steps(evidence: Evidence) -> Iterator[str]:
    """Warn where a recorded step is far from A's as well as from B's."""
    compared = steps_compared(evidence)
    for found in map(step_in, evidence.runs):
        if not compared or found is None:
            continue
        if any(1 / OTHER_STEP < found[0] / of < OTHER_STEP for of, _ in compared):
            continue
        own, where = found
        yield (
            f"A step took {time_within(own, 0.01)} {where}, and "
            f"{' or '.join(shown for _, shown in compared)} in the comparison: the workload, its "
            "settings or the definition of a step may differ."
        )
