"""stragglers: all ranks wait for some that repeatedly come late to the collectives."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import Unanswered, why_no_timeline
from kprof.analyze.findings.claims import in_words, percent
from kprof.analyze.findings.queries import why_no_device
from kprof.analyze.idle.causes import collective_waits
from kprof.analyze.late_causes import COMPUTE, Cause, LateCause, find_late_causes
from kprof.analyze.late_ranks import Lateness, find_lateness
from kprof.findings import Finding, Fix, Grade
from kprof.trace import Trace

# Ranks are never quite alike: a few percent of a step pass until the last has come.
LEAST_SHARE = 0.03
# So much is lost to ranks that are late in turn where their work differs.
LEAST_ROTATING_SHARE = 0.05
# From so many steps on, the same late rank in all of them is no chance.
MANY_UNITS = 8
MOST_NAMED = 8

IN_WORDS: dict[Cause, str] = {
    "data": "their GPUs wait for the data loader",
    "host": "their GPUs wait for the host",
    "compute": "they compute longer",
    "clock": "they run the same launches slower, as at lower clocks or on a shared GPU",
    "link": "collectives among themselves take longer, as on a slow link",
    "inconclusive": "inconclusive",
}


def why_no_ranks(trace: Trace) -> Unanswered | None:
    """Say why it is unknown which rank others wait for."""
    question = "Which rank do the others wait for?"
    trace = trace.all_ranks or trace
    if trace.kernels["rank"].nunique() < 2:
        return Unanswered(
            question,
            "one rank was recorded",
            "record all ranks of a run with `kprof run -- torchrun …`, or open their traces "
            "together: `kprof open RANK0 RANK1 …`",
        )
    if collective_waits(trace) is not None:
        return None
    return Unanswered(
        question,
        "no all-reduce, all-gather or reduce-scatter of a named process group could be matched "
        "between the recorded ranks",
        "record the same steps on all ranks, with torch 2.2 or later and NCCL",
    )


NEEDS = (why_no_device, why_no_timeline, why_no_ranks)


def check(trace: Trace) -> list[Finding]:
    """Find the ranks that others wait for: always the same ones, else ever other ones."""
    found = find_lateness(trace)
    if found is None:
        return []
    if found.stragglers and found.lost_ns >= LEAST_SHARE * found.unit_ns:
        return [_persistent(trace, found)]
    if found.rotating_ns >= LEAST_ROTATING_SHARE * found.unit_ns:
        return [_rotating(trace, found)]
    return []


def _persistent(trace: Trace, found: Lateness) -> Finding:
    late = [one for one in found.ranks if one.rank in found.stragglers]
    fewest, most = min(one.num_late for one in late), max(one.num_late for one in late)
    times = f"{most}" if fewest == most else f"{fewest} to {most}"
    share = found.lost_ns / max(found.unit_ns, 1)
    where = f" (all of {found.where})" if found.where and len(late) > 1 else ""
    verb = "comes" if len(late) == 1 else "come"
    claim = (
        f"{_named(found.stragglers)}{where} {verb} late to the collectives in {times} of "
        f"{found.num_units} {_units(found)}: the other {len(found.ranks) - len(late)} wait "
        f"{in_words(found.lost_ns)} of each ({percent(share)}) for that, with nothing else to do"
    )
    confidence: Grade = "high" if found.num_units >= MANY_UNITS else "medium"
    return _finding(trace, found, claim, confidence, found.lost_ns)


def _rotating(trace: Trace, found: Lateness) -> Finding:
    share = found.rotating_ns / max(found.unit_ns, 1)
    claim = (
        f"{found.num_rotating} of {len(found.ranks)} ranks come late to the collectives in turn: "
        f"the others wait {in_words(found.rotating_ns)} of each of {found.num_units} "
        f"{_units(found)} ({percent(share)}) for ever another one"
    )
    return _finding(trace, found, claim, "medium", found.rotating_ns)


def _finding(
    trace: Trace, found: Lateness, claim: str, confidence: Grade, lost_ns: float
) -> Finding:
    whole_ns = lost_ns if found.are_steps else lost_ns * found.num_units
    latest = sorted(found.ranks, key=lambda one: -one.late_ns)[:MOST_NAMED]
    causes = find_late_causes(trace)
    why = {one.rank: _longest_part(one) for one in causes}
    return Finding(
        rule="stragglers",
        claim=claim,
        confidence=confidence,
        effort="medium",
        rows=_waiting(trace, found),
        details=(
            _cause(causes) + why.get(None, ""),
            *(
                f"rank {one.rank}{f' on {one.host}' if one.host else ''}: "
                f"{in_words(max(one.late_ns, 0))} late in the mean, late in {one.num_late} of "
                f"{found.num_units}; waits {in_words(one.waits_ns)} for others"
                f"{why.get(one.rank, '')}"
                for one in latest
            ),
        ),
        fix=Fix(waited_ns=round(whole_ns)),
    )


def _cause(causes: tuple[LateCause, ...]) -> str:
    """Return why the late ranks are late, for each cause which."""
    by_cause: dict[Cause, list[int]] = {}
    for one in causes:
        by_cause.setdefault(one.cause, []).extend([] if one.rank is None else [one.rank])
    if len(by_cause) == 1:
        return f"cause: {IN_WORDS[next(iter(by_cause))]}"
    told = (f"{_named(tuple(ranks))}: {IN_WORDS[cause]}" for cause, ranks in by_cause.items())
    return f"causes: {'; '.join(told)}"


def _longest_part(one: LateCause) -> str:
    """Return which part of the late ranks' time is longer than that of ranks in time, and why."""
    if one.why_not:
        return f"; cause inconclusive: {one.why_not}"
    part = max(one.longer_ns, key=one.longer_ns.__getitem__)
    told = f"; when late, {part} {in_words(one.longer_ns[part])} longer than of ranks in time"
    if part != COMPUTE or one.same_launches_share is None:
        return told
    share = percent(min(max(one.same_launches_share, 0.0), 1.0))
    return f"{told}, {share} of it in launches that those have, too"


def _waiting(trace: Trace, found: Lateness) -> tuple[int, ...]:
    """Return the collectives in which ranks wait; of one rank in detail those that it has."""
    kernels = trace.kernels
    is_waiting = ~kernels["rank"].isin(found.stragglers).to_numpy(bool)
    waits = collective_waits(trace)
    if waits is None:
        is_collective = kernels["group_sequence"].notna().to_numpy(bool)
        both = np.flatnonzero(is_collective & is_waiting)
        return tuple((both if len(both) else np.flatnonzero(is_collective)).tolist())
    rows = waits["row"].to_numpy(np.int64)
    return tuple(rows[is_waiting[rows]].tolist())


def _named(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"Ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def _units(found: Lateness) -> str:
    return "steps" if found.are_steps else "parts of the window"
