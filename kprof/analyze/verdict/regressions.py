"""Regressions: proof that a candidate is worse than its baseline.

A regression is proven where a whole interval lies beyond the smallest effect that matters, or
where a target that was proven met, or a level that was passed, is now proven missed, or failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kprof.analyze.engagement import GateAdded, RunAdded, ServiceLevelAdded, without_folders
from kprof.analyze.sla.evaluate import PER_REQUEST
from kprof.comparison import Claim, Comparison, Interval

Verdict = Literal["PASSED", "REGRESSION", "INCONCLUSIVE"]

MORE_PAIRS = "kprof ab again with more --pairs"


@dataclass(frozen=True)
class Ruling:
    """The result for one metric, target or level."""

    what: str
    verdict: Verdict
    why: str
    settle: str = ""
    """The next step for an inconclusive one."""
    low: float | None = None
    """The candidate's value over the baseline's, turned so that above 1 is worse: between `low`
    and `high` at the confidence `level`."""
    high: float | None = None
    level: float | None = None


@dataclass(frozen=True)
class _Worse:
    """How many times worse B is: an interval, turned where higher is better."""

    low: float
    high: float
    level: float


def overall(rulings: tuple[Ruling, ...]) -> Verdict:
    """Return the verdict on all: one proven regression is enough, one open question leaves it."""
    found = {ruling.verdict for ruling in rulings}
    if "REGRESSION" in found:
        return "REGRESSION"
    return "PASSED" if found == {"PASSED"} else "INCONCLUSIVE"


def rule_on_comparison(candidate: Comparison, smallest: float | None) -> tuple[Ruling, ...]:
    """Rule on B of one comparison against its A; `smallest` in place of the plan's effect."""
    effect = candidate.plan.smallest_effect if smallest is None else smallest
    rulings = []
    for claim in candidate.claims:
        interval = _usable(claim)
        if interval is None:
            rulings.append(_open(claim, f"{claim.verdict}: {claim.why}"))
            continue
        # SAME is proven at the plan's effect by a test of its own, sharper than the interval.
        is_same = claim.verdict == "SAME" and effect >= candidate.plan.smallest_effect
        worse = _worse(claim, interval.low, interval.high, interval.level)
        rulings.append(_ruled(claim, worse, effect, is_same=is_same))
    return tuple(rulings)


def rule_on_comparisons(
    baseline: Comparison, candidate: Comparison, smallest: float | None
) -> tuple[Ruling, ...]:
    """Rule on B of the candidate against B of the baseline, by way of the A of both.

    Both intervals hold together at the sum of their errors, so the ratio's ends are theirs.
    """
    effect = candidate.plan.smallest_effect if smallest is None else smallest
    if differing := _differing(baseline, candidate):
        settle = "compare both with the same A, on the same machine"
        return tuple(
            Ruling(claim.metric.name, "INCONCLUSIVE", differing, settle)
            for claim in candidate.claims
        )
    earlier = {claim.metric: claim for claim in baseline.claims}
    return tuple(_by_way_of_a(earlier.get(one.metric), one, effect) for one in candidate.claims)


def _by_way_of_a(before: Claim | None, now: Claim, effect: float) -> Ruling:
    if before is None:
        why, settle = "the baseline does not compare it", "compare the baseline again with it"
        return Ruling(now.metric.name, "INCONCLUSIVE", why, settle)
    was, now_is = _usable(before), _usable(now)
    if was is None:
        return _open(before, f"the baseline is {before.verdict}: {before.why}")
    if now_is is None:
        return _open(now, f"{now.verdict}: {now.why}")
    level = 1 - (1 - was.level) - (1 - now_is.level)
    worse = _worse(now, now_is.low / was.high, now_is.high / was.low, level)
    return _ruled(now, worse, effect, is_same=False)


def _usable(claim: Claim) -> Interval | None:
    """Return the interval of a claim, if the measurement is valid and leaves room for a ratio."""
    interval = claim.interval
    if claim.verdict == "INVALID" or interval is None or interval.low <= 0:
        return None
    return interval


def _worse(claim: Claim, low: float, high: float, level: float) -> _Worse:
    if claim.metric.better == "lower":
        return _Worse(low, high, level)
    return _Worse(1 / high, 1 / low, level)


def _ruled(claim: Claim, worse: _Worse, effect: float, *, is_same: bool) -> Ruling:
    where = f"between {_said(worse.low)} and {_said(worse.high)}"
    where += f", at {100 * worse.level:.3g} % confidence"
    numbers = (worse.low, worse.high, worse.level)
    matters = f"the {100 * effect:g} % that matters"
    if worse.low > 1 + effect:
        why = f"{where}: all of it is beyond {matters}"
        return Ruling(claim.metric.name, "REGRESSION", why, "", *numbers)
    if is_same or worse.high <= 1 + effect:
        why = "proven the same" if is_same else f"{where}: none of it is beyond {matters}"
        return Ruling(claim.metric.name, "PASSED", why, "", *numbers)
    why = f"{where}: a part of it is beyond {matters}, and a part is not"
    return Ruling(claim.metric.name, "INCONCLUSIVE", why, _settled_by(claim), *numbers)


def _said(ratio: float) -> str:
    """Say how much worse or better that many times is."""
    return f"{100 * abs(ratio - 1):.2f} % {'better' if ratio < 1 else 'worse'}"


def _open(claim: Claim, why: str) -> Ruling:
    return Ruling(claim.metric.name, "INCONCLUSIVE", why.rstrip(" :."), _settled_by(claim))


def _settled_by(claim: Claim) -> str:
    if claim.pairs_needed:
        return f"{MORE_PAIRS}: about {claim.pairs_needed:,} more than the {claim.num_pairs:,} taken"
    return f"{MORE_PAIRS}, or on a quieter machine"


def _differing(baseline: Comparison, candidate: Comparison) -> str:
    """Say what keeps the two from having the same A; empty: nothing."""
    for fact in ("command of A", "GPU"):
        # The same code may lie in another folder on another day.
        pair = [without_folders(one.facts.get(fact, "")) for one in (baseline, candidate)]
        if pair[0] != pair[1]:
            return f"the {fact} differs: {pair[0] or 'none'} and {pair[1] or 'none'}"
    if without_folders(baseline.a) != without_folders(candidate.a):
        return f"A differs: {baseline.a} and {candidate.a}"
    return ""


def rule_on_runs(baseline: RunAdded, candidate: RunAdded) -> tuple[Ruling, ...]:
    """Say what two runs show, and that it proves nothing: how much runs differ is not known."""
    words = [word for word in candidate.command.split() if word.endswith(".py")]
    script = words[0] if words else "SCRIPT.py"
    settle = f"kprof ab --python BASELINE/{Path(script).name} {Path(script).name}"
    before_ns, now_ns = baseline.true_step_ns, candidate.true_step_ns
    if not before_ns or not now_ns:
        why = "one of the runs marks no steps"
    else:
        change = 100 * (now_ns / before_ns - 1)
        why = (
            f"a step takes {change:+.1f} %, but one run of each, one after the other, cannot tell "
            "a change of the code from one of the machine"
        )
    if baseline.command != candidate.command:
        why += f"; and the commands differ: {baseline.command} and {candidate.command}"
    return (Ruling("step time", "INCONCLUSIVE", why, settle),)


def rule_on_levels(baseline: ServiceLevelAdded, candidate: ServiceLevelAdded) -> tuple[Ruling, ...]:
    """Rule on every target of the baseline and of the candidate."""
    before = {one.target: one.verdict for one in baseline.targets}
    now = {one.target: one.verdict for one in candidate.targets}
    asked = dict.fromkeys([*before, *now])
    return tuple(_on_target(one, before.get(one), now.get(one)) for one in asked)


def _on_target(target: str, before: str | None, now: str | None) -> Ruling:
    if now == "MET":
        return Ruling(target, "PASSED", "proven met")
    if now == "MISSED" and before == "MISSED":
        why = "proven missed, as it was before; by more or not is unknown"
        return Ruling(target, "INCONCLUSIVE", why, "a baseline that keeps the target")
    if now == "MISSED" and before == "MET":
        return Ruling(target, "REGRESSION", "proven missed, and it was proven met before")
    if now == "MISSED":
        why = "proven missed, but nothing proves that it was met before"
        return Ruling(target, "INCONCLUSIVE", why, "judge the baseline with more requests")
    why = "not judged in the candidate" if now is None else "neither proven met nor missed"
    return Ruling(target, "INCONCLUSIVE", why, "kprof sla with more requests")


def rule_on_gates(baseline: GateAdded, candidate: GateAdded) -> tuple[Ruling, ...]:
    """Rule on every level of the quality gate that was asked for."""
    sides = [
        {name: one.states for name, one in side.subjects.items()} for side in (baseline, candidate)
    ]
    return tuple(_on_levels(*sides))


def _on_levels(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> Iterator[Ruling]:
    for subject in dict.fromkeys([*before, *now]):
        was, is_now = before.get(subject, {}), now.get(subject, {})
        for level in dict.fromkeys([*was, *is_now]):
            what, state, earlier = f"{subject}, {level}", is_now.get(level), was.get(level)
            if state == "passed":
                yield Ruling(what, "PASSED", "passed")
            elif state == "failed" and earlier == "failed":
                why = "failed, as it did before; by more or not is unknown"
                yield Ruling(what, "INCONCLUSIVE", why, "a baseline that passes")
            elif state == "failed" and earlier == "passed":
                yield Ruling(what, "REGRESSION", "failed, and it passed before")
            else:
                why = f"{state or 'not asked for'} now, {earlier or 'not asked for'} before"
                yield Ruling(what, "INCONCLUSIVE", why, "kprof kernels check, of both")


# How many calls or steps make a sample follows from how long they take.
_COUNTED = re.compile(r"\d[\d,.]*( \w+)?")
_OF_REQUESTS = ("attainment", "goodput")


def differing_comparisons(baseline: Comparison, candidate: Comparison) -> str:
    """Say what keeps two comparisons from being of one GPU, timed alike; empty: nothing."""
    # In small letters as `kprof.ab_test` once wrote it.
    gpus = [one.facts.get("GPU") or one.facts.get("gpu", "none") for one in (baseline, candidate)]
    if gpus[0] != gpus[1]:
        return f"the GPU differs: {gpus[0]} and {gpus[1]}"
    timed = [one.protocol for one in (baseline, candidate)]
    if _COUNTED.sub("", timed[0]) != _COUNTED.sub("", timed[1]):
        return f"how it was timed differs: {timed[0]} and {timed[1]}"
    return ""


def differing_services(baseline: ServiceLevelAdded, candidate: ServiceLevelAdded) -> str:
    """Say what keeps two service levels from being of the same load and GPUs; empty: nothing."""
    loads = [_loads(one.said) for one in (baseline, candidate)]
    if loads[0] != loads[1]:
        return f"the load differs: {'; '.join(loads[0])} and {'; '.join(loads[1])}"
    if any(run.get("loop") == "unknown" for run in _runs(baseline.said)):
        return "under which load they were measured is not known"
    gpus = [one.said.get("gpus") for one in (baseline, candidate)]
    if gpus[0] != gpus[1]:
        before, now = (one or "not told" for one in gpus)
        return f"the number of GPUs differs: {before} and {now}"
    return ""


def _loads(said: Mapping[str, Any]) -> list[str]:
    told = {f"{run.get('load')} ({run.get('tool')}, {run.get('loop')} loop)" for run in _runs(said)}
    return sorted(told) or ["no requests"]


def _runs(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return said.get("runs") or []


def differing_limits(baseline: ServiceLevelAdded, candidate: ServiceLevelAdded, target: str) -> str:
    """Say in which limits a target differs that counts requests within the others; empty: none."""
    if not target.startswith(_OF_REQUESTS):
        return ""
    before, now = (_limits(one.said) for one in (baseline, candidate))
    if before == now:
        return ""
    return f"the limits that it counts requests by differ: {before or 'none'} and {now or 'none'}"


def _limits(said: Mapping[str, Any]) -> str:
    found = {one["target"] for one in said["targets"] if one.get("metric") in PER_REQUEST}
    return ", ".join(sorted(found))
