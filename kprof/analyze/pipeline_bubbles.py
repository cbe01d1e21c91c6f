"""Pipeline bubbles: time in which a stage has nothing to do but wait for its neighbours.

A send or a receive ends on both ranks together, so one that takes longer than the shortest of its
kind waited for the other rank. The waits are those of the schedule (fill and drain) and of stages
with more work than others; a recording does not tell which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.bus_bandwidth import messages
from kprof.analyze.condense import rank_totals
from kprof.analyze.rank_layout import PIPELINE, collectives_along, places
from kprof.trace import Trace

POINT_TO_POINT = re.compile(r"_?i?(?:send|recv)|coalesced")


@dataclass(frozen=True)
class StageBubble:
    """The waits of one pipeline stage, the mean of its ranks."""

    stage: int
    ranks: tuple[int, ...]
    waits_ns: float
    """In a step, or in the window where none is marked: with nothing else on the device."""
    step_ns: float
    share: float
    """Waits in a step."""


def find_bubbles(trace: Trace) -> tuple[StageBubble, ...] | None:
    """Return the waits of each pipeline stage; None where no send in a pipeline group is known.

    A rank without known sends is left out.
    """
    everyone = trace.all_ranks or trace
    _, rows = collectives_along(everyone, PIPELINE, POINT_TO_POINT)
    if not len(rows):
        return None
    calls = everyone.kernels.iloc[rows][["rank", "group", "collective", "duration_ns"]].assign(
        message=messages(everyone)[rows], exposed_ns=allotted_time(everyone)[rows]
    )
    alike = calls.groupby(["group", "collective", "message"], observed=True, dropna=False)
    shortest = alike["duration_ns"].transform("min")
    waits = (calls["exposed_ns"] - shortest).clip(lower=0).groupby(calls["rank"]).sum()
    stage_of = {
        rank: place[PIPELINE] for rank, place in places(everyone.meta).items() if PIPELINE in place
    }
    by_stage: dict[int, list[tuple[int, float, float]]] = {}
    for one in rank_totals(trace):
        if one.rank in stage_of and one.rank in waits.index:
            number = max(one.num_steps, 1)
            step_ns = (one.steps_ns if one.num_steps else one.window_ns) / number
            own = (one.rank, float(waits[one.rank]) / number, step_ns)
            by_stage.setdefault(stage_of[one.rank], []).append(own)
    return tuple(_stage(stage, those) for stage, those in sorted(by_stage.items()))


def _stage(stage: int, ranks: list[tuple[int, float, float]]) -> StageBubble:
    numbers, waits, steps = zip(*ranks, strict=True)
    waits_ns, step_ns = (float(np.mean(times)) for times in (waits, steps))
    return StageBubble(stage, numbers, waits_ns, step_ns, waits_ns / step_ns if step_ns else 0.0)
