"""`kprof ab --swap auto`: which kernels make a workload faster.

A first process switches between the workload as it is, or the base, and each candidate in turn, in
the order of `Search`. Every window with a candidate is compared with one of the base, in turn the
one before and the one after it: so a drift cancels, and a difference is as likely above as below
the true one, under any noise. The mean of both would not do: under noise with spikes it chose a
neutral candidate in 16 % of 120 windows.

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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf, log
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kprof.ab.predict import Prediction, no_predictions, predictions
from kprof.ab.search import Search, Seen, kernel_of
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
    FIRST_LOOK,
    GATE_PASSED,
    GATE_UNFINISHED,
    NEEDS_GPU,
    PLAN,
    Checked,
    Choice,
    Ran,
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
# Shorter than those of a comparison: many candidates share the budget.
WINDOW_S = 0.1
# Windows in a row without a replaced call, after which a candidate is left out.
MOST_IDLE = 4
NO_MORE_CALLS = "no more calls: models that the workload builds later are not swapped"
# Candidates that end the workload are left out, and the rest is tried again, so often.
MOST_CRASHES = 4


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
    except UndecidedError:
        raise
    except NothingPaysError:
        # There is none where the budget was over before a kernel was tried.
        none = read_choice(folder / CHOICE) if (folder / CHOICE).exists() else Choice(())
        if none.tried and all(one.why or one.ratio is not None for one in none.tried):
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
    tell(f"trying kernels, for about {budget_s:.0f} s")
    tried = _Outcomes()
    place = raw / "recorded"
    predicted = predictions(a, options, place, tell) if has_gpu() else no_predictions(NO_GPU)
    try:
        _try_until_none_ends_it(a, options, raw, tell, tried, predicted)
        _gate(tried, raw, budget_s * GATE_SHARE, tell)
    finally:
        found, why = predicted()
        choice = replace(_choice_of(tried), findings=found, why_no_findings=why)
        if tried.of:
            write_choice(choice, folder / CHOICE)
    _tell_choice(choice, tell)
    if not choice.names:
        raise _nothing_chosen(choice, folder)
    return choice


@dataclass
class _Outcomes:
    """What is known so far of each candidate KERNEL=PROVIDER, and of the joint swap."""

    of: dict[str, Tried] = field(default_factory=dict)
    joint: Tried | None = None


def _choice_of(tried: _Outcomes) -> Choice:
    ranked = sorted(tried.of.values(), key=lambda one: (one.ratio or inf, one.name))
    return Choice(tuple(ranked), joint=tried.joint)


def _gate(tried: _Outcomes, raw: Path, most_s: float, tell: Tell) -> None:
    """Note what the correctness gate says of those that would be chosen, until all are judged.

    Where one fails, the next provider of its kernel is judged. Several run at once.
    """
    end_s = time.monotonic() + most_s
    place = raw / "gate"
    while names := [name for name in _choice_of(tried).names if not tried.of[name].gate]:
        tell(f"checking the results of {', '.join(names)}")
        place.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(GATES_AT_ONCE) as pool:
            judged = partial(_judge, place, end_s)
            outcomes = list(pool.map(judged, [tried.of[name] for name in names]))
        for name, one in zip(names, outcomes, strict=True):
            tried.of[name] = replace(tried.of[name], gate=one.outcome, gate_report=one.report)
            if one.outcome != GATE_PASSED:
                tell(f"{name} is left out: it {one.outcome}")


def _judge(place: Path, end_s: float, one: Tried) -> Checked:
    """Return what the gate says of a candidate's calls: kept, or from a process of its own."""
    sorts = json.dumps([asdict(sort) for sort in one.sorts])
    facts = {"name": one.name, "sorts": sorts, **facts_of_machine(os.environ)}
    kept = load_gate(facts)
    if kept is not None:
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
        return Checked(GATE_UNFINISHED)
    if not result.exists():
        return Checked(f"ended the correctness gate: {stem.with_suffix('.log')}")
    checked = Checked(**json.loads(result.read_text()))
    keep_gate(facts, checked)
    return checked


NO_GPU = "the rules are about a GPU's time"
GATE = "kprof.kernels.swap.gated"
# Processes that share the GPU; of the budget, for all of them, beside that for the windows.
GATES_AT_ONCE, GATE_SHARE = 4, 1.0


def _try_until_none_ends_it(
    a: Variant,
    options: AbOptions,
    raw: Path,
    tell: Tell,
    tried: _Outcomes,
    predicted: Prediction,
) -> None:
    """Note in `tried` what is known of each candidate; begin anew without one that fails."""
    names, apart = _all_names(), list[str]()
    for turn in range(MOST_CRASHES + 1):
        where = raw / f"choice{turn or ''}"
        search = Search(names, apart, lambda: [one.kernel for one in predicted()[0]])
        try:
            _try_all(a, search, options, where, tell, tried)
        except TrialError as error:
            fault, dropped = _after_crash(where / LOG, error.arm)
            tried.of |= {one.name: one for one in dropped if one.name in names}
            if fault is not None:
                last = error.problem.splitlines()[-1].strip()
                why = fault.why or f"the workload ended: {last}"
                apart += _kernels_apart(fault, search)
                for name in _blamed(fault):
                    tried.of[name] = Tried(name, why=why)
                tell(f"{fault.kernel or fault.name} is left out: {why}")
            if fault is None or turn == MOST_CRASHES:
                raise
            names = [one for one in names if not (one in tried.of and tried.of[one].why)]
            if names:
                continue
        return


def _kernels_apart(fault: _Fault, search: Search) -> list[str]:
    """Return the kernels that the next joint swap does without, after a fault."""
    if fault.kernel:
        return [fault.kernel]
    # Which kernel of several it was is unknown: they are tried one by one.
    return [] if _blamed(fault) else [kernel_of(one) for one in search.names]


def _blamed(fault: _Fault) -> list[str]:
    """Return the candidates KERNEL=PROVIDER that are left out after a fault; none: unknown."""
    if fault.kernel:
        return [f"{fault.kernel}={fault.provider}"]
    # Those before the last one ran well without it.
    return [one for one in fault.name.split(",") if "=" in one][-1:]


def _try_all(
    a: Variant,
    search: Search,
    options: AbOptions,
    folder: Path,
    tell: Tell,
    outcomes: _Outcomes,
) -> None:
    folder.mkdir(parents=True)
    entries = folder / LOG
    schedule = Schedule(
        "AB" * (MOST_WINDOWS // 2) + "A",
        options.skip,
        min(options.window_s, WINDOW_S),
        # The first of a window is not compared.
        min_steps=2,
        patch=PATCH,
        patch_arguments=(" ".join(search.first), str(entries.resolve())),
    )
    look = Look(entries, search, options.budget_s or BUDGET_S, tell)
    trial = run_trial(
        a, schedule, folder / "trial", is_enough=look.is_enough, why_to_end=look.why_to_end
    )
    tried = tried_in(trial.windows, entries, is_end=True)
    found, outcomes.joint = search.outcome(tried, seen_in(entries))
    outcomes.of |= found
    if not any(one.num_windows or one.why == NO_MORE_CALLS for one in tried.values()):
        raise _nothing_timed(options, trial, found, has_time=not (trial.windows and look.is_over))


class Look:
    """What the windows and the log so far mean for a trial under way."""

    def __init__(self, entries: Path, search: Search, budget_s: float, tell: Tell) -> None:
        self._entries, self._search, self._budget_s, self._tell = entries, search, budget_s, tell
        self._began_s = self._told_s = 0.0
        self._longest_s = 0.0
        self._size = 0
        self._last: dict[str, Any] = {}

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._time_left_s() < 0

    def _time_left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._began_s)

    def is_enough(self, windows: Sequence[Window]) -> bool:
        """Tell the workload which candidates need windows; return whether none does."""
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s = self._told_s = now_s
        tried = tried_in(windows, self._entries)
        left, base = self._search.left(tried, seen_in(self._entries), self._time_left_s())
        self._write_plan(left, base)
        self._longest_s = max((w.end_ns - w.start_ns) / 1e9 for w in windows)
        if now_s - self._told_s > TELL_S:
            self._told_s = now_s
            what = "all kernels together"
            if left != [self._search.joint]:
                what = f"{counted(len(left), 'candidate')} left"
            spent_s = now_s - self._began_s
            self._tell(f"{what}, {spent_s:.0f} of {self._budget_s:.0f} s")
        # The last window is one of the base.
        return len(windows) % 2 == 1 and (not left or self.is_over)

    def _write_plan(self, left: Sequence[str], base: str) -> None:
        """Write the plan; the workload never reads half of it."""
        path = self._entries.with_suffix(PLAN)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"left": left, "base": base}))
        partial.replace(path)

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
    pairings: dict[str, _Pairing] = {}
    for place in range(1, len(windows) - 1, 2):
        during = windows[place]
        inside = [one for one in spans if one.begin_ns <= during.start_ns < one.end_ns]
        if not inside:
            continue
        name = inside[0].name
        pairing = pairings.setdefault(name, _Pairing())
        num_calls = max(one.num_calls for one in inside if one.name == name)
        if pairing.is_idle(num_calls, is_counted=not found[name].num_compiled):
            continue
        other = pairing.next_to(place)
        if other is None or during.problem or windows[other].problem:
            continue
        if _base_at(windows[other].start_ns, spans) == inside[0].base:
            pairing.compare(during, windows, other)
    for name, one in pairings.items():
        if one.num_idle >= MOST_IDLE:
            found[name] = replace(found[name], why=NO_MORE_CALLS)
            one.ratios.clear()
    return {
        name: _with_ratios(
            one, np.array(pairings[name].ratios if name in pairings else []), is_end=is_end
        )
        for name, one in found.items()
    }


@dataclass
class _Pairing:
    """The windows of a candidate so far, each compared with one of the base."""

    ratios: list[float] = field(default_factory=list)
    """Logarithms."""
    num_idle: int = 0
    """Windows in a row in which nothing was replaced."""
    _num_calls: int = -1
    _is_begun: bool = False
    _used: int | None = None

    def is_idle(self, num_calls: int, *, is_counted: bool) -> bool:
        """Note the calls so far; return whether there are no more than before."""
        is_idle = is_counted and num_calls == self._num_calls
        self._num_calls = num_calls
        self.num_idle = self.num_idle + 1 if is_idle else 0
        return is_idle

    def next_to(self, place: int) -> int | None:
        """Return the window that one at this place is compared with; None: it is not compared.

        Kernels are compiled in the first. Two differences of a candidate share no window, so that
        they are independent.
        """
        if not self._is_begun:
            self._is_begun = True
            return None
        other = place - 1 if len(self.ratios) % 2 == 0 else place + 1
        return None if other == self._used else other

    def compare(self, during: Window, windows: Sequence[Window], other: int) -> None:
        """Compare a window with another one."""
        self._used = other
        self.ratios.append(log(during.settled_ns) - log(windows[other].settled_ns))


class _Span(NamedTuple):
    """A time in which a candidate was in."""

    name: str
    begin_ns: int
    end_ns: int
    num_calls: int
    """Calls that it replaced since the first such time."""
    base: str
    """The base of this time, which is in behind it; empty: the workload as it is."""


def _base_at(time_ns: int, spans: Sequence[_Span]) -> str:
    """Return the base of a time in which no candidate is in."""
    before = [one for one in spans if one.end_ns <= time_ns]
    return before[-1].base if before else ""


def _spans(entries: Path) -> tuple[list[_Span], dict[str, Tried]]:
    """Return when which candidate was in, and the candidates without their times."""
    spans: list[_Span] = []
    found: dict[str, Tried] = {}
    entered_ns, base = 0, ""
    for told in _lines_of(entries):
        name, at_ns = told["name"], told["time_ns"]
        one = found.setdefault(name, Tried(name))
        if told["event"] == "enter":
            entered_ns, base = at_ns, told.get("base", "")
        elif told["event"] == "leave":
            spans.append(_Span(name, entered_ns, at_ns, told["num_calls"], base))
            calls = {key: told[key] for key in ("num_calls", "num_compiled")}
            ran = msgspec.convert(told.get("ran", {}), dict[str, Ran])
            sorts = ran[kernel_of(name)].sorts if kernel_of(name) in ran else ()
            found[name] = replace(one, **calls, sorts=one.sorts or sorts)
        else:
            found[name] = replace(one, why=told["why"])
    return spans, found


def seen_in(entries: Path) -> dict[str, Seen]:
    """Return what the log says of the first entry of each candidate."""
    found: dict[str, Seen] = {}
    entered_ns = 0
    for told in _lines_of(entries):
        if told["event"] == "enter":
            entered_ns = told["time_ns"]
        elif told["event"] == "leave" and told["name"] not in found:
            ran = msgspec.convert(told.get("ran", {}), dict[str, Ran])
            took_s = (told["time_ns"] - entered_ns) / 1e9
            found[told["name"]] = Seen(ran, told.get("whys", {}), took_s)
    return found


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


class _Fault(NamedTuple):
    """The candidate that was in when the workload ended."""

    name: str
    why: str
    """Empty: unknown."""
    kernel: str
    """The kernel of it whose fault it is; empty: unknown."""
    provider: str


def _after_crash(entries: Path, arm: str) -> tuple[_Fault | None, list[Tried]]:
    """Return whose fault it is that the workload ended, and the candidates that cannot run.

    A process that an exception ends leaves the candidate before it exits, and may drop it then; why
    is empty unless that is the reason for the end.
    """
    lines = _lines_of(entries)
    enters = [place for place, line in enumerate(lines) if line["event"] == "enter"]
    if not enters:
        return None, []
    later = lines[enters[-1] + 1 :]
    is_culprit = not later or (arm == "B" and later[0]["event"] == "leave")
    spoilt: dict[str, Any] = next((line for line in later if line.get("is_spoilt")), {})
    dropped = [one for one in _spans(entries)[1].values() if one.why]
    if not is_culprit:
        return None, dropped
    name, kernel = lines[enters[-1]]["name"], spoilt.get("kernel", "")
    provider = seen_in(entries)[name].ran[kernel].provider if kernel else ""
    return _Fault(name, spoilt.get("why", ""), kernel, provider), dropped


def _all_names() -> list[str]:
    # Imports torch and Triton, which other comparisons do without.
    from kprof.kernels.swap.candidates import candidate_names

    return candidate_names()


def _tell_choice(choice: Choice, tell: Tell) -> None:
    for one in choice.tried:
        if one.ratio is not None:
            verdict = "chosen" if one.name in choice.names else "left out"
            changes = [f"{100 * (of - 1):+.1f}" for of in (one.ratio, one.low, one.high) if of]
            tell(f"{one.name}: step {changes[0]} % ({' to '.join(changes[1:])} %), {verdict}")


class NothingPaysError(KprofError):
    """All kernels were tried, and none that is faster for sure gives right results."""

    exit_code = 1


class UndecidedError(NothingPaysError):
    """No kernel was found to be faster, and one that was not judged may be."""

    exit_code = 3


def _nothing_chosen(choice: Choice, folder: Path) -> NothingPaysError:
    fix = f"see what was tried, and why not, in {folder / CHOICE}; "
    if choice.is_unjudged:
        return UndecidedError(
            "no kernel that makes this workload faster was judged right in time",
            fix=fix + "give the correctness gate more time: --budget",
        )
    if any(one.is_faster for one in choice.tried):
        return NothingPaysError(
            "no kernel that makes this workload faster passes the correctness gate",
            fix=fix + "kprof kernels check says more of a kernel",
        )
    num_untimed = sum(1 for one in choice.tried if one.ratio is None and not one.why)
    num_waiting = _num_without_gpu(choice.tried)
    if not num_untimed and num_waiting:
        return UndecidedError(
            f"no kernel makes this workload faster here, and {counted(num_waiting, 'kernel')} "
            "with calls in it could not run: its tensors are not on a GPU",
            fix="run it on a GPU; " + fix.removesuffix("; "),
        )
    if not num_untimed:
        fix += "kprof run shows what limits it"
        return NothingPaysError("no kernel makes this workload faster", fix=fix)
    return UndecidedError(
        "no kernel makes this workload faster for sure, and "
        f"{counted(num_untimed, 'kernel')} had too few windows",
        fix=fix + "give it more time: --budget, or name kernels: --swap NAMES",
    )


def _num_without_gpu(tried: Iterable[Tried]) -> int:
    """Return how many kernels have calls in a workload whose tensors are not on a GPU."""
    return len({kernel_of(one.name) for one in tried if one.why == NEEDS_GPU})


def _nothing_timed(
    options: AbOptions, trial: Trial, found: dict[str, Tried], *, has_time: bool
) -> KprofError:
    name = options.words[0]
    num_waiting = _num_without_gpu(found.values())
    if all(one.why for one in found.values()) and num_waiting:
        return UndecidedError(
            f"{counted(num_waiting, 'kernel')} with calls in {name} could not run: its tensors are "
            "not on a GPU",
            fix="run it on a GPU; kprof run shows what limits it here",
        )
    if all(one.why for one in found.values()):
        return NothingPaysError(
            f"no kernel has a call in {name}",
            fix="kprof kernels list says what kernels replace; kprof run shows what limits it",
        )
    if not has_time:
        return UndecidedError(
            f"the steps of {name} are too long to try kernels one by one in "
            f"{options.budget_s or BUDGET_S:.0f} s",
            fix="give more time (--budget), or name kernels: --swap NAMES",
        )
    return KprofError(
        f"{name} ended before kernels could be tried",
        fix=f"let it take more steps, or name kernels: --swap NAMES; its output: {trial.log}",
    )
