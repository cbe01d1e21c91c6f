"""L3: does the model expect the same next tokens?"""

from __future__ import annotations

import torch
from torch import Tensor

from kprof.gate.result import Level, Measure, judge, not_run, unjudged
from kprof.gate.subject import Precision

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
