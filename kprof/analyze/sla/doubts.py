"""The doubts that a reader of a verdict on a service has to know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kprof.analyze.sla.evaluate import PER_REQUEST
from kprof.analyze.sla.independence import OF_ONE_ANSWER, SPELL
from kprof.analyze.sla.responses import Responses
from kprof.analyze.sla.samples import measure_of, width_of
from kprof.analyze.sla.target_verdict import Judgement
from kprof.analyze.sla.targets import Target
from kprof.errors import counted, three_digits
from kprof.trace import Caveat

LATE_NS = 1_000_000
LATE_SHARE = 0.01
"""Share of the tightest limit; a client later than this, or than a millisecond, is in doubt."""
WIDE_SHARE = 0.01
"""Ranges wider than this share of the limit are worth a word."""

CLOSED_LOOP = Caveat(
    "closed_loop",
    "closed loop: the next request waits for an answer, so a slow service is asked less. The "
    "verdict holds at this concurrency; users who come by themselves need an open loop to judge",
)
UNKNOWN_LOAD = Caveat(
    "unknown_load", "the file does not say how requests were sent, by schedule or one by one"
)
NO_SCHEDULE = Caveat(
    "no_schedule", "the file holds no schedule: a client that sent too late would go unnoticed"
)
ONE_RUN = Caveat(
    "one_run", "one run: differences from one start of the service to the next are not seen"
)


def find_doubts(
    runs: Sequence[Responses], targets: Sequence[Target], judgements: Sequence[Judgement]
) -> tuple[Caveat, ...]:
    """Return a caveat for everything that weakens a verdict."""
    doubts = []
    if any(run.load.kind == "closed" for run in runs):
        doubts.append(CLOSED_LOOP)
    if any(run.load.kind == "unknown" for run in runs):
        doubts.append(UNKNOWN_LOAD)
    doubts += [
        Caveat("limited_load", why)
        for why in sorted({run.load.why for run in runs if run.load.why})
    ]
    doubts += _lateness(runs, targets)
    doubts += _ranges(runs, targets)
    doubts += _fewer(judgements)
    if len(runs) == 1:
        doubts.append(ONE_RUN)
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


def _fewer(judgements: Sequence[Judgement]) -> list[Caveat]:
    """Say what counts as fewer independent ones, and why."""
    doubts = []
    for judgement in judgements:
        text, why = judgement.target.text, judgement.why_fewer
        what = " slices" if judgement.target.metric.kind == "rate" else ""
        # A spell that is assumed is named in the verdict.
        if why not in ("", OF_ONE_ANSWER) and not why.startswith(SPELL):
            fewer = (
                f"{text}: {why}, so {judgement.num_samples:,}{what} count as "
                f"{counted(judgement.num_independent, 'independent one')}"
            )
            doubts.append(Caveat("fewer_independent", fewer))
    return doubts


def _lateness(runs: Sequence[Responses], targets: Sequence[Target]) -> list[Caveat]:
    lag = lag_of(runs)
    if lag is None:
        if any(run.load.kind == "open" for run in runs):
            return [NO_SCHEDULE]
        return []
    limits = [target.limit for target in targets if target.metric.name in PER_REQUEST]
    if lag <= LATE_NS and lag <= LATE_SHARE * min(limits, default=np.inf):
        return []
    lags = {
        row.sent_ns - row.scheduled_ns
        for run in runs
        for row in run.rows
        if row.scheduled_ns is not None
    }
    # One lag of all is a bound: the file knows the greatest alone.
    is_bound = len(lags) == 1
    in_ms = three_digits(lag / 1e6)
    late = f"up to {in_ms} ms" if is_bound else f"{in_ms} ms or more"
    told = (
        f"the client was late: {'' if is_bound else '1 % of the '}requests were sent {late} after "
        "they were due. Times count from when they were due; a target counts as missed only if it "
        "is missed from the sending on as well"
    )
    return [Caveat("late_client", told)]


def _ranges(runs: Sequence[Responses], targets: Sequence[Target]) -> list[Caveat]:
    """Say where a time is known to within a range only, apart from the client's lateness."""
    rows = [row for run in runs for row in run.rows if row.outcome == "answered"]
    doubts = []
    for target in targets:
        if target.metric.name not in PER_REQUEST:
            continue
        limit_ns = WIDE_SHARE * target.limit
        num_wide = sum(width_of(measure_of(target)(row), row) > limit_ns for row in rows)
        if num_wide:
            wide = (
                f"{target.text}: the file does not hold all times that it takes, so "
                f"{num_wide:,} of {counted(len(rows), 'time')} are ranges; met is judged by their "
                "upper ends, missed by their lower ones"
            )
            doubts.append(Caveat("wide_ranges", wide))
    return doubts
