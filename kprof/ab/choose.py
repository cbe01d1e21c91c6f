"""`kprof ab --swap auto`: which kernels make a workload faster, one by one.

A first process switches between the workload as it is and each candidate in turn. Every window with
a candidate is compared with one as it is, in turn the one before and the one after it: so a drift
cancels, and a difference is as likely above as below the true one, under any noise. The mean of
both would not do: under noise with spikes it chose a neutral candidate in 16 % of 120 windows.

The comparison that follows takes new samples in a new process, so the choice does not flatter its
result. A candidate gets windows until it is faster or slower for sure, or the budget is spent.

Looks after every window would choose one neutral candidate in four (measured, 80 windows). So a
candidate is judged at 8, 16, 32, … windows, and once more at the end: the errors of all looks
together are at most 10 %, half of it at either end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kprof.ab.predict import predictions
from kprof.ab.variants import BUDGET_S, AbOptions, Tell
from kprof.analyze.verdict.ranks import Floats, interval, walsh_averages
from kprof.collect.trials import Schedule, Trial, TrialError, Variant, Window, run_trial
from kprof.errors import KprofError, counted
from kprof.kernels.swap.kept import (
    facts_of,
    facts_of_machine,
    has_gpu,
    keep_choice,
    keep_gate,
    load_choice,
    load_gate,
    words_of,
)
from kprof.kernels.swap.swap_report import (
    CHOICE,
    DECIDED,
    FIRST_LOOK,
    GATE_PASSED,
    GATE_UNFINISHED,
    CallSort,
    Choice,
    Tried,
    read_choice,
    write_choice,
)

PATCH = "kprof.kernels.swap.candidates:next_candidate"
LOG = "candidates.jsonl"
# Fewest windows at the end: with fewer, no outcome is rare enough for ALPHA_AT_END.
FEWEST_WINDOWS = 7
# Chance that the interval misses the true ratio, at both ends together: of a look, of which there
# are at most eight, and of the last one.
ALPHA_OF_LOOK, ALPHA_AT_END = 0.01, 0.02
# At most 2,000 of a candidate, and so eight looks.
MOST_WINDOWS = 4_000
# Windows in a row without a replaced call, after which a candidate is left out.
MOST_IDLE = 4
NO_MORE_CALLS = "no more calls: models that the workload builds later are not swapped"
# Candidates that end the workload are left out, and the rest is tried again, so often.
MOST_CRASHES = 3


def chosen(a: Variant, options: AbOptions, folder: Path, raw: Path, tell: Tell) -> Choice:
    """Return the choice that was kept for this workload; if there is none, choose, and keep it.

    With a budget of its own, always choose. `folder` gets choice.json, and `raw` the files of the
    processes.

    Raises:
        NothingPaysError: no kernel makes the workload faster for sure.
        KprofError: the workload took too few steps, or fails by itself.
    """
    facts = facts_of(words_of(a.command), {**os.environ, **a.environment})
    kept = load_choice(facts) if options.budget_s is None else None
    if kept is not None:
        tell(f"kernels were chosen on {kept.made} for the same code: --budget S chooses anew")
        write_choice(kept, folder / CHOICE)
        if not kept.names:
            raise _nothing_chosen(kept, folder)
        return kept
    try:
        choice = choose(a, options, folder, raw, tell)
    except NothingPaysError:
        none = read_choice(folder / CHOICE)
        if all(one.why or one.ratio is not None for one in none.tried) and not none.is_unjudged:
            keep_choice(facts, none)
        raise
    keep_choice(facts, choice)
    return choice


def choose(a: Variant, options: AbOptions, folder: Path, raw: Path, tell: Tell) -> Choice:
    """Try every candidate on the workload, and return what was chosen and why.

    What was tried stands in the folder's choice.json, however it ends.

    Raises:
        KprofError: the workload took too few steps, or no candidate makes it faster.
    """
    budget_s = options.budget_s or BUDGET_S
    tell(f"trying kernels one by one, for about {budget_s:.0f} s")
    tried: dict[str, Tried] = {}
    place = raw / "recorded"
    found, why = predictions(a, options, place, tell) if has_gpu() else ((), NO_GPU)
    try:
        _try_until_none_ends_it(a, options, raw, tell, tried)
        _gate(tried, raw, budget_s * GATE_SHARE, tell)
    finally:
        choice = replace(_choice_of(tried), findings=found, why_no_findings=why)
        if tried:
            write_choice(choice, folder / CHOICE)
    _tell_choice(choice, tell)
    if not choice.names:
        raise _nothing_chosen(choice, folder)
    return choice


def _choice_of(tried: Mapping[str, Tried]) -> Choice:
    return Choice(tuple(sorted(tried.values(), key=lambda one: (one.ratio or 2.0, one.name))))


def _gate(tried: dict[str, Tried], raw: Path, most_s: float, tell: Tell) -> None:
    """Note what the correctness gate says of those that would be chosen, until all are judged.

    Where one fails, the next provider of its kernel is judged. Several run at once.
    """
    end_s = time.monotonic() + most_s
    place = raw / "gate"
    while names := [name for name in _choice_of(tried).names if not tried[name].gate]:
        tell(f"checking the results of {', '.join(names)}")
        place.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(GATES_AT_ONCE) as pool:
            judged = partial(_judge, place, end_s)
            outcomes = list(pool.map(judged, [tried[name] for name in names]))
        for name, outcome in zip(names, outcomes, strict=True):
            tried[name] = replace(tried[name], gate=outcome)
            if outcome != GATE_PASSED:
                tell(f"{name} is left out: it {outcome}")


def _judge(place: Path, end_s: float, one: Tried) -> str:
    """Return what the gate says of a candidate's calls: kept, or from a process of its own."""
    sorts = json.dumps([asdict(sort) for sort in one.sorts])
    facts = {"name": one.name, "sorts": sorts, **facts_of_machine(os.environ)}
    kept = load_gate(facts)
    if kept:
        return kept
    stem = place / one.name.replace("=", "-by-")
    given, result = stem.with_suffix(".calls"), stem.with_suffix(".outcome")
    given.write_text(sorts)
    result.unlink(missing_ok=True)
    command = (sys.executable, "-m", GATE, one.name, str(given), str(result))
    try:
        with stem.with_suffix(".log").open("wb") as log:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
                timeout=max(end_s - time.monotonic(), 0.0),
            )
    except subprocess.TimeoutExpired:
        return GATE_UNFINISHED
    if not result.exists():
        return f"ended the correctness gate: {stem.with_suffix('.log')}"
    outcome = str(json.loads(result.read_text()))
    keep_gate(facts, outcome)
    return outcome


NO_GPU = "the rules are about a GPU's time"
GATE = "kprof.kernels.swap.gated"
# Processes that share the GPU; of the budget, for all of them, beside that for the windows.
GATES_AT_ONCE, GATE_SHARE = 4, 1.0


def _try_until_none_ends_it(
    a: Variant, options: AbOptions, raw: Path, tell: Tell, tried: dict[str, Tried]
) -> None:
    """Note in `tried` what is known of each candidate; begin anew without one that fails."""
    names = _all_names()
    for turn in range(MOST_CRASHES + 1):
        where = raw / f"choice{turn or ''}"
        try:
            _try_all(a, names, options, where, tell, tried)
        except TrialError as error:
            culprit, why, dropped = _after_crash(where / LOG, error.arm)
            tried |= {one.name: one for one in dropped}
            if culprit is not None:
                last = error.problem.splitlines()[-1].strip()
                tried[culprit] = Tried(culprit, why=why or f"the workload ended: {last}")
                tell(f"{culprit} is left out: {tried[culprit].why}")
            if culprit is None or turn == MOST_CRASHES:
                raise
            names = [name for name in names if not (name in tried and tried[name].why)]
            if names:
                continue
        return


def _try_all(
    a: Variant,
    names: Sequence[str],
    options: AbOptions,
    folder: Path,
    tell: Tell,
    tried: dict[str, Tried],
) -> None:
    folder.mkdir(parents=True)
    entries = folder / LOG
    schedule = Schedule(
        "AB" * (MOST_WINDOWS // 2) + "A",
        options.skip,
        options.window_s,
        patch=PATCH,
        patch_arguments=(",".join(names), str(entries.resolve())),
    )
    look = Look(entries, names, options.budget_s or BUDGET_S, tell)
    trial = run_trial(
        a, schedule, folder / "trial", is_enough=look.is_enough, why_to_end=look.why_to_end
    )
    found = {name: Tried(name) for name in names}
    found |= tried_in(trial.windows, entries, is_end=True)
    tried |= found
    if not any(one.num_windows or one.why == NO_MORE_CALLS for one in found.values()):
        raise _nothing_timed(options, trial, found, has_time=not (trial.windows and look.is_over))


class Look:
    """What the windows and the log so far mean for a trial under way."""

    def __init__(self, entries: Path, names: Sequence[str], budget_s: float, tell: Tell) -> None:
        self._entries, self._names, self._budget_s, self._tell = entries, names, budget_s, tell
        self._began_s = self._told_s = 0.0
        self._longest_s = 0.0
        self._size = 0
        self._last: dict[str, Any] = {}

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() - self._began_s > self._budget_s

    def is_enough(self, windows: Sequence[Window]) -> bool:
        """Tell the workload which candidates are decided; return whether all are."""
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s = self._told_s = now_s
        taken = tried_in(windows, self._entries).values()
        decided = [one.name for one in taken if one.is_faster or one.is_slower or one.why]
        self._entries.with_suffix(DECIDED).write_text("\n".join(decided))
        self._longest_s = max((w.end_ns - w.start_ns) / 1e9 for w in windows)
        if now_s - self._told_s > TELL_S:
            self._told_s = now_s
            spent_s = now_s - self._began_s
            self._tell(
                f"{len(decided)} of {len(self._names)} kernels decided, "
                f"{spent_s:.0f} of {self._budget_s:.0f} s"
            )
        # The last window is one without a candidate.
        return len(windows) % 2 == 1 and (len(decided) == len(self._names) or self.is_over)

    def why_to_end(self) -> str:
        """Return why the candidate that is in must not go on; empty: it may."""
        size = self._entries.stat().st_size if self._entries.exists() else 0
        if size != self._size:
            self._size = size
            lines = _lines_of(self._entries)
            self._last = lines[-1] if lines else {}
        if self._last.get("is_spoilt"):
            return str(self._last["why"])
        patience_s = max(HUNG_S, HUNG_WINDOWS * self._longest_s)
        silent_s = time.time() - self._last.get("time_ns", 0) / 1e9
        if self._last.get("event") != "enter" or silent_s < patience_s:
            return ""
        return f"no window ended within {patience_s:.0f} s with it"


# A candidate is given up where its window takes longer than both; kernels compile in the first.
HUNG_S, HUNG_WINDOWS = 120.0, 20
# Between two messages on how far the choice is.
TELL_S = 10.0


def tried_in(windows: Sequence[Window], entries: Path, *, is_end: bool = False) -> dict[str, Tried]:
    """Return what windows A, B, A, B, … show of each candidate in the log.

    Before the end, a candidate has a ratio only once a look decided about it.
    """
    spans, found = _spans(entries)
    ratios: dict[str, list[float]] = {}
    used: dict[str, int] = {}
    num_calls: dict[str, int] = {}
    num_idle: dict[str, int] = {}
    for place in range(1, len(windows) - 1, 2):
        during = windows[place]
        inside = [one for one in spans if one.begin_ns <= during.start_ns < one.end_ns]
        if not inside:
            continue
        name, before = inside[0].name, num_calls.get(inside[0].name, -1)
        num_calls[name] = max(one.num_calls for one in inside if one.name == name)
        if num_calls[name] == before and not found[name].num_compiled:
            # Nothing was replaced in it.
            num_idle[name] = num_idle.get(name, 0) + 1
            continue
        num_idle[name] = 0
        if name not in ratios:
            # Kernels are compiled in its first window.
            ratios[name] = []
            continue
        other = place - 1 if len(ratios[name]) % 2 == 0 else place + 1
        # Two differences of a candidate share no window, so that they are independent.
        if used.get(name) == other or during.problem or windows[other].problem:
            continue
        used[name] = other
        ratios[name].append(log(during.time_ns) - log(windows[other].time_ns))
    for name, number in num_idle.items():
        if number >= MOST_IDLE:
            found[name] = replace(found[name], why=NO_MORE_CALLS)
            ratios.pop(name, None)
    return {
        name: _with_ratios(one, np.array(ratios.get(name, [])), is_end=is_end)
        for name, one in found.items()
    }


class _Span(NamedTuple):
    """A time in which a candidate was in."""

    name: str
    begin_ns: int
    end_ns: int
    num_calls: int
    """Calls that it replaced since the first such time."""


def _spans(entries: Path) -> tuple[list[_Span], dict[str, Tried]]:
    """Return when which candidate was in, and the candidates without their times."""
    spans: list[_Span] = []
    found: dict[str, Tried] = {}
    entered_ns = 0
    for told in _lines_of(entries):
        name, at_ns = told["name"], told["time_ns"]
        one = found.setdefault(name, Tried(name))
        if told["event"] == "enter":
            entered_ns = at_ns
        elif told["event"] == "leave":
            spans.append(_Span(name, entered_ns, at_ns, told["num_calls"]))
            calls = {key: told[key] for key in ("num_calls", "num_compiled")}
            sorts = tuple(msgspec.convert(told.get("sorts", []), list[CallSort]))
            found[name] = replace(one, **calls, sorts=one.sorts or sorts)
        else:
            found[name] = replace(one, why=told["why"])
    return spans, found


def _lines_of(entries: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the log; none before the first candidate was entered."""
    lines = entries.read_text().splitlines(keepends=True) if entries.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _with_ratios(one: Tried, ratios: Floats, *, is_end: bool) -> Tried:
    """Return a candidate with the ratio of its steps to those without it, and its interval.

    They are those of the first look that decided; at the end, of all windows if none did.
    """
    count = FIRST_LOOK
    while count <= len(ratios):
        looked = _looked_at(one, ratios[:count], ALPHA_OF_LOOK)
        if looked.is_faster or looked.is_slower:
            return looked
        count *= 2
    if not is_end or len(ratios) < FEWEST_WINDOWS:
        return replace(one, num_windows=len(ratios))
    return _looked_at(one, ratios, ALPHA_AT_END)


def _looked_at(one: Tried, ratios: Floats, alpha: float) -> Tried:
    averages = walsh_averages(ratios)
    ends = interval(averages, len(ratios), alpha)
    ratio, low, high = (float(np.exp(value)) for value in (np.median(averages), *ends))
    return replace(one, num_windows=len(ratios), ratio=ratio, low=low, high=high)


def _after_crash(entries: Path, arm: str) -> tuple[str | None, str, list[Tried]]:
    """Return the candidate that was in when the workload ended, why, and those that cannot run.

    A process that an exception ends leaves the candidate before it exits, and may drop it then; why
    is empty unless that is the reason for the end.
    """
    lines = _lines_of(entries)
    enters = [place for place, line in enumerate(lines) if line["event"] == "enter"]
    if not enters:
        return None, "", []
    later = lines[enters[-1] + 1 :]
    is_culprit = not later or (arm == "B" and later[0]["event"] == "leave")
    why = next((line["why"] for line in later if line.get("is_spoilt")), "")
    dropped = [one for one in _spans(entries)[1].values() if one.why]
    return (lines[enters[-1]]["name"] if is_culprit else None), why, dropped


def _all_names() -> list[str]:
    # Imports torch and Triton, which other comparisons do without.
    from kprof.kernels.swap.candidates import candidate_names

    return candidate_names()


def _tell_choice(choice: Choice, tell: Tell) -> None:
    for one in choice.tried:
        if one.ratio is not None:
            verdict = "chosen" if one.name in choice.names else "left out"
            tell(f"{one.name}: step {100 * (one.ratio - 1):+.1f} %, {verdict}")


class NothingPaysError(KprofError):
    """All kernels were tried, and none is faster for sure."""


def _nothing_chosen(choice: Choice, folder: Path) -> NothingPaysError:
    fix = f"see what was tried, and why not, in {folder / CHOICE}; "
    if choice.is_unjudged:
        return NothingPaysError(
            "no kernel that makes this workload faster was judged right in time",
            fix=fix + "give the correctness gate more time: --budget",
        )
    if any(one.is_faster for one in choice.tried):
        return NothingPaysError(
            "no kernel that makes this workload faster passes the correctness gate",
            fix=fix + "kprof kernels check says more of a kernel",
        )
    num_untimed = sum(1 for one in choice.tried if one.ratio is None and not one.why)
    if not num_untimed:
        fix += "kprof run shows what limits it"
        return NothingPaysError("no kernel makes this workload faster", fix=fix)
    return NothingPaysError(
        "no kernel makes this workload faster for sure, and "
        f"{counted(num_untimed, 'kernel')} had too few windows",
        fix=fix + "give it more time: --budget, or name kernels: --swap NAMES",
    )


def _nothing_timed(
    options: AbOptions, trial: Trial, found: dict[str, Tried], *, has_time: bool
) -> KprofError:
    name = options.words[0]
    if all(one.why for one in found.values()):
        return KprofError(
            f"no kernel has a call in {name}",
            fix="kprof kernels list says what kernels replace; kprof run shows what limits it",
        )
    if not has_time:
        return KprofError(
            f"the steps of {name} are too long to try kernels one by one in "
            f"{options.budget_s or BUDGET_S:.0f} s",
            fix="give more time (--budget), or name kernels: --swap NAMES",
        )
    return KprofError(
        f"{name} ended before kernels could be tried",
        fix=f"let it take more steps, or name kernels: --swap NAMES; its output: {trial.log}",
    )
