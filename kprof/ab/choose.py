"""`kprof ab --swap auto`: which kernels make a workload faster, one by one.

A first process switches between the workload as it is and each candidate in turn. Every window with
a candidate is compared with the windows as it is before and after it. The comparison that follows
takes new samples in a new process, so the choice does not flatter its result. A candidate gets
windows until it is faster or slower for sure, or the budget is spent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from kprof.ab.variants import AbOptions, Tell
from kprof.analyze.verdict.ranks import interval, walsh_averages
from kprof.collect.trials import Schedule, Trial, TrialError, Variant, Window, run_trial
from kprof.errors import KprofError
from kprof.kernels.swap.swap_report import CHOICE, DECIDED, Choice, Tried, write_choice

PATCH = "kprof.kernels.swap.candidates:next_candidate"
LOG = "candidates.jsonl"
# Fewest windows of a candidate that count; its first one, in which kernels are compiled, does not.
FEWEST_WINDOWS = 6
# For the windows of all candidates, beside the start of the workload.
BUDGET_S = 60.0
# Chance that the interval of a candidate misses its true ratio, at both ends together.
ALPHA = 0.1
MOST_WINDOWS = 4_000
# Candidates that end the workload are left out, and the rest is tried again, so often.
MOST_CRASHES = 3


def choose(a: Variant, options: AbOptions, folder: Path, tell: Tell) -> Choice:
    """Try every candidate on the workload, and return what was chosen and why.

    Raises:
        KprofError: the workload took too few steps, or no candidate makes it faster.
    """
    tell(f"trying kernels one by one, for about {BUDGET_S:.0f} s")
    tried: dict[str, Tried] = {}
    names = ""
    for turn in range(MOST_CRASHES + 1):
        where = folder / "raw" / f"choice{turn or ''}"
        try:
            found = _try_all(a, names, options, where)
        except TrialError as error:
            culprit, rest = _after_crash(where / LOG, names)
            if culprit is None or turn == MOST_CRASHES:
                raise
            tried[culprit] = Tried(culprit, why=f"the workload ended: {error.problem}")
            names = ",".join(rest)
            continue
        tried |= found
        break
    choice = Choice(tuple(sorted(tried.values(), key=lambda one: (one.ratio or 2.0, one.name))))
    write_choice(choice, folder / CHOICE)
    _tell_choice(choice, tell)
    if not choice.names:
        raise KprofError(
            "no kernel makes this workload faster",
            fix=f"see what was tried, and why not, in {folder / CHOICE}; "
            "kprof run shows what limits it",
        )
    return choice


def _try_all(a: Variant, names: str, options: AbOptions, folder: Path) -> dict[str, Tried]:
    folder.mkdir(parents=True)
    entries = folder / LOG
    schedule = Schedule(
        "AB" * (MOST_WINDOWS // 2) + "A",
        options.skip,
        options.window_s,
        patch=PATCH,
        patch_arguments=(names, str(entries.resolve())),
    )
    began_s = [0.0]

    def is_enough(windows: Sequence[Window]) -> bool:
        began_s[0] = began_s[0] or time.monotonic()
        taken = tried_in(windows, entries).values()
        alive = [one for one in taken if not one.why]
        decided = [one.name for one in alive if one.is_faster or one.is_slower]
        entries.with_suffix(DECIDED).write_text("\n".join(decided))
        has_all = len(decided) == len(alive) and bool(taken) and len(windows) > 2 * len(alive)
        # The last window is one without a candidate.
        is_over = time.monotonic() - began_s[0] > BUDGET_S
        return len(windows) % 2 == 1 and (has_all or is_over)

    trial = run_trial(a, schedule, folder / "trial", is_enough=is_enough)
    found = tried_in(trial.windows, entries)
    if not any(one.num_windows for one in found.values()):
        raise _nothing_timed(options.words[0], trial, found)
    return found


def tried_in(windows: Sequence[Window], entries: Path) -> dict[str, Tried]:
    """Return what windows A, B, A, B, … show of each candidate in the log."""
    spans, found = _spans(entries)
    ratios: dict[str, list[float]] = {}
    for place in range(1, len(windows) - 1, 2):
        before, during, after = windows[place - 1 : place + 2]
        name = next((name for name, begin, end in spans if begin <= during.start_ns < end), None)
        if name is None or any(one.problem for one in (before, during, after)):
            continue
        ratios.setdefault(name, []).append(
            log(during.time_ns) - (log(before.time_ns) + log(after.time_ns)) / 2
        )
    return {name: _with_ratios(one, ratios.get(name, [])[1:]) for name, one in found.items()}


def _spans(entries: Path) -> tuple[list[tuple[str, int, int]], dict[str, Tried]]:
    """Return when which candidate was in, and the candidates without their times."""
    spans: list[tuple[str, int, int]] = []
    found: dict[str, Tried] = {}
    entered_ns = 0
    for told in _lines_of(entries):
        name, at_ns = told["name"], told["time_ns"]
        one = found.setdefault(name, Tried(name))
        if told["event"] == "enter":
            entered_ns = at_ns
        elif told["event"] == "leave":
            spans.append((name, entered_ns, at_ns))
            calls = {key: told[key] for key in ("num_calls", "num_compiled")}
            found[name] = replace(one, **calls)
        else:
            found[name] = replace(one, why=told["why"])
    return spans, found


def _lines_of(entries: Path) -> list[dict[str, Any]]:
    """Return the lines of the log; none before the first candidate was entered."""
    return (
        [json.loads(line) for line in entries.read_text().splitlines()] if entries.exists() else []
    )


def _with_ratios(one: Tried, ratios: Sequence[float]) -> Tried:
    """Return a candidate with the ratio of its steps to those without it, and its interval."""
    count = len(ratios)
    if count < FEWEST_WINDOWS:
        return replace(one, num_windows=count)
    averages = walsh_averages(np.array(ratios))
    ends = interval(averages, count, ALPHA)
    ratio, low, high = (float(np.exp(value)) for value in (np.median(averages), *ends))
    return replace(one, num_windows=count, ratio=ratio, low=low, high=high)


def _after_crash(entries: Path, names: str) -> tuple[str | None, list[str]]:
    """Return the candidate that was in when the workload ended, and the others."""
    lines = _lines_of(entries)
    if not lines or lines[-1]["event"] != "enter":
        return None, []
    culprit = lines[-1]["name"]
    known = names.split(",") if names else _all_names()
    dropped = {line["name"] for line in lines if line["event"] == "drop"}
    return culprit, [name for name in known if name != culprit and name not in dropped]


def _all_names() -> list[str]:
    # Imports torch and Triton, which most comparisons do without.
    from kprof.kernels.swap.candidates import candidate_names

    return candidate_names()


def _tell_choice(choice: Choice, tell: Tell) -> None:
    for one in choice.tried:
        if one.ratio is not None:
            verdict = "chosen" if one.name in choice.names else "left out"
            tell(f"{one.name}: step {100 * (one.ratio - 1):+.1f} %, {verdict}")


def _nothing_timed(name: str, trial: Trial, found: dict[str, Tried]) -> KprofError:
    if found and all(one.why for one in found.values()):
        return KprofError(
            f"no kernel has a call in {name}",
            fix="kprof kernels list says what kernels replace; kprof run shows what limits it",
        )
    return KprofError(
        f"{name} ended before kernels could be tried",
        fix=f"let it take more steps, or name kernels: --swap NAMES; its output: {trial.log}",
    )
