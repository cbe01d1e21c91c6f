"""The machine-readable result, as `kprof open --json` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pandas as pd

from kprof.analyze.attribution.cuda_graphs import how_named
from kprof.analyze.attribution.ledger import Ledger, truth_columns
from kprof.analyze.attribution.steps import denominator, measure_communication, split_steps
from kprof.analyze.bus_bandwidth import measure_collectives
from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.capture_quality.unanswered import find_unanswered
from kprof.analyze.condense import rank_totals
from kprof.analyze.expert_load import ExpertLoad, find_expert_load
from kprof.analyze.findings.queries import whole_of
from kprof.analyze.findings.recoverable import idle_in_steps
from kprof.analyze.groupings import group_kernels, group_modules
from kprof.analyze.idle.causes import find_exposed_waits, group_idle, worst_places
from kprof.analyze.late_causes import find_late_causes
from kprof.analyze.late_ranks import find_lateness
from kprof.analyze.pipeline_bubbles import StageBubble, find_bubbles
from kprof.analyze.roofline.agreement import compare_bounds, traffic_ratio
from kprof.analyze.roofline.hardware_counters import is_counted
from kprof.analyze.roofline.launch_work import SOURCES
from kprof.analyze.roofline.utilisation import (
    Share,
    has_work,
    measure_known_work,
    measure_utilisation,
    share_of_time,
)
from kprof.report.summary import summarize
from kprof.trace import Trace

SCHEMA = 2
NUM_TOP = 20
NUM_PLACES = 5
LATENESS = ("late_ns", "waits_ns", "num_late", "late_in")


def result_of(trace: Trace, ledger: Ledger) -> dict[str, object]:
    """Return the result as plain data; times in ns, shares of one, unknown as None."""
    utilisation = measure_utilisation(trace)
    return {
        "schema": SCHEMA,
        "source": trace.meta.source,
        "command": list(trace.meta.command),
        "gpus": [asdict(gpu) for gpu in trace.gpus],
        "versions": trace.meta.versions,
        "num_ranks": trace.meta.num_ranks,
        "clocks": trace.meta.clocks,
        "untimed": trace.meta.untimed,
        "ceilings": _ceilings(trace),
        "summary": asdict(summarize(trace)),
        "recording": _recording(trace),
        "ledger": truth_columns(trace, ledger) | {"buckets": ledger.buckets},
        "denominator": _denominator(trace),
        "utilisation": {
            "mfu": _share(utilisation.mfu),
            "mbu": _share(utilisation.mbu),
            "roofline_share": _share(utilisation.roofline),
            "busy_share": _share(utilisation.busy),
        },
        "coverage": _coverage(trace),
        "replayed": [asdict(one) for one in how_named(trace)],
        "counters": _counters(trace),
        "time": records(split_steps(trace)),
        "communication": asdict(measure_communication(trace)),
        **(_ranks(trace) if trace.meta.num_ranks > 1 or trace.meta.totals else {}),
        "idle": _idle(trace),
        "kernels": records(group_kernels(trace.kernels, ["name", "kind", "dtype"]).head(NUM_TOP)),
        "modules": records(group_modules(trace.kernels).head(NUM_TOP)),
        **({"memory": [asdict(one) for one in trace.meta.memory]} if trace.meta.memory else {}),
        "what_if": [asdict(one) for one in trace.meta.what_if],
        "findings": _findings(trace),
        "audit": [asdict(check) for check in audit(trace)],
        "unanswered": [asdict(found) for found in find_unanswered(trace)],
        "caveats": [{"id": one.id, "text": one.text} for one in trace.meta.caveats],
    }


def _ceilings(trace: Trace) -> dict[str, object] | None:
    """Return the device's ceilings; of its links where they were measured."""
    device = trace.meta.device
    if device is None:
        return None
    told = asdict(device)
    return told if device.links else {key: one for key, one in told.items() if key != "links"}


def _denominator(trace: Trace) -> dict[str, object]:
    whole = denominator(trace)
    return {**asdict(whole), "step_ns": whole.step_ns, "whole": whole_of(trace)}


def _ranks(trace: Trace) -> dict[str, object]:
    return {
        "ranks": _by_rank(trace),
        "late_ranks": _late_ranks(trace),
        "collectives": records(measure_collectives(trace)),
        "pipeline": _each(find_bubbles(trace)),
        "experts": _each(find_expert_load(trace)),
    }


def _each(found: Sequence[StageBubble | ExpertLoad] | None) -> list[dict[str, object]] | None:
    return None if found is None else [asdict(one) for one in found]


def _late_ranks(trace: Trace) -> dict[str, object] | None:
    """Return which ranks are late, what that costs, and why; None where it is unknown."""
    found = find_lateness(trace)
    if found is None:
        return None
    told = {name: value for name, value in asdict(found).items() if name != "ranks"}
    return {**told, "causes": [asdict(one) for one in find_late_causes(trace)]}


def _by_rank(trace: Trace) -> list[dict[str, object]]:
    """Return what the time of each rank adds up to, and how it kept up in the collectives."""
    in_detail = set(trace.kernels["rank"].unique().tolist())
    lateness = find_lateness(trace)
    late = {one.rank: one for one in lateness.ranks} if lateness else {}
    found = []
    for one in rank_totals(trace):
        row = {**asdict(one), "is_in_detail": one.rank in in_detail}
        kept_up = late.get(one.rank)
        row |= {key: getattr(kept_up, key, None) for key in LATENESS}
        found.append(row)
    return found


def _share(share: Share) -> dict[str, object]:
    return asdict(share)


def _recording(trace: Trace) -> dict[str, object] | None:
    recording = trace.meta.recording
    if recording is None:
        return None
    cost = measure_cost(trace)
    return {**asdict(recording), "overhead": cost.slowdown if cost and cost.is_known else None}


def _coverage(trace: Trace) -> dict[str, object]:
    """Return how much of the device time has known work, from where, and the largest without."""
    kernels, work = trace.kernels, measure_known_work(trace)
    is_modelled = has_work(kernels)
    without = group_kernels(kernels[~is_modelled.to_numpy()], ["name", "op"]).head(NUM_TOP)
    attributed = (kernels["bucket"] == "attributed").to_numpy()
    return {
        "modelled_share": 1 - work.unknown,
        "at_least_share": work.at_least,
        "flops_share": work.flops,
        "modelled_share_of_attributed": share_of_time(kernels[attributed], is_modelled[attributed])
        if attributed.any()
        else None,
        "share_by_source": {
            source: share_of_time(kernels, kernels["work_from"] == source) for source in SOURCES
        },
        "largest_unmodelled": records(without[["name", "op", "calls", "time_ns"]]),
    }


def _counters(trace: Trace) -> dict[str, object] | None:
    """Return what hardware counted, and how far it agrees with the work models."""
    kernels = trace.kernels
    counted = is_counted(kernels)
    if not counted.any():
        return None
    ratios = traffic_ratio(kernels)
    known = ratios[~np.isnan(ratios)]
    agreement = compare_bounds(kernels)
    return {
        "launches": int(counted.sum()),
        "share_of_time": share_of_time(kernels, counted),
        "bounds": {**asdict(agreement), "share_agreeing": agreement.share},
        "median_traffic_over_least": float(np.median(known)) if len(known) else None,
    }


def _idle(trace: Trace) -> dict[str, object] | None:
    """Return the idle time in steps by cause, and how much of it lies at their edges."""
    if not trace.has_timeline:
        return None
    pieces = idle_in_steps(trace)
    edges = pieces[pieces["edge"].notna().to_numpy(bool)]
    worst = records(worst_places(pieces, NUM_PLACES))
    waits = find_exposed_waits(trace)
    return {
        "time_ns": int(pieces["duration_ns"].sum()),
        "causes": [
            {**group, "worst": [_placed(row) for row in worst if row["cause"] == group["cause"]]}
            for group in records(group_idle(pieces))
        ],
        "at_the_edges": records(group_idle(edges)),
        "exposed_collective_waits": None if waits is None else [asdict(wait) for wait in waits],
    }


def _placed(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "cause"}


def _findings(trace: Trace) -> dict[str, object] | None:
    """Return what the rules found; the rows that prove it stand in `findings.json`."""
    if trace.diagnosis is None:
        return None
    told = asdict(trace.diagnosis)
    for finding in told["findings"]:
        for rows in ("rows", "idle_rows", "range_rows"):
            del finding[rows]
    return told


def records(table: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of a table as plain data, unknown as None."""
    plain = table.astype(object).where(table.notna(), None)
    return [dict(zip(plain.columns, row, strict=True)) for row in plain.to_numpy().tolist()]
