"""What-if across ranks: a step without late ranks, or with all communication hidden.

No replay is needed. A collective ends on all its ranks together, so a step is shorter by the time
that the ranks which come last delay it; and no step is shorter than the time of the rank that
communicates least outside of its computation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.attribution.steps import find_steps, whole_ns
from kprof.analyze.late_ranks import LEAST_LATE, Lateness, find_lateness, waits_by_unit
from kprof.analyze.whatif.changes import ROOFLINE
from kprof.trace import Prediction, Trace

Floats = NDArray[np.float64]

LATE_RANKS, COMMUNICATION = "late ranks", "communication"
IN_TIME, HIDDEN = "in time", "hidden"
# As they are asked for.
RANKS_IN_TIME, ALL_HIDDEN, AT_ROOFLINE = (
    "ranks=in-time",
    "communication=hidden",
    "communication=roofline",
)
QUESTIONS = (RANKS_IN_TIME, ALL_HIDDEN, AT_ROOFLINE)
# Of the mean of units: so many standard errors hold 95 % of a normal distribution.
ERRORS = 1.96


def predict_across_ranks(trace: Trace) -> list[Prediction]:
    """Predict the step with late ranks in time, and with communication hidden by computation.

    Nothing where no collective was recorded on several ranks, and nothing that saves no time. A
    step is that of the slowest rank, or the window where no step is marked.
    """
    found = [answer(question, trace) for question in (RANKS_IN_TIME, ALL_HIDDEN)]
    return [one for one in found if (one.predicted_step_ns or one.step_ns) < one.step_ns]


def answer(question: str, trace: Trace) -> Prediction:
    """Answer one of `QUESTIONS`, or tell why it has no answer."""
    if question == RANKS_IN_TIME:
        told = Prediction(LATE_RANKS, IN_TIME, whole_ns(trace), what=IN_TIME)
    elif question == ALL_HIDDEN:
        told = Prediction(COMMUNICATION, HIDDEN, whole_ns(trace), what=HIDDEN)
    else:
        told = Prediction(COMMUNICATION, "at its roofline", whole_ns(trace), what=ROOFLINE)
        return replace(told, reason="no bandwidth of the links between ranks was measured")
    found = find_lateness(trace)
    exposed = None if found is None else _exposed_ns(trace, found)
    if found is None or exposed is None:
        return replace(told, reason="no collective was recorded on several ranks, repeatedly")
    most_ns = float(exposed.mean(axis=1).max())
    if question == RANKS_IN_TIME:
        saved_ns = np.array(found.lost_by_ns, dtype=float)
        # Ranks that differ by less are in time.
        unclear_ns = LEAST_LATE * found.unit_ns * bool(saved_ns.any())
        return _predicted(told, saved_ns, (unclear_ns, most_ns), found, trace)
    # Ranks meet in each unit: the one with the least to hide decides how long it takes.
    predicted = _predicted(told, exposed.min(axis=0), (0.0, most_ns), found, trace)
    # How far the host, or work that shares the GPU with collectives, bounds it is not recorded.
    return replace(predicted, longest_step_ns=predicted.step_ns)


def _predicted(
    told: Prediction,
    saved_ns: Floats,
    unclear_and_most_ns: tuple[float, float],
    found: Lateness,
    trace: Trace,
) -> Prediction:
    """Return a prediction from what each unit would be shorter by, at most by so much."""
    unclear_ns, most_ns = unclear_and_most_ns
    per_step = found.num_units / _num_steps(found, trace)
    mean_ns = min(float(saved_ns.mean()), most_ns)
    error_ns = ERRORS * float(saved_ns.std(ddof=1)) / np.sqrt(len(saved_ns)) + unclear_ns
    step_ns, saving, error, most = (
        round(ns * per_step) for ns in (found.unit_ns, mean_ns, error_ns, most_ns)
    )
    predicted = max(step_ns - saving, 0)
    return replace(
        told,
        step_ns=step_ns,
        predicted_step_ns=predicted,
        amdahl_step_ns=predicted,
        uncertainty_ns=error,
        shortest_step_ns=max(step_ns - min(saving + error, most), 0),
        longest_step_ns=min(predicted + error, step_ns),
    )


def _num_steps(found: Lateness, trace: Trace) -> int:
    """Return how many steps the units make up; one where no step is marked."""
    if found.are_steps:
        return found.num_units
    steps = find_steps(trace.all_ranks or trace)
    by_rank = pd.Series([step.rank for step in steps], dtype=np.int64).value_counts()
    return int(by_rank.max()) if len(by_rank) else 1


def _exposed_ns(trace: Trace, found: Lateness) -> Floats | None:
    """Return for each rank and unit its time in collectives with nothing else to do."""
    everyone = trace.all_ranks or trace
    units = waits_by_unit(trace)
    if units is None or len(found.units) < 2:
        return None
    waits, _ = units
    ranks = [one.rank for one in found.ranks]
    row = waits["row"].to_numpy(np.int64)
    table = np.zeros((len(ranks), len(found.units)))
    place = (
        np.searchsorted(ranks, waits["rank"].to_numpy(np.int64)),
        np.searchsorted(found.units, waits["unit"].to_numpy(np.int64)),
    )
    np.add.at(table, place, allotted_time(everyone)[row])
    return table
