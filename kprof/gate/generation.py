"""L4: where generated texts part, was it a coin toss, and no earlier than the model's own?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import NormalDist, fmean, quantiles

from kprof.gate.result import Level, Measure, judge, not_run
from kprof.gate.subject import Generation

MIN_PROMPTS = 20
MARGIN_NATS = 0.5
LENGTH_BAND = 0.1
ALPHA = 0.01
"""Of the test for parting earlier: at 0.05 it would reject one honest swap in twenty."""
MIN_PARTED = 5
"""A/A must have parted so often for a comparison of where to mean anything."""


def check_generation(
    replaced: Sequence[Generation], again: Sequence[Generation], new: Sequence[Generation]
) -> Level:
    """Compare greedy generations of the same prompts (L4).

    At the first token that differs, each run's pick must be among the other's likeliest, at most
    0.5 nats behind its own: a near tie, which rounding may decide either way.
    """
    if not len(replaced) == len(again) == len(new):
        return not_run("L4", "the runs differ in how many prompts they answered")
    if len(replaced) < MIN_PROMPTS:
        return not_run("L4", f"{len(replaced)} prompts are too few: give {MIN_PROMPTS}")
    if not any(one.tokens for one in replaced):
        return not_run("L4", "the replaced code generates nothing: there is nothing to compare")
    parted = [_parting(a, b) for a, b in zip(replaced, new, strict=True)]
    own = [_parting(a, b) for a, b in zip(replaced, again, strict=True)]
    margins = _margins(replaced, new, parted)
    own_margins = _margins(replaced, again, own)
    length, own_length = (_length_ratio(replaced, one) for one in (new, again))
    measures = [
        Measure(
            "widest margin where texts part",
            max(margins, default=0.0),
            max(MARGIN_NATS, max((m for m in own_margins if m < float("inf")), default=0.0)),
            max(own_margins, default=0.0),
            "nats",
        ),
        Measure(
            "length, away from the replaced", length, max(LENGTH_BAND, 2 * own_length), own_length
        ),
    ]
    notes = [_describe(parted, own)]
    if sum(at is not None for at in own) >= MIN_PARTED:
        p_value = log_rank(_times(own, replaced), _times(parted, replaced))
        measures.append(Measure("parts no earlier (p)", p_value, ALPHA, None, better="higher"))
    else:
        notes.append("A/A parted too seldom to judge where: give it other batch shapes")
    return judge("L4", measures, f"{len(replaced)} prompts", notes=notes)


def _parting(one: Generation, other: Generation) -> int | None:
    """Return the first place where the tokens differ, None where they never do."""
    pairs = zip_longest(one.tokens, other.tokens)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _margins(
    one: Sequence[Generation], other: Sequence[Generation], parted: Sequence[int | None]
) -> list[float]:
    """Return how far behind its own pick each run saw the other's, the wider of both."""
    found = []
    for a, b, at in zip(one, other, parted, strict=True):
        # A text that only ended earlier is a matter of the length.
        if at is not None and at < len(a.tokens) and at < len(b.tokens):
            found.append(max(_behind(a, b, at), _behind(b, a, at)))
    return found


def _behind(one: Generation, other: Generation, at: int) -> float:
    seen = one.top[at]
    pick, foreign = seen.get(one.tokens[at]), seen.get(other.tokens[at])
    if pick is None or foreign is None or pick - foreign != pick - foreign:
        return float("inf")
    return abs(pick - foreign)


def _length_ratio(one: Sequence[Generation], other: Sequence[Generation]) -> float:
    """Return by how much the mean length differs, over that of the first."""
    lengths = [fmean(len(generation.tokens) for generation in run) for run in (one, other)]
    return abs(lengths[1] - lengths[0]) / lengths[0]


Times = list[tuple[int, bool]]
"""For every prompt, how far the texts were alike, and whether they then parted."""


def _times(parted: Sequence[int | None], runs: Sequence[Generation]) -> Times:
    return [
        (len(run.tokens), False) if at is None else (at, True)
        for at, run in zip(parted, runs, strict=True)
    ]


def log_rank(standard: Times, other: Times) -> float:
    """Return the p-value, one-sided, of `other` parting no earlier than `standard`.

    Mantel's log-rank test: at each place, the partings of `other` against their expectation if
    both ran the same risk there.
    """
    surplus = variance = 0.0
    for at in sorted({at for at, has_parted in standard + other if has_parted}):
        at_risk = [sum(time >= at for time, _ in times) for times in (standard, other)]
        events = [sum(p and time == at for time, p in times) for times in (standard, other)]
        total, parted = sum(at_risk), sum(events)
        share = at_risk[1] / total
        surplus += events[1] - parted * share
        if total > 1:
            variance += parted * share * (1 - share) * (total - parted) / (total - 1)
    if variance == 0:
        return 1.0
    return 1 - NormalDist().cdf(surplus / variance**0.5)


def _describe(parted: Sequence[int | None], own: Sequence[int | None]) -> str:
    return f"parts from the replaced code {_partings(parted)}; that from itself {_partings(own)}"


def _partings(parted: Sequence[int | None]) -> str:
    places = [at for at in parted if at is not None]
    if not places:
        return "never"
    middle = places[0] if len(places) == 1 else quantiles(places, n=2)[0]
    return f"on {len(places)} of {len(parted)} prompts, at token {middle:.0f} (median)"
