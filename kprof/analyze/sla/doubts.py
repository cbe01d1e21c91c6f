"""What the reader of a verdict on a service has to know about how it was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kprof.analyze.sla.independence import OF_ONE_ANSWER
from kprof.analyze.sla.judge import PER_REQUEST
from kprof.analyze.sla.rates import find_window
from kprof.analyze.sla.samples import measure_of
from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.times import Range
from kprof.analyze.sla.verdict import Judgement
from kprof.responses import Response, Responses

LATE_NS = 1_000_000
LATE_SHARE = 0.01
"""Of the tightest limit: a client that is later than this, or than a millisecond, is in doubt."""
WIDE_SHARE = 0.01
"""Ranges wider than this share of the limit are worth a word."""

CLOSED_LOOP = (
    "closed loop: the next request waits for an answer, so a slow service is asked less. The "
    "verdict holds at this concurrency; users who come by themselves need an open loop to judge"
)


def find_doubts(
    runs: Sequence[Responses], targets: Sequence[Target], judgements: Sequence[Judgement]
) -> tuple[str, ...]:
    """Return a sentence for everything that weakens a verdict."""
    doubts = []
    if any(run.load.kind == "closed" for run in runs):
        doubts.append(CLOSED_LOOP)
    if any(run.load.kind == "unknown" for run in runs):
        doubts.append("the file does not say how requests were sent, by schedule or one by one")
    doubts += sorted({run.load.why for run in runs if run.load.why})
    doubts += _lateness(runs, targets)
    doubts += _ranges(runs, targets)
    doubts += _fewer(judgements)
    doubts += _duration(runs, judgements)
    if len(runs) == 1:
        doubts.append("one run: what differs from one start of the service to the next is not seen")
    return tuple(dict.fromkeys([*doubts, *(doubt for run in runs for doubt in run.doubts)]))


def lag_of(runs: Sequence[Responses]) -> int | None:
    """Return the 99th percentile of how late requests were sent, ns; None: no schedule known."""
    lags = [
        row.sent_ns - row.scheduled_ns
        for run in runs
        for row in run.rows
        if row.scheduled_ns is not None
    ]
    if not lags:
        return None
    return int(np.percentile(lags, 99, method="inverted_cdf"))


def _fewer(judgements: Sequence[Judgement]) -> list[str]:
    """Say what counts as fewer independent ones, and what spells nobody saw would change."""
    doubts = []
    for judgement in judgements:
        text, why = judgement.target.text, judgement.why_fewer
        what = " slices" if judgement.target.metric.kind == "rate" else ""
        if why not in ("", OF_ONE_ANSWER):
            doubts.append(
                f"{text}: {why}, so {judgement.num_samples:,}{what} count as "
                f"{judgement.num_independent:,} independent ones"
            )
        if judgement.longest_spell is not None:
            longest = judgement.longest_spell
            how = f"in spells of up to {longest:,}" if longest > 1 else "one by one"
            doubts.append(
                f"{text}: none broke it, so how many would at a time is not known: met holds "
                f"where they come {how}"
            )
    return doubts


def _duration(runs: Sequence[Responses], judgements: Sequence[Judgement]) -> list[str]:
    """Say how long the steady state was, where a rate is judged: it shows nothing slower."""
    if not any(j.target.metric.kind == "rate" and j.num_samples for j in judgements):
        return []
    longest = max(window.duration_s for run in runs if (window := find_window(run)) is not None)
    return [
        f"rates are of {_seconds(longest)} s of steady state: what goes on for as long or longer, "
        "as a slow spell of the service, is not seen to end"
    ]


def _seconds(duration_s: float) -> str:
    return f"{duration_s:,.0f}" if duration_s >= 100 else f"{duration_s:.3g}"


def _lateness(runs: Sequence[Responses], targets: Sequence[Target]) -> list[str]:
    lag = lag_of(runs)
    if lag is None:
        if any(run.load.kind == "open" for run in runs):
            return ["the file holds no schedule: a client that sent too late would go unnoticed"]
        return []
    limits = [target.limit for target in targets if target.metric.name in PER_REQUEST]
    if lag <= LATE_NS and lag <= LATE_SHARE * min(limits, default=np.inf):
        return []
    return [
        f"the client was late: 1 % of the requests were sent {lag / 1e6:.3g} ms or more after "
        "they were due. Times count from when they were due; a target counts as missed only if it "
        "is missed from the sending on as well"
    ]


def _ranges(runs: Sequence[Responses], targets: Sequence[Target]) -> list[str]:
    """Say where a time is known to within a range only, whatever the client's lateness."""
    rows = [row for run in runs for row in run.rows if row.outcome == "answered"]
    doubts = []
    for target in targets:
        if target.metric.name not in PER_REQUEST:
            continue
        num_wide = sum(_is_wide(measure_of(target)(row), row, target.limit) for row in rows)
        if num_wide:
            doubts.append(
                f"{target.text}: the file does not tell what came with every chunk, so "
                f"{num_wide:,} of {len(rows):,} times are ranges; met is judged by their upper "
                "ends, missed by their lower ones"
            )
    return doubts


def _is_wide(time: Range | None, row: Response, limit: float) -> bool:
    if time is None:
        return False
    return time.high - time.low - (row.sent_ns - row.due_ns) > WIDE_SHARE * limit
