"""L2: does the residual stream stay where it was, layer after layer?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from kprof.gate.result import Level, Measure, judge, not_run, unjudged

# 1 - cosine of 1e-4 is a relative error of 1.4 %: what 32 layers in bfloat16 come to.
MOST_TURNED = 1e-4
ERROR_RATIO = 2.0
GROWTH = 2.0
TINY = 1e-30
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
    return distance / max(size, TINY) if math.isfinite(distance) else math.inf


def _turned(one: Tensor, other: Tensor) -> float:
    """Return 1 - cosine, from the distance of the unit vectors: it keeps its digits near zero."""
    one, other = one.double().flatten(), other.double().flatten()
    gap = one / one.norm().clamp(min=TINY) - other / other.norm().clamp(min=TINY)
    return float(gap.square().sum() / 2)
