"""L2 to L6 of the quality gate: whole models, from their residual stream to their training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import NormalDist, fmean, median, quantiles, stdev

import torch
from torch import Tensor

from kprof.kernels.correctness.levels import Level, Measure, judge, not_run, unjudged
from kprof.kernels.correctness.subject import Curve, Generation, Precision

# 1 - cosine of 1e-4 is a relative error of 1.4 %: what 32 layers in bfloat16 come to.
MOST_TURNED = 1e-4
ERROR_RATIO = 2.0
GROWTH = 2.0
TINY_DRIFT = 1e-30
"""In the place of a size of zero."""


def check_layers(
    replaced: Sequence[Tensor],
    again: Sequence[Tensor],
    new: Sequence[Tensor],
    *,
    truth: Sequence[Tensor] | None = None,
) -> Level:
    """Compare the residual stream after every layer (L2).

    With the `truth` (the same model in a wider dtype), the errors against it are compared. Without
    it, the distance from the replaced code is, with that of the replaced code run `again`; where
    that gives the same bits, with the rounding of the stream itself.
    """
    if not replaced:
        return not_run("L2", "there is no layer")
    numbers = {len(stream) for stream in (replaced, again, new, truth or replaced)}
    if len(numbers) > 1:
        return not_run("L2", "the runs differ in how many layers they show")
    turned = [_turned(a, b) for a, b in zip(replaced, new, strict=True)]
    own = [_turned(a, b) for a, b in zip(replaced, again, strict=True)]
    errors = [_distance(a, b) for a, b in zip(truth or replaced, new, strict=True)]
    standard = _standard(replaced, again, truth)
    for distances in ((turned, own), (errors, standard)):
        level = unjudged("L2", *distances, "layers")
        if level:
            return level
    worst = max(range(len(turned)), key=lambda i: turned[i])
    most = max(MOST_TURNED, ERROR_RATIO * max(own))
    direction = Measure("1 - cosine", turned[worst], most, max(own), where=f"layer {worst}")
    ratios = [error / one for error, one in zip(errors, standard, strict=True)]
    worst = max(range(len(ratios)), key=lambda i: ratios[i])
    against = "against the truth" if truth else "against A/A"
    measures = [
        direction,
        Measure(
            f"relative error {against}",
            errors[worst],
            ERROR_RATIO * standard[worst],
            standard[worst],
            where=f"layer {worst}",
        ),
    ]
    if len(ratios) > 1:
        growth = ratios[-1] / max(median(ratios), 1.0)
        measures.append(Measure("growth over the layers", growth, GROWTH, 1.0, where="last layer"))
    size = f"{len(replaced)} layers, {replaced[0].numel():,} values each"
    return judge("L2", measures, size)


def _standard(
    replaced: Sequence[Tensor], again: Sequence[Tensor], truth: Sequence[Tensor] | None
) -> list[float]:
    """Return for every layer the error that the replaced code makes itself."""
    found = []
    for i, (stream, other) in enumerate(zip(replaced, again, strict=True)):
        # Each layer adds a rounding of the stream; they add up as independent errors do.
        rounding = torch.finfo(stream.dtype).eps * (i + 1) ** 0.5
        own = _distance(stream, other)
        found.append(max(_distance(truth[i], stream) if truth else 0.0, own, rounding / 2))
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the relative L2 distance; infinite where one of them is not finite."""
    one, other = one.double(), other.double()
    size, distance = float(one.norm()), float((one - other).norm())
    return distance / max(size, TINY_DRIFT) if math.isfinite(distance) else math.inf


def _turned(one: Tensor, other: Tensor) -> float:
    """Return 1 - cosine, from the distance of the unit vectors: it keeps its digits near zero."""
    one, other = one.double().flatten(), other.double().flatten()
    gap = one / one.norm().clamp(min=TINY_DRIFT) - other / other.norm().clamp(min=TINY_DRIFT)
    return float(gap.square().sum() / 2)


MIN_POSITIONS = 1_000
"""Fewer do not have a 99.9th percentile."""
CHUNK = 4096
TAIL = 0.999
TAIL_KLD = 1e-2
AA_RATIO = 2.0
AA_MARGIN = 0.002
"""How much less often than A/A the likeliest token may be the same."""
MEAN_KLD = {"same": 1e-4, "lower": 1e-3}
SAME_TOP = {"same": 0.995, "lower": 0.99}


def check_logits(
    replaced: Tensor, again: Tensor, new: Tensor, *, precision: Precision = "same"
) -> Level:
    """Compare logits at the same positions, (positions, vocabulary) each (L3).

    Bounds are those published for an 8-bit quantisation that users do not notice, and ten times
    narrower for one that keeps the precision, or twice the replaced code's own where that is more.
    """
    if replaced.shape != new.shape or replaced.shape != again.shape:
        return not_run("L3", "the runs differ in their positions or vocabulary")
    if len(replaced) < MIN_POSITIONS:
        return not_run("L3", f"{len(replaced)} positions are too few: give {MIN_POSITIONS:,}")
    divergence, own = _divergences(replaced, new), _divergences(replaced, again)
    level = unjudged("L3", divergence.tolist(), own.tolist(), "positions")
    if level:
        return level
    same, own_same = _same_top(replaced, new), _same_top(replaced, again)
    mean = max(MEAN_KLD[precision], AA_RATIO * float(own.mean()))
    tail, own_tail = (float(torch.quantile(one, TAIL)) for one in (divergence, own))
    least = min(SAME_TOP[precision], own_same - AA_MARGIN)
    measures = (
        Measure("mean divergence", float(divergence.mean()), mean, float(own.mean()), "nats"),
        Measure(
            "99.9th percentile of it", tail, max(TAIL_KLD, AA_RATIO * own_tail), own_tail, "nats"
        ),
        Measure("same likeliest token", same, least, own_same, "share", "higher"),
    )
    return judge("L3", measures, f"{len(replaced):,} positions")


def _divergences(one: Tensor, other: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence at every position, in nats; not finite is infinite."""
    found = []
    for a, b in zip(one.split(CHUNK), other.split(CHUNK), strict=True):
        p, q = torch.log_softmax(a.double(), -1), torch.log_softmax(b.double(), -1)
        # A token that neither expects at all (-inf in both) adds nothing.
        terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
        found.append(terms.sum(-1).clamp(min=0))
    return torch.nan_to_num(torch.cat(found), nan=float("inf"))


def _same_top(one: Tensor, other: Tensor) -> float:
    return float((one.argmax(-1) == other.argmax(-1)).double().mean())


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


RECOVERY = 0.99
STRICT_RECOVERY = 0.999
CONFIDENCE = 0.95
SURE = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
NUM_HALVINGS = 60
TINY = 1e-9


def check_task(
    replaced: Sequence[bool],
    again: Sequence[bool],
    new: Sequence[bool],
    *,
    recovery: float = RECOVERY,
) -> Level:
    """Compare which items were answered rightly, item by item (L5).

    Passes when the whole interval of the share of right answers kept lies above `recovery` (or
    above what A/A keeps, where that is less), fails when all of it lies below, and is undecided
    in between: too few items.
    """
    if not len(replaced) == len(again) == len(new):
        return not_run("L5", "the runs differ in how many items they answered")
    if not any(replaced):
        return not_run("L5", "the replaced code answers nothing rightly: there is nothing to keep")
    accuracy, num_right = fmean(replaced), sum(replaced)
    lost, won = discordant(replaced, new)
    kept = (num_right - lost + won) / num_right
    low, high = kept_within(lost, won, num_right)
    own = fmean(again) / accuracy
    # What the model loses by itself, or wins by the same luck, is nothing to ask of the swap.
    least = min(recovery, own, 1 / own if own else recovery)
    measure = Measure("right answers kept, at least", low, least, own, "share", "higher")
    p_value = mcnemar(lost, won)
    note = (
        f"kept {kept:.2%} ({low:.2%} to {high:.2%}); {lost} items lost, {won} won, "
        f"McNemar p = {p_value:.3g}"
    )
    looked_at = f"{len(replaced):,} items"
    if low < least <= high:
        needed = _needed(lost, won, num_right, len(replaced), least)
        why = f"the interval lies on both sides of {least:.2%}; {needed}"
        return Level("L5", "undecided", why, (measure,), looked_at, notes=(note,))
    return judge("L5", (measure,), looked_at, notes=(note,))


def discordant(one: Sequence[bool], other: Sequence[bool]) -> tuple[int, int]:
    """Return how many items only the first, and only the second answered rightly."""
    pairs = list(zip(one, other, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def kept_within(lost: int, won: int, num_right: int) -> tuple[float, float]:
    """Return between which shares of the right answers are kept, at 95 % confidence.

    The score interval of the ratio of two paired shares, of Nam and Blackwelder (2002): those
    shares that the counts are within 1.96 standard deviations of. Also with few items lost and
    won, where an interval from the counts' own deviation is too narrow.
    """
    kept = (num_right - lost + won) / num_right
    return _find_end(lost, won, num_right, 0.0, kept), _find_end(lost, won, num_right, None, kept)


def _find_end(lost: int, won: int, num_right: int, far: float | None, near: float) -> float:
    """Return where the counts become too unlikely, by halving what lies between."""
    if far is None:
        far = near + 1.0
        while abs(deviations(lost, won, num_right, far)) < SURE:
            far *= 2
    elif near == far:
        return far
    for _ in range(NUM_HALVINGS):
        middle = (far + near) / 2
        if abs(deviations(lost, won, num_right, middle)) < SURE:
            near = middle
        else:
            far = middle
    return far


def deviations(lost: int, won: int, num_right: int, kept: float) -> float:
    """Return by how many standard deviations more are right than if this share were kept.

    The deviation is that of the likeliest numbers of items lost and won by which just this share
    is kept; the former is the larger root of a quadratic equation.
    """
    total = num_right + won
    linear = num_right * (1 - kept**2) + lost + won
    root = math.sqrt(max(linear**2 - 4 * (1 + kept) * (1 - kept) * lost * total, 0.0))
    variance = (linear + root) / 2 - total * (1 - kept)
    surplus = num_right - lost + won - kept * num_right
    if variance <= TINY:
        return math.copysign(math.inf, surplus) if abs(surplus) > TINY else 0.0
    return surplus / math.sqrt(variance)


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided p-value that items are lost and won alike."""
    num = lost + won
    tail: float = sum(math.comb(num, k) for k in range(min(lost, won) + 1)) / 2**num
    return min(1.0, 2 * tail)


def _needed(lost: int, won: int, num_right: int, num_items: int, least: float) -> str:
    """Say how many items would decide, if the rest were like these."""
    far = abs(deviations(lost, won, num_right, least))
    if far <= TINY:
        return "no number of items would decide"
    return f"about {math.ceil(num_items * (SURE / far) ** 2):,} items would decide"


NUM_SEEDS = 3
NUM_EARLY = 32
"""Steps that are compared one by one; later ones part by chaos alone."""
EARLY = {"float32": 2e-5, "float64": 2e-5}
EARLY_LOW_PRECISION = 5e-2
NUM_LONG = 100
"""From so many steps on, where a run ends counts as well."""
FINAL_GAP = 0.0025
MOST_AGAIN = 4
"""Runs of the replaced code from the same start, where fewer cannot tell a gap from their scatter.
"""
SURE_OF_LOSS = {1: 63.66, 2: 9.925, 3: 5.841, MOST_AGAIN: 4.604}
"""Student's t at 99 %, by degrees of freedom: by that much, a run is none of so many and one."""
FINAL = "final loss: gap"
NORM_BAND = 0.02


def check_training(
    replaced: Curve,
    again: Sequence[Curve],
    new: Curve,
    seeds: Sequence[Curve],
    *,
    dtype: str = "bfloat16",
) -> Level:
    """Compare training runs from the same start (L6); `seeds` are runs of the replaced code, too.

    The first steps are compared one by one; a long run by where it ends: 0.25 % from the replaced
    code's, and no further than other seeds lie from one another. Runs of the same code part as
    well where gradients are added up in any order. So a run may end twice as far off as the first
    of `again`; one that ends further off, but within the scatter of all of them, is undecided.
    """
    if len(seeds) + 1 < NUM_SEEDS:
        return not_run("L6", f"{len(seeds) + 1} seeds are too few for a band: give {NUM_SEEDS}")
    runs = (replaced, *again, new, *seeds)
    if len({len(run.losses) for run in runs}) > 1 or len(replaced.losses) < NUM_EARLY:
        return not_run("L6", f"the runs must have the same {NUM_EARLY} steps at least")
    gaps = (_gaps(replaced, run) for run in (*again, *seeds))
    own = [max(together) for together in zip(*gaps, strict=True)]
    level = unjudged("L6", _gaps(replaced, new), own, "steps")
    if level:
        return level
    # More of them tell a failure from scatter, and make nothing pass.
    second = again[0]
    early, own_early = (max(_gaps(replaced, run)[:NUM_EARLY]) for run in (new, second))
    bound = EARLY.get(dtype, EARLY_LOW_PRECISION)
    name = f"loss, first {NUM_EARLY} steps: largest gap"
    measures = [Measure(name, early, max(bound, 2 * own_early), own_early)]
    if len(replaced.losses) >= NUM_LONG:
        measures += _final_measures(replaced, second, new, seeds)
    if replaced.gradient_norms and new.gradient_norms:
        measures.append(_norms(replaced, second, new))
    looked_at = f"{len(replaced.losses)} steps, {len(seeds) + 1} seeds"
    level = judge("L6", measures, looked_at)
    broken = [one.name for one in measures if not one.is_met]
    return _within_scatter(level, replaced, again, new) if broken == [FINAL] else level


def _within_scatter(level: Level, replaced: Curve, again: Sequence[Curve], new: Curve) -> Level:
    """Return the level as undecided, where the end of a run may be one of the replaced code's."""
    # Runs to the same bits are one run.
    ends = sorted({_end(run) for run in (replaced, *again)})
    if len(ends) == 1:
        return level
    scatter = stdev(ends) * math.sqrt(1 + 1 / len(ends))
    if abs(_end(new) - fmean(ends)) > SURE_OF_LOSS[min(len(ends) - 1, MOST_AGAIN)] * scatter:
        return level
    apart = _relative(min(ends), max(ends))
    why = f"{level.why}; yet {len(ends)} runs of the replaced code end up to {apart:.2g} apart"
    return replace(level, state="undecided", why=f"{why}: nobody can tell it from them")


def _gaps(one: Curve, other: Curve) -> list[float]:
    """Return the relative gap of every loss; infinite where one of them is not finite."""
    gaps = [_relative(a, b) for a, b in zip(one.losses, other.losses, strict=True)]
    return [gap if math.isfinite(gap) else math.inf for gap in gaps]


def _final_measures(
    replaced: Curve, again: Curve, new: Curve, seeds: Sequence[Curve]
) -> list[Measure]:
    ends = [_end(run) for run in (replaced, *seeds)]
    gap, own = (_relative(ends[0], _end(run)) for run in (new, again))
    band = _relative(ends[0], ends[0] + max(ends) - min(ends))
    return [
        Measure(FINAL, gap, max(FINAL_GAP, 2 * own), own),
        # The run whose seed it shares may lie at the band's edge: the band's width is what counts.
        Measure("final loss: gap within the seeds' band", gap, max(band, own), own),
    ]


def _end(run: Curve) -> float:
    """Return the mean loss over the last tenth."""
    return fmean(run.losses[-max(len(run.losses) // 10, 1) :])


def _norms(replaced: Curve, again: Curve, new: Curve) -> Measure:
    """Return how far the mean gradient norm is from the replaced code's, as a share."""
    standard = fmean(replaced.gradient_norms[:NUM_EARLY])
    gap, own = (
        _relative(standard, fmean((run.gradient_norms or replaced.gradient_norms)[:NUM_EARLY]))
        for run in (new, again)
    )
    threshold = max(NORM_BAND, 2 * own) if math.isfinite(own) else math.inf
    return Measure("gradient norm: gap", gap, threshold, own)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), 1e-12)
