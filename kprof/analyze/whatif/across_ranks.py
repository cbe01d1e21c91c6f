"""What-if across ranks: late ranks in time, communication hidden or at the links' bandwidth.

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
from kprof.analyze.bus_bandwidth import transfers
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
    """Predict the step with late ranks in time, and with communication hidden or at its roofline.

    Nothing where no collective was recorded on several ranks, and nothing that saves no time. A
    step is that of the slowest rank, or the window where no step is marked.
    """
    found = [answer(question, trace) for question in QUESTIONS]
    return [one for one in found if (one.predicted_step_ns or one.step_ns) < one.step_ns]


def is_across_ranks(prediction: Prediction) -> bool:
    """Tell whether a prediction answers one of `QUESTIONS`."""
    return prediction.target in (LATE_RANKS, COMMUNICATION)


def answer(question: str, trace: Trace) -> Prediction:
    """Answer one of `QUESTIONS`, or tell why it has no answer."""
    if question == RANKS_IN_TIME:
        told = Prediction(LATE_RANKS, IN_TIME, whole_ns(trace), what=IN_TIME)
    elif question == ALL_HIDDEN:
        told = Prediction(COMMUNICATION, HIDDEN, whole_ns(trace), what=HIDDEN)
    else:
        told = Prediction(COMMUNICATION, "at its roofline", whole_ns(trace), what=ROOFLINE)
    found, units = find_lateness(trace), waits_by_unit(trace)
    if found is None or units is None or len(found.units) < 2:
        return replace(told, reason="no collective was recorded on several ranks, repeatedly")
    waits, _ = units
    exposed_ns = allotted_time(trace.all_ranks or trace)[waits["row"].to_numpy(np.int64)]
    exposed = _by_unit(exposed_ns, waits, found)
    most_ns = float(exposed.mean(axis=1).max())
    if question == RANKS_IN_TIME:
        saved_ns = np.array(found.lost_by_ns, dtype=float)
        # Ranks that differ by less are in time.
        unclear_ns = LEAST_LATE * found.unit_ns * bool(saved_ns.any())
        return _predicted(told, saved_ns, (unclear_ns, most_ns), found, trace)
    if question == ALL_HIDDEN:
        # Ranks meet in each unit: the one with the least to hide decides how long it takes.
        predicted = _predicted(told, exposed.min(axis=0), (0.0, most_ns), found, trace)
        # How far the host, or work that shares the GPU with collectives, bounds it is not recorded.
        return replace(predicted, longest_step_ns=predicted.step_ns)
    transfer_ns = np.maximum(exposed_ns - waits["exposed_ns"].to_numpy(np.int64), 0)
    return _at_roofline(told, waits.assign(exposed_transfer_ns=transfer_ns), found, trace)


def _at_roofline(
    told: Prediction, waits: pd.DataFrame, found: Lateness, trace: Trace
) -> Prediction:
    """Predict the step with transfers at the measured bandwidth of the links.

    A rank gains what nothing hides of a transfer. The ceiling is of large messages: how far small
    ones fall short of it, and what others could gain whose ceiling is unknown, is in the interval.
    """
    calls = transfers(trace).set_index("row").loc[waits["row"]]
    share = (calls["bus_bytes_per_s"] / calls["ceiling_bytes_per_s"]).to_numpy(float)
    is_known = ~np.isnan(share)
    if not is_known.any():
        why = "the bytes that collectives moved were not recorded on all ranks of a group"
        if calls["ceiling_bytes_per_s"].isna().all():
            why = "no bandwidth of the links between these ranks was measured (`kprof roofline`)"
        return replace(told, reason=why)
    transfer_ns, exposed_ns = (
        column.to_numpy(float) for column in (calls["transfer_ns"], waits["exposed_transfer_ns"])
    )
    faster_ns = transfer_ns * np.maximum(1 - share, 0)
    saved, unclear = (
        # Ranks meet in each unit: the one that gains least decides how long it takes.
        _by_unit(np.where(is_known, known_ns, unknown_ns), waits, found).min(axis=0)
        for known_ns, unknown_ns in (
            (np.minimum(exposed_ns, faster_ns), 0.0),
            (np.minimum(exposed_ns, faster_ns), exposed_ns),
        )
    )
    all_ns = _by_unit(exposed_ns, waits, found)
    bounds_ns = (float((unclear - saved).mean()), float(all_ns.mean(axis=1).max()))
    predicted = _predicted(told, saved, bounds_ns, found, trace)
    known_share = float(transfer_ns[is_known].sum() / max(transfer_ns.sum(), 1.0))
    return replace(predicted, known_share=known_share, longest_step_ns=predicted.step_ns)


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
    # Units need not make up a step: the last one ends with its last collective.
    step_ns = told.step_ns
    saving, error, most = (round(ns * per_step) for ns in (mean_ns, error_ns, most_ns))
    predicted = max(step_ns - saving, 0)
    return replace(
        told,
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


def _by_unit(time_ns: Floats, waits: pd.DataFrame, found: Lateness) -> Floats:
    """Add up a time of each collective by rank and unit."""
    ranks = [one.rank for one in found.ranks]
    table = np.zeros((len(ranks), len(found.units)))
    place = (
        np.searchsorted(ranks, waits["rank"].to_numpy(np.int64)),
        np.searchsorted(found.units, waits["unit"].to_numpy(np.int64)),
    )
    np.add.at(table, place, time_ns)
    return table
